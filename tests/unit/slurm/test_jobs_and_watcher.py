"""SLURM's replies: parsed from recorded text of several versions, requested at a limited rate, combined to a run's
state."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.job_watcher import FIRST_PAUSE_S, JobWatcher
from primerl_hpc.observe.status.snapshot import real_state
from primerl_hpc.run.job_chain import current_job
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.command_lines import rows_of, task_name
from primerl_hpc.slurm.commands import UnknownJobError, ask, query_environ
from primerl_hpc.slurm.jobs import FORGOTTEN, MOST_ALONE, JobFact, find_facts, parse_sacct, parse_squeue
from tests.support.slurm_rows import SUBMITTED, account_row, asked_jobs, queue_row, row, squeue_answer


class Slurm:
    """A SLURM that replies by command and counts the queries."""

    def __init__(self) -> None:
        self.squeue, self.sacct = "", ""
        self.asked: list[str] = []
        self.is_down = False
        self.now = 1000.0

    def ask(self, command: list[str]) -> str:
        self.asked.append(command[0])
        if self.is_down:
            raise SchedulerError("slurm_load_jobs error: Socket timed out on send/recv operation")
        return squeue_answer(command, self.squeue) if command[0] == "squeue" else self.sacct


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def jobs(slurm: Slurm) -> JobWatcher:
    return JobWatcher(slurm.ask, lambda: slurm.now)


def test_many_runs_need_one_query(slurm: Slurm, jobs: JobWatcher) -> None:
    slurm.squeue = "".join(
        queue_row(str(i), "RUNNING", "None", "2026-11-21T03:36:13", f"n{i}") for i in range(1000)
    )
    facts = jobs.facts({str(i): 0 for i in range(1000)})
    assert len(facts) == 1000 and slurm.asked == ["squeue"]


def test_only_jobs_unknown_to_squeue_are_queried_in_accounting(slurm: Slurm, jobs: JobWatcher) -> None:
    slurm.squeue = queue_row("1", "RUNNING", "None", "", "n1")
    slurm.sacct = account_row("2", "CANCELLED by 1000", "0:15", "", "n2")
    facts = jobs.facts({"1": 0, "2": 0})
    assert (facts["1"].state, facts["2"].state) == ("RUNNING", "CANCELLED")
    slurm.now += 1e6
    jobs.facts({"1": 0, "2": 0})
    assert slurm.asked == ["squeue", "sacct", "squeue"]  # an ended job is not asked about again


def watch_for_ten_minutes(slurm: Slurm, jobs: JobWatcher) -> None:
    """Job 1, which is always running."""
    slurm.squeue = queue_row("1", "RUNNING", "None", "", "n1")
    for _ in range(600):
        jobs.facts({"1": "running"})
        slurm.now += 1.0


def test_queries_become_less_frequent_without_changes_and_prompt_after_one(
    slurm: Slurm, jobs: JobWatcher
) -> None:
    watch_for_ten_minutes(slurm, jobs)
    rare = len(slurm.asked)
    assert rare < 20
    slurm.now += FIRST_PAUSE_S
    jobs.facts({"1": "stopped"})
    assert len(slurm.asked) == rare + 1


def test_a_new_job_is_asked_about_at_once_unless_its_site_limits_questions(
    slurm: Slurm, jobs: JobWatcher, tmp_path: Path
) -> None:
    slurm.squeue = "".join(queue_row(str(job), "RUNNING", "None", "", "n1") for job in range(1, 4))
    run = RunDir(tmp_path)

    def submit(job: int, **more: float) -> None:
        write_json(run.job, {"scheduler": "slurm", "attempt": 1, "job_id": str(job), **more})
        jobs.facts_of([run])

    submit(1)
    submit(2)
    assert len(slurm.asked) == 2
    submit(3, ask_every_s=60.0)
    assert len(slurm.asked) == 2
    slurm.now += 60.0
    submit(3, ask_every_s=60.0)
    assert len(slurm.asked) == 3


def test_the_end_of_a_job_is_seen_soon_after_the_run_reported_it(slurm: Slurm, jobs: JobWatcher) -> None:
    watch_for_ten_minutes(slurm, jobs)
    jobs.facts({"1": "failed"})
    slurm.squeue = queue_row("1", "FAILED", "NonZeroExitCode", "", "n1")
    slurm.now += 2 * FIRST_PAUSE_S
    assert jobs.facts({"1": "failed"})["1"].has_ended


def test_a_slurm_that_does_not_answer_keeps_the_known_state_and_is_queried_less_often(
    slurm: Slurm, jobs: JobWatcher
) -> None:
    slurm.squeue = queue_row("1", "RUNNING", "None", "", "n1")
    jobs.facts({"1": 0})
    slurm.is_down = True
    for _ in range(100):
        slurm.now += 1.0
        assert jobs.facts({"1": 0})["1"].state == "RUNNING"
    assert "timed out" in (jobs.trouble or "")
    assert len(slurm.asked) < 10


DATA = Path(__file__).resolve().parents[2] / "slurm" / "data"


VERSIONS = sorted(path.stem.partition("-")[2] for path in DATA.glob("squeue-*.txt"))


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_replies_are_parsed(version: str) -> None:
    queue = parse_squeue((DATA / f"squeue-{version}.txt").read_text())
    past = parse_sacct((DATA / f"sacct-{version}.txt").read_text())
    assert {fact.state for fact in queue.values()} >= {
        "RUNNING",
        "PENDING",
        "COMPLETED",
        "FAILED",
        "CANCELLED",
    }
    waiting = next(fact for fact in queue.values() if fact.state == "PENDING")
    assert waiting.is_waiting and waiting.reason and not waiting.nodes
    failed = next(fact for fact in past.values() if fact.state == "FAILED")
    assert failed.exit_code == 3 and failed.has_ended
    assert next(fact for fact in past.values() if fact.state == "CANCELLED").has_ended


def test_reasons_with_spaces_array_jobs_and_component_leaders_are_parsed() -> None:
    texts = [(DATA / f"squeue-{version}.txt").read_text() for version in VERSIONS]
    facts = [fact for text in texts for fact in parse_squeue(text).values()]
    assert {"8", "18", "22"} <= {fact.job_id for fact in facts} and "9" not in {fact.job_id for fact in facts}
    reasons = {fact.reason for fact in facts}
    assert {"ReqNodeNotAvail, UnavailableNodes:n[7,9]", "launch failed requeued held"} <= reasons
    assert not any(fact.has_ended for fact in facts if fact.state in ("COMPLETING", "REQUEUE_HOLD"))


def test_a_users_formats_and_filters_do_not_affect_our_queries() -> None:
    environ = {
        "PATH": "/bin",
        "SQUEUE_PARTITION": "debug",
        "SACCT_FORMAT": "JobID",
        "SLURM_TIME_FORMAT": "%s",
    }
    assert query_environ({**environ, "SLURM_CONF": "/c"}) == {"PATH": "/bin", "SLURM_CONF": "/c"}


def test_a_controller_whose_name_does_not_resolve_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is that of squeue 22.05, which prints it after ten seconds."""
    command = tmp_path / "squeue"
    words = 'squeue: error: slurm_set_addr: Unable to resolve "head.invalid"'
    command.write_text(f"#!/bin/sh\necho '{words}' >&2\necho 'slurm_load_jobs error: No error' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SchedulerError, match="address of SLURM's controller"):
        ask(["squeue", "--noheader"])


def test_banners_and_torn_lines_are_not_jobs() -> None:
    text = "*** maintenance on Monday ***\n" + queue_row("7", "RUNNING", "None", "N/A", "n[1-2]") + "8\x1fRUN"
    assert parse_squeue(text) == {
        "7": JobFact("7", "RUNNING", "", None, "", "n[1-2]", submitted=SUBMITTED, name="toy")
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "toy-001")
    write_json(made.plan, {"version": 1})
    write_json(made.supervisor_lock, {"host": "n1", "pid": 1, "started": "1", "job": "7", "restart": "0"})
    return made


def state_of(run: RunDir, written: str | None, fact: JobFact | None) -> tuple[RunState, str | None]:
    job = {"scheduler": "slurm", "job_id": "7", "submitted": time.time() - 100}
    state = {"state": written, "started": time.time() - 50} if written else {}
    return real_state(run, state, job, {"7": fact} if fact else {})


@pytest.mark.parametrize(
    "written, fact, expected, words",
    [
        (
            None,
            JobFact("7", "PENDING", "Priority", start="2026-11-22T10:00:00"),
            RunState.PENDING,
            "Priority",
        ),
        (None, JobFact("7", "CONFIGURING"), RunState.PENDING, ""),
        (None, JobFact("7", "RUNNING"), RunState.STARTING, ""),
        (None, JobFact("7", "CANCELLED"), RunState.CANCELLED, "before it started"),
        (None, JobFact("7", "FAILED"), RunState.FAILED, "FAILED"),
        (None, None, RunState.PENDING, ""),
        ("running", JobFact("7", "RUNNING"), RunState.RUNNING, ""),
        ("running", JobFact("7", "NODE_FAIL", "NodeDown"), RunState.FAILED, "NODE_FAIL (NodeDown)"),
        ("running", JobFact("7", "OUT_OF_MEMORY"), RunState.FAILED, "OUT_OF_MEMORY"),
        ("stopping", JobFact("7", "TIMEOUT"), RunState.FAILED, "TIMEOUT"),
        ("stopping", JobFact("7", "CANCELLED"), RunState.CANCELLED, "resume"),
        ("running", JobFact("7", "PENDING", "BeginTime"), RunState.PENDING, "BeginTime"),
        ("failed", JobFact("7", "PENDING", "BeginTime"), RunState.PENDING, "BeginTime"),
        ("failed", JobFact("7", "COMPLETING"), RunState.STOPPING, "may requeue it"),
        ("failed", JobFact("7", "RUNNING"), RunState.STOPPING, "may requeue it"),
        ("failed", JobFact("7", "FAILED"), RunState.FAILED, ""),
        ("cancelled", JobFact("7", "NODE_FAIL"), RunState.FAILED, "NODE_FAIL"),
        ("done", JobFact("7", "COMPLETING"), RunState.DONE, ""),
        ("running", None, RunState.RUNNING, ""),  # the lock was touched a moment ago
    ],
)
def test_the_state_combines_slurm_and_the_files_of_the_run(
    run: RunDir, written: str | None, fact: JobFact | None, expected: RunState, words: str
) -> None:
    state, message = state_of(run, written, fact)
    assert state == expected and words in (message or "")


def test_a_canceled_run_names_its_last_complete_checkpoint(run: RunDir) -> None:
    """Its supervisor was killed before it wrote that the run had stopped, as on a slow file system."""
    canceled = JobFact("7", "CANCELLED")
    assert "before the run saved a checkpoint" in (state_of(run, "stopping", canceled)[1] or "")
    for step, marker in ((2, "COMPLETE"), (3, "half")):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / marker).touch()
    assert "after the checkpoint of step 2; continue with" in (state_of(run, "stopping", canceled)[1] or "")


