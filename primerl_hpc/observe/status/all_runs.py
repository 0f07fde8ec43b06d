"""``status`` without a run: all runs in a table of 80 columns, running ones first; and the table of ``--list``."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import click
from rich.table import Table

from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.run_catalog import ListedRun, RunCatalog
from primerl_hpc.observe.status.snapshot import Snapshot, take_snapshot
from primerl_hpc.observe.table import cell, column, make_table, render
from primerl_hpc.observe.text import WIDTH, cut, format_age, format_count, format_duration

_COLORS = {
    RunState.RUNNING: "green",
    RunState.DONE: "cyan",
    RunState.FAILED: "red",
    RunState.STOPPED: "yellow",
    RunState.CANCELLED: "yellow",
}
_START = re.compile(r", expected start \d+-(\d+-\d+)T(\d+:\d+):\d+$")
_NUMBERS = (("STEP", 12), ("REWARD", 6), ("TOK/S", 6), ("LEFT", 9))
_NUMBERS_WIDTH = sum(width for _, width in _NUMBERS) + len(_NUMBERS) - 1


class AllRuns:
    """A `View` of the runs whose directory exists, filtered by ``states`` and the glob ``pattern``.

    At most ``limit`` runs are shown (None: all). Only those are read beyond their state.
    """

    def __init__(
        self, jobs: JobWatcher, states: tuple[str, ...], pattern: str | None, limit: int | None
    ) -> None:
        self.jobs, self.catalog = jobs, RunCatalog(jobs)
        self.states, self.pattern, self.limit = states, pattern, limit
        self.shown: list[tuple[ListedRun, Snapshot]] = []
        self.hidden: Counter[str] = Counter()

    def refresh(self) -> None:
        runs = [run for run in self.catalog.list_runs() if self._is_selected(run)]
        count = len(runs) if self.limit is None else self.limit
        self.shown = [(run, take_snapshot(run.run, self.catalog.facts)) for run in runs[:count]]
        self.hidden = Counter(run.state.value for run in runs[count:])

    def _is_selected(self, run: ListedRun) -> bool:
        is_in_state = not self.states or run.state.value in self.states
        return run.exists and is_in_state and (not self.pattern or fnmatchcase(run.name, self.pattern))

    def change_key(self) -> object:
        return [(run.name, run.state, snapshot.step) for run, snapshot in self.shown]

    def as_json(self) -> dict[str, Any]:
        return {
            "runs": [
                {**snapshot.as_json(), "submitted": run.registered.submitted} for run, snapshot in self.shown
            ],
            "not_shown": dict(self.hidden),
            "slurm_trouble": self.jobs.trouble,
        }

    def text(self) -> str:
        lines = render(_table(self.shown, time.time()))
        if not self.shown:
            is_filtered = self.states or self.pattern
            lines = [
                "no run matches; try without --state and --name"
                if is_filtered
                else "no runs yet; start one with primerl-hpc submit"
            ]
        if hidden := self.hidden.total():
            counts = ", ".join(f"{count:,} {state}" for state, count in self.hidden.most_common())
            lines.append(f"and {hidden:,} more ({counts}): --all, --state, --name")
        if self.jobs.trouble:
            lines.append(cut(f"from the runs' files only: {self.jobs.trouble}", WIDTH))
        return "\n".join(lines)


def colored(state: RunState) -> str:
    return click.style(state.value, fg=_COLORS.get(state))


def list_table(runs: Sequence[ListedRun]) -> list[str]:
    """Return one line per run: name, time of submission, state, directory. Directories are never shortened."""
    table = make_table(
        column("RUN"), column("SUBMITTED"), column("STATE", 9), column("DIRECTORY"), has_header=False
    )
    for run in runs:
        submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.registered.submitted))
        state = run.state.value if run.exists else "gone"
        table.add_row(cell(run.name), cell(submitted), cell(state), cell(str(run.registered.root)))
    return render(table, width=10_000)


def _table(shown: Sequence[tuple[ListedRun, Snapshot]], now: float) -> Table:
    table = make_table(column("RUN", 26), column("STATE", 9), column("", _NUMBERS_WIDTH), column("AGE", 5))
    table.columns[2].header, table.columns[3].justify = _numbers([name for name, _ in _NUMBERS]), "right"
    for run, snapshot in shown:
        is_waiting = run.state in (RunState.PENDING, RunState.UNKNOWN) and run.message
        table.add_row(
            cell(run.name),
            cell(run.state.value, _COLORS.get(run.state, "")),
            cell(_START.sub(r", at \1 \2", run.message or "")) if is_waiting else _progress(snapshot),
            cell(format_age(now - run.registered.submitted)),
        )
    return table


def _progress(snapshot: Snapshot) -> Table:
    reward, speed = snapshot.metrics.get("reward/mean"), snapshot.metrics.get("perf/throughput")
    return _numbers(
        [
            f"{snapshot.step}/{snapshot.max_steps}" if snapshot.max_steps else "-",
            f"{reward:.3f}" if isinstance(reward, float) else "-",
            format_count(speed) if isinstance(speed, float) else "-",
            format_duration(snapshot.seconds_left) if snapshot.seconds_left is not None else "-",
        ]
    )


def _numbers(cells: Sequence[str]) -> Table:
    """Return a row of numbers as one cell, because a message takes its place for runs that wait."""
    columns = (column("", width, is_number=True) for _, width in _NUMBERS)
    row = make_table(*columns, has_header=False)
    row.add_row(*map(cell, cells))
    return row
