"""A curve drawn with characters, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence


def text_plot(
    xs: Sequence[float], ys: Sequence[float], *, width: int = 64, height: int = 10, unit: str = "step"
) -> str:
    """Plot ``ys`` over ``xs``, one point per column (the mean of its values). Return "" if ``ys`` is empty."""
    if not ys:
        return ""
    low, high = min(ys), max(ys)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    first, last = xs[0], xs[-1]
    columns: list[list[float]] = [[] for _ in range(width)]
    for x, y in zip(xs, ys, strict=True):
        index = 0 if last == first else int((x - first) / (last - first) * (width - 1))
        columns[index].append(y)
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