def test_a_run_whose_job_runs_is_running_despite_an_old_heartbeat(run: RunDir) -> None:
    os.utime(run.supervisor_lock, (1.0, 1.0))
    state, message = state_of(run, "running", JobFact("7", "RUNNING"))
    assert state == RunState.RUNNING
    assert "has not updated its heartbeat for" in (message or "") and "SLURM reports RUNNING" in (
        message or ""
    )
    assert state_of(run, "running", None)[0] == RunState.FAILED  # there is no evidence that it runs


@pytest.mark.parametrize("last_word", ["pending", "done", "stopped"])
def test_a_final_state_written_during_the_query_counts(run: RunDir, last_word: str) -> None:
    """The supervisor writes its state before it releases the lock: a reader of the earlier state finds no lock."""
    write_json(run.state, {"state": last_word, "updated": 2.0})
    run.supervisor_lock.unlink()
    assert state_of(run, "stopping", JobFact("7", "RUNNING"))[0] == last_word


def test_an_ended_job_is_queried_again_after_its_run_changed(slurm: Slurm, jobs: JobWatcher) -> None:
    slurm.squeue = queue_row("1", "NODE_FAIL", "None", "", "n1")
    assert jobs.facts({"1": "running"})["1"].has_ended
    slurm.now += 1e6
    slurm.squeue = queue_row("1", "RUNNING", "None", "", "n2")
    assert jobs.facts({"1": "running"})["1"].has_ended
    assert jobs.facts({"1": "starting"})["1"].state == "RUNNING"


