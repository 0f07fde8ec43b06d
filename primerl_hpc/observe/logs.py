"""``logs``: lines of one or many files, in order of time, each under its own colour; followed across restarts,
requeues and attempts, and while the run still waits in the queue.

Lines begin with a clock (``14:49:11``, behind a rank ``[0]`` in the trainer's). A line without one belongs to the line
before it. The day is reckoned back from the file's last change.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import click

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.logfiles import LogFile, LogFiles
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import real_state

POLL_S, SLOWEST_POLL_S = 0.3, 3.0
DAY_S = 86400.0
_CLOCK = re.compile(r"^(?:\[\d+\] ?)?(?:\d{4}-\d\d-\d\d[ T])?(\d\d):(\d\d):(\d\d)")
_COLORS = {
    "trainer": "green",
    "sft": "green",
    "orchestrator": "yellow",
    "inference": "cyan",
    "router": "blue",
    "prefill": "cyan",
    "teacher": "cyan",
    "judge": "cyan",
    "env_server": "magenta",
    "evaluator": "yellow",
    "job": "bright_black",
}


@dataclass(frozen=True)
class Filter:
    """Which lines are shown."""

    since: float | None = None
    """Seconds since the epoch."""
    pattern: re.Pattern[str] | None = None

    @property
    def is_set(self) -> bool:
        """What passes may lie anywhere in a file, not only at its end."""
        return self.since is not None or self.pattern is not None

    def keeps(self, stamp: float, line: str) -> bool:
        return (self.since is None or stamp >= self.since) and (
            self.pattern is None or self.pattern.search(line) is not None
        )


@dataclass(frozen=True, order=True)
class Line:
    stamp: float
    """Seconds since the epoch, to the second; the file's last change where no line above has a clock."""
    order: int
    """Place in what is shown: of lines of one second each file's stay together and in order."""
    text: str = field(compare=False)
    file: LogFile = field(compare=False)

    def as_json(self) -> dict[str, Any]:
        file = self.file
        whose = {"role": file.role, "process": file.process, "attempt": file.attempt}
        return {"time": self.stamp, **whose, "node": file.node, "rank": file.rank, "text": self.text}


def parse_since(text: str, now: float) -> float:
    """``90s``, ``10m``, ``2h``, ``1d`` ago, or ``14:30`` of today (of yesterday when that is still to come)."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip()):
        return now - float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": DAY_S}[match[2]]
    if match := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", text.strip()):
        then = _midnight(now) + int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3] or 0)
        return then if then <= now else then - DAY_S
    raise ValueError(f"'{text}' is no time; write 90s, 10m, 2h, 1d or 14:30")


def stamp_lines(lines: list[str], changed: float) -> list[float]:
    """A time for each line, reckoned backwards from ``changed``, the file's last change."""
    stamps, day, after = [changed] * len(lines), _midnight(changed), changed
    for index in range(len(lines) - 1, -1, -1):
        if (match := _CLOCK.match(lines[index])) is None:
            continue
        clock = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
        while day + clock > after + 3600:  # it was written before midnight
            day -= DAY_S
        after = stamps[index] = day + clock
    first = next((stamp for stamp, line in zip(stamps, lines, strict=True) if _CLOCK.match(line)), changed)
    for index, line in enumerate(lines):  # continuations take the time of their head
        if _CLOCK.match(line) is None:
            stamps[index] = stamps[index - 1] if index else first
    return stamps


def _midnight(now: float) -> float:
    day = time.localtime(now)
    return time.mktime((day.tm_year, day.tm_mon, day.tm_mday, 0, 0, 0, 0, 0, -1))


# -- printing ----------------------------------------------------------------------------------------------------------


def print_logs(files: list[LogFile], count: int, chosen: Filter, *, as_json: bool = False) -> bool:
    """The last ``count`` lines of each file that pass; False when none of the files is there."""
    lines, is_any = [], False
    for order, file in enumerate(files):
        try:
            with file.path.open(errors="replace") as opened:
                texts = [text.rstrip("\n") for text in deque(opened, maxlen=None if chosen.is_set else count)]
                changed = file.path.stat().st_mtime
        except FileNotFoundError:
            continue
        is_any = True
        stamped = zip(stamp_lines(texts, changed), texts, strict=True)
        lines += [Line(stamp, order, text, file) for stamp, text in stamped if chosen.keeps(stamp, text)][
            -count:
        ]
    _emit(lines, is_labelled=len(files) > 1, as_json=as_json)
    return is_any


