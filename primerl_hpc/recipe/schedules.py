"""Learning rates as pure functions of the step, so that a checkpoint needs no scheduler state.

``lr(step) = peak · factor(step)``; step is 1-based. Warm-up rises linearly and reaches 1 at step ``warmup_steps``.
Where it overlaps with the decay, the lower of the two counts.
"""

from __future__ import annotations

import math

from primerl_hpc.recipe.schema.training import Constant, Linear, Scheduler


def lr_factor(schedule: Scheduler, step: int, max_steps: int) -> float:
    """Return the share of the peak learning rate at ``step`` of 1..max_steps.

    After warm-up it is floor + (1 − floor) · left for linear, floor + (1 − floor) · (1 − cos(π · left)) / 2 for cosine,
    with floor = ``min_lr_ratio`` and left = (max_steps + 1 − step) / decay steps, at most 1. These are ``decay_steps``
    for linear, all steps after warm-up for cosine. The floor would be reached one step after the last: no trained step
    has a rate of 0.
    """
    warmup = min(1.0, step / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    if isinstance(schedule, Constant):
        return warmup
    is_linear = isinstance(schedule, Linear)
    decay_steps = schedule.decay_steps if is_linear else max_steps - schedule.warmup_steps
    left = min(1.0, max(0, max_steps + 1 - step) / decay_steps) if decay_steps > 0 else 1.0
    shape = left if is_linear else 0.5 * (1 - math.cos(math.pi * left))
    return min(warmup, schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * shape)


def highest_factor(schedule: Scheduler, max_steps: int) -> float:
    """Return the largest share of the peak learning rate that any step has."""
    decay_steps = schedule.decay_steps if isinstance(schedule, Linear) else 0
    if schedule.warmup_steps + decay_steps <= max_steps:
        return 1.0
    return max(lr_factor(schedule, step, max_steps) for step in range(1, max_steps + 1))
