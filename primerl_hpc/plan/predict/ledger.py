"""Corrections of a prediction from the ledger: factors (measured / predicted), shrunk towards 1.

    factors = corrections(rows, LedgerKey("H100-SXM", "qwen3", "16 ranks, …", {"torch": "2.9.1"}), now=time.time())
    correct(figure, factors["time.trainer.step"])

The logarithm of measured / predicted is a sum of effects of the GPU type, of the model family on it, of the layout of
that family, and noise. All four are normal with mean 0, so the posterior means are closed forms (normal-normal
shrinkage on a tree): few rows move a factor little, rows of the same layout count most, and a new family on a known GPU
starts from what other families showed. Only rows with the same version of the library that a figure depends on are
used. Older rows count less. Factors are within `BOUNDS`.

plan.json stores the prediction as a `PredictionRecord`, with the corrections that its figures contain. A plan without a
prediction (a CPU run, an unknown GPU or model) has none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from primerl_hpc.plan.plan import AppliedCorrection, PredictedFigure, PredictionRecord
from primerl_hpc.plan.predict.figure import Figure, Tier
from primerl_hpc.run.ledger.measures import MEASURE_OF
from primerl_hpc.run.ledger.rows import LedgerRow

BOUNDS = (0.5, 2.0)
"""Range of factors: a larger difference is an error of the formula or of a run, which no correction should hide."""
HALF_LIFE_DAYS = 90.0
"""Age at which a row counts half."""
DEVIATIONS = {"gpu": 0.30, "family": 0.15, "layout": 0.10, "noise": 0.08}
"""Standard deviations of the four effects, as logarithms. From the errors of fitted formulas on published rows: 20 %
between GPU types, 10–20 % between families held out, 8 % within; repeated measurements differ by 1.5–22 %."""
QUANTILE_80 = 1.2816
"""Half width of an 80 % interval in standard deviations."""


@dataclass(frozen=True)
class LedgerKey:
    """Hardware, model family, layout and software for which a plan is made."""

    gpu: str
    """GPU type of the trainer's nodes."""
    family: str
    layout: str
    software: Mapping[str, str] = field(default_factory=dict)
    engine_gpu: str = ""
    """GPU type of the engines' nodes; empty: the trainer's."""

    def gpu_of(self, figure: str) -> str:
        """Return the GPU type on which a figure is measured."""
        is_engine = figure in MEASURE_OF and MEASURE_OF[figure].library == "vllm"
        return self.engine_gpu or self.gpu if is_engine else self.gpu


@dataclass(frozen=True)
class Correction:
    """Factor by which a figure is multiplied."""

    figure: str
    factor: float
    deviation: float
    """Standard deviation of ln(factor), with the noise of one run."""
    num_rows: int
    """Rows of this figure on this GPU type."""
    closest: Literal["gpu", "family", "layout"]
    """The closest rows: of this layout, of this model family, or of this GPU type only."""

    def as_json(self) -> dict[str, float | int | str]:
        values = ("factor", "deviation", "num_rows", "closest")
        return {name: getattr(self, name) for name in values}


@dataclass(frozen=True)
class _Estimate:
    """A normal estimate: mean and variance."""

    mean: float
    variance: float


def corrections(rows: Iterable[LedgerRow], key: LedgerKey, *, now: float) -> dict[str, Correction]:
    """Return the correction of every figure for which the ledger has rows of this GPU type and software.

    ``now``: seconds since the epoch, from which the ages of rows are counted.
    """
    by_figure: dict[str, list[LedgerRow]] = defaultdict(list)
    for row in rows:
        if row.log_ratio is not None and row.gpu == key.gpu_of(row.figure) and _is_applicable(row, key):
            by_figure[row.figure].append(row)
    return {figure: _correction(figure, found, key, now) for figure, found in sorted(by_figure.items())}


def _is_applicable(row: LedgerRow, key: LedgerKey) -> bool:
    measure = MEASURE_OF.get(row.figure)
    if measure is not None and not measure.is_corrected:
        return False
    libraries = [measure.library] if measure is not None and measure.library else []
    return all(row.software.get(name) == key.software.get(name) for name in libraries)


