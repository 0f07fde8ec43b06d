"""``status`` without a run: all runs on one screen of 80 columns, a line each, running ones first."""

from __future__ import annotations

import re
import time
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

import click

from primerl_hpc.common.names import RunState
from primerl_hpc.observe.catalog import Brief, Catalog
from primerl_hpc.observe.plot import format_count, format_duration
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import Snapshot, take_snapshot
from primerl_hpc.observe.text import WIDTH, cut, format_age

_COLORS = {
    RunState.RUNNING: "green",
    RunState.DONE: "cyan",
    RunState.FAILED: "red",
    RunState.STOPPED: "yellow",
    RunState.CANCELLED: "yellow",
}
_HEADER = f"{'RUN':<29} {'STATE':<9} {'STEP':>9} {'REWARD':>6} {'TOK/S':>6} {'LEFT':>9}  {'AGE':>4}"
_START = re.compile(r", expected start \d+-(\d+-\d+)T(\d+:\d+):\d+$")
_NUMBERS = len(_HEADER) - 29 - 1 - 9 - 1 - 6


class AllRuns:
    """A `View` of all runs whose directory is there, or of those in ``states`` with names like ``pattern``.

    At most ``limit`` of them are shown (None: all), and only those are read beyond their state.
    """

    def __init__(
        self, jobs: JobWatcher, states: tuple[str, ...], pattern: str | None, limit: int | None
    ) -> None:
        self.jobs, self.catalog = jobs, Catalog(jobs)
        self.states, self.pattern, self.limit = states, pattern, limit
        self.shown: list[tuple[Brief, Snapshot]] = []
        self.hidden: Counter[str] = Counter()

    def look(self) -> None:
        briefs = [brief for brief in self.catalog.look() if self._fits(brief)]
        count = len(briefs) if self.limit is None else self.limit
        self.shown = [(brief, take_snapshot(brief.run, self.catalog.facts)) for brief in briefs[:count]]
        self.hidden = Counter(brief.state.value for brief in briefs[count:])

    def _fits(self, brief: Brief) -> bool:
        is_asked = not self.states or brief.state.value in self.states
        return brief.is_there and is_asked and (not self.pattern or fnmatchcase(brief.name, self.pattern))

    def mark(self) -> object:
        return [(brief.name, brief.state, snapshot.step) for brief, snapshot in self.shown]

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {**snapshot.as_json(), "submitted": brief.registered.submitted}
                for brief, snapshot in self.shown
            ],
            "not_shown": dict(self.hidden),
            "slurm_trouble": self.jobs.trouble,
        }

    def text(self) -> str:
        lines = [_HEADER, *(_line(brief, snapshot, time.time()) for brief, snapshot in self.shown)]
        if not self.shown:
            is_filtered = self.states or self.pattern
            lines = [
                "no run fits; leave out --state or --name"
                if is_filtered
                else "no runs yet; start one with primerl-hpc submit"
            ]
        if hidden := self.hidden.total():
            kinds = ", ".join(f"{count:,} {state}" for state, count in self.hidden.most_common())
            lines.append(f"and {hidden:,} more ({kinds}): --all, --state, --name")
        if self.jobs.trouble:
            lines.append(cut(f"as the runs' own files say: {self.jobs.trouble}", WIDTH))
        return "\n".join(lines)


def _line(brief: Brief, snapshot: Snapshot, now: float) -> str:
    head = f"{cut(brief.name, 29):<29} {colored(brief.state, 9)} "
    age = f"  {format_age(now - brief.registered.submitted):>4}"
    if brief.state in (RunState.PENDING, RunState.UNKNOWN) and brief.message:
        words = _START.sub(r", at \1 \2", brief.message)
        return head + f"{cut(words, _NUMBERS):<{_NUMBERS}}" + age
    reward, speed = snapshot.metrics.get("reward/mean"), snapshot.metrics.get("perf/throughput")
    left = format_duration(snapshot.seconds_left) if snapshot.seconds_left is not None else "-"
    step = f"{snapshot.step}/{snapshot.max_steps}" if snapshot.max_steps else "-"
    return (
        head
        + f"{step:>9} {f'{reward:.3f}' if isinstance(reward, float) else '-':>6} "
        + f"{format_count(speed) if isinstance(speed, float) else '-':>6} {left:>9}"
        + age
    )


def colored(state: RunState, width: int = 0) -> str:
    return click.style(f"{state.value:<{width}}", fg=_COLORS.get(state))
