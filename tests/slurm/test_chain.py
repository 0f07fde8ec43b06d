"""Chains under SLURM: links that continue after a walltime, a cancel or a crash, and what ends a chain.

The trainer of these runs saves checkpoint 1 at once and another one on a stop request.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from primerl_hpc.common.errors import ConfigError, OccupiedError, SchedulerError
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Kind, Role, RunState
from primerl_hpc.launch.cancel import cancel_run
from primerl_hpc.launch.compose import ChainRequest
from primerl_hpc.launch.queue import JobsTogether, together
from primerl_hpc.launch.submit import queue_run, resume_run
from primerl_hpc.plan.plan import OnExit, load_plan
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import parse_squeue, squeue_command
from tests.support.helpers import wait_for
from tests.support.virtual_slurm import SAY, TRAIN, SlurmToy, run_cli

UNTIL_DONE = ChainRequest(is_until_done=True)


def links_of(toy: SlurmToy) -> list[str]:
    return read_json(toy.run.job)["links"]


def started_jobs(toy: SlurmToy) -> list[str]:
    return [row["job"] for row in toy.events("attempt_started")]


def warn_of_walltime(toy: SlurmToy) -> None:
    """Send the signal that SLURM sends before the time limit (`--signal=B:USR2@…`), without the wait for it."""
    subprocess.run(["scancel", "--batch", "--signal=USR2", started_jobs(toy)[-1]], check=True)


def states(jobs: list[str]) -> list[str]:
    facts = parse_squeue(ask(squeue_command(jobs)))
    return [facts[job].state for job in jobs]


def add_trainer(toy: SlurmToy, code: str = TRAIN) -> SlurmToy:
    toy.add(Role.TRAINER, code, OnExit.ENDS_PHASE)
    return toy


def assert_went_on(toy: SlurmToy, *, attempt: int, step: int) -> None:
    toy.wait_for_words(f"goes on after {step}\n", "trainer-0", attempt)


def test_links_continue_at_the_walltime_without_losing_a_step_and_unneeded_ones_are_cancelled(
    toy: SlurmToy,
) -> None:
    add_trainer(toy).submit(ChainRequest(4))
    links = links_of(toy)
    for attempt in (1, 2):
        toy.wait_until_ready("trainer-0", attempt=attempt)
        saved = toy.run.latest_checkpoint()
        assert toy.snapshot().job["place"] == f"link {attempt} of 4"
        warn_of_walltime(toy)
        toy.wait_until_ready("trainer-0", attempt=attempt + 1)
        assert saved is not None and toy.run.latest_checkpoint() == saved + 1
        assert_went_on(toy, attempt=attempt + 1, step=saved + 1)
    shown = run_cli("status", str(toy.run.root)).stdout
    assert f"job {links[2]} (slurm), link 3 of 4" in shown
    toy.finish()
    assert states(links)[2:] == ["COMPLETED", "CANCELLED"]
    assert started_jobs(toy) == links[:3]


def test_a_walltime_without_a_new_checkpoint_ends_the_chain_with_the_reason(toy: SlurmToy) -> None:
    never_saves = TRAIN.replace("step += 1", "sys.exit(75)").replace("or step == 0", "")
    add_trainer(toy, never_saves).submit(ChainRequest(3))
    toy.wait_until_ready("trainer-0")
    warn_of_walltime(toy)
    toy.wait_for_state(RunState.STOPPED)
    assert "before a new checkpoint" in (toy.snapshot().message or "")
    toy.assert_nothing_is_left()
    assert states(links_of(toy))[1:] == ["CANCELLED", "CANCELLED"] and len(started_jobs(toy)) == 1


def test_a_killed_link_is_followed_by_the_next_one_while_there_is_progress(toy: SlurmToy) -> None:
    saves_once = TRAIN.replace("(is_last or is_stop or step == 0)", "(is_last or step == 0)")
    add_trainer(toy, saves_once).submit(ChainRequest(4))
    for attempt in (1, 2):  # the first made checkpoint 1 before it died, the second one nothing
        toy.wait_until_ready("trainer-0", attempt=attempt)
        owner = read_json(toy.run.supervisor_lock)
        toy.cluster.on(owner["host"], "kill", "-9", str(owner["pid"]))
    toy.wait_for_state(RunState.FAILED)
    message = toy.snapshot().message or ""
    assert "link 2 of 4 was killed" in message and "before a new checkpoint" in message
    toy.cluster.wait_until_idle()
    links = links_of(toy)
    assert started_jobs(toy) == links[:2] and states(links)[3] == "CANCELLED"
    toy.submit()
    toy.wait_until_ready("trainer-0", attempt=3)
    toy.finish()


def test_a_cancelled_link_is_skipped_and_two_links_never_run_at_once(toy: SlurmToy) -> None:
    add_trainer(toy).submit(ChainRequest(4))
    links = links_of(toy)
    toy.wait_until_ready("trainer-0")
    subprocess.run(["scancel", links[1]], check=True)
    wait_for(lambda: states(links)[1] == "CANCELLED", "the cancellation of link 2")
    with pytest.raises(OccupiedError, match="running"):
        toy.as_user(lambda: resume_run(toy.run))
    subprocess.run(["scancel", links[0]], check=True)
    toy.wait_until_ready("trainer-0", attempt=2)
    saved = toy.run.latest_checkpoint()  # 2 where the save was quicker than SLURM's end of the step
    assert saved in (1, 2)
    assert_went_on(toy, attempt=2, step=saved)
    assert toy.snapshot().job["place"] == "link 3 of 4"
    toy.finish()
    assert started_jobs(toy) == [links[0], links[2]] and "another supervisor" not in toy.words()


def test_cancel_ends_all_links_after_a_save(toy: SlurmToy) -> None:
    add_trainer(toy).submit(ChainRequest(3))
    toy.wait_until_ready("trainer-0")
    done = run_cli("cancel", str(toy.run.root), "--wait")
    assert done.returncode == 0 and "stopped" in done.stdout, done.stderr
    toy.assert_nothing_is_left()
    assert toy.run.latest_checkpoint() == 2 and len(started_jobs(toy)) == 1
    assert states(links_of(toy))[1:] == ["CANCELLED", "CANCELLED"]


def test_a_queued_chain_is_cancelled_in_the_queue_and_not_submitted_twice(toy: SlurmToy) -> None:
    blocker = ask(["sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"])
    add_trainer(toy).submit(ChainRequest(3))
    with pytest.raises(OccupiedError, match="waits in the queue"):
        toy.as_user(lambda: resume_run(toy.run))
    assert run_cli("cancel", str(toy.run.root)).returncode == 0
    assert set(states(links_of(toy))) == {"CANCELLED"}
    assert toy.snapshot().state == RunState.CANCELLED
    subprocess.run(["scancel", blocker.strip()], check=True)


def test_the_last_link_ends_with_a_hint_and_a_late_link_finds_the_run_complete(toy: SlurmToy) -> None:
    add_trainer(toy).submit(ChainRequest(2))
    for attempt in (1, 2):
        toy.wait_until_ready("trainer-0", attempt=attempt)
        warn_of_walltime(toy)
    toy.wait_for_state(RunState.STOPPED)
    message = toy.snapshot().message or ""
    assert "link 2 of 2, the last one, ended after step 3" in message and "resume" in message

    # a link that could not be cancelled does nothing; its exit code starts no dependent job
    def submit_late() -> str:
        with together() as jobs:
            late = jobs.submit(toy.run, toy.run.job_script)
            job = read_json(toy.run.job)
            write_json(toy.run.job, {**job, "links": [*job["links"], late]})
        return late

    late = toy.as_user(submit_late)
    wait_for(lambda: states([late]) == ["FAILED"], "the end of the late link")
    assert toy.snapshot().state == RunState.STOPPED and len(started_jobs(toy)) == 2


def test_until_done_queues_the_next_job_at_the_walltime(toy: SlurmToy) -> None:
    add_trainer(toy).submit(UNTIL_DONE)
    toy.wait_until_ready("trainer-0")
    warn_of_walltime(toy)
    toy.wait_until_ready("trainer-0", attempt=2)
    assert_went_on(toy, attempt=2, step=2)
    assert len(links_of(toy)) == 2 and toy.snapshot().job["place"] == "link 2"
    toy.finish()
    assert started_jobs(toy) == links_of(toy)


def test_until_done_reports_that_compute_nodes_may_not_submit(new_toy: Callable[..., SlurmToy]) -> None:
    toy = new_toy(partition="preemptible")
    add_trainer(toy).submit(UNTIL_DONE)
    toy.wait_until_ready("trainer-0")
    change = ["scontrol", "update", "PartitionName=preemptible"]
    subprocess.run([*change, "AllocNodes=nowhere"], check=True)
    try:
        warn_of_walltime(toy)
        toy.wait_for_state(RunState.STOPPED)
    finally:
        subprocess.run([*change, "AllocNodes=ALL"], check=True)
    message = toy.snapshot().message or ""
    assert "saved after step 2" in message and "cannot be submitted from a compute node" in message
    assert "primerl-hpc resume" in message
    toy.assert_nothing_is_left()


def test_a_refused_link_removes_the_earlier_ones_from_the_queue(toy: SlurmToy) -> None:
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)
    toy.prepare()

    def submit_two() -> list[str]:
        queued: list[str] = []
        with pytest.raises(SchedulerError, match="SLURM refused the job"), together() as jobs:
            queued.append(jobs.submit(toy.run, toy.run.job_script))
            jobs.submit(toy.run, toy.run.job_script, "--partition=nowhere")
        return queued

    assert states(toy.as_user(submit_two)) == ["CANCELLED"] and not toy.events("attempt_started")


@pytest.mark.parametrize("num_queued", [1, 2])
@pytest.mark.parametrize("then", ["resume", "cancel"])
def test_jobs_of_a_chain_whose_submission_was_killed_are_not_left_in_the_queue(
    toy: SlurmToy, num_queued: int, then: str
) -> None:
    """The first job is held until all are queued, and the others wait for it."""
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    toy.prepare()

    def submit_and_be_killed() -> list[str]:
        jobs = JobsTogether()
        jobs.submit_links(toy.run, toy.run.job_script, num_queued)
        return jobs.ids

    left = toy.as_user(submit_and_be_killed)
    assert set(states(left)) == {"PENDING"}
    if then == "cancel":
        assert toy.as_user(lambda: cancel_run(toy.run, now=False, wait=False)) == RunState.UNKNOWN
    else:
        toy.as_user(lambda: queue_run(toy.run, load_plan(toy.run)))
        wait_for(lambda: toy.snapshot().state == RunState.DONE)
    assert set(states(left)) == {"CANCELLED"}


def test_a_chain_is_refused_for_runs_that_cannot_use_one(toy: SlurmToy) -> None:
    toy.plan_changes = {"kind": Kind.EVAL}
    toy.add(Role.EVALUATOR, TRAIN, OnExit.ENDS_PHASE)
    with pytest.raises(ConfigError, match="writes none"):
        toy.submit(ChainRequest(2))
