"""Number the rows of a run for one target, so that each is sent exactly once over attempts and lost connections.

    stream = Stream(run, "wandb", ("trainer", "orchestrator"), extras)
    stream.restore(target.position)
    for item in stream.pending(): …; stream.commit(item)

``control/tracker/<target>.json`` has the number of sent items, and ``<target>.jsonl`` a line per batch: which bytes of
which file got which numbers. A batch is written there before its first item is sent, so the items of an interrupted
batch get the same numbers again. If a target knows how many items it has (W&B), that number is the truth: items that
were handed to it and got lost on the way are sent again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import append_json, parse_row, read_json_or_none, read_jsonl, write_json
from primerl_hpc.recipe.schema.run import LogExtras
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.base import Item, MetricRow
from primerl_hpc.tracking.samples import SampleReader

READ_BYTES = 1 << 20
"""Maximum size of the part of a metrics file that is read at once, unless one row is longer."""
SAMPLED = "orchestrator"
"""Source whose rows determine which batches are complete."""


class Stream:
    def __init__(self, run: RunDir, name: str, sources: tuple[str, ...], extras: LogExtras | None) -> None:
        self.run, self.sources = run, sources
        self.extras = extras if SAMPLED in sources else None
        self.path, self.journal = run.tracker_state(name), run.tracker_state(name).with_suffix(".jsonl")
        state = read_json_or_none(self.path) or {}
        self.memory: dict[str, Any] = state.get("memory", {})
        self.sent: int = state.get("number", 0)
        self.sampled: int = state.get("sampled", 0)
        self.collected: int = state.get("collected", 0)
        self.offsets: dict[str, int] = {name: state.get("offsets", {}).get(name, 0) for name in sources}
        self.last_values: dict[str, float] = {}
        self._reader = SampleReader(run.traces("train"))
        self._waiting: list[dict[str, Any]] = []
        self._next = self.sent

    def restore(self, position: int | None) -> None:
        """Continue where the target is; ``position`` is `Target.position`."""
        batches = list(read_jsonl(self.journal))
        self.sent = self._start(batches, position)
        self._waiting = [batch for batch in batches if batch["number"] + batch["count"] > self.sent]
        self._next = self.sent
        if batches:
            last = batches[-1]
            self.offsets |= {name: end for name, (_, end) in last["ranges"].items() if name in self.offsets}
            self.sampled, self.collected = last["sampled"], last["collected"]
            self._next = max(self.sent, last["number"] + last["count"])

    def _start(self, batches: list[dict[str, Any]], position: int | None) -> int:
        if position is None:
            return self.sent
        first = batches[0]["number"] if batches else self.sent
        return max(position, min(first, self.sent))

    def pending(self, *, is_last: bool = False) -> Iterator[Item]:
        """Yield the items to send: those of interrupted batches, then new ones. ``is_last``: no rows will follow."""
        while self._waiting:
            yield from self._items(self._waiting[0])
            self._waiting.pop(0)
        while (batch := self._next_batch(is_last)) is not None:
            append_json(self.journal, batch)
            self._waiting.append(batch)
            yield from self._items(batch)
            self._waiting.pop(0)

    def sent_offsets(self) -> dict[str, int]:
        """Return, after `restore`, how many bytes of each metrics file were sent."""
        offsets = dict(self.offsets)
        for batch in reversed(self._waiting):
            rows = self.sent - batch["number"]  # of this batch that were sent; not positive for later batches
            for name, (start, end) in batch["ranges"].items():
                lines = _read_lines(self.run.metrics(name), start, end)
                ends = [position for position, row in lines if _is_row(row)]
                offsets[name] = start if rows <= 0 else end if rows >= len(ends) else ends[rows - 1]
                rows -= len(ends)
        return offsets

    def rewind(self, offsets: dict[str, int], step: int) -> None:
        """Continue at ``offsets`` of files whose later rows were removed: those after ``step``."""
        self.offsets |= offsets
        self.sampled, self.collected = min(self.sampled, step), min(self.collected, step)
        self.save()
        self.journal.unlink(missing_ok=True)

    def commit(self, item: Item) -> None:
        """Record that ``item`` was sent."""
        self.sent = item.number + 1
        self.save()

    def save(self) -> None:
        state = {"number": self.sent, "offsets": self.offsets, "sampled": self.sampled}
        write_json(self.path, {**state, "collected": self.collected, "memory": self.memory})

    @property
    def is_complete(self) -> bool:
        """True if no item waits to be sent."""
        return not self._waiting and all(
            self.offsets[name] >= _size(self.run.metrics(name)) for name in self.sources
        )

    def _next_batch(self, is_last: bool) -> dict[str, Any] | None:
        ranges = {}
        count = 0
        for name in self.sources:
            start = self.offsets[name]
            rows, end = _read_rows(self.run.metrics(name), start)
            if end > start:
                ranges[name] = [start, end]
                self.offsets[name] = end
                count += len(rows)
                if name == SAMPLED and rows:
                    self.collected = max(self.collected, *(row["step"] for row in rows))
        steps = self._due_steps(is_last)
        if not ranges and not steps:
            return None
        batch = {"number": self._next, "count": count + len(steps), "ranges": ranges, "steps": steps}
        self._next += batch["count"]
        return {**batch, "sampled": self.sampled, "collected": self.collected}

    def _due_steps(self, is_last: bool) -> list[int]:
        """Return the steps whose rollouts are complete: those of a later batch are being collected."""
        if self.extras is None:
            return []
        newest = self.collected if is_last else self.collected - 1
        first = self.sampled // self.extras.interval + 1
        steps = [index * self.extras.interval for index in range(first, newest // self.extras.interval + 1)]
        self.sampled = steps[-1] if steps else self.sampled
        return steps

    def _items(self, batch: dict[str, Any]) -> Iterator[Item]:
        number = batch["number"]
        for name, (start, end) in batch["ranges"].items():
            for row in _read_rows(self.run.metrics(name), start, end)[0]:
                item = _row(number, name, row)
                self.last_values |= item.values
                if number >= self.sent:
                    yield item
                number += 1
        for step in batch["steps"]:
            if number >= self.sent and self.extras is not None:
                yield self._reader.table(number, step, self.extras)
            number += 1


def _read_rows(path: Path, start: int, end: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Return the rows with a step that begin at ``start``, and the position behind the last complete line.

    ``end``: that position, as an earlier call returned it.
    """
    lines = _read_lines(path, start, end)
    return [row for _, row in lines if _is_row(row)], lines[-1][0] if lines else start


def _read_lines(path: Path, start: int, end: int | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Return the complete lines: the position behind each, and its row, which is empty if the line is damaged."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(READ_BYTES if end is None else end - start)
            while b"\n" not in data and (more := file.read(READ_BYTES)):
                data += more
    except FileNotFoundError:
        return []
    lines = []
    for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]:
        start += len(line) + 1
        lines.append((start, parse_row(line) or {}))
    return lines


def _is_row(row: dict[str, Any]) -> bool:
    return isinstance(row.get("step"), int)


def _row(number: int, source: str, row: dict[str, Any]) -> MetricRow:
    values: dict[str, float] = {
        f"{source}/{key}": value
        for key, value in row.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return MetricRow(number, source, row["step"], float(row.get("time", 0.0)), values)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
