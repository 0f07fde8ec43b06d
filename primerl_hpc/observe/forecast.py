"""When the last step will be done, and whether that is before the walltime of this job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from primerl_hpc.observe.plot import format_duration


@dataclass(frozen=True)
class Forecast:
    seconds_left: float
    """To the last step of the phase, at the pace of the last steps."""
    job_seconds_left: float | None = None
    """To the walltime; None where there is none."""
    more_attempts: int | None = None
    """Jobs after this one; 0: it finishes in this one; None: no walltime, or no step fits into a job."""

    @property
    def sentence(self) -> str:
        left = f"{format_duration(self.seconds_left)} left"
        if self.job_seconds_left is None:
            return left
        job = f"the job ends in {format_duration(max(0.0, self.job_seconds_left))}"
        match self.more_attempts:
            case 0:
                return f"{left}, {job}: it finishes in this job"
            case None:
                return f"{left}, {job}: too short for a step"
            case more:
                return f"{left}, {job}: about {more} more {'job' if more == 1 else 'jobs'} after this one"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_forecast(
    rows: Mapping[int, Mapping[str, Any]],
    max_steps: int,
    *,
    now: float,
    started: float | None = None,
    ends: float | None = None,
    resumed_from: int = 0,
) -> Forecast | None:
    """``rows``: the last steps of this attempt; ``started`` and ``ends`` of its job in seconds since the epoch.

    None before two steps. Another attempt is taken to need as long as this one until its first step.
    """
    steps = sorted(rows)
    if len(steps) < 2 or not max_steps:
        return None
    last = rows[steps[-1]]
    pace_s = (last["time"] - rows[steps[0]]["time"]) / max(1, steps[-1] - steps[0])
    left_s = max(0.0, pace_s * (max_steps - steps[-1]) - max(0.0, now - last["time"]))
    if ends is None or started is None:
        return Forecast(left_s)
    job_s = ends - now
    if left_s <= job_s:
        return Forecast(left_s, job_s, 0)
    setup_s = max(0.0, last["time"] - started - pace_s * (steps[-1] - resumed_from))
    per_job_s = (ends - started) - setup_s
    if per_job_s < pace_s:
        return Forecast(left_s, job_s)
    return Forecast(left_s, job_s, math.ceil((left_s - max(0.0, job_s)) / per_job_s))