@pytest.mark.parametrize("written", [None, "pending"], ids=["never started", "back in the queue"])
def test_a_job_unknown_to_slurm_does_not_stay_pending(
    tmp_path: Path, slurm: Slurm, jobs: JobWatcher, written: str | None
) -> None:
    run = RunDir(tmp_path / "p1")
    write_json(run.job, {"scheduler": "slurm", "job_id": "5", "attempt": 1})
    state = {"attempt": 1, "state": written, "job_id": "5"} if written else {}
    if written:
        write_json(run.state, state)
    state_of = lambda: real_state(run, state, read_json(run.job), jobs.facts_of([run]))  # noqa: E731
    slurm.is_down = True
    assert state_of()[0] == RunState.PENDING  # unknown
    slurm.is_down, slurm.now = False, slurm.now + 1e6
    found, message = state_of()
    assert found == RunState.FAILED
    assert "SLURM no longer knows job 5" in (message or "") and "primerl-hpc resume p1" in (message or "")
    slurm.squeue, slurm.now = queue_row("5", "PENDING", "Priority", "N/A", ""), slurm.now + 1e6
    assert state_of()[0] == RunState.PENDING


def test_after_a_link_unknown_to_slurm_the_waiting_link_counts(
    tmp_path: Path, slurm: Slurm, jobs: JobWatcher
) -> None:
    run = RunDir(tmp_path)
    job = {"scheduler": "slurm", "job_id": "5", "links": ["5", "6"], "attempt": 1}
    state = {"attempt": 1, "state": "pending", "job_id": "5", "message": "link 2 of 2 goes on after step 3"}
    write_json(run.job, job)
    write_json(run.state, state)
    slurm.squeue = queue_row("6", "PENDING", "Priority", "N/A", "")
    facts = jobs.facts_of([run])
    assert current_job(job, state, facts) == "6"
    assert real_state(run, state, job, facts) == (RunState.PENDING, state["message"])


