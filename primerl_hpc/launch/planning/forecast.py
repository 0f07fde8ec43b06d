"""The forecast of a recipe on a profile: a prediction or the reason why there is none; ``auto`` decided by it.

recipe, notes = decide_auto(recipe, profile, model)   # before the planner
forecast = forecast_plan(plan, profile, model)        # after it
refuse_misfit(forecast)                               # ConfigError with the smallest change that fits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.checks.recipe.model_config import ModelConfig
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role
from primerl_hpc.launch.planning.learned import layout_key, ledger_key, with_corrections
from primerl_hpc.plan.assess.case import Case, make_case
from primerl_hpc.plan.assess.choice import apply_choice, choice_of
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.assess.prediction import Prediction, busy_cores, predict
from primerl_hpc.plan.assess.remedy import smallest_change
from primerl_hpc.plan.assess.rules import rules_of_thumb
from primerl_hpc.plan.assess.search import SearchResult, Space, has_auto, search
from primerl_hpc.plan.env_servers import raise_servers
from primerl_hpc.plan.plan import Plan, PredictionRecord
from primerl_hpc.plan.pools import Pools, nodes_of
from primerl_hpc.plan.predict.ledger import record_prediction
from primerl_hpc.plan.predict.timing.host_cores import ENVIRONMENTS, servers_for
from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.jobs import minutes


@dataclass(frozen=True)
class MeasuredLengths:
    """Lengths of the rollouts of an earlier run."""

    lengths: Lengths
    source: str


@dataclass(frozen=True)
class PlanForecast:
    """A prediction, or why there is none."""

    prediction: Prediction | None
    reason: str = ""
    """Sentence; empty with a prediction."""
    hint: str = ""
    case: Case | None = None
    space: Space | None = None
    warnings: tuple[str, ...] = ()
    """Broken rules of thumb."""

    def record(self) -> PredictionRecord | None:
        """Return the figures that a run compares with its measurements; None without a prediction that fits."""
        if self.prediction is None or self.case is None or not self.prediction.fits:
            return None
        case = self.case
        key = ledger_key(case, layout_key(self.prediction.choice, case.recipe))
        return record_prediction(self.prediction.figures.values(), key, case.corrections)

    def as_json(self) -> dict[str, Any]:
        """Return the figures by name, or the reason why there is no prediction."""
        if self.prediction is None:
            return {"reason": self.reason, "hint": self.hint}
        prediction = self.prediction
        return {
            "fits": prediction.fits,
            "misfits": list(map(str, prediction.misfits)),
            "bottleneck": prediction.bottleneck,
            "figures": {name: figure.as_dict() for name, figure in prediction.figures.items()},
            "absent": prediction.absent,
            "assumptions": list(prediction.assumptions),
        }


def read_lengths(run: RunDir) -> MeasuredLengths:
    """Return the distribution of completion lengths of a run, from its metrics. Raises NotFoundError without any.

    A metric row has mean, minimum, 10th and 90th percentile, and maximum of a batch; the rows of the second half of the
    run are joined, each as a histogram of these values.
    """
    rows = [
        row for row in read_steps(run.metrics("orchestrator")).values() if "completion_tokens/mean" in row
    ]
    if not rows:
        raise NotFoundError(
            f"{run.root} has no metrics of rollouts", hint="choose a run of kind rl with steps"
        )
    tokens: list[float] = []
    counts: list[float] = []
    for row in rows[len(rows) // 2 :]:
        part, weights = _histogram(row)
        tokens += part
        counts += weights
    return MeasuredLengths(Lengths.histogram(tokens, counts), f"metrics of {run.root.name}")


def _histogram(row: Mapping[str, float]) -> tuple[list[float], list[float]]:
    """Return values and weights with the row's percentiles and mean: 8 tenths lie between p10 and p90."""
    low, p10, mean, p90, high = (
        row[f"completion_tokens/{name}"] for name in ("min", "p10", "mean", "p90", "max")
    )
    tails = 0.1 * (low + p10) / 2 + 0.1 * (p90 + high) / 2
    middle = min(max((mean - tails) / 0.8, p10), p90)
    return [(low + p10) / 2, middle, (p90 + high) / 2], [0.1, 0.8, 0.1]


def space_of(recipe: Recipe, profile: Profile) -> Space:
    """Return the nodes of the profile that the policy's engines and the trainer may use.

    Raises ConfigError where engines and trainer have nodes of different types, which the search does not split.
    """
    pools, layout = Pools(profile), recipe.layout
    trainer = pools.of(layout.trainer.node_type, "layout.trainer")
    if layout.inference.node_type != layout.trainer.node_type and recipe.has_engines:
        raise ConfigError("engines and trainer have different node types")
    if recipe.layout.colocated is not None:
        raise ConfigError("engines and trainer use the same GPUs, so there is no split to choose")
    if recipe.layout.inference.elastic:
        raise ConfigError("elastic engines are in jobs of their own")
    per_node = trainer.per_node
    others = 0
    for role, engines in recipe.engines_beside.items():
        if role == Role.PREFILL:
            _check_prefill_nodes(recipe)
        elif engines.node_type == layout.trainer.node_type:
            others += nodes_of(engines.replicas, engines.accelerators_per_replica, per_node)
    nodes = trainer.work_nodes - others
    if nodes < 1:
        raise ConfigError("other engines need all nodes")
    return Space(nodes, per_node)


