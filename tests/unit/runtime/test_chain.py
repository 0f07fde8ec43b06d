"""The next job of a chain, from inside a job: which wait, which are cancelled, how one is queued and recorded.

SLURM's commands are shell scripts that print fixed replies. tests/slurm asks a real SLURM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.run.job_chain import JobChain
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.job.chain import (
    NO_PROGRESS,
    QueuedLink,
    cancel_links,
    queue_next_link,
    read_chain,
    waiting_links,
    why_fault_ends_chain,
    why_not_begin,
)
from tests.support.slurm_rows import UNKNOWN_JOB, printed, queue_row

CHAIN = JobChain(("1", "2", "3"))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install commands of these names and shell scripts; return the file that lists their calls."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    calls.touch()
    monkeypatch.setenv("PATH", str(folder))

    def install(**bodies: str) -> Path:
        for name, body in bodies.items():
            command = folder / name
            command.write_text(f'#!/bin/bash\necho "{name} $*" >>{calls}\n{body}\n')
            command.chmod(0o755)
        return calls

    return install


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.launch.mkdir(parents=True)
    (run.launch / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1\ntrue\n")
    write_json(run.job, {"job_id": "1", "links": ["1", "2", "3"]})
    return run


def squeue_lines(**states: str) -> str:
    """A squeue that knows these jobs, and reports an error if it is asked about another one alone."""
    rows = printed(*(queue_row(job[1:], state) for job, state in states.items()))
    known = "|".join(f"*--jobs={job[1:]}[\\ ]*|*--jobs=*,*" for job in states)
    return f'case "$* " in {known}) {rows} ;; *) {UNKNOWN_JOB} ;; esac'


# -- which chain -----------------------------------------------------------------------------------


def test_a_job_finds_the_chain_that_lists_it(run: RunDir) -> None:
    assert read_chain(run, "2") == CHAIN


def test_a_single_job_and_a_job_of_an_earlier_submission_have_no_chain(run: RunDir) -> None:
    assert read_chain(run, "7") is None
    write_json(run.job, {"job_id": "1"})
    assert read_chain(run, "1") is None
    run.job.unlink()
    assert read_chain(run, "1") is None


def test_a_link_that_was_killed_without_progress_is_named_with_the_reason() -> None:
    start = {"phase": "main", "step": 9}
    earlier = {"job_id": 1, "state": "running", "began": start}
    assert why_not_begin(CHAIN, "2", earlier, start) == (
        RunState.FAILED,
        f"link 1 of 3 was killed and {NO_PROGRESS}",
    )


def test_the_state_of_a_run_that_is_over_is_the_reason_not_to_begin() -> None:
    earlier = {"job_id": "1", "state": "stopped"}
    assert why_not_begin(CHAIN, "2", earlier, None) == (RunState.STOPPED, "the run is stopped")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ({"exit_code": ExitCode.CONFIG, "message": "no such key"}, "no such key"),
        ({"exit_code": ExitCode.CONFIG}, "failed"),
        ({"exit_code": ExitCode.FAILED, "message": "lost"}, f"lost; {NO_PROGRESS}"),
        ({}, f"failed; {NO_PROGRESS}"),
    ],
)
def test_the_reason_why_a_chain_ends_is_the_failures_message(failure: dict[str, object], reason: str) -> None:
    assert why_fault_ends_chain(failure, progressed=False) == reason


# -- jobs in the queue -----------------------------------------------------------------------------


def test_only_later_links_that_have_not_ended_wait_in_the_queue(slurm: Callable[..., Path]) -> None:
    calls = slurm(squeue=squeue_lines(_1="PENDING", _2="CANCELLED", _3="PENDING"))
    assert asyncio.run(waiting_links(CHAIN, "1")) == ("3",)
    assert "--jobs=2,3 " in calls.read_text()


def test_a_link_that_the_queue_no_longer_knows_does_not_wait(slurm: Callable[..., Path]) -> None:
    slurm(squeue=squeue_lines(_3="RUNNING"), sacct="exit 1")
    assert asyncio.run(waiting_links(CHAIN, "1")) == ("3",)


def test_a_link_that_the_queue_does_not_list_waits_if_nothing_reports_its_end(
    slurm: Callable[..., Path],
) -> None:
    slurm(squeue=printed(queue_row("3", "RUNNING")), sacct="exit 1")
    assert asyncio.run(waiting_links(CHAIN, "1")) == ("2", "3")


def test_the_last_link_waits_for_none_and_does_not_ask(slurm: Callable[..., Path]) -> None:
    calls = slurm(squeue="exit 1")
    assert asyncio.run(waiting_links(CHAIN, "3")) == ()
    assert calls.read_text() == ""


def test_all_later_links_count_as_waiting_if_slurm_does_not_answer(slurm: Callable[..., Path]) -> None:
    slurm(squeue="echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    assert asyncio.run(waiting_links(CHAIN, "1")) == ("2", "3")


def test_links_are_cancelled_with_one_command(slurm: Callable[..., Path]) -> None:
    calls = slurm(scancel="exit 0")
    assert asyncio.run(cancel_links(("2", "3"))) is None
    assert calls.read_text() == "scancel 2 3\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo 'scancel: error: Access denied' >&2; exit 1", "scancel: error: Access denied"),
        ("exit 3", "scancel ended with 3"),
    ],
)
def test_a_refused_cancellation_returns_why(slurm: Callable[..., Path], body: str, reason: str) -> None:
    slurm(scancel=body)
    assert asyncio.run(cancel_links(("2",))) == reason


# -- the next job ----------------------------------------------------------------------------------


def test_a_queued_link_follows_this_job_and_follow_up_jobs_wait_for_it(
    slurm: Callable[..., Path], run: RunDir
) -> None:
    after = {"export": {"job_id": "15"}, "evaluation": {"job_id": "16"}}
    write_json(run.job, {"job_id": "1", "links": ["1", "2", "3"], "after": after})
    calls = slurm(sbatch="echo Submitted batch job 41", scontrol="exit 0")
    assert asyncio.run(queue_next_link(run, CHAIN, "3")) == QueuedLink("41")
    assert read_json(run.job) == {"job_id": "1", "links": ["1", "2", "3", "41"], "after": after}
    sbatch, *updates = calls.read_text().splitlines()
    assert sbatch.startswith("sbatch --dependency=afterany:3 ")
    condition = "Dependency=afterok:1?afterok:2?afterok:3?afterok:41"
    assert updates == [f"scontrol update JobId={job} {condition}" for job in ("15", "16")]
    assert (run.launch / "submitit" / "41_submission.sh").read_text().endswith("true\n")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "printf 'sbatch: error: a\\nsbatch: error: b\\n' >&2; exit 1",
            "the next job cannot be submitted from a compute node (sbatch: error: a; sbatch: error: b)",
        ),
        ("exit 1", "the next job cannot be submitted from a compute node (sbatch failed)"),
    ],
)
def test_a_refused_link_is_reported_with_sbatchs_output(
    slurm: Callable[..., Path], run: RunDir, body: str, reason: str
) -> None:
    slurm(sbatch=body)
    assert asyncio.run(queue_next_link(run, CHAIN, "3")) == QueuedLink(None, reason)
    assert read_json(run.job)["links"] == ["1", "2", "3"]


def test_a_compute_node_without_sbatch_queues_no_link(slurm: Callable[..., Path], run: RunDir) -> None:
    slurm()
    queued = asyncio.run(queue_next_link(run, CHAIN, "3"))
    assert queued.job_id is None
    assert queued.refused.startswith("the next job could not be submitted (")
    assert not list((run.launch / "submitit").iterdir())


def test_a_queued_link_that_cannot_be_recorded_continues_the_run(
    slurm: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.common.waiting.IO_RETRY_LIMIT_S", 0.1)
    calls = slurm(sbatch="echo Submitted batch job 41")
    run.job.unlink()
    run.job.mkdir()
    assert asyncio.run(queue_next_link(run, CHAIN, "3")) == QueuedLink("41")
    assert len(calls.read_text().splitlines()) == 1
