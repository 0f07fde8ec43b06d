"""JSON-lines records of a run: append supervisor events, follow a file that another process is writing, read rollouts.

record_event(run, "role_started", process="trainer-0")      # a row of control/events.jsonl
rows = Tail(run.metrics("trainer")).read()                  # rows that were completed since the last read
messages_of(row)                                            # the conversation of a row of traces/*.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import append_json, parse_row
from primerl_hpc.run.rundir import RunDir


def record_event(run_dir: RunDir, event: str, **details: Any) -> dict[str, Any]:
    """Append ``{"time", "event", **details}`` to control/events.jsonl. Only the supervisor calls it.

    ``event`` is a short snake_case word, e.g. ``role_started``.
    """
    row = event_row(event, **details)
    append_events(run_dir, [row])
    return row


def event_row(event: str, **details: Any) -> dict[str, Any]:
    return {"time": round(time.time(), 3), "event": event, **details}


def append_events(run_dir: RunDir, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows of `event_row` with one operation. Only the supervisor calls it."""
    append_json(run_dir.events, *rows)


class Tail:
    """Reads the new complete lines of a JSON-lines file."""

    def __init__(self, path: Path, *, from_end: bool = False, offset: int = 0) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else offset

    def read(self) -> list[dict[str, Any]]:
        """Return the rows that were completed since the last read, and advance ``offset`` past them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        # the incomplete line of a killed writer is skipped
        return [row for line in complete.splitlines() if (row := parse_row(line)) is not None]


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row of the traces with their content; empty for rows of older versions."""
    messages, start = [], 0
    for message in row.get("messages", ()):
        end = start + message["chars"]
        content = row["prompt"][start:end]
        messages.append(
            {key: value for key, value in message.items() if key != "chars"} | {"content": content}
        )
        start = end + 1  # the newline between messages
    if messages:
        messages[-1]["content"] = row["completion"]
    return messages
