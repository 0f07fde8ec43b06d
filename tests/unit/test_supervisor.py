"""The supervisor with real child processes: small programs in place of the heavy roles, the same plan, files and signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
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
from primerl_hpc.common.rundir import RunDir, rendezvous_name
from primerl_hpc.common.slurm import JobFact
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.observe.diagnose import diagnose, tell
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import take_snapshot
from primerl_hpc.plan.types import OnExit, Plan
from primerl_hpc.runtime.guard import descendants_of
from primerl_hpc.runtime.journal import patiently
from primerl_hpc.runtime.supervisor import Supervisor
from tests.support import ROOT, is_alive, make_plan, process_plan, wait_for

RECIPE = {
    "kind": "rl",
    "name": "toy",
    "model": {"name": "some/model"},
    "max_steps": 3,
    "environments": {"train": [{"id": "reverse-text"}]},
    "recovery": {"in_place": False},
}

PUBLISH = """
import sys, time
from pathlib import Path
from primerl_hpc.common.rundir import RunDir, publish_endpoint
run = RunDir(Path(sys.argv[1]))
publish_endpoint(run, sys.argv[3], "http://127.0.0.1:1")
"""
SERVE = PUBLISH + "time.sleep(600)\n"
UNTIL_STOPPED = """
import sys, time
from pathlib import Path
from primerl_hpc.common.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
while not run.stop_request.exists(): time.sleep(0.05)
sys.exit(75)
"""


class Toy:
    """A run whose roles are one-line programs."""

    def __init__(self, root: Path) -> None:
        self.run = RunDir(root)
        self.recipe = RECIPE
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

    def start(self, plan: Plan | None = None) -> None:
        plan = plan or make_plan(self.run.root, self.recipe, processes=self.processes)
        write_json(self.run.plan, plan.model_dump(mode="json"))
        self.supervisor = subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.runtime.supervisor", str(self.run.root)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, timeout_s: float = 30.0) -> int:
        assert self.supervisor is not None
        return self.supervisor.wait(timeout=timeout_s)

    def wait_until_it_says(self, words: str) -> None:
        assert self.supervisor is not None and self.supervisor.stderr is not None
        assert any(words in line for line in self.supervisor.stderr)

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


def test_a_crash_of_the_trainer_tells_the_first_fault_and_ends_everything(toy: Toy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, "raise SystemExit('error: the loss is a teapot')", OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    failure = read_json(toy.run.failure)
    assert (failure["process"], failure["exit_code"], failure["signal"]) == ("trainer-0", 1, None)
    assert "teapot" in failure["message"] and failure["last_lines"]
    assert take_snapshot(toy.run).state == RunState.FAILED


def test_a_killed_trainer_is_told_by_its_signal(toy: Toy) -> None:
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


def test_a_killed_server_is_started_again_and_the_run_goes_on(toy: Toy) -> None:
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


def test_a_server_that_dies_again_and_again_without_progress_fails_the_run(toy: Toy) -> None:
    toy.add(Role.ROUTER, "raise SystemExit(1)", OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end(60) == ExitCode.FAILED
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
    toy.recipe = {name: RECIPE[name] for name in ("name", "model")}
    toy.recipe |= {"kind": "eval", "environments": {"eval": [{"id": "reverse-text"}]}}
    toy.add(Role.INFERENCE, PUBLISH + textwrap.dedent(code), OnExit.RESTART)
    toy.add(Role.EVALUATOR, PUBLISH + textwrap.dedent(wait), OnExit.ENDS_PHASE)
    (toy.run.root / "traces").mkdir(parents=True)
    toy.start()
    assert toy.end(60) == ExitCode.DONE


def test_a_server_that_is_not_ready_in_time_is_started_again(toy: Toy) -> None:
    toy.add(Role.ROUTER, "import time; time.sleep(600)", OnExit.RESTART, ready_timeout_s=1)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.events("role_restarting"))
    assert toy.events("role_not_ready")
    write_json(toy.run.stop_request, {"now": True})
    toy.end()


def test_a_process_that_was_not_ready_in_time_is_said_to_be_so_once(toy: Toy) -> None:
    toy.add(Role.TRAINER, "import time; time.sleep(600)", OnExit.ENDS_PHASE, ready_timeout_s=1)
    toy.start()
    assert toy.end() == ExitCode.FAILED
    failure = read_json(toy.run.failure)
    assert (failure["message"], failure["signal"]) == ("trainer-0 was not ready after 1 s", "SIGKILL")
    assert len(toy.events("role_not_ready")) == 1
    assert "SIGKILL (by the supervisor)" in tell(diagnose(toy.run), 5)


def test_what_a_killed_guard_kept_is_gone_before_the_next_life_starts(toy: Toy) -> None:
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


def test_a_wish_to_restart_a_life_that_has_ended_spares_its_successor(toy: Toy) -> None:
    """A peer that talked to a killed engine complains of it; the supervisor has started the next one already."""
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


# one step a life, with its row; dies at the steps whose first character is in `faults`, once each
STEPS = """
import os, sys, time
from pathlib import Path
from primerl_hpc.common.metrics import MetricsWriter
from primerl_hpc.common.rundir import RunDir, publish_endpoint
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
    toy.recipe = RECIPE | {"recovery": {"in_place": True}}
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.add(Role.TRAINER, STEPS, OnExit.ENDS_PHASE)
    wait = "while not (run.checkpoint(3) / 'COMPLETE').exists(): time.sleep(0.05)"
    toy.add(Role.ORCHESTRATOR, PUBLISH + wait, OnExit.ENDS_PHASE)
    toy.run.root.mkdir(parents=True)
    for name, how in faults.items():
        (toy.run.root / name).write_text(how)
    return toy


