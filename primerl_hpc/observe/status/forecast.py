"""Predict when the last step will be finished, and whether that is before the walltime of the job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from primerl_hpc.observe.text import format_duration


@dataclass(frozen=True)
class Forecast:
    seconds_left: float
    """Until the last step of the phase, at the pace of the last steps."""
    job_seconds_left: float | None = None
    """Until the walltime; None if the job has none."""
    more_attempts: int | None = None
    """Number of jobs needed after this one; None without a walltime, or if no step fits into a job."""
    phase: str | None = None
    """The phase, if others follow, whose pace is not known yet; None: the end of the phase is that of the run."""

    @property
    def sentence(self) -> str:
        left = f"{format_duration(self.seconds_left)} left"
        left += f" in phase {self.phase}" if self.phase is not None else ""
        if self.job_seconds_left is None:
            return left
        job = f"the job ends in {format_duration(max(0.0, self.job_seconds_left))}"
        if self.phase is not None:
            return f"{left}, {job}"
        match self.more_attempts:
            case 0:
                return f"{left}, {job}: the run finishes in this job"
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
    phase: str | None = None,
) -> Forecast | None:
    """Return the forecast, or None before two steps are finished.

    ``rows``: the last steps of this attempt. ``now``, ``started`` and ``ends`` (of the job) are in seconds since the
    epoch. The startup of further attempts is assumed to take as long as that of this one. ``phase``: as in `Forecast`.
    """
    steps = sorted(rows)
    if len(steps) < 2 or not max_steps:
        return None
    last = rows[steps[-1]]
    pace_s = (last["time"] - rows[steps[0]]["time"]) / max(1, steps[-1] - steps[0])
    left_s = max(0.0, pace_s * (max_steps - steps[-1]) - max(0.0, now - last["time"]))
    if phase is not None:
        return Forecast(left_s, ends - now if ends is not None else None, phase=phase)
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
