"""The guard: whatever happens to the command, to the guard or to its parent, nothing below stays alive."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.guard import DEVICE_VARIABLES, descendants_of
from primerl_hpc.runtime.steps.local import visible_accelerators
from tests.support.helpers import PATIENCE_S, captured, is_alive, process_plan, wait_for

GUARD = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--grace", "1", "--"]

# A guard that waits longer for its peers than a test waits for it.
PATIENT_GUARD = f"""
import sys
from primerl_hpc.runtime.steps import guard
guard.PEERS_S = {2 * PATIENCE_S}
sys.exit(guard.main(sys.argv[1:]))
"""

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
    """  # noqa: E501
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


def test_killing_a_command_kills_all_of_its_descendants(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, below = family
    below[0].kill()
    assert guard.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL
    assert all_gone(below)


def test_the_guard_forwards_sigterm_and_returns_the_commands_exit_code(
    family: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    guard, below = family
    guard.terminate()
    assert guard.wait(timeout=PATIENCE_S) == 7
    assert all_gone(below)


# A command and its child share memory and are deaf to SIGTERM.
SHARING = """
import multiprocessing, os, signal, time
from multiprocessing.shared_memory import SharedMemory

def stay(name):
    segment = SharedMemory(name)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getppid(), name, flush=True)
    time.sleep(7200)

if __name__ == "__main__":
    segment = SharedMemory(create=True, size=4096)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    multiprocessing.get_context("spawn").Process(target=stay, args=(segment.name,)).start()
    time.sleep(7200)
"""


@pytest.mark.parametrize("is_command_killed", [True, False], ids=["command killed", "guard terminated"])
def test_shared_memory_of_killed_processes_is_deleted(tmp_path: Path, is_command_killed: bool) -> None:
    script, out = tmp_path / "sharing.py", tmp_path / "out"
    script.write_text(SHARING)
    with out.open("wb") as file:
        guard = subprocess.Popen([*GUARD, sys.executable, str(script)], stdout=file)
    wait_for(lambda: out.read_text().endswith("\n"))
    command, name = out.read_text().split()
    assert Path("/dev/shm", name).exists()
    if is_command_killed:
        os.kill(int(command), signal.SIGKILL)
    else:
        guard.terminate()
    assert guard.wait(timeout=PATIENCE_S) == 128 + signal.SIGKILL
    assert not Path("/dev/shm", name).exists()


def test_a_resource_tracker_that_does_not_end_is_killed() -> None:
    code = textwrap.dedent(
        """
        import subprocess, sys
        from primerl_hpc.runtime.steps import guard

        guard.TRACKERS_S = 0.0
        tracker = "import time; 'multiprocessing.resource_tracker'; time.sleep(7200)"
        child = subprocess.Popen([sys.executable, "-c", tracker])
        guard.kill_all([child.pid])
        assert child.poll() is None
        assert guard.end_descendants(grace_s=0.0) == []
        """
    )
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=True)


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


def test_processes_that_do_not_exit_are_abandoned_and_named() -> None:
    """As those that the kernel holds: this one may not be killed before it was given up."""
    code = textwrap.dedent(
        """
        import os, subprocess, sys
        from primerl_hpc.runtime.steps import guard

        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
        child.stdout.readline()
        left = guard.end_descendants(grace_s=0.0, give_up_s=0.0)
        assert left == [child.pid]
        guard.report_survivors([os.getpid()])
        assert guard.end_descendants(grace_s=0.0) == []
        """  # noqa: E501
    )
    done = captured([sys.executable, "-c", code], timeout=PATIENCE_S, check=True)
    assert re.fullmatch(r"guard: cannot end \d+ \(python\S*, state R\)\n", done.stderr)


def test_orphans_are_killed_but_processes_of_the_job_script_are_not() -> None:
    code = textwrap.dedent(
        """
        import asyncio, subprocess
        from primerl_hpc.runtime.steps.local import end_orphans

        theirs, orphan = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
        asyncio.run(end_orphans((), {theirs.pid}))
        assert theirs.poll() is None and orphan.poll() is not None
        theirs.kill()
        """
    )
    subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=True)


