"""Follows a JSON-lines file that somebody else is writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Tail:
    """New whole lines of a JSON-lines file since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False, offset: int = 0) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else offset

    def read(self) -> list[dict[str, Any]]:
        """Rows that were completed since; ``offset`` then stands behind the last of them."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        rows = []
        for line in whole.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # a line that was torn when its writer was killed
        return rows