def test_a_dead_trainer_goes_on_after_the_last_checkpoint_while_the_engine_stays(toy: Toy) -> None:
    recovering(toy, fault_2="once", fault_3="once").start()
    assert toy.end(60) == ExitCode.DONE
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


def test_a_fault_that_comes_again_ends_the_run_and_the_first_one_stays_known(toy: Toy) -> None:
    recovering(toy, fault_1="once", fault_2="always").start()
    assert toy.end(60) == ExitCode.FAILED
    assert [row["after_step"] for row in toy.events("recovery_started")] == [0, 1]
    failure = read_json(toy.run.failure)
    assert "no luck with step 2" in failure["message"] and "without a new step" in failure["reason"]
    assert ["no luck with step 1" in each["message"] for each in failure["recovered"]] == [True, False]
    found = diagnose(toy.run)
    assert [fault["after_step"] for fault in found.recovered] == [0, 1]
    assert re.search(r"recovered +after step 0, from trainer-0", tell(found, 5))


def test_what_a_dead_orchestrator_left_beyond_the_checkpoint_is_gone(toy: Toy) -> None:
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
def test_a_hung_trainer_writes_its_stacks_down_and_is_treated_like_a_dead_one(
    toy: Toy, has_batch: bool
) -> None:
    send = """
    from primerl_hpc.common.metrics import MetricsWriter
    MetricsWriter(run.metrics("orchestrator")).write(1, {})
    """
    code = """
    import os
    from primerl_hpc.common.log import dump_stacks_on_signal
    dump_stacks_on_signal()
    def hang_here(): time.sleep(600)
    if os.environ["PRIMERL_INCARNATION"] == "0": hang_here()
    """
    toy.recipe = RECIPE | {"recovery": {"in_place": True}, "timeouts": {"stall_s": 3}}
    toy.add(Role.TRAINER, PUBLISH + textwrap.dedent(code), OnExit.ENDS_PHASE, ready_timeout_s=60)
    if has_batch:
        toy.add(Role.ORCHESTRATOR, PUBLISH + textwrap.dedent(send), OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end(60) == ExitCode.DONE
    assert [row["process"] for row in toy.events("role_hung")] == ["trainer-0"]
    said = "its last step was 0" + (", the last batch 1" if has_batch else "")
    assert toy.events("recovery_started")[0]["message"].endswith(said)
    assert "in hang_here" in (toy.run.attempt_logs(1) / "trainer-0.log").read_text()


def test_a_frozen_engine_is_started_again_though_its_process_lives(toy: Toy) -> None:
    code = """
    from http.server import BaseHTTPRequestHandler, HTTPServer
    import sys
    from pathlib import Path
    from primerl_hpc.common.rundir import RunDir, publish_endpoint
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # answers every request with an error
    publish_endpoint(RunDir(Path(sys.argv[1])), sys.argv[3], f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()
    """
    toy.recipe = RECIPE | {"timeouts": {"health_s": 10}}
    toy.add(Role.INFERENCE, code, OnExit.RESTART)
    toy.add(Role.ORCHESTRATOR, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    toy.start()
    wait_for(lambda: toy.is_ready("inference-0"))
    os.kill(toy.pid_of("inference-0"), signal.SIGSTOP)
    wait_for(lambda: len(toy.events("role_ready")) == 2, "its second life", 60)
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
    wait_for(lambda: len(toy.events("phase_started")) == 2)
    toy.supervisor.send_signal(signal.SIGTERM)
    assert toy.end() == ExitCode.STOPPED
    assert os.readlink(toy.run.latest_logs) == "attempt_2"


def test_a_cancel_that_comes_before_the_supervisor_is_kept_and_a_later_resume_goes_on(toy: Toy) -> None:
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, "print('orchestrated')", OnExit.ENDS_PHASE)
    write_json(toy.run.stop_request, {"reason": "cancel", "now": False})
    toy.start()
    assert toy.end() == ExitCode.PREEMPTED
    assert take_snapshot(toy.run).state == RunState.CANCELLED and not toy.events("role_started")
    toy.start()
    assert toy.end() == ExitCode.DONE


def test_what_people_asked_for_is_not_replaced_by_a_wish_of_the_supervisor(toy: Toy) -> None:
    make_plan(toy.run.root, RECIPE, processes=[process_plan(Role.TRAINER)])
    supervisor = Supervisor(toy.run)
    write_json(toy.run.stop_request, {"reason": "cancel", "now": False})
    supervisor.request_stop("walltime")
    assert read_json(toy.run.stop_request)["reason"] == "cancel"
    toy.run.stop_request.unlink()
    supervisor.request_stop("walltime")
    assert read_json(toy.run.stop_request)["reason"] == "walltime"


def test_what_takes_long_does_not_hold_the_loop_and_is_over_before_a_cancelled_attempt_goes_on() -> None:
    loop_goes_on, has_begun, is_over = threading.Event(), threading.Event(), []

    def look() -> None:
        has_begun.set()
        is_over.append(loop_goes_on.wait(timeout=20))

    async def cancel_it() -> None:
        looking = asyncio.create_task(patiently(look, is_long=True))
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
    plan = make_plan(toy.run.root, RECIPE, processes=toy.processes)
    warmup = plan.phases[0].model_copy(update={"name": "warmup"})
    plan = plan.model_copy(update={"phases": (warmup, *plan.phases)})
    toy.start(plan)
    wait_for((toy.run.root / "leaving").exists, "the teardown")
    toy.supervisor.send_signal(signal.SIGTERM)
    wait_for(lambda: toy.events("signal"))
    (toy.run.root / "enough").touch()
    assert toy.end() == ExitCode.PREEMPTED
    assert [row["phase"] for row in toy.events("phase_started")] == ["warmup"]


def test_a_job_without_its_allocation_says_why_it_failed(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    plan = make_plan(toy.run.root, RECIPE, processes=toy.processes)
    toy.start(plan.model_copy(update={"scheduler": "slurm"}))
    assert toy.end() == ExitCode.UNAVAILABLE
    assert read_json(toy.run.state)["state"] == RunState.FAILED
    failure = read_json(toy.run.failure)
    assert "no SLURM job" in failure["message"] and failure["exit_code"] == ExitCode.UNAVAILABLE


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


def test_a_fault_of_the_supervisor_is_told_like_any_other(toy: Toy) -> None:
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
x = Path(sys.argv[1]) / "metrics" / "x.jsonl"
x.parent.mkdir(exist_ok=True)
"""
FALTERS = (
    X
    + """
while not x.with_name("waits").exists():
    time.sleep(0.05)
x.symlink_to("nowhere")  # its size is an OSError
time.sleep(3)
x.unlink()
"""
)
WAITS_UNTIL_IT_FALTERS = X + "x.with_name('waits').touch()\nwhile not x.is_symlink(): time.sleep(0.05)\n"
WAITS_UNTIL_IT_IS_OVER = WAITS_UNTIL_IT_FALTERS + "while x.is_symlink(): time.sleep(0.05)\n"


def what_cannot_be_seen(toy: Toy, orchestrator: str) -> list[str]:
    """A line of the supervisor's log each, in a run whose progress cannot be looked at for three seconds."""
    toy.add(Role.TRAINER, FALTERS, OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, orchestrator, OnExit.ENDS_PHASE)
    toy.start()
    assert toy.end() == ExitCode.DONE
    return re.findall("cannot see (.*?), trying again", toy.supervisor.stderr.read())


def test_progress_that_cannot_be_seen_for_a_moment_is_told_of_once_and_ends_nothing(toy: Toy) -> None:
    assert what_cannot_be_seen(toy, WAITS_UNTIL_IT_IS_OVER) == ["the run's progress"]


def test_a_filesystem_that_falters_when_a_role_ends_is_told_of_once_and_ends_nothing(toy: Toy) -> None:
    told = what_cannot_be_seen(toy, WAITS_UNTIL_IT_FALTERS)
    assert told.count("the run directory") == 1
    assert told.count("the run's progress") <= 1  # it may have been looked at before the end


def test_an_attempt_begins_when_the_run_directory_answers(toy: Toy) -> None:
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.run.failure.mkdir(parents=True)  # of an earlier attempt; to unlink it is an OSError
    toy.start()
    toy.wait_until_it_says("trying again")
    assert not toy.events("attempt_started")
    toy.run.failure.rmdir()
    assert toy.end() == ExitCode.DONE


def test_a_signal_before_the_run_directory_answers_ends_the_attempt_under_its_own_number(toy: Toy) -> None:
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE)
    toy.run.failure.mkdir(parents=True)
    write_json(toy.run.state, {"attempt": 3, "state": "failed"})
    toy.start()
    toy.wait_until_it_says("trying again")
    toy.supervisor.send_signal(signal.SIGTERM)
    assert toy.end() == ExitCode.PREEMPTED
    state = read_json(toy.run.state)
    assert (state["attempt"], state["state"]) == (4, RunState.CANCELLED)


@pytest.mark.parametrize("code", [0, 75])
def test_an_exit_that_cannot_be_written_down_at_once_counts_all_the_same(toy: Toy, code: int) -> None:
    """Lost, it would hold the nodes until the walltime: nothing else happens that anybody waits for."""
    left = """
    import sys, time
    from pathlib import Path
    from primerl_hpc.common.rundir import RunDir, rendezvous_name
    left = RunDir(Path(sys.argv[1])).endpoint(rendezvous_name("trainer-0"))
    """
    trainer = f"left.mkdir(parents=True)  # to unlink it is an OSError\nsys.exit({code})"
    orchestrator = "while not (left.parents[2] / 'enough').exists(): time.sleep(0.05)"
    toy.add(Role.TRAINER, textwrap.dedent(left) + trainer, OnExit.ENDS_PHASE)
    toy.add(Role.ORCHESTRATOR, textwrap.dedent(left) + orchestrator, OnExit.ENDS_PHASE)
    toy.start()
    toy.wait_until_it_says("trying again")
    toy.run.endpoint(rendezvous_name("trainer-0")).rmdir()
    (toy.run.root / "enough").touch()
    assert toy.end() == (code or ExitCode.DONE)
    assert [row["process"] for row in toy.events("role_exited")] == ["trainer-0", "orchestrator-0"]


def test_a_recovery_goes_on_when_the_run_directory_answers_again(toy: Toy) -> None:
    """What lies beyond the checkpoint cannot be deleted for a while: the trainer is not started before that."""
    code = """
    run.checkpoints.touch()  # to list it is an OSError
    sys.exit(1)
    """
    again = "\nif (run.root / 'again').exists(): sys.exit(0)\n(run.root / 'again').touch()"
    toy.recipe = RECIPE | {"recovery": {"in_place": True}}
    toy.add(Role.TRAINER, PUBLISH + again + textwrap.dedent(code), OnExit.ENDS_PHASE)
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
    toy.start()
    toy.wait_until_it_says("trying again")
    assert toy.events("role_exited") and not toy.events("recovery_started")
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
    assert toy.supervisor.wait(timeout=30) == ExitCode.OCCUPIED
    assert "another supervisor" in toy.supervisor.stderr.read()
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=30) == ExitCode.STOPPED


