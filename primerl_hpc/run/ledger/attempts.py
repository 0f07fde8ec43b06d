"""The attempts of a run with their durations, from its events: what a run has used so far.

attempts = attempts_from_events(read_jsonl(run.events), is_running=False, activity=last_activity(run, 3))
used_s(run, before=4)                   # seconds of the attempts 1 to 3
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.run.rundir import BUDGET, RunDir


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run. ``start`` and ``end`` are in seconds since the epoch."""

    number: int
    job: str | None
    start: float
    end: float | None
    """None while the attempt is running."""
    resumed_from: int = 0


def attempts_from_events(
    events: Iterable[dict[str, Any]], *, is_running: bool, activity: Mapping[int, float] | None = None
) -> list[Attempt]:
    """Return the attempts in ``events``. The last one has no end if ``is_running``.

    An attempt ends with its last event or its last activity (``activity``: time by attempt), whichever is later,
    because an attempt that was killed writes no event.
    """
    activity = activity or {}
    attempts: list[Attempt] = []
    is_over = False
    for event in events:
        event_time = float(event["time"])
        if event["event"] == "attempt_started":
            number = int(event["attempt"])
            end, is_over = max(event_time, activity.get(number, event_time)), False
            attempts.append(Attempt(number, event.get("job"), event_time, end))
        elif attempts and not is_over:
            # link_idle comes from a later job of the chain that had nothing to do, possibly much later
            is_over = event["event"] == "link_idle"
            is_phase = event["event"] == "phase_started"
            last = attempts[-1]
            assert last.end is not None
            attempts[-1] = replace(
                last,
                end=last.end if is_over else max(last.end, event_time),
                resumed_from=int(event.get("resumed_from") or 0) if is_phase else last.resumed_from,
            )
    if attempts and is_running:
        attempts[-1] = replace(attempts[-1], end=None)
    return attempts


@dataclass(frozen=True)
class BudgetStop:
    """The end of an attempt because one more step would have exceeded the budget of hours."""

    budget_s: float
    """The budget then, in seconds of the job."""
    need_s: float
    """Seconds that one more step and its save needed."""


def budget_stop(run: RunDir) -> BudgetStop | None:
    """Return the last stop of the run if its budget was the reason."""
    stops = [event for event in read_jsonl(run.events) if event["event"] == "stop_requested"]
    last = stops[-1] if stops else {}
    if last.get("reason") != BUDGET:
        return None
    return BudgetStop(float(last.get("budget_s") or 0.0), float(last.get("need_s") or 0.0))


def last_activity(run: RunDir, attempt: int) -> dict[int, float]:
    """Return the time of the last finished step by attempt.

    For ``attempt``, the latest one, the last heartbeat of the supervisor counts too.
    """
    activity: dict[int, float] = {}
    for role in ("sft", "trainer"):
        for row in read_jsonl(run.metrics(role)):
            number, finished = row.get("attempt"), row.get("time")
            if isinstance(number, int) and isinstance(finished, int | float):
                activity[number] = max(finished, activity.get(number, 0.0))
    with contextlib.suppress(OSError):
        activity[attempt] = max(run.supervisor_lock.stat().st_mtime, activity.get(attempt, 0.0))
    return activity


def used_s(run: RunDir, *, before: int | None = None) -> float:
    """Return the seconds for which attempts of a run held its nodes; ``before``: only those before this attempt."""
    attempts = attempts_from_events(
        read_jsonl(run.events), is_running=False, activity=last_activity(run, before or 0)
    )
    ended = [attempt for attempt in attempts if before is None or attempt.number < before]
    return sum((attempt.end or attempt.start) - attempt.start for attempt in ended)
