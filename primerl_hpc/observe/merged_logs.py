"""Print or follow log files: lines merged by time, one color per role.

Following continues across restarts, requeues and attempts, and waits while the run is in the queue.

A line begins with a time of day (``14:49:11``, after ``[<rank>]`` in the trainer's logs, or in the field ``time`` of a
JSON object). A line without one belongs to
the line before it. The date is derived backwards from the file's modification time.

Reading order: `stamp_lines` → `print_logs` → `LogFollower` → `follow_logs`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import click

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.safety.error_text import is_native_frame
from primerl_hpc.observe.log_files import JOB, LogFile, LogFiles, matches
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import real_state
from primerl_hpc.observe.text import split_at
from primerl_hpc.run.rundir import RunDir

POLL_S, SLOWEST_POLL_S = 0.3, 3.0
DAY_S = 86400.0
_CLOCK = re.compile(r"^(?:\[\d+\] ?)?(?:\{\"time\": \")?(?:\d{4}-\d\d-\d\d[ T])?(\d\d):(\d\d):(\d\d)")
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
class LogFilter:
    """Selects the lines to show, by time and by regular expression."""

    since: float | None = None
    """Seconds since the epoch."""
    pattern: re.Pattern[str] | None = None

    @property
    def is_set(self) -> bool:
        """True if matching lines may be anywhere in a file, so that all of it has to be read."""
        return self.since is not None or self.pattern is not None

    def keeps(self, stamp: float, line: str) -> bool:
        return (self.since is None or stamp >= self.since) and (
            self.pattern is None or self.pattern.search(line) is not None
        )


@dataclass(frozen=True, order=True)
class Line:
    stamp: float
    """Seconds since the epoch, with a resolution of 1 s; the file's modification time if no line before it has a
    time.
    """
    order: int
    """Index of the file, which keeps lines of the same second together by file and in order."""
    text: str = field(compare=False)
    file: LogFile = field(compare=False)

    def as_json(self) -> dict[str, Any]:
        file = self.file
        source = {"role": file.role, "process": file.process, "attempt": file.attempt}
        return {"time": self.stamp, **source, "node": file.node, "rank": file.rank, "text": self.text}


def parse_since(text: str, now: float) -> float:
    """Parse ``90s``, ``10m``, ``2h``, ``1d`` (ago) or ``14:30`` (today, or yesterday if that is in the future).

    Returns seconds since the epoch. Raises ValueError for other formats.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text.strip()):
        return now - float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": DAY_S}[match[2]]
    if match := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?", text.strip()):
        then = _midnight(now) + int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3] or 0)
        return then if then <= now else then - DAY_S
    raise ValueError(f"'{text}' is not a time. Write 90s, 10m, 2h, 1d or 14:30.")


def stamp_lines(lines: list[str], changed: float) -> list[float]:
    """Return a time for each line, in seconds since the epoch. ``changed`` is the file's modification time."""
    stamps, day, after = [changed] * len(lines), _midnight(changed), changed
    for index in range(len(lines) - 1, -1, -1):
        if (match := _CLOCK.match(lines[index])) is None:
            continue
        clock = int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3])
        while day + clock > after + 3600:  # written before midnight
            day -= DAY_S
        after = stamps[index] = day + clock
    first = next((stamp for stamp, line in zip(stamps, lines, strict=True) if _CLOCK.match(line)), changed)
    for index, line in enumerate(lines):  # continuation lines take the time of the line before them
        if _CLOCK.match(line) is None:
            stamps[index] = stamps[index - 1] if index else first
    return stamps


def _midnight(now: float) -> float:
    day = time.localtime(now)
    return time.mktime((day.tm_year, day.tm_mon, day.tm_mday, 0, 0, 0, 0, 0, -1))


# -- printing --------------------------------------------------------------------------------------


def print_logs(files: list[LogFile], count: int, chosen: LogFilter, *, as_json: bool = False) -> bool:
    """Print the last ``count`` matching lines of each file. Return False if none of the files exists."""
    lines, is_any = [], False
    for order, file in enumerate(files):
        try:
            with file.path.open(errors="replace") as opened:
                complete = (text.rstrip("\n") for text in opened)
                selected = complete if as_json else (text for text in complete if not is_native_frame(text))
                texts = list(deque(selected, maxlen=None if chosen.is_set else count))
                changed = file.path.stat().st_mtime
        except FileNotFoundError:
            continue
        is_any = True
        stamped = zip(stamp_lines(texts, changed), texts, strict=True)
        lines += [Line(stamp, order, text, file) for stamp, text in stamped if chosen.keeps(stamp, text)][
            -count:
        ]
    _emit(lines, is_labeled=len(files) > 1, as_json=as_json)
    return is_any


