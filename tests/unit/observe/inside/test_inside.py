"""`exec`, `stacks` and `top` for a run on this machine, with real processes, and real tmux and py-spy if
installed. tests/slurm/test_lifecycle.py has the steps of a job.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ExitCode, NotFoundError, PrimerlError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role
from primerl_hpc.observe.diagnose.diagnose import diagnose, render_diagnosis
from primerl_hpc.observe.inside.engine_traces import count_since, read_iterations
from primerl_hpc.observe.inside.profiles import missing_traces
from primerl_hpc.observe.inside.stacks import collect_stacks, parse_stacks
from primerl_hpc.observe.inside.steps import Place, all_places, mpi_option, step_command, step_environ
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.steps.stacks import blocked_threads, state_of, waited_path
from tests.support.helpers import TOY_RECIPE as TOY
from tests.support.helpers import captured, make_plan, process_plan, wait_for
from tests.support.terminal import Terminal
from tests.unit.runtime.test_supervisor import PUBLISH, SERVE, UNTIL_STOPPED, Toy, toy  # noqa: F401 (a fixture)

SCRIPT = "echo out; echo err >&2; exit 3"
# the parent of a vfork is in state D until its child ends: it waits in the kernel and accepts no signal but SIGKILL
BLOCKED = "import ctypes, time\nctypes.CDLL(None).vfork()\ntime.sleep(600)\n"


def command(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def run_of(toy: Toy) -> str:  # noqa: F811
    return str(toy.run.root)


def test_commands_run_in_a_running_run_with_their_own_exit_code(toy: Toy) -> None:  # noqa: F811
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    refused = command("exec", run_of(toy), "--", "true")
    assert isinstance(refused.exception, NotFoundError)
    toy.start()
    wait_for(lambda: toy.events("role_started"))
    done = command("exec", run_of(toy), "--role", "trainer", "--json", "--", "sh", "-c", SCRIPT)
    (step,) = json.loads(done.stdout)["steps"]
    assert (step["exit_code"], step["stdout"], step["stderr"], step["job"]) == (3, "out\n", "err\n", None)
    assert done.return_value == 3
    assert "no-such-program" in str(command("exec", run_of(toy), "no-such-program").exception)
    for words in (("--role", "judge"), ("--node", "nowhere")):
        assert isinstance(command("exec", run_of(toy), *words, "--", "true").exception, NotFoundError)
    with Terminal("primerl_hpc", "exec", run_of(toy), "--shell", "sh", cwd=toy.run.root) as terminal:
        terminal.press("echo $((20 + 3))-x; exit 5\n")
        terminal.wait_for("23-x")
        assert terminal.end() == 5
    write_json(toy.run.stop_request, {})
    toy.end()


OBSERVING = (
    ("status",),
    ("logs",),
    ("logs", "job"),
    ("samples",),
    ("scores",),
    ("diagnose",),
    ("chat", "--prompt", "hello"),
    ("stacks",),
    ("exec", "--", "true"),
    ("exec", "--json"),
    ("du",),
    ("profile",),
)
"""Commands that observe a run, some of which are refused: this run has no engine, no trainer and no rollouts."""


def test_commands_that_observe_a_run_change_nothing_in_it(toy: Toy) -> None:  # noqa: F811
    def files() -> dict[Path, bytes]:
        own = (toy.run.state, toy.run.supervisor_lock)  # the supervisor's heartbeat
        paths = [path for path in toy.run.root.rglob("*") if path.is_file() and path not in own]
        return {path: path.read_bytes() for path in paths}

    def processes() -> dict[int, float]:
        assert toy.supervisor is not None
        children = psutil.Process(toy.supervisor.pid).children(recursive=True)
        return {child.pid: child.create_time() for child in children}

    toy.add(Role.ORCHESTRATOR, PUBLISH + UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("orchestrator-0"))
    before = files(), processes()
    for name, *words in OBSERVING:
        done = command(name, run_of(toy), *words)
        assert done.exception is None or isinstance(done.exception, PrimerlError), done.exception
    assert (files(), processes()) == before
    write_json(toy.run.stop_request, {})
    assert toy.end() == ExitCode.STOPPED


def test_profile_requests_traces_of_existing_ranks_and_reports_a_run_that_ends(toy: Toy) -> None:  # noqa: F811
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_started"))
    assert isinstance(command("profile", run_of(toy), "--ranks", "0,5").exception, NotFoundError)
    assert "commas" in str(command("profile", run_of(toy), "--ranks", "a").exception)
    shown = json.loads(command("profile", run_of(toy), "--no-wait", "--json").stdout)
    request = json.loads(toy.run.profile_request.read_text())
    assert (request["steps"], request["ranks"]) == (3, [0]) and not shown["is_complete"]
    assert shown["traces"] == [str(toy.run.profile_trace(request["id"], 0))]
    write_json(toy.run.stop_request, {})
    toy.end()
    assert missing_traces(toy.run, [Path(path) for path in shown["traces"]]) is None
    assert isinstance(command("profile", run_of(toy)).exception, NotFoundError)


def test_profile_refuses_engines_that_do_not_run_and_too_many_steps_of_the_trainer(toy: Toy) -> None:  # noqa: F811
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_started"))
    refused = command("profile", run_of(toy), "--engines", "inference-0")
    assert isinstance(refused.exception, NotFoundError) and "no running engine" in str(refused.exception)
    assert "at most 20" in str(command("profile", run_of(toy), "--steps", "21").exception)
    assert not toy.run.profile_request.exists()
    write_json(toy.run.stop_request, {})
    toy.end()


def test_iterations_are_those_of_the_busiest_data_parallel_rank() -> None:
    text = 'vllm:iteration_tokens_total_count{{engine="{0}",model_name="m"}} {1}\n'
    before = read_iterations("# HELP x\n" + text.format(0, "12.0") + text.format(1, "1e+02"))
    after = read_iterations(text.format(0, "19.0") + text.format(1, "102.0") + text.format(2, "3.0"))
    assert count_since(before, after) == 7 and count_since({}, {}) == 0


def test_a_step_requests_everything_explicitly_and_ignores_the_job_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = step_command(Place("7", ("n1", "n2"), 1), ["hostname"], name="exec")
    assert words[:2] == ["srun", "--jobid=7"] and words[-1] == "hostname"
    for option in ("--overlap", "--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--het-group=1", "--mem=0"):
        assert option in words
    assert "--pty" in step_command(Place("7", ("n1",)), ["bash"], name="shell", is_terminal=True)
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert "SLURM_JOB_ID" not in step_environ() and step_environ(A="b")["SLURM_CONF"] == "/etc/slurm.conf"


def test_steps_of_a_user_have_the_mpi_option_of_the_runs_own_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun of the command line reads the cluster's MpiDefault, which may start a PMI server for each step."""
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM: the files decide
    run = RunDir(tmp_path / "run")
    arguments = ("--mpi=pmix", "--container-image=x")
    make_plan(run.root, TOY, processes=[process_plan(Role.TRAINER, srun_args=arguments)])
    write_json(run.plan, {**json.loads(run.plan.read_text()), "scheduler": "slurm"})
    write_json(run.state, {"state": "running", "attempt": 1, "job_id": "7", "host": "n1"})
    run.supervisor_lock.write_text("")
    words = [step_command(place, ["true"], name="exec") for place in all_places(run)]
    assert [word for word in words[0] if word.startswith(("--mpi", "--container"))] == ["--mpi=pmix"]
    make_plan(run.root, TOY, processes=[process_plan(Role.TRAINER)])
    assert mpi_option(run) == ()  # scheduler.mpi: null