def test_a_run_of_another_plan_version_is_refused_in_one_sentence(toy: Toy) -> None:
    toy.add(Role.TRAINER, UNTIL_STOPPED, OnExit.ENDS_PHASE)
    make_plan(toy.run.root, RECIPE, processes=toy.processes)
    plan = json.loads(toy.run.plan.read_text())
    write_json(toy.run.plan, {**plan, "version": 99})
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc.runtime.supervisor", str(toy.run.root)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.DATA and done.stderr.count("\n") == 1
    assert read_json_or_none(toy.run.state) is None


@pytest.mark.parametrize(
    "state, written, attempt, word",
    [
        ("PENDING", "running", 2, "waits"),
        ("RUNNING", "running", 1, "is running"),
        ("RUNNING", "running", 2, "is running"),  # however old its sign of life is by this machine's clock
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


def test_a_resumed_run_is_submitted_and_not_what_its_dead_attempt_wrote(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    write_json(run.state, {"state": "running", "attempt": 1, "started": time.time() + 600})
    alive = {"scheduler": "local", "job_id": str(os.getpid()), "submitted": time.time()}
    write_json(run.job, {**alive, "attempt": 1})
    assert take_snapshot(run).state == RunState.FAILED
    write_json(run.job, {**alive, "attempt": 2})
    assert take_snapshot(run).state == RunState.SUBMITTED