def test_a_command_that_is_not_there_is_127(capfd: pytest.CaptureFixture[str]) -> None:
    assert subprocess.run([*GUARD, "/no/such/program"], check=False).returncode == 127
    assert "no such program" in capfd.readouterr().err


def test_a_sigterm_while_the_command_is_being_made_ends_it() -> None:
    code = textwrap.dedent(
        """
        import os, signal, sys
        from primerl_hpc.runtime.steps import guard

        popen = guard.subprocess.Popen
        def make(*args, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return popen(*args, **options)
        guard.subprocess.Popen = make
        sys.exit(guard.Guard(["sleep", "30"], grace_s=0.5).run())
        """
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode
        == 128 + signal.SIGTERM
    )


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_commands_exit_code_is_the_guards(code: int) -> None:
    assert subprocess.run([*GUARD, "bash", "-c", f"exit {code}"], check=False).returncode == code


def test_a_task_that_succeeds_waits_for_its_peers_and_one_that_fails_does_not(tmp_path: Path) -> None:
    """srun kills the other tasks of a step 10 s after the first one has ended, also while they write their output."""

    def task(number: int, command: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "SLURM_NTASKS": "2", "SLURM_PROCID": str(number)}
        words = ["--tell", str(tmp_path / "trainer-0.0"), "--", "bash", "-c", command]
        return subprocess.Popen([sys.executable, "-c", PATIENT_GUARD, *words], env=environ)

    marker = tmp_path / "slow"
    first, second = task(0, "exit 0"), task(1, f"sleep 2; touch {marker}; exit 75")
    try:
        assert first.wait(timeout=PATIENCE_S) == 0 and marker.exists()
        assert second.wait(timeout=PATIENCE_S) == 75
        for path in tmp_path.glob("*.json"):
            path.unlink()
        first = task(0, "exit 3")  # its peer has not begun
        assert first.wait(timeout=PATIENCE_S) == 3
        second = task(1, "exit 0")
        assert second.wait(timeout=PATIENCE_S) == 0
        for path in tmp_path.glob("*.json"):
            path.unlink()
        first = task(1, "exit 0")  # its peer never ends
        wait_for((tmp_path / "trainer-0.0.1.json").exists)
        first.terminate()
        assert first.wait(timeout=PATIENCE_S) == 0
    finally:
        for process in (first, second):
            process.kill()


@pytest.mark.parametrize(
    "outer, has_gpus, accelerators, seen",
    [
        (None, True, (1, 2), {"CUDA_VISIBLE_DEVICES": "1,2"}),  # a workstation, where it is not set
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
    guard = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", *show]
    assert captured(guard, check=True).stdout.strip() == seen


def test_a_guarded_command_has_the_hard_limits_whatever_the_login_shell_had() -> None:
    """SLURM hands the soft limits of the shell that submitted to every step."""
    names = ("RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_NPROC")
    show = f"import resource as r; print([r.getrlimit(getattr(r, name)) for name in {names}])"
    shell = f"ulimit -S -l 8; ulimit -S -n 256; exec {shlex.join([*GUARD, sys.executable, '-c', show])}"
    done = captured(["bash", "-c", shell], check=True)
    limits = ast.literal_eval(done.stdout)
    assert len(limits) == 3 and all(soft == hard for soft, hard in limits)


def test_a_scratch_folder_that_does_not_exist_on_the_node_is_reported_as_such() -> None:
    environ = {"PRIMERL_PRIVATE_TMP": ".pabc", "PRIMERL_SCRATCH": "$NO_SUCH_DISK/me"}
    command = [*GUARD, sys.executable, "-c", ""]
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, check=False)
    assert done.returncode == 127 and b"$NO_SUCH_DISK is not set" in done.stderr
    assert b"no such program" not in done.stderr
