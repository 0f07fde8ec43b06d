"""A curve as text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence


def text_plot(
    xs: Sequence[float], ys: Sequence[float], *, width: int = 64, height: int = 10, unit: str = "step"
) -> str:
    """Points (means per column) over an axis of ``xs``; empty when there is nothing to draw."""
    if not ys:
        return ""
    low, high = min(ys), max(ys)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    first, last = xs[0], xs[-1]
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(xs, ys, strict=True):
        where = 0 if last == first else int((x - first) / (last - first) * (width - 1))
        columns[where].append(y)
    grid = [[" "] * width for _ in range(height)]
    for column, values in enumerate(columns):
        if values:
            level = (sum(values) / len(values) - low) / (high - low)
            grid[height - 1 - round(level * (height - 1))][column] = "•"
    labels = [f"{high:6.3f}", *["      "] * (height - 2), f"{low:6.3f}"]
    lines = [f"{label} ┤{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]
    axis = f"{' ' * 7}└{'─' * width}"
    ends = f"{' ' * 8}{f'{unit} {first:g}':<{width - 8}}{last:>8g}"
    return "\n".join([*lines, axis, ends])


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