def test_stacks_show_every_process_and_diagnose_names_one_that_is_blocked_in_the_kernel(
    toy: Toy,  # noqa: F811
) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, BLOCKED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    wait_for(
        lambda: any(process.is_blocked for process in collect_stacks(toy.run, only_blocked=True).processes)
    )
    report = collect_stacks(toy.run)
    assert not report.problems
    by_name: dict[str, list] = {}
    for process in report.processes:
        by_name.setdefault(process.process, []).append(process)
    assert set(by_name) == {"supervisor", "inference-0", "trainer-0"}
    (blocked,) = [process for process in by_name["trainer-0"] if process.is_blocked]
    assert blocked.wchan and blocked.stack == ""
    server = next(process for process in by_name["inference-0"] if process.pid == toy.pid_of("inference-0"))
    if shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        assert "Thread" in server.stack and "<module>" in server.stack
    else:
        assert "py-spy is not installed" in server.note
    MetricsWriter(toy.run.metrics("trainer")).write(1, {"time/step": 0.1, "loss/mean": 1.0})
    old = json.loads(toy.run.metrics("trainer").read_text()) | {"time": 1.0}
    toy.run.metrics("trainer").write_text(json.dumps(old) + "\n")
    write_json(toy.run.state, json.loads(toy.run.state.read_text()) | {"started": 1.0})
    found = diagnose(toy.run)
    assert found.as_json()["blocked"] == [blocked.blocked_sentence]
    assert f"process {blocked.pid}" in " ".join(render_diagnosis(found, num_lines=3).split())
    for process in by_name["trainer-0"]:
        # shown commands are shortened, by the length of the path of this checkout
        if "primerl_hpc.runtime.steps.guard" not in Path(f"/proc/{process.pid}/cmdline").read_text():
            os.kill(process.pid, signal.SIGKILL)
    assert toy.end() == ExitCode.FAILED


