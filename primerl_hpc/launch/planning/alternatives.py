"""Other layouts of a recipe: what `plan --compare` and `plan --nodes` show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from primerl_hpc.checks.recipe.model_config import read_model
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.launch.planning.forecast import MeasuredLengths, PlanForecast, case_for, space_of
from primerl_hpc.launch.planning.learned import with_corrections
from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.assess.prediction import Prediction, predict
from primerl_hpc.plan.assess.search import SearchResult, Space, search
from primerl_hpc.recipe.schema.recipe import Recipe

_INFERENCE = ("nodes", "replicas", "tensor_parallel", "data_parallel", "expert_parallel")
_PREFILL = ("replicas", "tensor_parallel", "data_parallel", "expert_parallel")
_TRAINER = ("nodes", "ranks", "context_parallel", "tensor_parallel", "replicate")
MAX_ROWS = 8
EQUAL = 1.005
"""Step times with a smaller ratio are shown as equal."""


@dataclass(frozen=True)
class Alternative:
    prediction: Prediction
    reason: str
    """Why it is the best, or why it lost."""

    def as_json(self) -> dict[str, Any]:
        figures = {name: figure.value for name, figure in self.prediction.figures.items()}
        return {"layout": asdict(self.prediction.choice), "reason": self.reason, "figures": figures}


@dataclass(frozen=True)
class ScalingRow:
    nodes: int
    prediction: Prediction | None
    reason: str = ""
    tokens_per_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        if self.prediction is None:
            return {"nodes": self.nodes, "reason": self.reason}
        figures = {name: figure.value for name, figure in self.prediction.figures.items()}
        return {"nodes": self.nodes, "layout": asdict(self.prediction.choice), "figures": figures}


def with_auto_layout(recipe: Recipe) -> Recipe:
    """Return the recipe with every size of its layout left to the search."""
    layout = recipe.layout
    inference = layout.inference.model_copy(update=dict.fromkeys(_INFERENCE, "auto"))
    if inference.prefill is not None:
        prefill = inference.prefill.model_copy(update=dict.fromkeys(_PREFILL, "auto"))
        inference = inference.model_copy(update={"prefill": prefill})
    trainer = layout.trainer.model_copy(update=dict.fromkeys(_TRAINER, "auto"))
    return recipe.model_copy(
        update={"layout": layout.model_copy(update={"inference": inference, "trainer": trainer})}
    )


def compare_layouts(
    recipe: Recipe, profile: Profile, forecast: PlanForecast, measured: MeasuredLengths | None = None
) -> tuple[SearchResult, list[Alternative]]:
    """Return the search over all layouts, and the best of them with the plan's own. Raises ConfigError."""
    free = with_auto_layout(recipe)
    case = with_corrections(case_for(free, profile, read_model(free, profile), measured))
    found = search(case, space_of(free, profile), is_complete=True)
    predictions = list(found.simulated)
    if free.layout.inference.prefill is not None:
        predictions += _without_prefill(case, free, profile, found)
    if (
        forecast.prediction is not None
        and forecast.prediction.fits
        and "time.step" in forecast.prediction.figures
    ):
        own = predict(case, forecast.prediction.choice, parts=Parts(case), depth="quick")
        predictions = [item for item in predictions if item.choice != own.choice] + [own]
        predictions.sort(key=lambda item: item.figures["time.step"].value)
    best = predictions[0] if predictions else None
    mine = forecast.prediction.choice if forecast.prediction is not None else None
    return found, [
        Alternative(item, _reason(item, best, item.choice == mine))
        for item in predictions
        if best is not None
    ]


def _without_prefill(case: Case, recipe: Recipe, profile: Profile, found: SearchResult) -> list[Prediction]:
    """Return the best layouts without prefill engines, and add their search to ``found``."""
    inference = recipe.layout.inference.model_copy(update={"prefill": None})
    plain = recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"inference": inference})})
    without = search(replace(case, recipe=plain), space_of(plain, profile), num_simulated=2, is_complete=True)
    found.num_layouts += without.num_layouts
    found.pruned += without.pruned
    return without.simulated


def _reason(item: Prediction, best: Prediction, is_own: bool) -> str:
    own = "this plan; " if is_own else ""
    step, fastest = item.figures["time.step"].value, best.figures["time.step"].value
    if item is best:
        return f"{own}fastest"
    ratio = step / fastest
    slower = f"{ratio - 1:.0%} slower" if ratio < 2 else f"{ratio:.1f} times the step time"
    if ratio < EQUAL:
        return f"{own}equally fast"
    if item.run is None:
        return f"{own}{slower}"
    side = {
        "engines": "engines are too slow",
        "trainer": "the trainer is too slow",
        "prefill engines": "prefill engines are too slow",
        "weight updates": "weight updates are too slow",
        "both": "both sides are busy",
    }
    return f"{own}{slower}: {side[item.bottleneck or 'both']}"


def scaling(
    recipe: Recipe, profile: Profile, nodes: list[int], measured: MeasuredLengths | None = None
) -> list[ScalingRow]:
    """Return the best layout for each number of nodes. Raises ConfigError if nothing can be predicted."""
    free = with_auto_layout(recipe)
    case = with_corrections(case_for(free, profile, read_model(free, profile), measured))
    per_node = space_of(free, profile).gpus_per_node
    rows = []
    for number in nodes:
        found = search(case, Space(number, per_node), num_simulated=4)
        if found.best is None:
            rows.append(ScalingRow(number, None, found.reason))
            continue
        best = predict(case, found.best.choice, depth="full")
        rate = best.figures.get("rate.tokens")
        rows.append(ScalingRow(number, best, tokens_per_s=rate.value if rate is not None else 0.0))
    return rows


def parse_nodes(text: str) -> list[int]:
    """Return the numbers of nodes of ``4..32`` (doubled from the first), ``8`` or ``4,6,12``. Raises ConfigError."""
    try:
        if ".." in text:
            first, last = (int(word) for word in text.split("..", 1))
            numbers = []
            number = first
            while 0 < number < last:
                numbers.append(number)
                number *= 2
            numbers.append(last)
        else:
            numbers = [int(word) for word in text.split(",")]
            first, last = min(numbers), max(numbers)
    except ValueError:
        numbers, first, last = [], 0, 0
    if not numbers or first < 1 or last < first:
        raise ConfigError(
            f"--nodes {text} is not a range of nodes", hint="write --nodes 4..32 or --nodes 4,8,12"
        )
    if len(numbers) > MAX_ROWS:
        raise ConfigError(f"--nodes {text} has {len(numbers)} numbers, at most {MAX_ROWS} are compared")
    return numbers