def _check_prefill_nodes(recipe: Recipe) -> None:
    inference = recipe.layout.inference
    assert inference.prefill is not None
    if inference.prefill.node_type != inference.node_type and inference.prefill.replicas == "auto":
        raise ConfigError("the number of prefill engines on nodes of another type is not searched")


def decide_auto(
    recipe: Recipe, profile: Profile, model: ModelConfig, measured: MeasuredLengths | None = None
) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with ``auto`` decided by prediction, and notes with the reasons.

    Where nothing can be predicted, ``auto`` stays, and the planner's fixed rules decide.
    """
    if recipe.is_external or recipe.kind not in (Kind.RL, Kind.SFT) or not has_auto(recipe):
        return recipe, ()
    if not profile.node.gpus:
        return recipe, ()
    try:
        case = case_for(recipe, profile, model, measured)
        found = search(with_corrections(case), space_of(recipe, profile))
    except ConfigError as error:
        return recipe, (f"auto by fixed rules, because nothing is predicted: {error.cause}",)
    recipe, notes = _applied(recipe, found)
    if found.best is None or recipe.kind != Kind.RL:
        return recipe, notes
    cores = busy_cores(case, found.best.figures["time.step"].value)[ENVIRONMENTS]
    recipe, reasons = raise_servers(recipe, servers_for(cores), profile.node.cores)
    return recipe, notes + reasons


def _applied(recipe: Recipe, found: SearchResult) -> tuple[Recipe, tuple[str, ...]]:
    if found.best is None:
        return recipe, (f"auto by fixed rules: {found.reason}",)
    one_of = f", the fastest predicted step of {found.num_layouts} layouts" if found.num_layouts > 1 else ""
    # the forecast shows the step time, from the complete simulation
    return apply_choice(recipe, found.best.choice), (f"auto: {found.best.choice}{one_of}",)


def case_for(
    recipe: Recipe, profile: Profile, model: ModelConfig, measured: MeasuredLengths | None = None
) -> Case:
    """Return the case of a recipe. Raises ConfigError for an unknown model or GPU type, or a profile without GPUs."""
    if measured is None:
        return make_case(recipe, profile, model.shape)
    return make_case(recipe, profile, model.shape, lengths=measured.lengths, lengths_source=measured.source)


def forecast_plan(
    plan: Plan, profile: Profile, model: ModelConfig, measured: MeasuredLengths | None = None
) -> PlanForecast:
    """Return the forecast of a plan's main phase. Never raises for what is unknown: the reason is in the result."""
    phase = plan.phase(MAIN_PHASE)
    recipe = phase.recipe
    walltime = minutes(profile.scheduler.time) if profile.scheduler.type == "slurm" else None
    walltime_s = 60 * walltime if walltime is not None else None
    try:
        if recipe.is_external:
            raise ConfigError("the model is served by an external server")
        case = case_for(recipe, profile, model, measured)
        choice = choice_of(phase, case.shape.num_experts)
        case = with_corrections(case, layout_key(choice, recipe))
        prediction = predict(case, choice)
    except ConfigError as error:
        warnings = rules_of_thumb(recipe, None, walltime_s=walltime_s)
        return PlanForecast(None, error.cause, error.hint, warnings=tuple(warnings))
    warnings = rules_of_thumb(recipe, prediction, walltime_s=walltime_s)
    try:
        space = space_of(recipe, profile)
    except ConfigError:
        space = None
    return PlanForecast(prediction, case=case, space=space, warnings=tuple(warnings))


def remedy_of(forecast: PlanForecast) -> str:
    """Return the smallest change with which the plan fits, or other remedies; empty if the search does not apply."""
    if forecast.case is not None and forecast.case.recipe.layout.colocated is not None:
        return "remove layout.colocated to give each side GPUs of its own, or set trainer.optimizer_offload to true"
    if forecast.prediction is None or forecast.case is None or forecast.space is None:
        return ""
    change = smallest_change(forecast.case, forecast.prediction, forecast.space, Parts(forecast.case))
    if change is not None:
        return str(change)
    return "no change of a few keys fits; set the keys of layout to auto, or use more nodes or GPUs with more memory"


def refuse_misfit(forecast: PlanForecast) -> None:
    """Raise ConfigError if a role needs more memory than there is, with the smallest change that fits."""
    if forecast.prediction is None or forecast.prediction.fits:
        return
    cause = "; ".join(map(str, forecast.prediction.misfits))
    raise ConfigError(f"the plan does not fit: {cause}", hint=remedy_of(forecast))
