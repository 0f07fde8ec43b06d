"""Who waits for whom in an RL run, from the metrics of its last steps, as one sentence with its numbers.

The trainer measures how long it waits for batches (``time/wait_for_batch`` of ``time/step``), the orchestrator how long
it may start nothing because the trainer is behind (``time/wait_for_policy``), and the engines how full they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Row = Mapping[str, Any]

WAITS = 0.15
"""Share of its time from which on a side counts as waiting."""
LATE_S = 1.0
"""An event loop that is as late as this has no CPU."""


@dataclass(frozen=True)
class Bottleneck:
    side: Literal["inference", "environments", "orchestrator", "trainer", "none"]
    sentence: str
    trainer_waits: float
    """Share of the trainer's time, 0 to 1."""
    orchestrator_waits: float
    engines_idle: float
    """Share of the engines' time in which they had no request."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def find_bottleneck(trainer: Iterable[Row], orchestrator: Iterable[Row]) -> Bottleneck | None:
    """Rows of the last steps of both sides; None before both have finished one."""
    trainer, orchestrator = list(trainer), list(orchestrator)
    if not trainer or not orchestrator:
        return None
    wait_s, step_s = _mean(trainer, "time/wait_for_batch"), _mean(trainer, "time/step")
    idle_s, collect_s = _mean(orchestrator, "time/wait_for_policy"), _mean(orchestrator, "time/step")
    trainer_waits, orchestrator_waits = _share(wait_s, step_s), _share(idle_s, collect_s)
    shares = (trainer_waits, orchestrator_waits, _mean(orchestrator, "inference/idle"))
    if max(trainer_waits, orchestrator_waits) < WAITS:
        words = f"none: the trainer waits {trainer_waits:.0%}, the orchestrator {orchestrator_waits:.0%} of the time"
        return Bottleneck("none", words, *shares)
    if orchestrator_waits >= trainer_waits:
        words = (
            f"trainer: generation stands still {orchestrator_waits:.0%} of the time for a new policy "
            f"({idle_s:.1f} of {collect_s:.1f} s a step)"
        )
        return Bottleneck("trainer", words, *shares)
    side, why = _behind_the_trainer(orchestrator)
    words = f"{side}: the trainer waits {trainer_waits:.0%} of its time for batches ({wait_s:.1f} of {step_s:.1f} s a step); {why}"
    return Bottleneck(side, words, *shares)


def _behind_the_trainer(
    rows: list[Row],
) -> tuple[Literal["inference", "environments", "orchestrator"], str]:
    """What keeps batches back: the orchestrator's own process, the environments, or the engines."""
    late_s = _mean(rows, "event_loop_lag/max")
    if late_s > LATE_S:
        return "orchestrator", f"its event loop runs up to {late_s:.1f} s late, it lacks CPU"
    running, queued = _mean(rows, "inference/running"), _mean(rows, "inference/waiting")
    in_flight, cache = _mean(rows, "dispatcher/in_flight"), _mean(rows, "inference/kv_usage/max")
    if in_flight and running + queued < 0.25 * in_flight:
        return (
            "environments",
            f"of {in_flight:.0f} rollouts in flight only {running + queued:.0f} are at the engines",
        )
    full = "and are full" if queued >= 1 or cache > 0.9 else "and have room"
    return (
        "inference",
        f"engines run {running:.0f} requests {full} ({queued:.0f} wait, KV cache {cache:.0%})",
    )


def _mean(rows: list[Row], name: str) -> float:
    values = [float(row[name]) for row in rows if isinstance(row.get(name), float | int)]
    return sum(values) / len(values) if values else 0.0


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
