"""SLURM's answers: parsed from recorded text of several versions, asked for politely, and turned into a run's state."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import SEPARATOR, JobFact, ask, parse_sacct, parse_squeue, query_environ
from primerl_hpc.observe.slurm import FIRST_PAUSE_S, JobWatcher
from primerl_hpc.observe.snapshot import real_state


def line(*fields: str) -> str:
    return SEPARATOR.join(fields) + "\n"


class Slurm:
    """Answers by command, and counts the questions."""

    def __init__(self) -> None:
        self.squeue, self.sacct = "", ""
        self.asked: list[str] = []
        self.is_down = False
        self.now = 1000.0

    def ask(self, command: list[str]) -> str:
        self.asked.append(command[0])
        if self.is_down:
            raise SchedulerError("slurm_load_jobs error: Socket timed out on send/recv operation")
        return self.squeue if command[0] == "squeue" else self.sacct


@pytest.fixture
def slurm() -> Slurm:
    return Slurm()


@pytest.fixture
def jobs(slurm: Slurm) -> JobWatcher:
    return JobWatcher(slurm.ask, lambda: slurm.now)


def test_many_runs_are_one_question(slurm: Slurm, jobs: JobWatcher) -> None:
    slurm.squeue = "".join(
        line(str(i), "RUNNING", "None", "2026-11-21T03:36:13", f"n{i}") for i in range(1000)
    )
    facts = jobs.facts({str(i): 0 for i in range(1000)})
    assert len(facts) == 1000 and slurm.asked == ["squeue"]


def test_only_what_squeue_has_forgotten_is_looked_up_in_accounting(slurm: Slurm, jobs: JobWatcher) -> None:
    slurm.squeue = line("1", "RUNNING", "None", "", "n1")
    slurm.sacct = line("2", "CANCELLED by 1000", "0:15", "", "n2", "None")
    facts = jobs.facts({"1": 0, "2": 0})
    assert (facts["1"].state, facts["2"].state) == ("RUNNING", "CANCELLED")
    slurm.now += 1e6
    jobs.facts({"1": 0, "2": 0})
    assert slurm.asked == ["squeue", "sacct", "squeue"]  # an ended job is not asked about again


def watch_for_ten_minutes(slurm: Slurm, jobs: JobWatcher) -> None:
    """Job 1, which runs all the time."""
    slurm.squeue = line("1", "RUNNING", "None", "", "n1")
    for _ in range(600):
        jobs.facts({"1": "running"})
        slurm.now += 1.0


def test_questions_become_rarer_while_nothing_changes_and_prompt_when_the_run_does(
    slurm: Slurm, jobs: JobWatcher
) -> None:
    watch_for_ten_minutes(slurm, jobs)
    rare = len(slurm.asked)
    assert rare < 20
    slurm.now += FIRST_PAUSE_S
    jobs.facts({"1": "stopped"})
    assert len(slurm.asked) == rare + 1


def test_the_end_of_a_job_is_seen_soon_after_its_run_said_so_though_slurm_was_slower(
    slurm: Slurm, jobs: JobWatcher
) -> None:
    watch_for_ten_minutes(slurm, jobs)
    jobs.facts({"1": "failed"})
    slurm.squeue = line("1", "FAILED", "NonZeroExitCode", "", "n1")
    slurm.now += 2 * FIRST_PAUSE_S
    assert jobs.facts({"1": "failed"})["1"].has_ended


def test_a_slurm_that_does_not_answer_leaves_the_old_facts_and_is_asked_less(
    slurm: Slurm, jobs: JobWatcher
) -> None:
    slurm.squeue = line("1", "RUNNING", "None", "", "n1")
    jobs.facts({"1": 0})
    slurm.is_down = True
    for _ in range(100):
        slurm.now += 1.0
        assert jobs.facts({"1": 0})["1"].state == "RUNNING"
    assert "timed out" in (jobs.trouble or "")
    assert len(slurm.asked) < 10


DATA = Path(__file__).resolve().parents[1] / "slurm" / "data"


VERSIONS = sorted(path.stem.partition("-")[2] for path in DATA.glob("squeue-*.txt"))


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_answers_are_read(version: str) -> None:
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


def test_reasons_with_blanks_and_commas_jobs_of_arrays_and_leaders_of_components_are_read() -> None:
    texts = [(DATA / f"squeue-{version}.txt").read_text() for version in VERSIONS]
    facts = [fact for text in texts for fact in parse_squeue(text).values()]
    assert {"8", "18_7", "18_[8-40%4]"} <= {fact.job_id for fact in facts}
    reasons = {fact.reason for fact in facts}
    assert {"ReqNodeNotAvail, UnavailableNodes:n[7,9]", "launch failed requeued held"} <= reasons
    assert not any(fact.has_ended for fact in facts if fact.state in ("COMPLETING", "REQUEUE_HOLD"))


def test_a_persons_own_formats_and_filters_do_not_reach_our_questions() -> None:
    environ = {
        "PATH": "/bin",
        "SQUEUE_PARTITION": "debug",
        "SACCT_FORMAT": "JobID",
        "SLURM_TIME_FORMAT": "%s",
    }
    assert query_environ({**environ, "SLURM_CONF": "/c"}) == {"PATH": "/bin", "SLURM_CONF": "/c"}


def test_a_controller_whose_name_does_not_resolve_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are those of 22.05's squeue, which takes ten seconds to say them."""
    command = tmp_path / "squeue"
    words = 'squeue: error: slurm_set_addr: Unable to resolve "head.invalid"'
    command.write_text(f"#!/bin/sh\necho '{words}' >&2\necho 'slurm_load_jobs error: No error' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SchedulerError, match="address of SLURM's controller"):
        ask(["squeue", "--noheader"])


def test_banners_and_torn_lines_are_not_jobs() -> None:
    text = "*** maintenance on Monday ***\n" + line("7", "RUNNING", "None", "N/A", "n[1-2]") + "8\x1fRUN"
    assert parse_squeue(text) == {"7": JobFact("7", "RUNNING", "", None, "", "n[1-2]")}


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
        ("failed", JobFact("7", "COMPLETING"), RunState.STOPPING, "back into the queue"),
        ("failed", JobFact("7", "RUNNING"), RunState.STOPPING, "back into the queue"),
        ("failed", JobFact("7", "FAILED"), RunState.FAILED, ""),
        ("cancelled", JobFact("7", "NODE_FAIL"), RunState.FAILED, "NODE_FAIL"),
        ("done", JobFact("7", "COMPLETING"), RunState.DONE, ""),
        ("running", None, RunState.RUNNING, ""),  # the lock was touched a moment ago
    ],
)
def test_slurm_and_the_runs_own_files_make_one_state(
    run: RunDir, written: str | None, fact: JobFact | None, expected: RunState, words: str
) -> None:
    state, message = state_of(run, written, fact)
    assert state == expected and words in (message or "")


