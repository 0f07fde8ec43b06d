"""The supervisor with real child processes: small programs in place of the heavy roles, the same plan, files and
signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from primerl_hpc.common.errors import ExitCode, OccupiedError
from primerl_hpc.common.files import read_json, read_json_or_none, read_jsonl, write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.observe.diagnose.diagnose import diagnose, render_diagnosis
from primerl_hpc.observe.inside.stacks import collect_stacks
from primerl_hpc.observe.report.report import starts_of
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.one_run import OneRun
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.observe.status.usage import Accounting
from primerl_hpc.plan.plan import OnExit, Plan
from primerl_hpc.run.endpoints import rendezvous_name
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files.journal import retry_run_directory
from primerl_hpc.runtime.steps.guard import descendants_of
from primerl_hpc.runtime.supervisor import Supervisor
from primerl_hpc.slurm.jobs import JobFact
from tests.support.helpers import (
    PATIENCE_S,
    ROOT,
    TOY_RECIPE,
    captured,
    is_alive,
    make_plan,
    process_plan,
    wait_for,
)

PUBLISH = """
import sys, time
from pathlib import Path
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
publish_endpoint(run, sys.argv[3], "http://127.0.0.1:1")
"""
SERVE = PUBLISH + "time.sleep(600)\n"
UNTIL_STOPPED = """
import sys, time
from pathlib import Path
from primerl_hpc.run.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
while not run.stop_request.exists(): time.sleep(0.05)
sys.exit(75)
"""
UNTIL_GIVEN_UP = """
import sys, time
from pathlib import Path
from primerl_hpc.run.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
while "role_given_up" not in run.events.read_text(): time.sleep(0.05)
"""


class Toy:
    """A run whose roles are one-line programs."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir(root)
        self.recipe = TOY_RECIPE
        self.processes: list = []
        self.supervisor: subprocess.Popen[str] | None = None

    def add(
        self, role: Role, code: str, on_exit: OnExit, *, index: int = 0, ready_timeout_s: int = 0
    ) -> None:
        name = f"{role.value}-{index}"
        argv = (sys.executable, "-c", textwrap.dedent(code), str(self.run.root), "main", name)
        self.processes.append(
            process_plan(role, index, argv=argv, on_exit=on_exit, ready_timeout_s=ready_timeout_s)
        )

    def start(self, plan: Plan | None = None, *, pythonpath: Path | None = ROOT, **environ: str) -> None:
        plan = plan or make_plan(self.run.root, self.recipe, processes=self.processes)
        write_json(self.run.plan, plan.model_dump(mode="json"))
        self.supervisor = subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.runtime.supervisor", str(self.run.root)],
            env={**os.environ, "PYTHONPATH": str(pythonpath or ""), **environ},
            cwd=self.run.root,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> int:
        assert self.supervisor is not None
        try:
            return self.supervisor.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            stacks = json.dumps(collect_stacks(self.run).as_json(), indent=1)
            pytest.fail(f"the supervisor did not end:\n{stacks}\n{self.run.events.read_text()}")

    def wait_until_it_says(self, words: str) -> str:
        """Return the log up to and with the line that has ``words``."""
        assert self.supervisor is not None and self.supervisor.stderr is not None
        seen = ""
        for line in self.supervisor.stderr:
            seen += line
            if words in line:
                return seen
        raise AssertionError(f"the supervisor ended without {words!r}:\n{seen}")

    def events(self, name: str) -> list[dict]:
        return [row for row in read_jsonl(self.run.events) if row["event"] == name]

    def is_ready(self, process: str) -> bool:
        return any(row["process"] == process for row in self.events("role_ready"))

    def pid_of(self, process: str) -> int:
        endpoint = read_json(self.run.endpoint(process))
        return endpoint["pid"]


@pytest.fixture
def toy(tmp_path: Path):
    made = Toy(tmp_path / "run")
    yield made
    if made.supervisor is not None and made.supervisor.poll() is None:
        made.supervisor.kill()
        made.supervisor.wait()


