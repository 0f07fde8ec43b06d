"""Learning rates and the checkpoints to keep: pure functions."""

import pytest

pytest.importorskip("torch")

from primerl_hpc.recipe.schedules import highest_factor, lr_factor
from primerl_hpc.recipe.schema.run import Checkpoint
from primerl_hpc.recipe.schema.training import Constant, Cosine, Linear
from primerl_hpc.trainer.checkpoint.checkpoint import is_due, kept_checkpoints


def test_constant_rises_over_its_warmup_and_stays():
    rates = [lr_factor(Constant(warmup_steps=4), step, 10) for step in range(1, 11)]
    assert rates == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert lr_factor(Constant(), 1, 10) == 1


def test_linear_warms_up_stays_and_would_be_at_its_floor_after_the_last_step():
    schedule = Linear(warmup_steps=2, decay_steps=4, min_lr_ratio=0.1)
    rates = [lr_factor(schedule, step, 10) for step in range(1, 12)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325, 0.1])


def test_the_lower_of_warm_up_and_decay_counts_where_they_overlap():
    schedule = Linear(warmup_steps=12, decay_steps=12)
    rates = [lr_factor(schedule, step, 20) for step in range(1, 21)]
    assert rates[:10] == pytest.approx([step / 12 for step in range(1, 11)])
    assert rates[10:] == pytest.approx([step / 12 for step in range(10, 0, -1)])


@pytest.mark.parametrize("max_steps", [1, 5, 20, 24, 300])
@pytest.mark.parametrize(
    "schedule", [Constant(warmup_steps=9), Linear(warmup_steps=12, decay_steps=12), Cosine(warmup_steps=9)]
)
def test_the_highest_factor_is_that_of_a_step(schedule, max_steps):
    highest = max(lr_factor(schedule, step, max_steps) for step in range(1, max_steps + 1))
    assert highest_factor(schedule, max_steps) == pytest.approx(highest)


def test_cosine_meets_its_peak_its_middle_and_its_floor():
    schedule = Cosine(warmup_steps=10, min_lr_ratio=0.2)
    assert lr_factor(schedule, 5, 110) == pytest.approx(0.5)
    assert lr_factor(schedule, 10, 110) == lr_factor(schedule, 11, 110) == pytest.approx(1)
    assert lr_factor(schedule, 61, 110) == pytest.approx(0.6)
    assert lr_factor(schedule, 111, 110) == pytest.approx(0.2)


def test_steps_after_the_last_stay_at_the_floor():
    for schedule in (Linear(decay_steps=4, min_lr_ratio=0.1), Cosine(warmup_steps=0, min_lr_ratio=0.1)):
        assert [lr_factor(schedule, step, 10) for step in (11, 12, 30)] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("max_steps", [1, 2, 9, 10, 11, 20, 1000])
@pytest.mark.parametrize(
    "schedule", [Linear(), Linear(decay_steps=1), Linear(decay_steps=0), Cosine(), Cosine(warmup_steps=0)]
)
def test_every_step_trains_at_a_rate_above_zero_and_at_most_the_peak(schedule, max_steps):
    """A floor of 0 is reached one step after the last, so that the last batch still trains."""
    rates = [lr_factor(schedule, step, max_steps) for step in range(1, max_steps + 1)]
    assert 0 < min(rates) <= max(rates) <= 1


def test_checkpoints_are_due_at_intervals_and_at_the_end():
    config = Checkpoint(interval=4)
    assert [step for step in range(1, 11) if is_due(config, step, 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_due(Checkpoint(at_end=False), step, 10)] == []


def test_kept_checkpoints_are_the_newest_and_the_multiples():
    config = Checkpoint(interval=10, keep_last=2, keep_interval=30)
    assert kept_checkpoints([10, 20, 30, 40, 50], config) == {30, 40, 50}