def _emit(lines: Iterable[Line], *, is_labelled: bool, as_json: bool) -> None:
    for line in sorted(lines):
        if as_json:
            click.echo(json.dumps(line.as_json(), ensure_ascii=False))
            continue
        prefix = ""
        if is_labelled:
            prefix = click.style(f"{line.file.label:<20} │ ", fg=_COLORS.get(line.file.role))
        click.echo(prefix + line.text)


def what_is_missing(run: RunDir) -> NotFoundError:
    """For a role whose log is not there yet, or never came to be."""
    state, message = real_state(run, read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {})
    why = f" ({message})" if message else ""
    if state == RunState.UNKNOWN:  # nobody started it
        mend = f"primerl-hpc resume {shlex.quote(run.root.name)}"
    elif state.is_final:
        mend = "primerl-hpc logs … job shows what the job itself printed"
    else:
        mend = "-f waits for it"
    return NotFoundError(
        f"no log yet: the run is {state.value}{why}",
        mend=mend,
    )


# -- following ---------------------------------------------------------------------------------------------------------


@dataclass
class Follower:
    """New whole lines of files that come, grow, and are replaced by those of the next attempt."""

    files: LogFiles
    role: str | None
    node: str | None
    rank: int | None
    attempt: int | None
    """None: whichever runs."""
    count: int
    chosen: Filter
    as_json: bool = False
    offsets: dict[Path, int] = field(default_factory=dict)
    is_first: bool = True
    """No file has been seen yet: of those that are there, only the end is shown."""

    def look(self) -> list[Line]:
        try:
            chosen = self.files.choose(self.role, node=self.node, rank=self.rank, attempt=self.attempt)
        except NotFoundError:
            has_nodes = bool(self.files.hosts(self.attempt or self.files.last_attempt))
            if self.node is None or (has_nodes and self.is_first):
                raise
            return []  # it has no nodes yet, or this attempt has others
        lines = [line for order, file in enumerate(chosen) for line in self._new_lines(order, file)]
        self.is_first = self.is_first and not self.offsets
        return lines

    def _new_lines(self, order: int, file: LogFile) -> Iterator[Line]:
        try:
            with file.path.open("rb") as opened:
                # open asks the server; stat alone may be told an old size
                changed = os.fstat(opened.fileno())
                if self.offsets.get(file.path) == changed.st_size:
                    return
                if file.path not in self.offsets:
                    is_end = self.is_first and not self.chosen.is_set
                    self.offsets[file.path] = _tail_start(opened, self.count) if is_end else 0
                if changed.st_size < self.offsets[file.path]:
                    self.offsets[file.path] = 0  # it was written anew
                opened.seek(self.offsets[file.path])
                data = opened.read()
        except FileNotFoundError:
            return
        whole = data.rfind(b"\n") + 1
        self.offsets[file.path] += whole
        texts = data[:whole].decode(errors="replace").splitlines()
        stamped = zip(stamp_lines(texts, changed.st_mtime), texts, strict=True)
        lines = [Line(stamp, order, text, file) for stamp, text in stamped if self.chosen.keeps(stamp, text)]
        yield from lines[-self.count :] if self.is_first else lines


def _tail_start(file: BinaryIO, count: int) -> int:
    last = deque(file, maxlen=count)
    return file.tell() - sum(map(len, last))


def follow_logs(run: RunDir, follower: Follower, jobs: JobWatcher) -> None:
    """Until the run has ended. Says on stderr what is waited for while there is nothing to show."""
    pause_s, told, attempt = POLL_S, None, None
    while True:
        job = read_json_or_none(run.job) or {}
        state, message = real_state(run, read_json_or_none(run.state) or {}, job, jobs.facts_of([run]))
        lines = follower.look()
        if lines and attempt not in (None, lines[-1].file.attempt):
            click.echo(click.style(f"── attempt {lines[-1].file.attempt} ──", dim=True), err=True)
        attempt = lines[-1].file.attempt if lines else attempt
        is_labelled = follower.role is None or len({line.file.label for line in lines}) > 1
        _emit(lines, is_labelled=is_labelled, as_json=follower.as_json)
        if state.is_final or state == RunState.UNKNOWN:
            if follower.is_first:
                raise what_is_missing(run)
            return
        words = f"{state.value}{f': {message}' if message else ''}"
        if not lines and words != told and state in (RunState.PENDING, RunState.SUBMITTED):
            click.echo(click.style(f"waiting, the run is {words}", dim=True), err=True)
        told = words
        pause_s = POLL_S if lines else min(1.2 * pause_s, SLOWEST_POLL_S)
        time.sleep(pause_s)