def test_trainer_and_orchestrator_exit_end_the_run_and_release_the_servers(toy: Toy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, "print('orchestrated')", OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.DONE
    assert take_snapshot(toy.run).state == RunState.DONE
    assert not toy.run.supervisor_lock.exists() and not toy.run.endpoint("inference-0").exists()
    assert "trained" in (toy.run.attempt_logs(1) / "trainer-0.log").read_text()


def test_a_crash_of_the_trainer_reports_the_first_fault_and_ends_all_processes(toy: Toy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, "raise SystemExit('error: the loss is a teapot')", OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    failure = read_json(toy.run.failure)
    assert (failure["process"], failure["exit_code"], failure["signal"]) == ("trainer-0", 1, None)
    assert "teapot" in failure["message"] and failure["last_lines"]
    assert take_snapshot(toy.run).state == RunState.FAILED


def test_a_killed_trainer_is_reported_with_its_signal(toy: Toy) -> None:
    toy.add(Role.TRAINER, "import os; os.kill(os.getpid(), 9)", OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    assert read_json(toy.run.failure)["signal"] == "SIGKILL"


def test_a_sentence_left_by_a_rank_decides_message_and_exit_code(toy: Toy) -> None:
    code = """
    import sys
    from pathlib import Path
    from primerl_hpc.common.files import write_json
    path = Path(sys.argv[1]) / "control" / "errors" / "trainer-0.json"
    write_json(path, {"process": "trainer-0", "rank": 1, "exit_code": 65, "message": "row 7 has no answer"})
    sys.exit(1)
    """
    toy.add(Role.TRAINER, code, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.DATA
    failure = read_json(toy.run.failure)
    assert (failure["rank"], failure["message"]) == (1, "row 7 has no answer")
    assert read_json(toy.run.state)["processes"]["trainer-0"]["exit"] == "exit code 65"  # as `diagnose`


def test_a_killed_server_restarts_and_the_run_continues(toy: Toy) -> None:
    toy.add(Role.ROUTER, SERVE, OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("router-0"))
    first = toy.pid_of("router-0")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(toy.events("role_ready")) == 2)
    assert toy.pid_of("router-0") != first
    assert read_json(toy.run.endpoint("router-0"))["incarnation"] == 1
    write_json(toy.run.stop_request, {})
    toy.end()


def test_times_of_a_start_are_recorded_also_of_processes_that_serve_nothing(toy: Toy) -> None:
    publish = PUBLISH.replace('"http://127.0.0.1:1")', 'URL, phases={"imports": 0.5, "model": 0.25})')
    toy.add(Role.ROUTER, publish.replace("URL", '"http://127.0.0.1:1"') + "time.sleep(600)\n", OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, publish.replace("URL", '""') + UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: len(toy.events("role_ready")) == 2)
    rows = {row["process"]: row for row in toy.events("role_ready")}
    for name, url in (("router-0", "http://127.0.0.1:1"), ("orchestrator-0", None)):
        row, phases = rows[name], rows[name]["phases"]
        assert row["url"] == url and list(phases) == ["launch", "imports", "model"]
        assert sum(phases.values()) == pytest.approx(max(row["after_s"], 0.75), abs=0.1)
        assert read_json(toy.run.state)["processes"][name]["start"] == phases
    shown = OneRun(toy.run, JobWatcher(), Accounting())
    shown.refresh()
    assert "start-up    " in shown.text() and "imports 0.5 s, model 0.2 s" in shown.text()
    assert [row[1] for row in starts_of(shown.events)] == list(rows)
    assert (
        read_json(toy.run.state)["processes"]["orchestrator-0"]["state"] == "starting"
    )  # it has no endpoint
    write_json(toy.run.stop_request, {})
    toy.end()


def test_a_server_that_dies_again_and_again_without_progress_fails_the_run(toy: Toy) -> None:
    toy.add(Role.ROUTER, "raise SystemExit(1)", OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    assert read_json(toy.run.failure)["process"] == "router-0"
    assert len(toy.events("role_restarting")) == 3


def test_an_evaluation_makes_progress_with_every_rollout(toy: Toy) -> None:
    """It writes one row of metrics per version: an engine that dies now and then must not end it."""
    code = """
    with run.traces("eval").open("a") as file: file.write("{}\\n")
    raise SystemExit(1)
    """
    wait = """
    path = run.traces("eval")
    while not path.exists() or len(path.read_text().splitlines()) < 6: time.sleep(0.05)
    """
    toy.recipe = {name: TOY_RECIPE[name] for name in ("name", "model")}
    toy.recipe |= {"kind": "eval", "environments": {"eval": [{"id": "reverse-text"}]}}
    toy.add(Role.INFERENCE, PUBLISH + textwrap.dedent(code), OnExit.RESTART)
    toy.add(Role.EVALUATOR, PUBLISH + textwrap.dedent(wait), OnExit.ENDS_PHASE)
    (toy.run.root / "traces").mkdir(parents=True)
    toy.start()
    assert toy.end() == ExitCode.DONE


def test_a_server_that_is_not_ready_in_time_is_started_again(toy: Toy) -> None:
    toy.add(Role.ROUTER, "import time; time.sleep(600)", OnExit.RESTART, ready_timeout_s=1)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_restarting"))
    assert toy.events("role_not_ready")
    write_json(toy.run.stop_request, {"now": True})
    toy.end()


def test_a_process_that_is_not_ready_in_time_is_reported_once(toy: Toy) -> None:
    toy.add(Role.TRAINER, "import time; time.sleep(600)", OnExit.ENDS_PHASE, ready_timeout_s=1)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    failure = read_json(toy.run.failure)
    assert (failure["message"], failure["signal"]) == ("trainer-0 was not ready after 1 s", "SIGKILL")
    assert len(toy.events("role_not_ready")) == 1
    assert "SIGKILL (by the supervisor)" in render_diagnosis(diagnose(toy.run), 5)


def test_a_line_of_the_setup_that_failed_is_the_runs_fault_and_no_process_is_started(toy: Toy) -> None:
    """As launch/job.sbatch reports it; tests/unit/render/test_render.py has the script, tests/slurm the job."""
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    make_plan(toy.run.root, toy.recipe, processes=toy.processes)
    output = "some words before\n/var/spool/slurmd/job3/slurm_script: line 27: module: command not found\n"
    report = (
        "primerl_hpc.runtime.supervisor",
        str(toy.run.root),
        "--setup-failure",
        "127",
        "module load nccl/2.99",
        output,
    )
    done = captured([sys.executable, "-m", *report], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == ExitCode.CONFIG, done.stderr
    snapshot = take_snapshot(toy.run)
    words = "failed with exit status 127: module load nccl/2.99: module: command not found"
    assert (snapshot.state, snapshot.attempt) == (RunState.FAILED, 1) and words in snapshot.message
    failure = read_json(toy.run.failure)
    assert (failure["exit_code"], failure["reason"]) == (ExitCode.CONFIG, "the setup of its job failed")
    said = " ".join(render_diagnosis(diagnose(toy.run), 5).split())
    assert words in said and "optional: true" in said and "try again? no" in said
    assert not toy.events("role_started") and not toy.run.supervisor_lock.exists()
    toy.start()  # the module is there now
    assert toy.end() == ExitCode.DONE


# -- which copy of the package a role runs
# -------------------------------------------------------------------------------

ROLE = """
import sys
import primerl_hpc
from primerl_hpc.roles.start import start_role
def serve(role):
    print("runs", primerl_hpc.__file__, flush=True)
    import an_environment
    print("finds", an_environment.__file__, flush=True)
sys.exit(start_role("trainer", sys.argv[1:], serve))
"""


def copy_package(folder: Path, *, change: str = "") -> Path:
    """A checkout that is not installed; ``change`` is a line more in it."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "primerl_hpc", folder / "primerl_hpc", ignore=skipped)
    with (folder / "primerl_hpc" / "run" / "records.py").open("a") as file:
        file.write(change)
    return folder


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """Create a folder like one of `env install --target`."""
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "an_environment.py").touch()
    return folder


def start_with(toy: Toy, pythonpath: Path | None, *, role: Path, python: str = sys.executable) -> None:
    """The supervisor finds the package by ``pythonpath``, the role is asked to have ``role`` on its own."""
    toy.add(Role.TRAINER, ROLE, OnExit.ENDS_PHASE)
    trainer = toy.processes[0]
    changes = {"env": {"PYTHONPATH": str(role)}, "argv": (python, *trainer.argv[1:])}
    toy.processes = [trainer.model_copy(update=changes)]
    toy.start(pythonpath=pythonpath)


def test_pythonpath_of_a_recipe_is_joined_with_the_folder_of_the_package(
    toy: Toy, tmp_path: Path, environments: Path
) -> None:
    checkout = copy_package(tmp_path / "checkout")
    start_with(toy, checkout, role=environments)
    assert toy.end() == ExitCode.DONE
    log = (toy.run.attempt_logs(1) / "trainer-0.log").read_text()
    assert f"runs {checkout}/primerl_hpc/__init__.py" in log
    assert f"finds {environments}/an_environment.py" in log


def test_a_role_that_would_run_another_copy_of_the_package_is_refused(
    toy: Toy, tmp_path: Path, environments: Path
) -> None:
    other = copy_package(environments)
    start_with(toy, None, role=other)  # the supervisor's is installed
    assert toy.end() == ExitCode.CONFIG
    message = read_json(toy.run.failure)["message"]
    assert f"from {other}/primerl_hpc" in message and f"from {ROOT}/primerl_hpc" in message, message
    assert "PYTHONPATH" in message and "\n" not in message


@pytest.mark.parametrize("change", ["", "# another version\n"], ids=["the same content", "other content"])
def test_an_interpreter_of_its_own_may_have_its_package_elsewhere_but_no_other_one(
    toy: Toy, tmp_path: Path, environments: Path, change: str
) -> None:
    other = copy_package(environments, change=change)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    start_with(toy, None, role=other, python=str(python))
    if not change:
        assert toy.end() == ExitCode.DONE
        return
    assert toy.end() == ExitCode.CONFIG
    message = read_json(toy.run.failure)["message"]
    assert message.count("(content ") == 2 and "software.roles" in message


def test_processes_of_a_killed_guard_have_ended_before_the_next_incarnation_starts(toy: Toy) -> None:
    leaves = """
    import os, subprocess
    left = run.root / "left"
    if left.exists():
        (run.root / "beside").write_text(str(os.path.exists(f"/proc/{left.read_text()}")))
    else:
        below = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3).pid)"
        told = subprocess.run([sys.executable, "-c", below], stdout=subprocess.PIPE, text=True)
        left.write_text(told.stdout.strip())
    """
    publish = "publish_endpoint(run"
    toy.add(Role.INFERENCE, SERVE.replace(publish, textwrap.dedent(leaves) + publish), OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    psutil.Process(toy.pid_of("inference-0")).parent().kill()
    wait_for(lambda: len(toy.events("role_ready")) == 2)
    assert (toy.run.root / "beside").read_text() == "False"
    write_json(toy.run.stop_request, {"now": True})
    toy.end()


def test_a_peer_may_ask_for_a_restart(toy: Toy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    write_json(toy.run.restart_request("inference-0"), {"reason": "it cannot be updated"})
    wait_for(lambda: len(toy.events("role_ready")) == 2)
    write_json(toy.run.stop_request, {"now": True})
    toy.end()


def test_a_restart_request_for_an_earlier_incarnation_spares_its_successor(toy: Toy) -> None:
    """A peer that was connected to a killed engine reports it; the supervisor has started the next one already."""
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    os.kill(toy.pid_of("inference-0"), signal.SIGKILL)
    wait_for(lambda: len(toy.events("role_ready")) == 2)
    request = toy.run.restart_request("inference-0")
    write_json(request, {"reason": "it did not answer", "incarnation": 0})
    wait_for(lambda: not request.exists())
    write_json(request, {"reason": "it did not answer", "incarnation": 1})
    wait_for(lambda: len(toy.events("role_ready")) == 3)
    assert len(toy.events("role_restart_requested")) == 1
    write_json(toy.run.stop_request, {"now": True})
    toy.end()


def test_a_stop_request_ends_with_75_when_both_sides_saved(toy: Toy) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: len(toy.events("role_started")) == 2)
    write_json(toy.run.stop_request, {})
    assert toy.end() == ExitCode.STOPPED
    assert take_snapshot(toy.run).state == RunState.STOPPED


def test_sigterm_asks_the_roles_to_save(toy: Toy) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_started"))
    toy.supervisor.send_signal(signal.SIGTERM)
    assert toy.end() == ExitCode.STOPPED


def test_torchruns_zero_with_a_stopped_outcome_counts_as_stopped(toy: Toy) -> None:
    code = """
    import sys
    from pathlib import Path
    from primerl_hpc.common.files import write_json
    write_json(Path(sys.argv[1]) / "control" / "outcomes" / "trainer-0.json", {"outcome": "stopped", "step": 2})
    """
    toy.add(Role.TRAINER, code, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.STOPPED


# one step an incarnation, with its row; dies at the steps whose first character is in `faults`, once each
STEPS = """
import os, sys, time
from pathlib import Path
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
run, name = RunDir(Path(sys.argv[1])), sys.argv[3]
publish_endpoint(run, name, "http://127.0.0.1:1")
step = run.latest_checkpoint() or 0
print("goes on after", step, flush=True)
while step < 3:
    step += 1
    MetricsWriter(run.metrics("trainer")).write(step, {})
    fault = run.root / f"fault_{step}"
    if fault.exists():
        if fault.read_text() == "once":
            fault.unlink()
        raise SystemExit(f"error: no luck with step {step}")
    run.finish_checkpoint_side(step, "trainer", ("trainer",))
"""


def recovering(toy: Toy, **faults: str) -> Toy:
    """A trainer that dies after step N of ``fault_N``, an orchestrator that waits, and an engine."""
    toy.recipe = TOY_RECIPE | {"recovery": {"in_place": True}}
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, STEPS, OnExit.ENDS_PHASE)
    wait = "while not (run.checkpoint(3) / 'COMPLETE').exists(): time.sleep(0.05)"
    toy.add(Role.ORCHESTRATOR, PUBLISH + wait, OnExit.ENDS_PHASE)
    toy.run.root.mkdir(parents=True)
    for name, how in faults.items():
        (toy.run.root / name).write_text(how)
    return toy


def test_a_killed_trainer_continues_from_the_last_checkpoint_while_the_engine_stays(toy: Toy) -> None:
    recovering(toy, fault_2="once", fault_3="once").start()
    assert toy.end() == ExitCode.DONE
    log = (toy.run.attempt_logs(1) / "trainer-0.log").read_text()
    assert [line for line in log.splitlines() if line.startswith("goes on")] == [
        f"goes on after {step}" for step in (0, 1, 2)
    ]
    recoveries = toy.events("recovery_started")
    assert [(row["process"], row["after_step"]) for row in recoveries] == [("trainer-0", 1), ("trainer-0", 2)]
    assert "no luck with step 2" in recoveries[0]["message"]
    incarnations = {name: each["incarnation"] for name, each in read_json(toy.run.state)["processes"].items()}
    assert incarnations == {"inference-0": 0, "trainer-0": 2, "orchestrator-0": 2}
    assert len(toy.events("attempt_started")) == 1 and not toy.run.failure.exists()


def test_a_recurring_fault_ends_the_run_and_the_first_one_is_reported(toy: Toy) -> None:
    recovering(toy, fault_1="once", fault_2="always").start()
    assert toy.end() == ExitCode.FAILED
    assert [row["after_step"] for row in toy.events("recovery_started")] == [0, 1]
    failure = read_json(toy.run.failure)
    assert "no luck with step 2" in failure["message"] and "without a new step" in failure["reason"]
    assert ["no luck with step 1" in each["message"] for each in failure["recovered"]] == [True, False]
    found = diagnose(toy.run)
    assert [fault["after_step"] for fault in found.recovered] == [0, 1]
    assert re.search(r"recovered +after step 0, from trainer-0", render_diagnosis(found, 5))


def test_a_run_continues_after_several_kills_at_the_same_step(toy: Toy) -> None:
    recovering(toy, fault_2="2")
    kill = """
    left = int(fault.read_text())
    fault.write_text(str(left - 1)) if left > 1 else fault.unlink()
    os.kill(os.getpid(), 9)
    """
    code = STEPS.replace(
        "        if fault.read_text()",
        textwrap.indent(textwrap.dedent(kill), " " * 8) + "        if fault.read_text()",
    )
    toy.processes[1] = toy.processes[1].model_copy(
        update={"argv": (*toy.processes[1].argv[:2], code, *toy.processes[1].argv[3:])}
    )
    toy.start()
    assert toy.end() == ExitCode.DONE
    recoveries = toy.events("recovery_started")
    assert [(row["after_step"], row["in_s"]) for row in recoveries] == [(1, 1), (1, 4)]
    assert {row["message"] for row in recoveries} == {"killed by signal 9 (SIGKILL)"}


def test_files_of_a_killed_orchestrator_beyond_the_checkpoint_are_deleted(toy: Toy) -> None:
    recovering(toy)
    toy.processes[1] = toy.processes[1].model_copy(
        update={"argv": tuple(word.replace("step < 3", "step < 1") for word in toy.processes[1].argv)}
    )
    toy.start()
    wait_for(lambda: toy.run.latest_checkpoint() == 1 and toy.is_ready("orchestrator-0"))
    (toy.run.weights_step(2)).mkdir(parents=True)
    os.kill(toy.pid_of("orchestrator-0"), signal.SIGKILL)
    wait_for(lambda: toy.events("recovery_started"))
    wait_for(lambda: toy.run.endpoint("orchestrator-0").exists(), "its next life")
    assert not toy.run.weights_step(2).exists() and toy.run.latest_checkpoint() == 1
    write_json(toy.run.stop_request, {"now": True})
    assert toy.end() == ExitCode.PREEMPTED


@pytest.mark.parametrize("has_batch", [True, False], ids=["with a batch", "alone, as in benchmark mode"])
def test_a_hung_trainer_writes_its_stacks_and_is_treated_like_an_exited_one(
    toy: Toy, has_batch: bool
) -> None:
    send = """
    from primerl_hpc.run.metrics import MetricsWriter
    MetricsWriter(run.metrics("orchestrator")).write(1, {})
    """
    before = """
    import os
    from primerl_hpc.common.log import dump_stacks_on_signal
    dump_stacks_on_signal()
    def hang_here(): time.sleep(900)
    """
    code = 'if os.environ["PRIMERL_INCARNATION"] == "0": hang_here()\n'
    toy.recipe = TOY_RECIPE | {"recovery": {"in_place": True}, "timeouts": {"stall_s": 10}}
    toy.add(Role.TRAINER, textwrap.dedent(before) + PUBLISH + code, OnExit.ENDS_PHASE, ready_timeout_s=300)
    if has_batch:
        toy.add(Role.ORCHESTRATOR, PUBLISH + textwrap.dedent(send), OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.DONE
    assert [row["process"] for row in toy.events("role_hung")] == ["trainer-0"]
    said = "its last step was 0" + (", the last batch 1" if has_batch else "")
    assert toy.events("recovery_started")[0]["message"].endswith(said)
    assert "in hang_here" in (toy.run.attempt_logs(1) / "trainer-0.log").read_text()


def test_a_frozen_engine_is_restarted_although_its_process_is_alive(toy: Toy) -> None:
    code = """
    from http.server import BaseHTTPRequestHandler, HTTPServer
    import sys
    from pathlib import Path
    from primerl_hpc.run.endpoints import publish_endpoint
    from primerl_hpc.run.rundir import RunDir
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # answers every request with an error
    publish_endpoint(RunDir(Path(sys.argv[1])), sys.argv[3], f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()
    """
    toy.recipe = TOY_RECIPE | {"timeouts": {"health_s": 10}}
    toy.add(Role.INFERENCE, code, OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    os.kill(toy.pid_of("inference-0"), signal.SIGSTOP)
    wait_for(lambda: len(toy.events("role_ready")) == 2, "its second life")
    assert [row["process"] for row in toy.events("role_hung")] == ["inference-0"]
    write_json(toy.run.stop_request, {"now": True})
    toy.end()


def test_a_killed_supervisor_leaves_nothing_running_and_resume_takes_over(toy: Toy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    wait_for(lambda: len(descendants_of(toy.supervisor.pid)) == 4, "both roles behind their guards")
    below = [psutil.Process(pid) for pid in descendants_of(toy.supervisor.pid)]
    toy.supervisor.kill()
    toy.supervisor.wait()
    wait_for(lambda: not any(map(is_alive, below)), "every process to end")
    snapshot = take_snapshot(toy.run)
    assert snapshot.state == RunState.FAILED and "resume" in (snapshot.message or "")
    toy.start()
    # not before the trainer is there: without it nothing is saved, and the exit code is another one
    wait_for(lambda: len(descendants_of(toy.supervisor.pid)) == 4, "both roles behind their guards again")
    toy.supervisor.send_signal(signal.SIGTERM)
    assert toy.end() == ExitCode.STOPPED
    assert os.readlink(toy.run.latest_logs) == "attempt_2"


def test_a_cancellation_before_the_supervisor_starts_is_kept_and_a_later_resume_continues(toy: Toy) -> None:
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, "print('orchestrated')", OnExit.ENDS_PHASE)
    write_json(toy.run.stop_request, {"reason": "cancel", "now": False})
    toy.start()
    assert toy.end() == ExitCode.PREEMPTED
    assert take_snapshot(toy.run).state == RunState.CANCELLED and not toy.events("role_started")
    toy.start()
    assert toy.end() == ExitCode.DONE


def test_a_users_stop_request_is_not_replaced_by_the_supervisors(toy: Toy) -> None:
    make_plan(toy.run.root, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    supervisor = Supervisor(toy.run)
    write_json(toy.run.stop_request, {"reason": "cancel", "now": False})
    supervisor.stop.request("walltime")
    supervisor.journal.catch_up()
    assert read_json(toy.run.stop_request)["reason"] == "cancel"
    toy.run.stop_request.unlink()
    supervisor.stop.request("walltime")
    supervisor.journal.catch_up()
    assert read_json(toy.run.stop_request)["reason"] == "walltime"


def test_long_work_does_not_block_the_loop_and_ends_before_a_cancelled_attempt_continues() -> None:
    loop_goes_on, has_begun, is_over = threading.Event(), threading.Event(), []

    def look() -> None:
        has_begun.set()
        is_over.append(loop_goes_on.wait(timeout=PATIENCE_S))

    async def cancel_it() -> None:
        looking = asyncio.create_task(retry_run_directory(look))
        while not has_begun.is_set():
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.sleep(0)
        loop_goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert is_over == [True]

    asyncio.run(cancel_it())


def test_a_signal_while_a_phase_is_torn_down_starts_nothing_of_the_next(toy: Toy) -> None:
    lingers = """
    import signal
    from pathlib import Path
    def leave(*_):
        (run.root / "leaving").touch()
        while not (run.root / "enough").exists(): time.sleep(0.05)
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, leave)
    """
    publish = "publish_endpoint(run"
    toy.add(Role.INFERENCE, SERVE.replace(publish, textwrap.dedent(lingers) + publish), OnExit.RESTART)
    trains = "while not run.endpoint('inference-0').exists(): time.sleep(0.05)"
    toy.add(Role.TRAINER, PUBLISH + trains, OnExit.ENDS_PHASE)
    plan = make_plan(toy.run.root, TOY_RECIPE, processes=toy.processes)
    warmup = plan.phases[0].model_copy(update={"name": "warmup"})
    plan = plan.model_copy(update={"phases": (warmup, *plan.phases)})
    toy.start(plan)
    wait_for((toy.run.root / "leaving").exists, "the teardown")
    toy.supervisor.send_signal(signal.SIGTERM)
    wait_for(lambda: toy.events("signal"))
    (toy.run.root / "enough").touch()
    assert toy.end() == ExitCode.PREEMPTED
    assert [row["phase"] for row in toy.events("phase_started")] == ["warmup"]


def test_a_job_without_its_allocation_reports_why_it_failed(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    plan = make_plan(toy.run.root, TOY_RECIPE, processes=toy.processes)
    toy.start(plan.model_copy(update={"scheduler": "slurm"}))
    assert toy.end() == ExitCode.UNAVAILABLE
    assert read_json(toy.run.state)["state"] == RunState.FAILED
    failure = read_json(toy.run.failure)
    assert "not part of a SLURM job" in failure["message"] and failure["exit_code"] == ExitCode.UNAVAILABLE


def test_a_supervisor_that_was_taken_over_leaves_its_successor_alone(toy: Toy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    theirs = {
        toy.run.supervisor_lock: {"host": "elsewhere", "pid": 1, "job": None},
        toy.run.state: {"attempt": 2, "state": "running"},
        toy.run.endpoint("inference-0"): {"attempt": 2, "incarnation": 0, "url": "http://127.0.0.1:2"},
    }
    for path, content in theirs.items():
        write_json(path, content)
    assert toy.end() == ExitCode.OCCUPIED
    assert {path: read_json_or_none(path) for path in theirs} == theirs and toy.run.reserve.exists()


def test_a_fault_of_the_supervisor_is_reported_like_any_other(toy: Toy) -> None:
    code = """
    import sys
    from pathlib import Path
    metrics = Path(sys.argv[1]) / "metrics"
    metrics.mkdir(exist_ok=True)
    (metrics / "trainer.jsonl").write_text('{"attempt": 1}\\n')
    """
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, code, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    failure = read_json(toy.run.failure)
    assert (failure["process"], failure["message"]) == ("supervisor", "KeyError: 'step'")
    assert take_snapshot(toy.run).state == RunState.FAILED and not toy.run.endpoint("inference-0").exists()


X = """
import sys, time
from pathlib import Path
x = Path(sys.argv[1]) / "metrics" / "eval.jsonl"
x.parent.mkdir(exist_ok=True)
"""
FALTERS = (
    X
    + """
while not x.with_name("waits").exists():
    time.sleep(0.05)
x.symlink_to(x.name)  # a loop: its size is an OSError
while not x.with_name("told").exists():
    time.sleep(0.05)
x.unlink()
"""
)
WAITS_UNTIL_IT_FALTERS = X + "x.with_name('waits').touch()\nwhile not x.is_symlink(): time.sleep(0.05)\n"
WAITS_UNTIL_IT_IS_OVER = WAITS_UNTIL_IT_FALTERS + "while x.is_symlink(): time.sleep(0.05)\n"


def what_cannot_be_seen(toy: Toy, orchestrator: str, until: str) -> list[str]:
    """A line of the supervisor's log each, in a run whose progress cannot be read until the log has the last one."""
    toy.add(Role.TRAINER, FALTERS, OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, orchestrator, OnExit.ENDS_PHASE)
    toy.start()
    before = toy.wait_until_it_says(f"Cannot access {until}, retrying")
    (toy.run.root / "metrics" / "told").touch()
    assert toy.end() == ExitCode.DONE
    return re.findall("Cannot access (.*?), retrying", before + toy.supervisor.stderr.read())


def test_transient_errors_while_reading_progress_are_reported_once_and_end_nothing(toy: Toy) -> None:
    progress = "the run's progress"
    assert what_cannot_be_seen(toy, WAITS_UNTIL_IT_IS_OVER, progress) == [progress]


def test_transient_errors_at_the_exit_of_a_role_are_reported_once_and_end_nothing(toy: Toy) -> None:
    told = what_cannot_be_seen(toy, WAITS_UNTIL_IT_FALTERS, "the run directory")
    assert told.count("the run directory") == 1
    assert told.count("the run's progress") <= 1  # it may have been read before the end


def test_an_attempt_starts_when_the_run_directory_responds(toy: Toy) -> None:
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.run.failure.mkdir(parents=True)  # of an earlier attempt; to unlink it is an OSError
    toy.start()
    toy.wait_until_it_says("retrying")
    assert not toy.events("attempt_started")
    toy.run.failure.rmdir()
    assert toy.end() == ExitCode.DONE


def test_a_signal_before_the_run_directory_responds_ends_the_attempt_under_its_number(toy: Toy) -> None:
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.run.failure.mkdir(parents=True)
    write_json(toy.run.state, {"attempt": 3, "state": "failed"})
    toy.start()
    toy.wait_until_it_says("retrying")
    toy.supervisor.send_signal(signal.SIGTERM)
    assert toy.end() == ExitCode.PREEMPTED
    state = read_json(toy.run.state)
    assert (state["attempt"], state["state"]) == (4, RunState.CANCELLED)


@pytest.mark.parametrize("code", [0, 75])
def test_an_exit_that_cannot_be_written_down_at_once_counts_all_the_same(toy: Toy, code: int) -> None:
    """Lost, it would hold the nodes until the walltime: no other event would end the wait."""
    left = """
    import sys, time
    from pathlib import Path
    from primerl_hpc.run.endpoints import rendezvous_name
    from primerl_hpc.run.rundir import RunDir
    left = RunDir(Path(sys.argv[1])).endpoint(rendezvous_name("trainer-0"))
    """
    trainer = f"left.mkdir(parents=True)  # to unlink it is an OSError\nsys.exit({code})"
    orchestrator = "while not (left.parents[2] / 'enough').exists(): time.sleep(0.05)"
    toy.add(Role.TRAINER, textwrap.dedent(left) + trainer, OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, textwrap.dedent(left) + orchestrator, OnExit.ENDS_PHASE)
    toy.start()
    toy.wait_until_it_says("retrying")
    toy.run.endpoint(rendezvous_name("trainer-0")).rmdir()
    wait_for(lambda: toy.events("role_exited"), "the trainer's exit to be written down")
    (toy.run.root / "enough").touch()
    assert toy.end() == (code or ExitCode.DONE)
    assert [row["process"] for row in toy.events("role_exited")] == ["trainer-0", "orchestrator-0"]


def test_a_recovery_continues_when_the_run_directory_responds_again(toy: Toy) -> None:
    """Files beyond the checkpoint cannot be deleted for a while: the trainer is not started before that."""
    code = """
    run.checkpoints.touch()  # to list it is an OSError
    sys.exit(1)
    """
    again = "\nif (run.root / 'again').exists(): sys.exit(0)\n(run.root / 'again').touch()"
    toy.recipe = TOY_RECIPE | {"recovery": {"in_place": True}}
    toy.add(Role.TRAINER, PUBLISH + again + textwrap.dedent(code), OnExit.ENDS_PHASE)
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.start()
    toy.wait_until_it_says("retrying")
    wait_for(lambda: toy.events("role_exited"))  # events are written in series, later than the log line
    assert not toy.events("recovery_started")
    toy.run.checkpoints.unlink()
    assert toy.end() == ExitCode.DONE
    started = [row["incarnation"] for row in toy.events("role_started") if row["process"] == "trainer-0"]
    assert started == [0, 1] and len(toy.events("recovery_started")) == 1


def test_a_second_supervisor_on_the_run_directory_is_refused(toy: Toy) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_started"))
    first = toy.supervisor
    toy.start()
    assert toy.supervisor.wait(timeout=PATIENCE_S) == ExitCode.OCCUPIED
    assert "another supervisor" in toy.supervisor.stderr.read()
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=PATIENCE_S) == ExitCode.STOPPED


def test_a_run_of_another_plan_version_is_refused_in_one_sentence(toy: Toy) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    make_plan(toy.run.root, TOY_RECIPE, processes=toy.processes)
    plan = json.loads(toy.run.plan.read_text())
    write_json(toy.run.plan, {**plan, "version": 99})
    done = captured(
        [sys.executable, "-m", "primerl_hpc.runtime.supervisor", str(toy.run.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == ExitCode.DATA and done.stderr.count("\n") == 1
    assert read_json_or_none(toy.run.state) is None


@pytest.mark.parametrize(
    "state, written, attempt, word",
    [
        ("PENDING", "running", 2, "waits"),
        ("RUNNING", "running", 1, "is running"),
        ("RUNNING", "running", 2, "is running"),  # however old its heartbeat is by this machine's clock
        ("RUNNING", "stopped", 1, "is running"),
        ("RUNNING", "stopped", 2, None),
        ("SUSPENDED", "running", 2, "is suspended"),
    ],
)
def test_a_run_whose_job_will_work_on_it_is_not_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, written: str, attempt: int, word: str | None
) -> None:
    """``attempt``: of the state that is written; the job is for the second one."""
    run = RunDir(tmp_path / "run")
    write_json(run.state, {"state": written, "attempt": attempt})
    write_json(run.job, {"scheduler": "slurm", "job_id": "7", "attempt": 2})
    monkeypatch.setattr(JobWatcher, "facts_of", lambda self, runs: {"7": JobFact("7", state)})
    if word is None:
        return check_not_running(run)
    with pytest.raises(OccupiedError, match=f"job 7 of this run {word}.*primerl-hpc cancel"):
        check_not_running(run)


def test_a_resumed_run_reports_submitted_and_not_the_state_of_its_last_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_json(run.state, {"state": "running", "attempt": 1, "started": time.time() + 600})
    alive = {"scheduler": "local", "job_id": str(os.getpid()), "submitted": time.time()}
    write_json(run.job, {**alive, "attempt": 1})
    assert take_snapshot(run).state == RunState.FAILED
    write_json(run.job, {**alive, "attempt": 2})
    assert take_snapshot(run).state == RunState.SUBMITTED


def test_an_optional_process_that_cannot_start_is_left_out_with_its_reason(toy: Toy) -> None:
    toy.add(Role.TRACKER, "print('tracker-0: wandb refused: no key'); raise SystemExit(78)", OnExit.OPTIONAL)
    toy.add(Role.TRAINER, UNTIL_GIVEN_UP, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.DONE
    (given_up,) = toy.events("role_given_up")
    assert (given_up["process"], given_up["message"]) == ("tracker-0", "tracker-0: wandb refused: no key")
    exit_of_tracker = read_json(toy.run.state)["processes"]["tracker-0"]["exit"]
    assert exit_of_tracker == "exit code 78: tracker-0: wandb refused: no key"
