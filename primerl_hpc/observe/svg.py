"""Curves as inline SVG: no script, no library, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 440, 180, 56, 22, 8
MOST_POINTS = 400
COLORS = ("#2f7ed8", "#d9822b", "#3a9d5d", "#a55eea", "#c0392b")


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points: means of neighbours, so that noise does not hide the course."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in each) / len(each), sum(y for _, y in each) / len(each)) for each in chunks]


def chart(title: str, curves: Mapping[str, Points]) -> str:
    """One figure with a curve per name; "" when there is nothing to draw."""
    drawn = {name: thin(points) for name, points in curves.items() if points}
    if not drawn:
        return ""
    every = [point for points in drawn.values() for point in points]
    (x_low, x_high), (y_low, y_high) = _span([x for x, _ in every]), _span([y for _, y in every])

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - 8)
        down = TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    lines = [
        f'<polyline fill="none" stroke="{COLORS[index % len(COLORS)]}" stroke-width="1.5" '
        f'points="{" ".join(place(x, y) for x, y in points)}"/>'
        + (
            f'<circle cx="{place(*points[0]).split(",")[0]}" cy="{place(*points[0]).split(",")[1]}" r="2.5" '
            f'fill="{COLORS[index % len(COLORS)]}"/>'
            if len(points) == 1
            else ""
        )
        for index, points in enumerate(drawn.values())
    ]
    axis = f"M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - 8}"
    legend = "".join(
        f'<span style="color:{COLORS[index % len(COLORS)]}">— {escape(name)}</span> '
        for index, name in enumerate(drawn)
        if len(drawn) > 1
    )
    return (
        f"<figure><figcaption>{escape(title)} {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<path d="{axis}" fill="none" stroke="currentColor" opacity=".4"/>'
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{_number(y_high)}</text>'
        f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">{_number(y_low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{_number(x_low)}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{_number(x_high)}</text>'
        f"{''.join(lines)}</svg></figure>"
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Never empty: a flat curve lies in the middle."""
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-12 else (low - 0.5, high + 0.5)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
