"""Chains without a SLURM: which link continues, which job represents the run, and what the command line refuses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.job_watcher import open_jobs
from primerl_hpc.observe.status.snapshot import real_state
from primerl_hpc.run.job_chain import JobChain, chain_of, current_job
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.job.chain import why_fault_ends_chain, why_not_begin
from primerl_hpc.runtime.job.requeue import decide_continuation
from primerl_hpc.slurm.jobs import JobFact
from tests.unit.cli.test_cli import folder, primerl  # noqa: F401

CHAIN = JobChain(("1", "2", "3"))
JOB: dict[str, Any] = {"scheduler": "slurm", "job_id": "1", "attempt": 4, "links": ["1", "2", "3"]}
AT_9 = {"phase": "main", "step": 9}


@pytest.mark.parametrize(
    "earlier, begins, state",
    [
        ({}, AT_9, None),  # the first link of a new run
        ({"job_id": "0", "state": "failed", "began": AT_9}, AT_9, None),  # an earlier submission
        ({"job_id": "1", "state": "pending", "began": AT_9}, AT_9, None),  # handed over
        ({"job_id": "2", "state": "running", "began": AT_9}, AT_9, None),  # this very link, requeued
        ({"job_id": "1", "state": "running", "began": {"phase": "main", "step": 3}}, AT_9, None),
        ({"job_id": "1", "state": "stopping", "began": {"phase": "warmup", "step": 9}}, AT_9, None),
        ({"job_id": "1", "state": "starting"}, AT_9, None),
        (
            {"job_id": "1", "state": "starting"},
            None,
            None,
        ),  # all phases are done, and the state is not yet written
        ({"job_id": "1", "state": "running", "began": AT_9}, AT_9, RunState.FAILED),
        ({"job_id": "1", "state": "done"}, None, RunState.DONE),
        ({"job_id": "1", "state": "stopped"}, AT_9, RunState.STOPPED),
        ({"job_id": "1", "state": "cancelled"}, AT_9, RunState.CANCELLED),
        ({"job_id": "1", "state": "failed"}, AT_9, RunState.FAILED),
    ],
)
def test_a_link_starts_unless_the_run_is_complete_or_the_previous_link_made_no_progress(
    earlier: dict[str, Any], begins: dict[str, Any] | None, state: RunState | None
) -> None:
    verdict = why_not_begin(CHAIN, "2", earlier, begins)
    assert (verdict[0] if verdict else None) == state
    if verdict and "began" in earlier:
        assert verdict[1].startswith("link 1 of 3 was killed")


USR2, TERM = signal.SIGUSR2, signal.SIGTERM


@pytest.mark.parametrize(
    "reason, signals, progressed, goes_on",
    [
        ("SIGTERM", {TERM}, False, True),  # the link was cancelled, not the run
        ("scheduler", {TERM}, True, True),
        ("cancel", {TERM}, True, False),
        ("cancel", set(), True, False),
        ("walltime", {USR2, TERM}, True, True),  # the save took longer than the walltime
        ("walltime", {TERM}, False, False),
    ],
)
def test_a_link_hands_over_except_after_a_cancel_or_a_walltime_without_progress(
    reason: str, signals: set[int], progressed: bool, goes_on: bool
) -> None:
    request = {"reason": reason}
    assert (
        decide_continuation(request, signals, progressed=progressed, is_followed=True).is_automatic is goes_on
    )


@pytest.mark.parametrize(
    "code, progressed, words",
    [
        (ExitCode.FAILED, True, None),
        (ExitCode.FAILED, False, "before a new checkpoint"),
        (ExitCode.BAD_NODE, False, None),
        (ExitCode.DATA, True, "row 7"),
        (ExitCode.NO_CONTINUE, True, "row 7"),
    ],
)
def test_a_fault_is_left_to_the_next_link_unless_it_would_recur(
    code: ExitCode, progressed: bool, words: str | None
) -> None:
    why = why_fault_ends_chain({"exit_code": int(code), "message": "row 7 is empty"}, progressed=progressed)
    assert why is None if words is None else words in (why or "")


def fact(job: str, state: str, reason: str = "") -> dict[str, JobFact]:
    return {job: JobFact(job, state, reason)}


@pytest.mark.parametrize(
    "written, writer, facts, current, state",
    [
        (None, None, fact("1", "PENDING", "Priority"), "1", RunState.PENDING),
        ("running", "1", fact("1", "RUNNING") | fact("2", "PENDING"), "1", RunState.RUNNING),
        ("pending", "1", fact("1", "FAILED") | fact("2", "PENDING", "Dependency"), "2", RunState.PENDING),
        ("running", "1", fact("1", "NODE_FAIL") | fact("2", "PENDING"), "2", RunState.PENDING),
        ("running", "1", fact("1", "FAILED") | fact("2", "CANCELLED"), "3", RunState.RUNNING),
        ("running", "2", fact("2", "FAILED") | fact("3", "CANCELLED"), "2", RunState.FAILED),
        ("done", "2", fact("2", "COMPLETED") | fact("3", "PENDING"), "3", RunState.DONE),
        ("stopped", "1", fact("1", "FAILED") | fact("2", "PENDING"), "2", RunState.STOPPED),
    ],
)
def test_the_state_of_a_run_is_that_of_its_current_link(
    tmp_path: Path,
    written: str | None,
    writer: str | None,
    facts: dict[str, JobFact],
    current: str,
    state: RunState,
) -> None:
    run = RunDir(tmp_path)
    content = {"state": written, "attempt": 4, "job_id": writer} if written else {}
    write_json(run.supervisor_lock, {"host": "n1", "pid": 1, "started": "1", "job": "1", "restart": "0"})
    assert current_job(JOB, content, facts) == current
    assert real_state(run, content, JOB, facts)[0] == state


def test_slurm_is_not_queried_about_ended_links() -> None:
    assert list(open_jobs({}, JOB)) == ["1", "2", "3"]
    assert list(open_jobs({"state": "running", "attempt": 5, "job_id": "2"}, JOB)) == ["2", "3"]
    assert not open_jobs({"state": "done", "attempt": 5, "job_id": "2"}, JOB)


def test_a_link_reports_its_position() -> None:
    assert CHAIN.place("2") == "link 2 of 3"
    assert JobChain(("1", "2"), is_until_done=True).place("2") == "link 2"
    assert chain_of({"job_id": "1"}) is None


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("--chain", "3"), ExitCode.CONFIG, "no walltime"),
        (("--until-done",), ExitCode.CONFIG, "no walltime"),
        (("--chain", "0"), ExitCode.USAGE, "0 is not in the range"),
        (("--chain", "3", "--until-done"), ExitCode.CONFIG, "cannot be combined"),
    ],
)
def test_a_chain_that_the_run_cannot_use_is_refused_and_leaves_no_files(
    folder: Path,  # noqa: F811
    words: tuple[str, ...],
    code: ExitCode,
    said: str,
) -> None:
    done = primerl("submit", "recipe.yaml", "-p", "local", *words, cwd=folder)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert not (folder / "runs").exists()