def _emit(lines: Iterable[Line], *, is_labeled: bool, as_json: bool) -> None:
    """Print ``lines`` sorted by time. Long lines are wrapped in a terminal only, not in a pipe or file."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in sorted(lines):
        if as_json:
            click.echo(json.dumps(line.as_json(), ensure_ascii=False))
            continue
        prefix = ""
        if is_labeled:
            prefix = f"{line.file.label:<20} │ "
        styled = partial(click.style, fg=_COLORS.get(line.file.role))
        first, *rest = split_at(line.text, width and width - len(prefix))
        click.echo(styled(prefix) + first)
        for part in rest:
            click.echo(styled(" " * (len(prefix) - 2) + prefix[-2:]) + part)


def missing_log_error(run: RunDir, attempt: int | None = None, role: str | None = None) -> NotFoundError:
    """Return the error for a role without a log file, with a hint that depends on the state of the run."""
    facts = read_json_or_none(run.state) or {}
    last = facts.get("attempt")
    if attempt is not None and isinstance(last, int) and attempt > last:
        return NotFoundError(f"attempt {attempt} does not exist", hint=f"the last attempt is {last}")
    state, message = real_state(run, facts, read_json_or_none(run.job) or {})
    detail = f" ({message})" if message else ""
    if state == RunState.UNKNOWN:  # never submitted
        hint = f"primerl-hpc resume {shlex.quote(run.root.name)}"
    elif state.is_final:
        output = f"primerl-hpc logs {shlex.quote(run.root.name)} {JOB} shows the output of the job"
        hint = f"primerl-hpc diagnose {shlex.quote(run.root.name)}" if role == JOB else output
    else:
        hint = "use --follow to wait for it"
    detail += later_start(run, role)
    return NotFoundError(
        f"no log yet: the run is {state.value}{detail}",
        hint=hint,
    )


def later_start(run: RunDir, role: str | None) -> str:
    """Return when a role starts that the present phase does not have; empty for any other role."""
    now, passed = (read_json_or_none(run.state) or {}).get("phase"), list[str]()
    for phase in (read_json_or_none(run.plan) or {}).get("phases", ()):
        if any(matches(process, role or "") for process in phase.get("processes", ())):
            return f"; {role} starts with phase {phase['name']}, after phase {now}" if now in passed else ""
        passed.append(phase["name"])
    return ""


# -- following -------------------------------------------------------------------------------------


@dataclass
class LogFollower:
    """Returns the new complete lines of files that appear, grow, and are replaced by those of the next attempt."""

    files: LogFiles
    role: str | None
    node: str | None
    rank: int | None
    attempt: int | None
    """None: the latest one."""
    count: int
    chosen: LogFilter
    as_json: bool = False
    offsets: dict[Path, int] = field(default_factory=dict)
    is_first: bool = True
    """No file has been found yet: only the end of existing files is shown."""

    def poll(self) -> list[Line]:
        """Return the lines written since the last call. Raises NotFoundError if the selection cannot match any file."""
        try:
            chosen = self.files.choose(self.role, node=self.node, rank=self.rank, attempt=self.attempt)
        except NotFoundError:
            has_nodes = bool(self.files.hosts(self.attempt or self.files.last_attempt))
            if self.node is None or (has_nodes and self.is_first):
                raise
            return []  # the run has no nodes yet, or the node belongs to an earlier attempt
        lines = [line for order, file in enumerate(chosen) for line in self._new_lines(order, file)]
        self.is_first = self.is_first and not self.offsets
        return lines

    def _new_lines(self, order: int, file: LogFile) -> Iterator[Line]:
        try:
            with file.path.open("rb") as opened:
                # over NFS, open revalidates the size; stat alone may return a cached one
                changed = os.fstat(opened.fileno())
                if self.offsets.get(file.path) == changed.st_size:
                    return
                if file.path not in self.offsets:
                    is_end = self.is_first and not self.chosen.is_set
                    self.offsets[file.path] = _tail_start(opened, self.count) if is_end else 0
                if changed.st_size < self.offsets[file.path]:
                    self.offsets[file.path] = 0  # the file was truncated and rewritten
                opened.seek(self.offsets[file.path])
                data = opened.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self.offsets[file.path] += end
        texts = [
            line.decode(errors="replace") for line in data[:end].splitlines()
        ]  # of bytes: U+2028 ends no line
        stamped = zip(stamp_lines(texts, changed.st_mtime), texts, strict=True)
        lines = [
            Line(stamp, order, text, file)
            for stamp, text in stamped
            if self.chosen.keeps(stamp, text) and (self.as_json or not is_native_frame(text))
        ]
        yield from lines[-self.count :] if self.is_first else lines


def _tail_start(file: BinaryIO, count: int) -> int:
    """Return the offset of the last ``count`` lines."""
    last = deque(file, maxlen=count)
    return file.tell() - sum(map(len, last))


def follow_logs(run: RunDir, follower: LogFollower, jobs: JobWatcher) -> None:
    """Print new lines until the run has ended. While it waits in the queue, report that on stderr."""
    pause_s, reported, attempt = POLL_S, None, None
    while True:
        job = read_json_or_none(run.job) or {}
        state, message = real_state(run, read_json_or_none(run.state) or {}, job, jobs.facts_of([run]))
        lines = follower.poll()
        if lines and attempt not in (None, lines[-1].file.attempt):
            click.echo(click.style(f"── attempt {lines[-1].file.attempt} ──", dim=True), err=True)
        attempt = lines[-1].file.attempt if lines else attempt
        is_labeled = follower.role is None or len({line.file.label for line in lines}) > 1
        _emit(lines, is_labeled=is_labeled, as_json=follower.as_json)
        if state.is_final or state == RunState.UNKNOWN:
            if follower.is_first:
                raise missing_log_error(run)
            return
        later = later_start(run, follower.role) if follower.is_first else ""
        status = f"{state.value}{f': {message}' if message else ''}{later}"
        if not lines and status != reported and (later or state in (RunState.PENDING, RunState.SUBMITTED)):
            click.echo(click.style(f"waiting: the run is {status}", dim=True), err=True)
        reported = status
        pause_s = POLL_S if lines else min(1.2 * pause_s, SLOWEST_POLL_S)
        time.sleep(pause_s)
