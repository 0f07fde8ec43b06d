"""Learning rates as pure functions of the step, so that a checkpoint needs no scheduler state.

``lr(step) = peak · factor(step)``; step is 1-based. Warm-up rises linearly and reaches 1 at step ``warmup_steps``.
"""

from __future__ import annotations

import math

from primerl_hpc.recipe.training_schema import Constant, Cosine, Linear, Scheduler


def lr_factor(schedule: Scheduler, step: int, max_steps: int) -> float:
    """Share of the peak learning rate at ``step`` of 1..max_steps.

    linear: warm-up, stable, then over the last ``decay_steps`` down to ``min_lr_ratio`` at ``max_steps``.
    cosine: from the end of warm-up down to ``min_lr_ratio`` at ``max_steps``.
    """
    warmup = min(1.0, step / schedule.warmup_steps) if schedule.warmup_steps else 1.0
    if isinstance(schedule, Constant):
        return warmup
    floor = schedule.min_lr_ratio
    if isinstance(schedule, Linear):
        left = (max_steps - step) / schedule.decay_steps if schedule.decay_steps else 1.0
        return warmup * (floor + (1 - floor) * min(1.0, max(0.0, left)))
    assert isinstance(schedule, Cosine)
    if step <= schedule.warmup_steps:
        return warmup
    done = min(1.0, (step - schedule.warmup_steps) / max(1, max_steps - schedule.warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
