"""The metric that measures each predicted figure: one table, used by the supervisor, `status` and `report`.

    compare({"time.step": {"value": 41.0, …}}, metric_rows(run))[0].ratio       # measured / predicted: 1.07

The first step of an attempt is left out, because it contains compilation and warm-up. A figure that is not in the
table, or whose metric was not written, has no measured value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.run.metrics import with_floats
from primerl_hpc.run.rundir import RunDir

Row = Mapping[str, Any]
Library = Literal["torch", "vllm", ""]
GIB = float(2**30)
MAX_IDLE = 0.1
"""Share of idle engines up to which their rate is that of busy engines."""


@dataclass(frozen=True)
class Measure:
    """How a figure is measured in a run."""

    figure: str
    """Name of the predicted figure."""
    file: Literal["trainer", "orchestrator"]
    """metrics/<file>.jsonl; a trainer of kind sft writes ``sft``."""
    value: Callable[[Row], float | None]
    """The measured value of one step; None: this step has none."""
    summary: Callable[[Sequence[float]], float]
    """Over the steps of an attempt."""
    unit: str
    label: str
    """For `status` and `report`."""
    library: Library = ""
    """Library whose version the figure depends on. Empty: the figure is simulated from others, so it is compared but
    not corrected."""

    @property
    def is_corrected(self) -> bool:
        """True if plans multiply the figure by the correction of the ledger."""
        return bool(self.library)


def _metric(name: str, factor: float = 1.0) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        found = row.get(name)
        return factor * found if isinstance(found, int | float) else None

    return value


def _numbers(row: Row, *names: str) -> Sequence[float] | None:
    """Return the values of metrics; None if one of them is missing or no number."""
    found = [row.get(name) for name in names]
    numbers = [number for number in found if isinstance(number, int | float)]
    return numbers if len(numbers) == len(names) else None


def _sum(*names: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        found = _numbers(row, *names)
        return None if found is None else sum(found)

    return value


def _share(part: str, total: str) -> Callable[[Row], float | None]:
    def value(row: Row) -> float | None:
        found = _numbers(row, part, total)
        return found[0] / found[1] if found is not None and found[1] > 0 else None

    return value


def _decode_s(row: Row) -> float | None:
    """Seconds per token of each sequence (TPOT); None where the engines were partly idle."""
    found = _numbers(row, *(f"inference/{name}" for name in ("running", "tokens_per_s", "idle")))
    if found is None:
        return None
    running, rate, idle = found
    return running / rate if rate > 0 and idle < MAX_IDLE else None


def _batch_rate(row: Row) -> float | None:
    """Generated tokens of the batch per second."""
    found = _numbers(row, "completion_tokens/mean", "batch/rollouts", "time/step")
    if found is None:
        return None
    tokens, rollouts, seconds = found
    return tokens * rollouts / seconds if seconds > 0 else None


_TRAINER_STEP = _sum("time/forward_backward", "time/optimizer")
_MEDIAN, _MEAN = statistics.median, statistics.fmean
MEASURES: tuple[Measure, ...] = (
    Measure(
        "memory.trainer.reserved",
        "trainer",
        _metric("perf/peak_memory", GIB),
        max,
        "B",
        "trainer memory per GPU",
        "torch",
    ),
    Measure("time.trainer.step", "trainer", _TRAINER_STEP, _MEDIAN, "s", "trainer computes", "torch"),
    Measure("time.engine.decode", "orchestrator", _decode_s, _MEDIAN, "s", "decode per token", "vllm"),
    Measure(
        "time.weight_update",
        "orchestrator",
        _metric("time/weight_update"),
        _MEDIAN,
        "s",
        "weight update",
        "vllm",
    ),
    Measure("time.step", "trainer", _metric("time/step"), _MEDIAN, "s", "step"),
    Measure("rate.tokens", "orchestrator", _batch_rate, _MEDIAN, "tokens/s", "generated tokens"),
    Measure(
        "rate.engines",
        "orchestrator",
        _metric("inference/tokens_per_s"),
        _MEDIAN,
        "tokens/s",
        "engines generate",
    ),
    Measure(
        "idle.trainer",
        "trainer",
        _share("time/wait_for_batch", "time/step"),
        _MEAN,
        "1",
        "trainer waits",
    ),
    Measure("idle.engines", "orchestrator", _metric("inference/idle"), _MEAN, "1", "engines idle"),
    Measure("staleness.mean", "orchestrator", _metric("off_policy/mean"), _MEAN, "steps", "mean staleness"),
    Measure("run.in_flight", "orchestrator", _metric("dispatcher/in_flight"), _MEAN, "rollouts", "in flight"),
)
"""To add a figure: its name in the prediction, and the metric of the same quantity."""

MEASURE_OF = {measure.figure: measure for measure in MEASURES}


@dataclass(frozen=True)
class Comparison:
    """A predicted figure and what a run measured."""

    figure: str
    predicted: float
    low: float
    high: float
    """80 % interval of the prediction."""
    measured: float
    unit: str

    @property
    def label(self) -> str:
        return MEASURE_OF[self.figure].label

    @property
    def ratio(self) -> float | None:
        """measured / predicted; None for a prediction of 0."""
        return self.measured / self.predicted if self.predicted else None

    @property
    def is_inside(self) -> bool:
        """True if the measured value is within the predicted interval."""
        return self.low <= self.measured <= self.high

    def as_json(self) -> dict[str, Any]:
        values = {
            name: getattr(self, name) for name in ("figure", "predicted", "low", "high", "measured", "unit")
        }
        return {**values, "label": self.label, "ratio": self.ratio, "is_inside": self.is_inside}


def compare(
    figures: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Iterable[Row]]
) -> tuple[Comparison, ...]:
    """Compare predicted ``figures`` (``value``, ``low``, ``high`` by name) with the rows of metric files by name.

    Figures without a measurement are left out, so a run without a prediction has no comparisons.
    """
    steps = {name: steady_rows(list(of_file)) for name, of_file in rows.items()}
    found = []
    for measure in MEASURES:
        figure = figures.get(measure.figure)
        values = [measure.value(row) for row in steps.get(measure.file, ())]
        known = [value for value in values if value is not None and math.isfinite(value)]
        if figure is None or not known:
            continue
        ends = (float(figure["value"]), float(figure["low"]), float(figure["high"]))
        found.append(Comparison(measure.figure, *ends, measure.summary(known), measure.unit))
    return tuple(found)


def steady_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without the first one of each attempt; all rows if no others remain."""
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault(row.get("attempt"), row)
    rest = [row for row in rows if all(row is not start for start in first.values())]
    return rest or list(rows)


def metric_rows(run: RunDir, attempt: int | None = None) -> dict[str, list[Row]]:
    """Return the rows of both metric files, of one attempt or all. A trainer of kind sft counts as the trainer."""
    found: dict[str, list[Row]] = {}
    for name, file in (("trainer", "sft"), ("trainer", "trainer"), ("orchestrator", "orchestrator")):
        rows: list[Row] = [with_floats(row) for row in read_jsonl(run.metrics(file))]
        chosen = [row for row in rows if attempt is None or row.get("attempt") == attempt]
        if chosen:
            found[name] = chosen
    return found
