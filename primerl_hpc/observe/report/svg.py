"""Curves as inline SVG, without scripts or libraries, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 440, 180, 56, 22, 8
MOST_POINTS = 400
COLORS = ("#2f7ed8", "#d9822b", "#3a9d5d", "#a55eea", "#c0392b")


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Reduce ``points`` to at most ``most`` by averaging neighbors, so that noise does not hide the trend."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // most)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks
    ]


def chart(title: str, curves: Mapping[str, Points]) -> str:
    """Return an HTML figure with one curve per name; "" if all curves are empty."""
    drawn = {name: thin(points) for name, points in curves.items() if points}
    if not drawn:
        return ""
    legend = "".join(
        f'<span style="color:{_color(index)}">— {escape(name)}</span> '
        for index, name in enumerate(drawn)
        if len(drawn) > 1
    )
    return (
        f"<figure><figcaption>{escape(title)} {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{_drawing(drawn)}</svg></figure>'
    )


def chart_file(title: str, curves: Mapping[str, Points]) -> str:
    """Return the content of an SVG file with one curve per name, their names and the title."""
    drawn = {name: thin(points) for name, points in curves.items() if points}
    names = "".join(
        f'<text x="{LEFT}" y="{30 + 14 * index}" fill="{_color(index)}">— {escape(name)}</text>'
        for index, name in enumerate(drawn)
    )
    top = 26 + 14 * len(drawn)
    body = f'<g transform="translate(0,{top})">{_drawing(drawn)}</g>' if drawn else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + top}" '
        f'width="{2 * WIDTH}" font-family="sans-serif" font-size="10">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="14" font-size="12">{escape(title)}</text>'
        f"{names}{body}</svg>\n"
    )


def _drawing(drawn: Mapping[str, Points]) -> str:
    """Return axes and curves, without the enclosing svg element."""
    all_points = [point for points in drawn.values() for point in points]
    (x_low, x_high), (y_low, y_high) = _span([x for x, _ in all_points]), _span([y for _, y in all_points])

    def to_pixels(x: float, y: float) -> tuple[str, str]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - 8)
        down = TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f}", f"{down:.1f}"

    lines = []
    for index, points in enumerate(drawn.values()):
        spots = [to_pixels(x, y) for x, y in points]
        path = " ".join(",".join(spot) for spot in spots)
        lines.append(f'<polyline fill="none" stroke="{_color(index)}" stroke-width="1.5" points="{path}"/>')
        if len(spots) == 1:
            lines.append(f'<circle cx="{spots[0][0]}" cy="{spots[0][1]}" r="2.5" fill="{_color(index)}"/>')
    axis = f"M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - 8}"
    return (
        f'<path d="{axis}" fill="none" stroke="currentColor" opacity=".4"/>'
        f'<text x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{_number(y_high)}</text>'
        f'<text x="{LEFT - 6}" y="{HEIGHT - BOTTOM}" text-anchor="end">{_number(y_low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{_number(x_low)}</text>'
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 6}" text-anchor="end">{_number(x_high)}</text>'
        f"{''.join(lines)}"
    )


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of ``values``, widened if all are equal so that the curve is drawn in the middle."""
    low, high = min(values), max(values)
    return (low, high) if high - low > 1e-12 else (low - 0.5, high + 0.5)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
