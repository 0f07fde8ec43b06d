"""A predicted number with its interval, formula, inputs and source.

    weights = exact("memory.engine.weights", 16.4e9, "B", "parameters × bytes", {"parameters": 8.2e9, "bytes": 2})
    buffers = estimate("memory.engine.graphs", 0.6e9, 1.5, "B", "layers × captured sizes", {...}, source="...")
    total = add("memory.engine", "B", [weights, buffers])
    total.value, total.low, total.high                                    # an 80 % interval

Inputs are independent: the widths of their intervals add in quadrature, absolute ones in sums and logarithmic ones in
products (log-normal uncertainty: the value divided and multiplied by a factor). `Figure.find` returns an input by its
name, `plan --why NAME` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any


class Tier(IntEnum):
    """Origin of a figure, worst first. A figure made of others has the tier of the worst one."""

    FORMULA = 1  # derived from the shape of the model and the layout alone
    DATASHEET = 2  # a manufacturer's figure
    TABLE = 3  # interpolated in published measurements of the same hardware
    CALIBRATED = 4  # a formula corrected by measurements on this site
    MEASURED = 5  # measured on this site with the same layout


@dataclass(frozen=True)
class Figure:
    """A value with its 80 % interval. ``inputs`` has what ``formula`` names; figures among them explain themselves."""

    name: str
    """Dotted, e.g. ``memory.trainer.activations``."""
    value: float
    low: float
    high: float
    unit: str
    """``B``, ``s``, ``tokens``, ``tokens/s``, ``FLOP``, ``FLOP/s``, ``B/s``, ``cores`` or ``1`` for ratios and
    counts."""
    formula: str
    inputs: Mapping[str, float | str | Figure] = field(default_factory=dict)
    source: str = ""
    """Document, repository and revision, or measurement that the constants of the formula come from."""
    tier: Tier = Tier.FORMULA

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high < math.inf:
            raise ValueError(
                f"{self.name}: the interval [{self.low}, {self.high}] does not contain {self.value}, "
                "or is not finite and positive"
            )

    def walk(self) -> Iterator[Figure]:
        """Yield this figure and all figures among its inputs, each before its own inputs."""
        yield self
        for value in self.inputs.values():
            if isinstance(value, Figure):
                yield from value.walk()

    def find(self, name: str) -> Figure | None:
        """Return the figure with this name among this one and its inputs, or None."""
        return next((figure for figure in self.walk() if figure.name == name), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the figure and its inputs as JSON values."""
        inputs = {
            key: value.as_dict() if isinstance(value, Figure) else value for key, value in self.inputs.items()
        }
        return {
            "name": self.name,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
            "formula": self.formula,
            "inputs": inputs,
            "source": self.source,
            "tier": self.tier.name.lower(),
        }

    def renamed(self, name: str) -> Figure:
        return replace(self, name=name)

    def moved(self, old: str, new: str) -> Figure:
        """Return the figure with prefix ``new`` in place of ``old`` in the names of itself and of its inputs."""

        def name_of(name: str) -> str:
            return new + name.removeprefix(old) if name.startswith(old) else name

        inputs = {
            name_of(key): value.moved(old, new) if isinstance(value, Figure) else value
            for key, value in self.inputs.items()
        }
        formula = self.formula.replace(old, new)
        return replace(self, name=name_of(self.name), formula=formula, inputs=inputs)

    @property
    def log_widths(self) -> tuple[float, float]:
        """ln(value / low) and ln(high / value). Both are 0 for the value 0."""
        if self.value == 0:
            return 0.0, 0.0
        return _log(self.value, self.low), _log(self.high, self.value)


def _log(above: float, below: float) -> float:
    return math.log(above / below) if below > 0 else math.inf


def exact(
    name: str,
    value: float,
    unit: str,
    formula: str,
    inputs: Mapping[str, float | str | Figure] | None = None,
    *,
    source: str = "",
    tier: Tier = Tier.FORMULA,
) -> Figure:
    """Return a figure without uncertainty of its own, such as a count of parameters."""
    return Figure(name, value, value, value, unit, formula, dict(inputs or {}), source, tier)


def estimate(
    name: str,
    value: float,
    factor: float,
    unit: str,
    formula: str,
    inputs: Mapping[str, float | str | Figure] | None = None,
    *,
    source: str = "",
    tier: Tier = Tier.FORMULA,
) -> Figure:
    """Return a figure whose 80 % interval is the value divided and multiplied by ``factor`` (at least 1)."""
    return Figure(
        name, value, value / factor, value * factor, unit, formula, dict(inputs or {}), source, tier
    )


def add(name: str, unit: str, parts: Iterable[Figure], *, formula: str = "", source: str = "") -> Figure:
    """Return the sum of independent figures. Raises ValueError for parts in another unit or with equal names."""
    parts = list(parts)
    _check_unit(name, unit, parts)
    total = sum(part.value for part in parts)
    below = math.hypot(*(part.value - part.low for part in parts))
    above = math.hypot(*(part.high - part.value for part in parts))
    text = formula or " + ".join(part.name for part in parts)
    return _combined(name, total, (max(total - below, 0.0), total + above), unit, text, parts, source)


def multiply(name: str, unit: str, parts: Iterable[Figure], *, formula: str = "", source: str = "") -> Figure:
    """Return the product of independent figures."""
    parts = list(parts)
    total = math.prod(part.value for part in parts)
    below, above = (math.hypot(*(part.log_widths[side] for part in parts)) for side in (0, 1))
    ends = (total * math.exp(-below), total * math.exp(above))
    return _combined(name, total, ends, unit, formula or " × ".join(p.name for p in parts), parts, source)


def divide(
    name: str, unit: str, above: Figure, below: Figure, *, formula: str = "", source: str = ""
) -> Figure:
    """Return the quotient of two independent figures. Raises ZeroDivisionError if ``below`` is 0."""
    value = above.value / below.value
    down = math.hypot(above.log_widths[0], below.log_widths[1])
    up = math.hypot(above.log_widths[1], below.log_widths[0])
    text = formula or f"{above.name} / {below.name}"
    return _combined(
        name, value, (value * math.exp(-down), value * math.exp(up)), unit, text, [above, below], source
    )


def largest(name: str, unit: str, parts: Iterable[Figure], *, formula: str = "", source: str = "") -> Figure:
    """Return the maximum of figures: of their values and of both ends of their intervals.

    Raises ValueError without parts and for parts in another unit.
    """
    parts = list(parts)
    _check_unit(name, unit, parts)
    low, value, high = (max(getattr(part, end) for part in parts) for end in ("low", "value", "high"))
    text = formula or f"max({', '.join(part.name for part in parts)})"
    tier = min(part.tier for part in parts)
    return Figure(name, value, low, high, unit, text, {part.name: part for part in parts}, source, tier)


def _check_unit(name: str, unit: str, parts: list[Figure]) -> None:
    wrong = [part for part in parts if part.unit != unit]
    if wrong:
        raise ValueError(f"{name} is in {unit}, but {wrong[0].name} is in {wrong[0].unit}")


def _combined(
    name: str,
    value: float,
    ends: tuple[float, float],
    unit: str,
    formula: str,
    parts: list[Figure],
    source: str,
) -> Figure:
    inputs = {part.name: part for part in parts}
    if len(inputs) < len(parts):
        raise ValueError(f"{name} has two inputs of the same name")
    tier = min((part.tier for part in parts), default=Tier.FORMULA)
    return Figure(name, value, min(ends[0], value), max(ends[1], value), unit, formula, inputs, source, tier)