@pytest.mark.parametrize(
    "reason, words",
    [("JobHeldUser", "scontrol release 5"), ("JobHeldAdmin", "ask the site to release job 5")],
)
def test_a_held_job_reports_who_can_release_it_and_has_no_expected_start(
    tmp_path: Path, slurm: Slurm, jobs: JobWatcher, reason: str, words: str
) -> None:
    run = RunDir(tmp_path)
    write_json(run.job, {"scheduler": "slurm", "job_id": "5", "attempt": 1})
    slurm.squeue = queue_row("5", "PENDING", reason, "2027-11-24T03:00:00", "")
    state, message = real_state(run, {}, read_json(run.job), jobs.facts_of([run]))
    assert state == RunState.PENDING and words in (message or "") and "2027" not in (message or "")


# -- numbers: of arrays, of jobs that SLURM does not list, given again to other jobs ------------------

ARRAY = queue_row("3", "RUNNING", listed="1_3") + queue_row("1", "COMPLETED", listed="1_4")
"""Printed by SLURM 22.05 for ``squeue --jobs=1``: the last task of an array has the array's number as its own."""


def test_the_tasks_of_a_job_array_are_found_under_their_own_numbers() -> None:
    past = account_row("3", "FAILED", "3:0", listed="1_3") + account_row("1", "RUNNING", listed="1_4")
    assert {job: fact.state for job, fact in parse_squeue(ARRAY).items()} == {
        "3": "RUNNING",
        "1": "COMPLETED",
    }
    assert {job: fact.state for job, fact in parse_sacct(past).items()} == {"3": "FAILED", "1": "RUNNING"}


