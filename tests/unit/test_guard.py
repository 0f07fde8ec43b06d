"""The guard: whatever happens to the command, to the guard or to its parent, nothing below stays alive."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.runtime.guard import DEVICE_VARIABLES, descendants_of
from primerl_hpc.runtime.local_step import visible_accelerators
from primerl_hpc.runtime.steps import Launch
from tests.support import is_alive, process_plan, wait_for

GUARD = [sys.executable, "-m", "primerl_hpc.runtime.guard", "--grace", "1", "--"]

# A command like an engine: a child in the same session, a grandchild in a session of its own, both deaf to SIGTERM.
FAMILY = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    inner = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True); time.sleep(600)"
    a = subprocess.Popen([sys.executable, "-c", deaf])
    b = subprocess.Popen([sys.executable, "-c", inner])
    if "term-exits" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    time.sleep(600)
    """
)


@pytest.fixture
def family(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """A running guard with four processes below it, and those."""
    out = tmp_path / "out"
    with out.open("wb") as file:
        guard = subprocess.Popen([*GUARD, sys.executable, "-c", FAMILY, "term-exits"], stdout=file)
    wait_for(lambda: out.read_bytes().count(b"up") == 2 and len(descendants_of(guard.pid)) == 4)
    yield guard, [psutil.Process(pid) for pid in descendants_of(guard.pid)]
    guard.kill()
    guard.wait()


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def test_a_killed_command_takes_its_whole_tree_along(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, below = family
    below[0].kill()
    assert guard.wait(timeout=20) == 128 + signal.SIGKILL
    assert all_gone(below)


def test_sigterm_reaches_the_command_and_its_code_comes_back(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, below = family
    guard.terminate()
    assert guard.wait(timeout=20) == 7
    assert all_gone(below)


def test_the_tree_ends_when_the_guards_parent_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parent_code = f"import subprocess, sys\nsubprocess.run({[*GUARD, sys.executable, '-c', FAMILY]!r})"
    with out.open("wb") as file:
        parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=file)
    wait_for(lambda: out.read_bytes().count(b"up") == 2)
    below = [psutil.Process(pid) for pid in descendants_of(parent.pid)]
    assert len(below) == 5
    parent.kill()
    parent.wait()
    wait_for(lambda: all_gone(below))


def test_who_does_not_end_is_given_up_and_named() -> None:
    """As those that the kernel holds: this one may not be killed before it was given up."""
    code = textwrap.dedent(
        """
        import os, subprocess, sys
        from primerl_hpc.runtime import guard

        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
        child.stdout.readline()
        left = guard.end_descendants(grace_s=0.0, give_up_s=0.0)
        assert left == [child.pid]
        guard.tell_survivors([os.getpid()])
        assert guard.end_descendants(grace_s=0.0) == []
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=20, check=True, capture_output=True, text=True
    )
    assert re.fullmatch(r"guard: cannot end \d+ \(python\S*, state R\)\n", done.stderr)


def test_orphans_end_and_what_the_jobs_script_had_started_stays() -> None:
    code = textwrap.dedent(
        """
        import asyncio, subprocess
        from primerl_hpc.runtime.local_step import end_orphans

        theirs, orphan = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
        asyncio.run(end_orphans((), {theirs.pid}))
        assert theirs.poll() is None and orphan.poll() is not None
        theirs.kill()
        """
    )
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True)


def test_a_command_that_is_not_there_is_127(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run([*GUARD, "/no/such/program"], check=False).returncode == 127
    assert "no such program" in capfd.readouterr().err


def test_a_sigterm_while_the_command_is_being_made_ends_it() -> None:
    code = textwrap.dedent(
        """
        import os, signal, sys
        from primerl_hpc.runtime import guard

        popen = guard.subprocess.Popen
        def make(*args, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return popen(*args, **options)
        guard.subprocess.Popen = make
        sys.exit(guard.Guard(["sleep", "30"], grace_s=0.5).run())
        """
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode
        == 128 + signal.SIGTERM
    )


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_commands_exit_code_is_the_guards(code: int) -> None:
    assert subprocess.run([*GUARD, "bash", "-c", f"exit {code}"], check=False).returncode == code


@pytest.mark.parametrize(
    "outer, has_gpus, accelerators, seen",
    [
        (None, True, (1, 2), {"CUDA_VISIBLE_DEVICES": "1,2"}),  # a workstation, where nobody sets it
        (None, True, (), {"CUDA_VISIBLE_DEVICES": ""}),
        (None, False, (1, 2), {}),  # slots of a machine without GPUs
        ("4,GPU-b,6", True, (1, 2), {"CUDA_VISIBLE_DEVICES": "GPU-b,6"}),
        ("", True, (1,), {}),
    ],
)
def test_a_local_process_sees_the_gpus_of_its_plan_and_no_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outer: str | None,
    has_gpus: bool,
    accelerators: tuple[int, ...],
    seen: dict[str, str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outer is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outer)
    process = process_plan(Role.TRAINER).model_copy(update={"accelerators": accelerators})
    launch = Launch(process, RunDir(tmp_path), "main", 1, 0)
    assert visible_accelerators(launch, has_gpus=has_gpus) == seen


@pytest.mark.parametrize("outer, seen", [({}, "1,2"), ({"CUDA_VISIBLE_DEVICES": "4,5,6"}, "5,6")])
def test_a_step_is_narrowed_to_its_devices_though_the_site_names_none(
    monkeypatch: pytest.MonkeyPatch, outer: dict[str, str], seen: str
) -> None:
    for name in DEVICE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, devices in outer.items():
        monkeypatch.setenv(name, devices)
    show = ("--devices", "1,2", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    guard = [sys.executable, "-m", "primerl_hpc.runtime.guard", *show]
    assert subprocess.run(guard, capture_output=True, text=True, check=True).stdout.strip() == seen
