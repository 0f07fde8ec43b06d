"""Find the bottleneck of an RL run from the metrics of its last steps, as one sentence with numbers.

The trainer measures how long it waits for batches (``time/wait_for_batch`` of ``time/step``), the orchestrator how long
it waits because the trainer is behind (``time/wait_for_policy``), and the engines report their load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Row = Mapping[str, Any]

WAITS = 0.15
"""Minimum share of its time for which a side must wait to be reported as waiting."""
LATE_S = 1.0
"""An event loop with at least this delay lacks CPU time."""


@dataclass(frozen=True)
class Bottleneck:
    side: Literal["inference", "environments", "orchestrator", "trainer", "none"]
    sentence: str
    trainer_waits: float
    """Share of the trainer's time spent waiting for batches, 0 to 1."""
    orchestrator_waits: float
    """Share of the orchestrator's time spent waiting for a new policy, 0 to 1."""
    engines_idle: float
    """Share of the time in which engines had no request, 0 to 1."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_bottleneck(trainer: Iterable[Row], orchestrator: Iterable[Row]) -> Bottleneck | None:
    """Return the bottleneck over the given rows of both sides; None before both have finished a step."""
    trainer, orchestrator = list(trainer), list(orchestrator)
    if not trainer or not orchestrator:
        return None
    wait_s, step_s = _mean(trainer, "time/wait_for_batch"), _mean(trainer, "time/step")
    idle_s, collect_s = _mean(orchestrator, "time/wait_for_policy"), _mean(orchestrator, "time/step")
    trainer_waits, orchestrator_waits = _share(wait_s, step_s), _share(idle_s, collect_s)
    shares = (trainer_waits, orchestrator_waits, _mean(orchestrator, "inference/idle"))
    if max(trainer_waits, orchestrator_waits) < WAITS:
        sentence = f"none: the trainer waits {trainer_waits:.0%}, the orchestrator {orchestrator_waits:.0%} of the time"
        return Bottleneck("none", sentence, *shares)
    if orchestrator_waits >= trainer_waits:
        sentence = (
            f"trainer: the next batch waits for a new policy {orchestrator_waits:.0%} of the time "
            f"({idle_s:.1f} of {collect_s:.1f} s per step)"
        )
        return Bottleneck("trainer", sentence, *shares)
    side, reason = _limiting_side(orchestrator)
    sentence = (
        f"{side}: the trainer waits {trainer_waits:.0%} of its time for batches "
        f"({wait_s:.1f} of {step_s:.1f} s per step); {reason}"
    )
    return Bottleneck(side, sentence, *shares)


def _limiting_side(
    rows: list[Row],
) -> tuple[Literal["inference", "environments", "orchestrator"], str]:
    """Return what limits the rate of batches, with the reason: the orchestrator process, environments or engines."""
    late_s = _mean(rows, "event_loop_lag/max")
    if late_s > LATE_S:
        return "orchestrator", f"its event loop runs up to {late_s:.1f} s late, so it lacks CPU time"
    running, queued = _mean(rows, "inference/running"), _mean(rows, "inference/waiting")
    in_flight, cache = _mean(rows, "dispatcher/in_flight"), _mean(rows, "inference/kv_usage/max")
    if in_flight and running + queued < 0.25 * in_flight:
        return (
            "environments",
            f"of {in_flight:.0f} rollouts in flight, the engines process {running + queued:.0f}",
        )
    full = "and are full" if queued >= 1 or cache > 0.9 else "and have free capacity"
    return (
        "inference",
        f"engines run {running:.0f} requests {full} ({queued:.0f} wait, KV cache {cache:.0%})",
    )


def _mean(rows: list[Row], name: str) -> float:
    values = [float(row[name]) for row in rows if isinstance(row.get(name), float | int)]
    return sum(values) / len(values) if values else 0.0


def _share(part: float, total: float) -> float:
    return min(1.0, part / total) if total > 0 else 0.0
