"""Distribution of the lengths of rollouts, as equally likely values.

lengths = Lengths.lognormal(mean=5000, cv=1.0, longest=32_768)
lengths.mean, lengths.cv, lengths.mean_position
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import exp, log
from random import Random
from statistics import NormalDist

QUANTILES = 4096
"""Number of equally likely values that represent a distribution."""


@dataclass(frozen=True)
class Lengths:
    """Distribution of the tokens that a rollout generates: equally likely values in ascending order."""

    values: tuple[float, ...]

    def __repr__(self) -> str:
        return f"Lengths(mean={self.mean:.6g}, cv={self.cv:.3g}, longest={self.values[-1]:.6g})"

    @classmethod
    def constant(cls, tokens: float) -> Lengths:
        return cls((float(tokens),))

    @classmethod
    def lognormal(cls, mean: float, cv: float, longest: float | None = None) -> Lengths:
        """Return a lognormal distribution of this coefficient of variation, truncated at ``longest``.

        ``mean``: after the truncation. A mean above ``longest`` gives the constant ``longest``.
        """
        if longest is not None and mean >= longest:
            return cls.constant(longest)
        if cv == 0:
            return cls.constant(mean)
        sigma = log(1 + cv * cv) ** 0.5
        raw = [exp(sigma * quantile) for quantile in _normal_quantiles()]
        scale = mean * QUANTILES / sum(raw)
        if longest is not None and raw[-1] * scale > longest:
            scale = _scale_of_truncated(raw, mean, longest)
        return cls(tuple(min(value * scale, longest or value * scale) for value in raw))

    @classmethod
    def histogram(cls, tokens: Sequence[float], counts: Sequence[float]) -> Lengths:
        """Return the distribution of a histogram: ``counts[i]`` rollouts of ``tokens[i]`` tokens.

        Raises ValueError without rollouts.
        """
        pairs = sorted((value, number) for value, number in zip(tokens, counts, strict=True) if number > 0)
        if not pairs:
            raise ValueError("the histogram of lengths is empty")
        ends = list(accumulate(number for _, number in pairs))
        places = ((index + 0.5) / QUANTILES * ends[-1] for index in range(QUANTILES))
        return cls(tuple(float(pairs[min(bisect_right(ends, place), len(pairs) - 1)][0]) for place in places))

    def drawer(self, random: Random) -> Callable[[], float]:
        """Return a function that draws the length of the next rollout."""
        draw, values, size = random.random, self.values, len(self.values)
        return lambda: values[int(draw() * size)]

    @cached_property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @cached_property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation / mean."""
        mean = self.mean
        return (sum((value - mean) ** 2 for value in self.values) / len(self.values)) ** 0.5 / mean

    @cached_property
    def mean_position(self) -> float:
        """Mean number of tokens that a running rollout has generated: E[L²] / 2 E[L], because long ones run longer."""
        return sum(value * value for value in self.values) / (2 * sum(self.values))


def _scale_of_truncated(raw: list[float], mean: float, longest: float) -> float:
    """Return the factor on ``raw`` (ascending) with which its values, truncated at ``longest``, have this mean."""
    low, high = 0.0, longest / raw[0]
    for _ in range(40):
        middle = (low + high) / 2
        if sum(min(value * middle, longest) for value in raw) < mean * len(raw):
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=1)
def _normal_quantiles() -> tuple[float, ...]:
    normal = NormalDist()
    return tuple(normal.inv_cdf((index + 0.5) / QUANTILES) for index in range(QUANTILES))
