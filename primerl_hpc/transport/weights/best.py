"""The policy versions with the best values of a metric (``weights.keep_best``), which pruning must not delete.

best = BestVersions(run, "eval/held-out/reward/mean", 2, is_due=lambda version: version % 10 == 0)
best.keep(run.stable_weights())      # {30, 50, 60}: the best two, and one that is not evaluated yet
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import MetricSeries


@dataclass
class BestVersions:
    run: RunDir
    metric: str
    count: int
    is_due: Callable[[int], bool]
    """True if the version will get a value."""
    lowest: bool = False
    _series: MetricSeries = field(init=False)

    def __post_init__(self) -> None:
        self._series = MetricSeries(self.run, self.metric)

    def keep(self, versions: Iterable[int]) -> set[int]:
        """Return which of ``versions`` are the best so far, and which may be but have no value yet."""
        self._series.refresh()
        # a batch of step n is sampled by version n - 1 or earlier
        shift = 1 if self._series.source == "orchestrator" else 0
        values = {step - shift: value for step, value in self._series.values.items() if math.isfinite(value)}
        newest = max(values, default=-1)
        measured = [version for version in versions if version in values]
        measured.sort(key=lambda version: (values[version] if self.lowest else -values[version], version))
        pending = {version for version in versions if version > newest and self.is_due(version)}
        return set(measured[: self.count]) | pending
