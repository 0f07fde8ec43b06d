"""Ledger files: JSON lines, one row per figure. One file per run, and one per user for all runs.

    append_rows(user_ledger(), rows)
    rows = read_rows(user_ledger(), warn=print)

The user's file has many writers on many nodes: a writer locks it (``fcntl.lockf``, which NFS supports too), writes all
its rows with one call, and syncs. A line that cannot be parsed is skipped with a warning and kept in the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import parse_row
from primerl_hpc.common.locks import lock_file
from primerl_hpc.run.ledger.rows import LedgerRow, parse_ledger_row

MAX_ROWS = 20_000
"""Rows that are read: the newest ones. A run adds about ten."""


def user_ledger() -> Path:
    """Return the path of the user's ledger, without creating it."""
    return env.state_home() / "ledger.jsonl"


def append_rows(path: Path, rows: Iterable[LedgerRow]) -> int:
    """Append rows and return their number. An incomplete last line of a killed writer is terminated first.

    Raises OSError if the file cannot be written.
    """
    lines = [json.dumps(row.as_json(), ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows]
    if not lines:
        return 0
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        lock_file(fd, between_nodes=True)  # without locks: a row is one appending write
        size = os.fstat(fd).st_size
        is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = memoryview((("\n" if is_torn else "") + "".join(lines)).encode())
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return len(lines)


def read_rows(path: Path, *, warn: Callable[[str], Any]) -> list[LedgerRow]:
    """Return the newest rows in the order of the file; a missing file has none. ``warn`` gets one line per problem.

    Raises OSError for a file that exists and cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows: list[LedgerRow] = []
    broken: list[int] = []
    for number, line in enumerate(lines[-MAX_ROWS:], start=max(0, len(lines) - MAX_ROWS) + 1):
        if not line.strip():
            continue
        value = parse_row(line)
        try:
            if value is None:
                raise ValueError("not a JSON object")
            rows.append(parse_ledger_row(value))
        except ValueError:
            broken.append(number)
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        warn(f"{path}:{broken[0]}: not a row of a ledger; skipped line {broken[0]}{more}")
    return rows
