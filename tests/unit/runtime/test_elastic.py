"""Elastic engines without SLURM: which engines have joined by their files, and when a host ends with its run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_json, write_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint, request_restart
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.elastic_members import SILENT_S, ElasticEngines
from primerl_hpc.runtime.engine_host import EngineHost
from primerl_hpc.runtime.supervisor import Supervisor
from tests.support.helpers import PATIENCE_S, ROOT, TOY_RECIPE, make_plan, process_plan, wait_for
from tests.support.slurm_rows import UNKNOWN_JOB, printed, queue_row, row
from tests.unit.runtime.test_supervisor import SERVE


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    plan = make_plan(tmp_path, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    phase = plan.phases[0].model_copy(update={"elastic": (process_plan(Role.INFERENCE),)})
    plan = plan.model_copy(update={"phases": (phase,)})
    run = RunDir(tmp_path)
    write_json(run.plan, plan.model_dump(mode="json"))
    write_text(run.supervisor_lock, "{}")
    return run


def told(engines: ElasticEngines) -> list[tuple[str, str]]:
    engines.hurry()
    return [(name, change["state"]) for name, change in engines.changes()]


def test_engines_join_leave_and_return_as_others(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ElasticEngines(run, ["inference-0", "inference-1"])
    assert told(engines) == []
    publish_endpoint(run, "inference-1", "http://h:1")
    assert told(engines) == [("inference-1", "joined")]
    assert told(engines) == []
    monkeypatch.setenv("PRIMERL_INCARNATION", "1000")
    publish_endpoint(run, "inference-1", "http://h:2")  # so fast that its exit was not noticed
    assert told(engines) == [("inference-1", "left"), ("inference-1", "joined")]
    run.endpoint("inference-1").unlink()
    assert told(engines) == [("inference-1", "left")]


def test_an_engine_without_a_live_host_is_dropped_until_the_host_is_back(run: RunDir) -> None:
    engines = ElasticEngines(run, ["inference-0"])
    publish_endpoint(run, "inference-0", "http://h:1")
    assert told(engines) == [("inference-0", "joined")]
    silent = time.time() + SILENT_S + 5
    os.utime(run.supervisor_lock, (silent, silent))
    assert told(engines) == [("inference-0", "left")]
    assert not run.endpoint("inference-0").exists()
    publish_endpoint(run, "inference-0", "http://h:1")
    os.utime(run.endpoint("inference-0"), (silent, silent))
    assert told(engines) == [("inference-0", "joined")]


@pytest.mark.parametrize(
    ("state", "attempt", "engines", "is_over"),
    [
        (RunState.RUNNING, 2, "7", False),
        (RunState.DONE, 2, "7", True),
        (RunState.STOPPED, 2, "7", False),  # its job may be requeued: SLURM is asked when its lock is missing
        (RunState.PENDING, 2, "7", False),  # requeued: it will want its engines again
        (RunState.STOPPED, 1, "7", False),  # the attempt before the one that was submitted
        (RunState.RUNNING, 2, "8", False),  # the submitter has not written us down yet
    ],
)
def test_a_host_ends_with_its_run_and_not_before(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, state: RunState, attempt: int, engines: str, is_over: bool
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    write_json(run.state, {"state": state.value, "attempt": attempt, "phase": "main"})
    write_json(run.job, {"scheduler": "slurm", "attempt": 2, "engines_job_id": engines})
    host = EngineHost(run, 0)
    assert host._is_run_over() == is_over
    is_wanted = host._is_wanted(host.plan.phase("main"))
    assert is_wanted == (state == RunState.RUNNING and engines == "7")
    host.started_at -= 3600
    assert host._is_run_over() == (is_over or engines == "8")


Commands = Callable[..., Path]


def is_time_over(host: EngineHost) -> bool:
    host.next_walltime_check = 0.0
    return asyncio.run(host._is_time_over())


def test_an_engine_leaves_at_the_reported_end_although_other_processes_have_just_asked(
    run: RunDir, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    calls = commands(squeue=printed(row("8", "8", "0:20")))  # less than the reserve
    host, other = EngineHost(run, 0), EngineHost(run, 0)
    assert other.questions.may_ask()
    assert not is_time_over(host) and not calls.exists()  # no end is known yet
    host.leave_at = time.monotonic() - 1.0
    assert is_time_over(host) and calls.read_text().count("squeue") == 1


def test_the_walltime_of_an_engine_is_watched_without_the_shared_folder(
    run: RunDir, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    commands(squeue=printed(row("8", "8", "0:20")))
    host = EngineHost(run, 0)
    write_text(run.slurm_questions, "a file where the folder should be")
    assert is_time_over(host)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Puts SLURM's commands by name before all others. Returns the file with a line per call.

    Without accounting, if no other is given: that of a virtual cluster of earlier tests knows jobs of the same number.
    """
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def make(**bodies: str) -> Path:
        (tmp_path / "bin").mkdir()
        for name, body in {"sacct": "exit 1", **bodies}.items():
            command = tmp_path / "bin" / name
            command.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path / "calls"}\n{body}\n')
            command.chmod(0o755)
        return tmp_path / "calls"

    return make