def test_the_file_of_a_blocked_system_call_is_found(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for call in ("open('pipe')", "import os; os.read(os.open('pipe', os.O_RDWR), 1)"):
        child = subprocess.Popen([sys.executable, "-c", call], cwd=tmp_path)
        try:
            wait_for(lambda: waited_path(child.pid, child.pid) == str(pipe))  # noqa: B023
            assert state_of(Path(f"/proc/{child.pid}")) == "S" and blocked_threads(child.pid) == []
        finally:
            child.kill()
            child.wait()
    assert waited_path(child.pid, child.pid) == ""


def test_mixed_or_incomplete_output_of_nodes_is_separated() -> None:
    def lines(node: str, entries: list) -> list[str]:
        packed = base64.b64encode(zlib.compress(json.dumps(entries).encode())).decode()
        return [
            *(f"@stacks {node} {packed[at : at + 9]}" for at in range(0, len(packed), 9)),
            f"@stacks {node} .",
        ]

    first, second = lines("a", [{"pid": 1}]), lines("b", [{"pid": 2}])
    mixed = ["Welcome to the cluster"]
    for index in range(max(len(first), len(second))):
        mixed += [*first[index : index + 1], *second[index : index + 1]]
    assert parse_stacks(mixed) == {"a": [{"pid": 1}], "b": [{"pid": 2}]}
    assert parse_stacks([*first[:-1], "@stacks c !!", "@stacks c ."]) == {}


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_top_starts_a_pane_for_each_role_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    roots = [tmp_path / "first.run", tmp_path / "second"]
    for root in roots:
        roles = (Role.TRAINER, Role.ORCHESTRATOR, Role.INFERENCE, Role.ENV_SERVER, Role.ROUTER)
        make_plan(root, TOY, processes=[process_plan(role) for role in roles])
        write_json(
            root / "control" / "job.json", {"scheduler": "local", "job_id": str(os.getpid()), "attempt": 1}
        )
    words = ("top", *map(str, roots), "--json")
    try:
        shown = json.loads(command(*words).stdout)
        assert shown["session"] == "primerl-first-run-and-1" and shown["is_new"]
        assert [line.split()[-2:] for line in shown["panes"]["second"]] == [
            [role, "-f"] for role in ("trainer", "orchestrator", "inference", "env_server")
        ]

        def pane_text(number: int) -> str:
            target = f"primerl-first-run-and-1:second.{number}"
            return captured(["tmux", "capture-pane", "-p", "-t", target]).stdout

        log = roots[1] / "logs" / "attempt_1" / "trainer-0.log"
        log.write_text("12:00:00 trainer step 1\n")
        base = int(captured(["tmux", "show-options", "-gv", "pane-base-index"], check=True).stdout)
        wait_for(lambda: "step 1" in pane_text(base), tell=lambda: pane_text(base))
        assert not json.loads(command(*words).stdout)["is_new"], "the session exists"
        assert "letters, digits" in str(command("top", str(roots[0]), "--session", "a:b").exception)
    finally:
        subprocess.run(["tmux", "kill-server"], check=False, capture_output=True)


def test_top_without_tmux_prints_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(tmp_path / "run", TOY, processes=[process_plan(Role.TRAINER), process_plan(Role.INFERENCE)])
    monkeypatch.setenv("PATH", str(tmp_path))
    printed = command("top", str(tmp_path / "run")).output
    for role in ("trainer", "inference"):
        assert f"primerl-hpc logs {tmp_path / 'run'} {role} -f" in printed
