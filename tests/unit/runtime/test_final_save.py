"""When a job starts its final save: what the deadline learns from rows of metrics, and what the watch asks SLURM."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.files import append_json
from primerl_hpc.common.names import Role
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.context import JobClock, RunContext, StopRequests
from primerl_hpc.runtime.files.journal import Journal
from primerl_hpc.runtime.job import walltime as walltime_module
from primerl_hpc.runtime.job.walltime import Deadline, WalltimeWatch
from primerl_hpc.runtime.step_history import ProgressWatch
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan
from tests.unit.runtime.test_walltime import step_row as row

SFT = {"kind": "sft", "name": "toy", "model": {"name": "m"}, "max_steps": 3}
SFT |= {"sft": {"data": {"path": "none.jsonl"}}}


def learn(
    deadline: Deadline, *rows: dict[str, Any], batch: int | None = 0, checkpoint: int = 0, now: float = 0.0
) -> Deadline:
    deadline.learn(rows, attempt=1, batch=batch, checkpoint=checkpoint, now=now)
    return deadline


# -- the deadline ----------------------------------------------------------------------------------


def test_one_more_step_needs_its_duration_and_the_saves_plus_a_tenth_and_half_a_minute() -> None:
    assert Deadline(300).need_s == 300
    assert Deadline(10, save_s=100).need_s == pytest.approx(110 + 30)
    deadline = learn(Deadline(10, save_s=100), row(1, step=50.0), batch=1)
    assert deadline.need_s == pytest.approx(55 + 110 + 30)


def test_a_measured_save_that_is_short_does_not_go_below_the_margin() -> None:
    assert Deadline(100, save_s=0).need_s == 100
    assert learn(Deadline(10), row(1, step=0.75, save_ckpt=0.25)).save_s == 0.25


def test_only_the_slowest_save_counts() -> None:
    rows = [row(1, step=9.0, save_ckpt=5.0), row(2, step=9.0, save_ckpt=7.0), row(3, step=9.0, save_ckpt=6.0)]
    assert learn(Deadline(10, save_s=2.0), *rows).save_s == 7.0
    assert learn(Deadline(10, save_s=8.0), *rows).save_s == 8.0


def test_a_step_that_only_waited_took_no_time() -> None:
    assert learn(Deadline(10), row(1, step=5.0, wait_for_batch=6.0)).step_s == 0
    assert learn(Deadline(10)).step_s == 0


def test_between_steps_the_next_step_must_fit() -> None:
    deadline = learn(Deadline(10, save_s=20), row(1, step=100.0), batch=1)
    assert deadline.is_due(deadline.need_s) and not deadline.is_due(deadline.need_s + 1)


def test_a_batch_that_the_trainer_has_finished_is_no_step_under_way() -> None:
    for batch in (0, 1):
        deadline = Deadline(10)
        for now in (0.0, 500.0):
            learn(deadline, row(1, step=2.0), batch=batch, now=now)
        assert deadline.step_s == 2.0


def test_before_its_first_batch_an_attempt_is_due_at_the_margin_only() -> None:
    deadline = Deadline(10, save_s=100)
    for now in (0.0, 500.0):
        learn(deadline, row(7, step=50.0, attempt=0), batch=0, now=now)
    assert not deadline.is_due(11) and deadline.is_due(10)
    learn(deadline, row(7, step=50.0, attempt=0), batch=8, now=600.0)
    assert deadline.is_due(deadline.need_s)


def test_without_batches_a_step_is_under_way_from_the_end_of_the_first_one() -> None:
    """In kind sft, steps follow one another; the first may include compilation and has no start to measure."""
    deadline = Deadline(10)
    for now in (0.0, 400.0):
        learn(deadline, batch=None, now=now)
    assert deadline.step_s == 0 and not deadline.is_due(11)
    for now in (500.0, 700.0):
        learn(deadline, row(1, step=30.0), batch=None, now=now)
    assert deadline.step_s == 200.0
    learn(deadline, row(1, step=30.0), row(2, step=40.0), batch=None, now=720.0)
    assert deadline.step_s == 40.0


def test_a_finished_save_is_not_waited_for_again_while_its_row_is_the_last_one() -> None:
    deadline = learn(Deadline(10), row(1, step=2.0, save_ckpt=1.0), now=100.0)
    learn(deadline, row(1, step=2.0, save_ckpt=1.0), checkpoint=1, now=130.0)
    assert not deadline.is_saving and deadline.save_s == 31.0
    learn(deadline, row(1, step=2.0, save_ckpt=1.0), checkpoint=1, now=900.0)
    assert not deadline.is_saving and deadline.save_s == 31.0


def test_a_repeated_step_replaces_the_save_of_its_first_run() -> None:
    deadline = learn(Deadline(10), row(5, step=2.0, save_ckpt=1.0), now=100.0)
    learn(deadline, row(5, at=9.0, step=2.0), now=500.0)
    assert not deadline.is_saving


def test_a_save_stays_under_way_while_later_steps_run() -> None:
    deadline = learn(Deadline(10), row(5, step=2.0, save_ckpt=1.0), now=100.0)
    learn(deadline, row(5, step=2.0, save_ckpt=1.0), row(6, step=2.0), checkpoint=4, now=120.0)
    assert deadline.is_saving and deadline.save_s == 1.0


# -- the watch -------------------------------------------------------------------------------------


class FakeSlurm(JobClock):
    """A clock whose job has the same time left whenever SLURM is asked."""

    answer_s = math.inf
    num_questions = 0

    async def refresh(self) -> None:
        self.num_questions += 1
        self.ends_at = time.monotonic() + self.answer_s


def make_watch(
    folder: Path,
    recipe: dict[str, Any] = TOY_RECIPE,
    *,
    margin_s: int | None = 60,
    job_id: str | None = "7",
    left_s: float = math.inf,
) -> tuple[WalltimeWatch, FakeSlurm]:
    role = Role.SFT if recipe["kind"] == "sft" else Role.TRAINER
    plan = make_plan(folder, recipe, processes=[process_plan(role)])
    plan = plan.model_copy(update={"signal_margin_s": margin_s})
    run = RunDir(folder)
    journal = Journal(run, 2)
    clock = FakeSlurm(journal, job_id, ends_at=time.monotonic() + left_s)
    clock.answer_s = left_s
    context = RunContext(run, plan, 2, journal, clock, StopRequests(run, journal))
    progress = ProgressWatch(run, plan.phases[0], busy_s=0.0)
    return WalltimeWatch(context, plan.phases[0], progress), clock


@pytest.mark.parametrize(
    ("job_id", "margin_s", "is_due"), [("7", 60, True), (None, 60, False), ("7", None, False)]
)
def test_only_jobs_of_slurm_with_a_margin_end_early(
    tmp_path: Path, job_id: str | None, margin_s: int | None, is_due: bool
) -> None:
    watch, _ = make_watch(tmp_path, job_id=job_id, margin_s=margin_s, left_s=0)
    assert asyncio.run(watch.is_due()) is is_due


def test_the_end_is_confirmed_by_slurm_before_a_run_stops(tmp_path: Path) -> None:
    watch, clock = make_watch(tmp_path, left_s=50)
    clock.answer_s = 1000.0  # the limit was extended
    assert not asyncio.run(watch.is_due()) and clock.num_questions == 1
    clock.ends_at, clock.answer_s = time.monotonic() + 50, 40.0
    assert asyncio.run(watch.is_due()) and clock.num_questions == 2


def test_slurm_is_asked_every_ten_minutes_whether_the_limit_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = time.monotonic()
    monkeypatch.setattr(walltime_module.time, "monotonic", lambda: clock_s)
    watch, clock = make_watch(tmp_path, left_s=1e6)
    asked = []
    start_s = clock_s
    for second in range(0, 1900, 100):
        clock_s = start_s + second
        before = clock.num_questions
        assert not asyncio.run(watch.is_due())
        asked += [second] * (clock.num_questions - before)
    assert asked == [600, 1200, 1800]


def test_the_watch_learns_from_both_sides_of_an_rl_run(tmp_path: Path) -> None:
    watch, clock = make_watch(tmp_path, left_s=500)
    metrics = watch.run_dir
    for step in range(1, 13):
        seconds = {"step": 200.0 if step == 2 else 400.0 if step == 3 else 10.0}
        append_json(metrics.metrics("trainer"), row(step, attempt=2, **seconds))
    append_json(metrics.metrics("orchestrator"), row(12, attempt=2))
    assert asyncio.run(watch.is_due()), "a step of 400 s is among the last ten, and 500 s are left"
    append_json(metrics.metrics("trainer"), row(13, attempt=2, step=10.0))
    assert not asyncio.run(watch.is_due())
    assert watch.as_details() == {"need_s": 71.0, "left_s": 500, "step_s": 10.0, "save_s": None}
    assert clock.num_questions == 1


def test_a_step_begins_with_the_batch_of_this_attempt(tmp_path: Path) -> None:
    watch, _ = make_watch(tmp_path)
    asyncio.run(watch.is_due())
    assert watch.batch == 0
    append_json(watch.run_dir.metrics("orchestrator"), row(8, attempt=1))
    asyncio.run(watch.is_due())
    assert watch.batch == 0
    append_json(watch.run_dir.metrics("orchestrator"), row(5, attempt=2))
    asyncio.run(watch.is_due())
    assert watch.batch == 5


def test_an_sft_run_has_one_side_and_no_batches(tmp_path: Path) -> None:
    watch, _ = make_watch(tmp_path, SFT, left_s=400)
    append_json(watch.run_dir.metrics("sft"), row(1, attempt=2, step=390.0))
    append_json(watch.run_dir.metrics("orchestrator"), row(9, attempt=2))
    assert asyncio.run(watch.is_due()) and watch.batch is None


def test_the_slowest_save_outlives_an_attempt(tmp_path: Path) -> None:
    watch, _ = make_watch(tmp_path)
    append_json(watch.run_dir.metrics("trainer"), row(1, attempt=2, step=2.0, save_ckpt=70.04))
    asyncio.run(watch.is_due())
    assert watch.context.journal.state["slowest_save_s"] == 70.04
    again = WalltimeWatch(watch.context, watch.context.plan.phases[0], watch.watch)
    assert again.deadline.save_s == 70.04
    assert again.as_details() == {"need_s": 107.0, "left_s": None, "step_s": 0.0, "save_s": 70.0}


def test_a_save_ends_when_its_checkpoint_is_complete(tmp_path: Path) -> None:
    watch, _ = make_watch(tmp_path)
    append_json(watch.run_dir.metrics("trainer"), row(1, attempt=2, step=2.0, save_ckpt=0.5))
    asyncio.run(watch.is_due())
    assert watch.deadline.is_saving
    for side in ("trainer", "orchestrator"):
        watch.run_dir.checkpoint_side(1, side).mkdir(parents=True)
        watch.run_dir.finish_checkpoint_side(1, side, ("trainer", "orchestrator"))
    asyncio.run(watch.is_due())
    assert not watch.deadline.is_saving


def test_durations_are_reported_with_one_digit(tmp_path: Path) -> None:
    watch, _ = make_watch(tmp_path, left_s=99.6)
    watch.deadline.step_s, watch.deadline.save_s = 1.26, 2.34
    assert watch.as_details() == {"need_s": 60, "left_s": 100, "step_s": 1.3, "save_s": 2.3}