@pytest.mark.parametrize(
    "state, squeue, is_over",
    [
        (RunState.STOPPED, printed(queue_row("9", "PENDING", "BeginTime")), False),  # requeued from outside
        (RunState.STOPPED, UNKNOWN_JOB, True),
        (RunState.STOPPED, "exit 0", False),  # a wrapper of the site may hide the job
        (RunState.STOPPED, "echo 'Socket timed out' >&2; exit 1", False),
        (RunState.DONE, "echo 'Socket timed out' >&2; exit 1", True),
    ],
)
def test_engines_of_a_stopped_run_stay_while_slurm_may_start_its_job_again(
    run: RunDir, commands: Commands, state: RunState, squeue: str, is_over: bool
) -> None:
    commands(squeue=squeue)
    run.supervisor_lock.unlink()
    write_json(run.state, {"state": state.value, "attempt": 1, "phase": "main"})
    write_json(run.job, {"scheduler": "slurm", "job_id": "9", "attempt": 1})
    assert EngineHost(run, 0)._is_run_over() == is_over


@pytest.mark.parametrize(
    "state, signals, is_cancelled, are_dropped",
    [
        (RunState.DONE, {signal.SIGTERM}, False, True),
        (RunState.STOPPED, set(), False, True),
        (RunState.STOPPED, {signal.SIGTERM}, True, True),  # `cancel`, and its scancel
        (RunState.STOPPED, {signal.SIGTERM}, False, False),  # preempted, or requeued from outside
        (RunState.CANCELLED, {signal.SIGTERM}, False, False),
        (RunState.FAILED, set(), False, False),
    ],
)
def test_waiting_engines_leave_the_queue_with_a_run_that_does_not_come_back(
    run: RunDir, commands: Commands, state: RunState, signals: set[int], is_cancelled: bool, are_dropped: bool
) -> None:
    calls = commands(scancel="exit 0")
    write_json(run.job, {"scheduler": "slurm", "job_id": "9", "attempt": 1, "engines_job_id": "7"})
    supervisor = Supervisor(run)
    supervisor.journal.state["state"] = state
    supervisor.stop.signals, supervisor.handoff.is_cancelled = signals, is_cancelled
    asyncio.run(supervisor._cancel_waiting_engines())
    assert calls.exists() == are_dropped


@pytest.fixture
def served(run: RunDir, tmp_path: Path) -> Iterator[tuple[RunDir, subprocess.Popen[str], Path]]:
    """A run whose first elastic engine is up, its host, and the host's output."""
    argv = (sys.executable, "-c", SERVE, str(run.root), "main", "inference-0")
    plan = load_plan(run)
    phase = plan.phases[0].model_copy(update={"elastic": (process_plan(Role.INFERENCE, argv=argv),)})
    write_json(run.plan, plan.model_copy(update={"phases": (phase,)}).model_dump(mode="json"))
    write_json(run.state, {"state": "running", "attempt": 1, "phase": "main"})
    log = tmp_path / "host.log"
    with log.open("w") as file:
        host = subprocess.Popen(
            [sys.executable, "-m", "primerl_hpc.runtime.engine_host", str(run.root), "0"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=file,
            text=True,
        )
    try:
        wait_for(lambda: read_endpoint(run, "inference-0"), "its engine", tell=log.read_text)
        yield run, host, log
    finally:
        host.kill()
        host.wait()


def test_an_engine_host_tolerates_transient_errors_of_the_run_directory(
    served: tuple[RunDir, subprocess.Popen[str], Path],
) -> None:
    run, host, log = served
    kept = run.state.with_name("kept")
    engine = read_endpoint(run, "inference-0")
    run.state.rename(kept)
    run.state.mkdir()  # to read it is an OSError
    wait_for(lambda: "retrying" in log.read_text() or host.poll() is not None, "its look", tell=log.read_text)
    assert host.poll() is None and read_endpoint(run, "inference-0") == engine
    run.state.rmdir()
    write_json(run.state, read_json(kept) | {"state": "done"})
    assert host.wait(timeout=PATIENCE_S) == 0


def test_an_engine_host_ignores_a_restart_request_for_another_incarnation(
    served: tuple[RunDir, subprocess.Popen[str], Path],
) -> None:
    run, _, log = served
    path, request = run.endpoint("inference-0"), run.restart_request("inference-0")
    engine, vouched_at = read_json(path), path.stat().st_mtime_ns
    request_restart(run, "inference-0", engine["incarnation"] + 7, "it did not answer")
    wait_for(lambda: not request.exists(), "its look", tell=log.read_text)
    wait_for(lambda: path.exists() and path.stat().st_mtime_ns > vouched_at, "its word", tell=log.read_text)
    assert read_json(path) == engine
    request_restart(run, "inference-0", engine["incarnation"], "it did not answer")
    wait_for(lambda: (read_endpoint(run, "inference-0") or engine) != engine, "its next life")
    assert read_json(path)["incarnation"] == engine["incarnation"] + 1


def test_an_engine_restarts_with_the_keys_of_a_new_attempt(
    served: tuple[RunDir, subprocess.Popen[str], Path],
) -> None:
    run, _, log = served
    engine = read_json(run.endpoint("inference-0"))
    assert engine["attempt"] == 1
    write_json(run.state, read_json(run.state) | {"attempt": 2})
    wait_for(
        lambda: (read_endpoint(run, "inference-0") or engine)["attempt"] == 2,
        "its engine in attempt 2",
        tell=log.read_text,
    )


def test_the_host_of_no_run_ends_with_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from primerl_hpc.runtime.engine_host import main

    assert main([str(tmp_path / "none"), "0"]) == 66
    assert "plan.json" in capfd.readouterr().err
    assert main(["x"]) == 2
