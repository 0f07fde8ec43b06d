"""Text for a terminal of 80 columns: durations, counts, and wrapped lines.

    format_duration(7620)                 → "2:07 h"
    labeled("used", "3.1 GPU-hours", 12)  → ["used        3.1 GPU-hours"]

Tables are in table.py.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

WIDTH = 80
HARD_BLANK = "\0"
"""Placeholder for a blank at which `wrap` must not break the line."""


# -- numbers ---------------------------------------------------------------------------------------


def format_duration(seconds: float) -> str:
    """``42 s``, ``3:05 min``, ``2:07 h``"""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60}:{seconds % 60:02d} min"
    return f"{seconds // 3600}:{seconds % 3600 // 60:02d} h"


def format_count(value: float) -> str:
    """``950``, ``12.3k``, ``4.5M``"""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def format_clock(seconds: float) -> str:
    """``0:42``, ``3:05``, ``2:07:00``"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_age(seconds: float) -> str:
    """``42s``, ``5m``, ``3h``, ``12d``: one number of at most three digits, for narrow columns."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "m"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / unit))}{name}"
    return f"{round(seconds / 86400)}d"


# -- lines -----------------------------------------------------------------------------------------


def cut(text: str, width: int) -> str:
    """Return ``text``, shortened to ``width`` columns with an ellipsis."""
    return text if len(text) <= width else text[: width - 1] + "…"


def display_path(path: Path) -> str:
    """Return ``path`` relative to the working directory, or the absolute path if it is not below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def wrap(text: str, indent: str) -> list[str]:
    """Break ``text`` into lines of `WIDTH` columns; lines after the first begin with ``indent``."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
    return [line.replace(HARD_BLANK, " ") for line in lines]


def split_at(text: str, width: int | None) -> list[str]:
    """Split ``text`` into pieces of at most ``width`` columns, at blanks where possible. ``width`` None: do not
    split.
    """
    text = text.expandtabs(8)
    if width is None or len(text) <= width:
        return [text]
    indent = text[: len(text) - len(text.lstrip())][: width // 2]
    pieces = textwrap.wrap(
        text,
        max(width, 20),
        subsequent_indent=indent,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
    return pieces or [text]


def labeled(label: str, text: str | None, width: int) -> list[str]:
    """Return ``label`` in a column of ``width`` followed by the wrapped ``text``; no lines if ``text`` is empty."""
    return wrap(f"{label:<{width - 1}} {text}".rstrip(), " " * width) if text else []