def test_a_run_whose_job_runs_lives_however_old_its_sign_of_life_looks_here(run: RunDir) -> None:
    os.utime(run.supervisor_lock, (1.0, 1.0))
    state, message = state_of(run, "running", JobFact("7", "RUNNING"))
    assert state == RunState.RUNNING
    assert "silent for" in (message or "") and "SLURM says RUNNING" in (message or "")
    assert state_of(run, "running", None)[0] == RunState.FAILED  # nobody vouches for it


@pytest.mark.parametrize("last_word", ["pending", "done", "stopped"])
def test_a_last_word_that_comes_while_one_looks_counts(run: RunDir, last_word: str) -> None:
    """The lock is given back after it: whoever read the state before sees no supervisor any more."""
    write_json(run.state, {"state": last_word, "updated": 2.0})
    run.supervisor_lock.unlink()
    assert state_of(run, "stopping", JobFact("7", "RUNNING"))[0] == last_word


def test_an_ended_job_is_asked_about_again_when_its_run_says_something_new(
    slurm: Slurm, jobs: JobWatcher
) -> None:
    slurm.squeue = line("1", "NODE_FAIL", "None", "", "n1")
    assert jobs.facts({"1": "running"})["1"].has_ended
    slurm.now += 1e6
    slurm.squeue = line("1", "RUNNING", "None", "", "n2")
    assert jobs.facts({"1": "running"})["1"].has_ended
    assert jobs.facts({"1": "starting"})["1"].state == "RUNNING"