def _correction(figure: str, rows: list[LedgerRow], key: LedgerKey, now: float) -> Correction:
    cells: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        age_days = max(0.0, now - row.time) / 86_400
        ratio = row.log_ratio
        assert ratio is not None  # selected above
        limit = math.log(2 * BOUNDS[1])
        cells[row.family, row.layout].append(
            (min(max(ratio, -limit), limit), 0.5 ** (age_days / HALF_LIFE_DAYS))
        )
    noise = DEVIATIONS["noise"] ** 2
    layouts: dict[str, dict[str, _Estimate]] = defaultdict(dict)
    for (family, layout), found in cells.items():
        weight = sum(weight for _, weight in found)
        if weight > 1e-9:
            mean = sum(ratio * weight for ratio, weight in found) / weight
            layouts[family][layout] = _Estimate(mean, noise / weight)
    combined = {family: _combine(found.values(), "layout") for family, found in layouts.items()}
    of_families = {family: estimate for family, estimate in combined.items() if estimate is not None}
    gpu = _posterior(_Estimate(0.0, DEVIATIONS["gpu"] ** 2), _combine(of_families.values(), "family"))
    family = _below(gpu, of_families.get(key.family), "family")
    result = _below(family, layouts.get(key.family, {}).get(key.layout), "layout")
    low, high = BOUNDS
    return Correction(
        figure,
        factor=min(max(math.exp(result.mean), low), high),
        deviation=math.sqrt(result.variance + noise),
        num_rows=len(rows),
        closest="layout"
        if key.layout in layouts.get(key.family, {})
        else ("family" if key.family in layouts else "gpu"),
    )


def _combine(children: Iterable[_Estimate], level: str) -> _Estimate | None:
    """Return the estimate of a parent from those of its children, which differ from it by the level's deviation."""
    found = [_Estimate(child.mean, child.variance + DEVIATIONS[level] ** 2) for child in children]
    if not found:
        return None
    precision = sum(1 / child.variance for child in found)
    return _Estimate(sum(child.mean / child.variance for child in found) / precision, 1 / precision)


def _posterior(prior: _Estimate, observed: _Estimate | None) -> _Estimate:
    """Return the posterior of a normal prior and a normal observation."""
    if observed is None:
        return prior
    precision = 1 / prior.variance + 1 / observed.variance
    mean = (prior.mean / prior.variance + observed.mean / observed.variance) / precision
    return _Estimate(mean, 1 / precision)


def _below(parent: _Estimate, observed: _Estimate | None, level: str) -> _Estimate:
    """Return the posterior of a child. Its prior is the parent's posterior mean, which already contains ``observed``.

    With p the parent, E[child | p] = (p / τ² + x / v) / (1 / τ² + 1 / v) is linear in p, so the posterior mean of p
    gives the posterior mean of the child, and its variance adds with the squared coefficient.
    """
    variance = DEVIATIONS[level] ** 2
    if observed is None:
        return _Estimate(parent.mean, parent.variance + variance)
    own = _posterior(_Estimate(parent.mean, variance), observed)
    share = own.variance / variance
    return _Estimate(own.mean, own.variance + share**2 * parent.variance)


def correct(figure: Figure, correction: Correction | None) -> Figure:
    """Return the figure multiplied by its correction, with an interval that is never wider than before."""
    if correction is None or figure.value == 0:
        return figure
    value = figure.value * correction.factor
    width = QUANTILE_80 * correction.deviation
    below, above = figure.log_widths
    tier = Tier.MEASURED if correction.closest == "layout" else Tier.CALIBRATED
    return replace(
        figure,
        value=value,
        low=value * math.exp(-min(below, width)),
        high=value * math.exp(min(above, width)),
        formula=f"({figure.formula}) × correction",
        inputs={**figure.inputs, "uncorrected": figure.value, "correction": correction.factor},
        source=f"{figure.source}; ledger: {correction.num_rows} rows, closest: same {correction.closest}".lstrip(
            "; "
        ),
        tier=max(tier, figure.tier),
    )


def record_prediction(
    figures: Iterable[Figure], key: LedgerKey, applied: Mapping[str, Correction]
) -> PredictionRecord:
    """Return the record of ``figures``, which contain the corrections ``applied``."""
    kept = {
        figure.name: PredictedFigure(
            value=figure.value,
            low=figure.low,
            high=figure.high,
            unit=figure.unit,
            tier=figure.tier.name.lower(),
        )
        for figure in figures
    }
    used = {
        name: AppliedCorrection.model_validate(correction.as_json())
        for name, correction in applied.items()
        if name in kept
    }
    return PredictionRecord(
        gpu=key.gpu,
        engine_gpu=key.engine_gpu or key.gpu,
        family=key.family,
        layout=key.layout,
        software=dict(key.software),
        figures=kept,
        corrections=used,
    )
