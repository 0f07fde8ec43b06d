"""Text of 80 columns."""

from __future__ import annotations

import textwrap
from pathlib import Path

WIDTH = 80
HARD_BLANK = "\0"
"""Stands for a blank at which no line breaks."""


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def shown(path: Path) -> str:
    """As a user in this folder would type it: whole where it lies elsewhere."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def wrap(text: str, indent: str) -> list[str]:
    """Lines of `WIDTH` columns; those after the first begin with ``indent``."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(HARD_BLANK, " ") for line in lines]


def labelled(label: str, words: str | None, width: int) -> list[str]:
    """``label`` in a column of ``width``, the words beside it; nothing without words."""
    return wrap(f"{label:<{width - 1}} {words}".rstrip(), " " * width) if words else []


def format_age(seconds: float) -> str:
    """``42s``, ``5m``, ``3h``, ``12d``: one number of at most three digits, for narrow columns."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / unit))}{name}"
    return f"{round(seconds / 86400)}d"