def test_rows_of_other_tasks_of_an_array_are_not_those_of_the_job() -> None:
    text = "a notice\n" + row("3", "1_3", "n1") + row("1", "1_4", "n2") + row("1", "1")
    assert rows_of("1", text, 1) == [["n2"]] and rows_of("3", text, 1) == [["n1"]]
    components = row("7", "7+0", "n1") + row("8", "7+1", "n2") + row("9", "9", "n3")
    assert rows_of("7", components, 1) == [["n1"], ["n2"]]


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "4"}, "1_4"),
        ({"SLURM_JOB_ID": "1"}, "1"),
        ({"SLURM_JOB_ID": "3", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}, "1"),
        ({}, "1"),
    ],
    ids=["its own task", "no array", "asked by another task", "outside of a job"],
)
def test_a_command_that_changes_the_task_of_an_array_does_not_name_the_array(
    environ: dict[str, str], name: str
) -> None:
    assert task_name("1", environ) == name


INVALID, HIDDEN = UnknownJobError("slurm_load_jobs error: Invalid job id specified"), ""
NO_ACCOUNTING = SchedulerError("sacct: Slurm accounting storage is disabled")


@pytest.mark.parametrize(
    ("listed", "accounted", "state"),
    [
        (queue_row("7", "RUNNING"), account_row("7", "COMPLETED"), "RUNNING"),
        (HIDDEN, account_row("7", "COMPLETED"), "COMPLETED"),
        (HIDDEN, account_row("7", "RUNNING"), "RUNNING"),
        (HIDDEN, "", None),
        (HIDDEN, NO_ACCOUNTING, None),
        (INVALID, account_row("7", "COMPLETED"), "COMPLETED"),
        (INVALID, account_row("7", "RUNNING"), FORGOTTEN),  # slurmdbd has missed its end
        (INVALID, "", FORGOTTEN),
        (INVALID, NO_ACCOUNTING, FORGOTTEN),
    ],
)
@pytest.mark.parametrize("jobs", [["7"], ["7", "8"]], ids=["alone", "with another"])
def test_a_job_that_squeue_does_not_list_is_over_only_if_slurm_reports_it(
    jobs: list[str], listed: str | Exception, accounted: str | Exception, state: str | None
) -> None:
    def ask(command: list[str]) -> str:
        answer = listed if command[0] == "squeue" else accounted
        if isinstance(answer, UnknownJobError) and asked_jobs(command) != ["7"]:
            answer = queue_row("8", "RUNNING")  # asked about several jobs, squeue omits unknown ones
        if isinstance(answer, Exception):
            raise answer
        return answer

    fact = find_facts(jobs, ask).get("7")
    assert (fact.state if fact else None) == state


def test_few_jobs_are_asked_about_separately() -> None:
    asked = []

    def ask(command: list[str]) -> str:
        asked.append(command)
        return ""

    assert find_facts([str(job) for job in range(100)], ask) == {} and len(asked) == 2 + MOST_ALONE


def test_a_job_whose_number_was_given_again_is_not_the_runs_job(
    tmp_path: Path, slurm: Slurm, jobs: JobWatcher
) -> None:
    """SLURM counts from the start after its limit, and on a new cluster."""
    run, submitted = RunDir(tmp_path), datetime.fromisoformat(SUBMITTED).timestamp()
    own = {"scheduler": "slurm", "job_id": "5", "attempt": 1, "name": "math", "submitted": submitted}
    write_json(run.job, own)
    slurm.squeue = queue_row("5", "RUNNING", name="code", submitted="2026-07-01T00:00:00")
    assert jobs.facts_of([run])["5"].is_forgotten
    for name, at in (("math", "2026-07-01T00:00:00"), ("code", SUBMITTED), ("code", "2026-01-01T00:30:00")):
        slurm.squeue, slurm.now = queue_row("5", "RUNNING", name=name, submitted=at), slurm.now + 1e6
        assert jobs.facts_of([run])["5"].state == "RUNNING"  # requeued, renamed by the site, clocks differ
    write_json(run.job, {**own, "here": True})
    slurm.squeue, slurm.now = queue_row("5", "RUNNING", submitted="2025-01-01T00:00:00"), slurm.now + 1e6
    assert jobs.facts_of([run])["5"].state == "RUNNING"  # the allocation is older than the run
