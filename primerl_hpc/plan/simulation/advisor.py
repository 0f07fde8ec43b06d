"""Split advisor: simulate an RL run with its measured rates on every split of its nodes, and name a faster one.

    measured = measure_sides(trainer_rows, orchestrator_rows, recipe)
    advice = advise(measured, UnitSplit(engines=3, trainer=1))
    advice.best, advice.gain, advice.sentence                   # UnitSplit(engines=2, trainer=2), 1.4, "…"

A unit of a split is a node, or an accelerator if the run has one node. Engines scale with their units; of a trainer
step only forward and backward do. The simulation is first compared with the run itself: if it does not reproduce the
measured step, there is no advice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeGuard

from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.plan.simulation.sides import EngineSide, TrainerSide, Workload
from primerl_hpc.plan.simulation.simulate import simulate

Row = Mapping[str, Any]
MIN_STEPS = 4
"""Steps of an attempt without which nothing is advised."""
MIN_GAIN = 1.05
"""Smallest speed-up that is advised: less is within the error of the simulation."""
MAX_DEVIATION = 1.5
"""Largest ratio, in either direction, of the simulated and the measured step with which the simulation is used."""
MAX_IDLE = 0.5
"""Share of idle polls from which more engines are not considered: environments or the trainer limit such a run."""
MAX_CANDIDATES = 15
SIMULATED_ROLLOUTS = 12_000
QUANTILE_90 = 1.2816
"""90th percentile of the normal distribution in standard deviations."""
DEFAULT_CV = 1.0
MAX_RUNNING = 1024
DOUBLES_AT = 64
"""Running sequences at which the time per token is assumed to be twice that of one sequence: an assumption, which a
spread of measured loads replaces."""


@dataclass(frozen=True)
class UnitSplit:
    engines: int
    """Units (nodes or accelerators) of the engines."""
    trainer: int

    @property
    def total(self) -> int:
        return self.engines + self.trainer

    def __str__(self) -> str:
        return f"{self.engines} for engines, {self.trainer} for the trainer"


@dataclass(frozen=True)
class MeasuredSides:
    """Both sides of a run as its metrics describe them, for the split with which they were measured."""

    workload: Workload
    engines: EngineSide
    trainer: TrainerSide
    step_s: float
    """Measured time between trainer steps."""
    engines_idle: float = 0.0
    """Share of polls that found an engine without requests."""


@dataclass(frozen=True)
class Advice:
    current: UnitSplit
    best: UnitSplit
    unit: str
    measured_step_s: float
    simulated_step_s: float
    """Step time of the current split in the simulation."""
    best_step_s: float
    reason: str = ""
    """Why nothing is advised; empty if ``best`` is faster."""

    @property
    def gain(self) -> float:
        """Simulated speed-up: step time now / step time of the best split."""
        return self.simulated_step_s / self.best_step_s if self.best_step_s else 1.0

    @property
    def is_advised(self) -> bool:
        return not self.reason

    @property
    def sentence(self) -> str:
        if self.reason:
            return f"keep {self.unit}s {self.current}: {self.reason}"
        return (
            f"{self.unit}s {self.best} instead of {self.current}: about {self.gain:.2f}× as fast "
            f"({self.measured_step_s:.1f} s per step measured, {self.measured_step_s / self.gain:.1f} s expected)"
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain, "is_advised": self.is_advised, "sentence": self.sentence}


def advise(
    measured: MeasuredSides, current: UnitSplit, *, unit: str = "node", span: int = 1, min_trainer: int = 1
) -> Advice:
    """Return the fastest split of ``current.total`` units.

    ``span``: units that one engine needs. ``min_trainer``: units without which the trainer has too little memory.
    """
    now_s = _step_s(measured, current, current)
    deviation = max(now_s / measured.step_s, measured.step_s / now_s)
    if deviation > MAX_DEVIATION:
        reason = (
            f"the simulation does not reproduce this run ({now_s:.1f} s per step, "
            f"measured {measured.step_s:.1f} s)"
        )
        return Advice(current, current, unit, measured.step_s, now_s, now_s, reason)
    most_engines = current.total if measured.engines_idle < MAX_IDLE else current.engines
    candidates = [
        split
        for split in _candidates(current, span)
        if split.trainer >= min_trainer and split.engines <= most_engines
    ]
    times = {split: _step_s(measured, current, split) for split in candidates}
    best = min(times, key=lambda split: (times[split], abs(split.engines - current.engines)), default=current)
    if best == current or now_s / times[best] < MIN_GAIN:
        reason = f"no other split is at least {MIN_GAIN - 1:.0%} faster".replace("%", " %")
        return Advice(current, current, unit, measured.step_s, now_s, now_s, reason)
    return Advice(current, best, unit, measured.step_s, now_s, times[best])


def _candidates(current: UnitSplit, span: int) -> list[UnitSplit]:
    """Return the other splits of the same units; of many, evenly spaced ones."""
    sizes = range(span, current.total, span)
    stride = max(1, math.ceil(len(sizes) / MAX_CANDIDATES))
    near = {current.engines - span, current.engines + span}
    chosen = sorted({*sizes[::stride], *(near & set(sizes))} - {current.engines})
    return [UnitSplit(engines, current.total - engines) for engines in chosen]


def _step_s(measured: MeasuredSides, current: UnitSplit, split: UnitSplit) -> float:
    """Return the simulated time per step with another split."""
    num_engines = max(1, round(measured.engines.num_engines * split.engines / current.engines))
    engines = replace(measured.engines, num_engines=num_engines)
    token_s = measured.trainer.token_s * current.trainer / split.trainer
    trainer = replace(measured.trainer, token_s=token_s)
    steps = min(24, max(8, SIMULATED_ROLLOUTS // measured.workload.batch_size))
    return simulate(measured.workload, engines, trainer, steps=steps).step_s


def measure_sides(
    trainer: Sequence[Row],
    orchestrator: Sequence[Row],
    *,
    batch_size: int | None,
    group_size: int,
    max_in_flight: int,
    max_off_policy_steps: int,
    async_level: int | None = None,
) -> MeasuredSides | None:
    """Return both sides from the metrics of an attempt; None if it is too short or a metric is missing.

    ``trainer`` and ``orchestrator``: rows of metrics/*.jsonl without the first step of the attempt. ``batch_size``
    None: the measured number of rollouts, which varies with ``batch_tokens``. ``async_level`` None: its default.
    """
    if min(len(trainer), len(orchestrator)) < MIN_STEPS:
        return None
    step_s = _median(trainer, "time/step")
    compute_s = _median(trainer, "time/forward_backward")
    lengths, curve = _lengths(orchestrator), engine_curve(orchestrator)
    num_engines = _median(orchestrator, "inference/engines")
    if not (step_s and compute_s is not None and lengths and curve and num_engines):
        return None
    turns = max(1, round(_median(orchestrator, "turns/mean") or 1))
    engines = EngineSide(
        num_engines=round(num_engines),
        curve=curve,
        max_running=_max_running(orchestrator, round(num_engines)),
        pause_s=_median(orchestrator, "time/engines_paused") or 0.0,
        detect_s=_detect_s(orchestrator),
    )
    duration_s = _median(orchestrator, "rollout_s/mean")
    generating_s = lengths.mean * engines.token_s(_mean_running(orchestrator, num_engines))
    env_s = max(0.0, (duration_s - generating_s) / turns) if duration_s else 0.0
    workload = Workload(
        batch_size=_measured_batch(orchestrator, group_size) if batch_size is None else batch_size,
        group_size=group_size,
        max_in_flight=max_in_flight,
        max_off_policy_steps=max_off_policy_steps,
        async_level=async_level,
        lengths=lengths,
        turns=turns,
        # a queue in the engines also makes rollouts long, and the simulation has its own
        env_s=env_s
        if env_s > 0.05 * generating_s and not _median(orchestrator, "inference/waiting")
        else 0.0,
    )
    tokens = workload.batch_size * lengths.mean
    trainer_side = TrainerSide(
        fixed_s=_median(trainer, "time/optimizer") or 0.0,
        token_s=compute_s / tokens,
        publish_s=_median(trainer, "time/broadcast_weights") or 0.0,
        deliver_s=(_median(orchestrator, "time/pack") or 0.0) + (_median(orchestrator, "time/send") or 0.0),
    )
    idle = _median(orchestrator, "inference/idle") or 0.0
    return MeasuredSides(workload, engines, trainer_side, step_s, idle)


def _measured_batch(rows: Sequence[Row], group_size: int) -> int:
    """Return the median number of rollouts of a batch, in complete groups."""
    return max(1, round((_median(rows, "batch/rollouts") or 0) / group_size)) * group_size


def is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and value > 0


def engine_curve(rows: Sequence[Row]) -> tuple[tuple[float, float], ...] | None:
    """Return (running sequences of an engine, seconds per token of each): a line through the measured steps.

    Without a spread of loads the slope is unknown. The time is then assumed to double from few sequences to
    `DOUBLES_AT`: weights are read once for all of them, the KV cache of each.
    """
    points = []
    for row in rows:
        engines, running, rate = (
            row.get(f"inference/{name}") for name in ("engines", "running", "tokens_per_s")
        )
        if is_positive(engines) and is_positive(running) and is_positive(rate):
            points.append((running / engines, running / rate))
    if not points:
        return None
    load, seconds = (statistics.fmean(point[axis] for point in points) for axis in (0, 1))
    loads = [point[0] for point in points]
    if max(loads) > 1.3 * min(loads) and len(points) >= MIN_STEPS:
        slope, base = statistics.linear_regression(loads, [point[1] for point in points])
        slope = min(max(slope, 0.0), seconds / load)
        base = seconds - slope * load
    else:
        base = seconds / (1 + load / DOUBLES_AT)
        slope = base / DOUBLES_AT
    highest = max(2.0 * max(loads), float(MAX_RUNNING))
    return (1.0, base + slope), (highest, base + slope * highest)


def _lengths(rows: Sequence[Row]) -> Lengths | None:
    """Return lognormal lengths from the mean and the 10th and 90th percentiles."""
    mean = _median(rows, "completion_tokens/mean")
    if not mean or mean <= 0:
        return None
    low, high, longest = (_median(rows, f"completion_tokens/{name}") for name in ("p10", "p90", "max"))
    cv = DEFAULT_CV
    if low and high and low > 0:
        sigma = math.log(max(high / low, 1.0)) / (2 * QUANTILE_90)
        cv = math.sqrt(math.expm1(sigma**2))
    return Lengths.lognormal(mean, cv, longest=max(longest or 0.0, mean) or None)


def _mean_running(rows: Sequence[Row], num_engines: float) -> float:
    """Return the mean number of sequences that an engine runs, including the polls that found it idle."""
    counts = [
        row["inference/running"] for row in rows if isinstance(row.get("inference/running"), int | float)
    ]
    return statistics.fmean(counts) / num_engines


def _max_running(rows: Sequence[Row], num_engines: int) -> int:
    """Return the sequences that an engine runs at once: those measured while others waited."""
    full = [
        row["inference/running"] / num_engines
        for row in rows
        if row.get("inference/waiting", 0) >= 1 and isinstance(row.get("inference/running"), int | float)
    ]
    return max(1, round(statistics.median(full))) if full else MAX_RUNNING


def _detect_s(rows: Sequence[Row]) -> float:
    update, paused = _median(rows, "time/weight_update"), _median(rows, "time/engines_paused")
    return max(0.0, update - (paused or 0.0)) if update else 0.0


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [
        row[name] for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])
    ]
    return statistics.median(values) if values else None
