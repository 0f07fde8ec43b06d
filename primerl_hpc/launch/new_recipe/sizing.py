"""The planner's layout for a model on a number of GPUs, and the fewest GPUs that it needs.

    sized = choose_layout(recipe, profile, gpus=16)          # Sized, or None if nothing fits on 16 GPUs
    fewest_gpus(recipe, profile)                             # 12; None if no number up to `MAX_GPUS` is enough

The layout of ``recipe`` is ``auto``. On one GPU engine and trainer take turns (``layout.colocated``). Nodes are those
of the profile's ``node``, in any number, so that it is known how much is missing on a profile that is too small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from primerl_hpc.checks.recipe.model_config import load_config, read_model
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.launch.planning.alternatives import with_auto_layout
from primerl_hpc.launch.planning.forecast import case_for
from primerl_hpc.launch.planning.learned import with_corrections
from primerl_hpc.plan.assess.case import Case, make_case
from primerl_hpc.plan.assess.choice import LayoutChoice
from primerl_hpc.plan.assess.prediction import Prediction, predict
from primerl_hpc.plan.assess.search import NEAR, Space, has_layout, search
from primerl_hpc.recipe.schema.layout import Colocated, colocation_conflicts
from primerl_hpc.recipe.schema.recipe import Recipe

MAX_GPUS = 4096
STALENESS = (1, 2, 4, 8)
"""Values of ``rollouts.max_off_policy_steps`` that are compared; 0 makes trainer and engines wait for each other."""
TRANSPORTS = ("filesystem", "broadcast")
"""Values of ``weights.transport`` that are compared; the first is used unless the other is faster by `NEAR`."""


@dataclass(frozen=True)
class Sized:
    """A layout with its prediction."""

    prediction: Prediction
    space: Space
    gpus: int
    """All GPUs, those of a teacher included."""
    gpu: str
    """Type of the GPUs."""
    num_layouts: int = 1
    teacher_gpus: int = 0
    """GPUs of one engine of the teacher: its ``tensor_parallel``."""
    teacher_engines: int = 1
    transport: str = "filesystem"
    steps_by_staleness: dict[int, float] | None = None
    """Predicted seconds of a step by ``max_off_policy_steps``; None for kinds without rollouts that are trained on."""
    staleness: int = 8

    @property
    def choice(self) -> LayoutChoice:
        return self.prediction.choice

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step of a training run."""
        return self.prediction.figures["time.step"].value


def check_number(profile: Profile, gpus: int) -> None:
    """Raise ConfigError if the profile's nodes cannot provide exactly this number of GPUs."""
    per_node = profile.node.gpus
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        raise ConfigError(
            f"{gpus} GPUs are not a number of complete nodes: a node of profile '{profile.name}' has {per_node} GPUs",
            hint=f"use {below} or {below + per_node} GPUs",
        )
    if gpus > (most := profile.nodes * per_node):
        raise ConfigError(
            f"profile '{profile.name}' has {most} GPUs, {gpus} were given",
            hint=f"use at most {most} GPUs, or a profile with more nodes",
        )


def choose_layout(recipe: Recipe, profile: Profile, gpus: int) -> Sized | None:
    """Return the planner's layout for this number of GPUs; None if no layout fits.

    Raises ConfigError if nothing can be predicted: an unknown model or GPU type, or a teacher that fits on no node.
    """
    search_of = _LayoutSearch.of(_shared(recipe) if gpus == 1 else recipe, profile)
    per_node = search_of.per_node
    space = search_of.space(gpus)
    if space is None and gpus > per_node:
        raise ConfigError(
            f"{gpus // per_node} nodes are too few for the teacher on nodes of its own, engines and trainer",
            hint=f"use at most {per_node} GPUs, which they share, or at least {gpus + per_node}",
        )
    sized = search_of.best(space) if space is not None else None
    if sized is None:
        return None
    if sized.choice.is_colocated:
        sized = replace(sized, staleness=0)
    elif recipe.kind == Kind.RL:
        sized = search_of.with_staleness(sized)
    size = search_of.teacher_gpus
    engines = per_node // size if size and gpus > per_node else 1
    return replace(sized, gpus=gpus, teacher_gpus=size, teacher_engines=engines)


def fewest_gpus(recipe: Recipe, profile: Profile) -> int | None:
    """Return the smallest number of GPUs on which a layout fits; None if `MAX_GPUS` are not enough."""
    search_of, per_node = _LayoutSearch.of(recipe, profile), profile.node.gpus

    on_one_gpu = _LayoutSearch.of(_shared(recipe), profile)

    def fits(gpus: int) -> bool:
        chosen = on_one_gpu if gpus == 1 else search_of
        space = chosen.space(gpus)
        return space is not None and chosen.has_layout(space)

    for gpus in range(1, per_node + 1):
        if fits(gpus):
            return gpus
    most = 2
    while not fits(most * per_node):
        most *= 2
        if most * per_node > MAX_GPUS:
            return None
    least = most // 2 + 1
    while least < most:  # more nodes never fit less
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle * per_node) else (middle + 1, most)
    return most * per_node


@dataclass(frozen=True)
class _LayoutSearch:
    """Searches layouts of one recipe on the node type of a profile."""

    case: Case
    per_node: int
    """GPUs of a node."""
    teacher_gpus: int
    """GPUs of one engine of the teacher; 0 without a teacher."""

    @classmethod
    def of(cls, recipe: Recipe, profile: Profile) -> _LayoutSearch:
        """Raise ConfigError, see `choose_layout`."""
        free = _with_auto(recipe)
        case = with_corrections(case_for(free, profile, read_model(free, profile)))
        return cls(case, profile.node.gpus, _teacher_gpus(recipe, profile))

    def space(self, gpus: int) -> Space | None:
        """Return the nodes that policy and trainer use; None if the teacher leaves too few.

        On one node all roles share the GPUs; on several, each role has nodes of its own.
        """
        if gpus <= self.per_node:
            return Space(1, gpus - self.teacher_gpus) if gpus > self.teacher_gpus else None
        nodes = gpus // self.per_node - -(-self.teacher_gpus // self.per_node)
        return Space(nodes, self.per_node) if nodes > 1 else None

    def best(self, space: Space) -> Sized | None:
        """Return the fastest layout of ``space``; for a run without a trainer the one with the smallest engines."""
        recipe = self.case.recipe
        if recipe.kind == Kind.EVAL:
            return self._engines(space)
        case = self._case_on(space)
        found = search(case, space)
        if found.best is None:
            return None
        transport = recipe.weights.transport
        gpu = case.trainer_gpu.name
        return Sized(found.best, space, found.best.choice.gpus, gpu, found.num_layouts, transport=transport)

    def has_layout(self, space: Space) -> bool:
        """True if `best` finds a layout."""
        if self.case.recipe.kind == Kind.EVAL:
            return self._engines(space) is not None
        return has_layout(self._case_on(space), space)

    def _case_on(self, space: Space) -> Case:
        recipe = self.case.recipe
        if recipe.kind != Kind.SFT:  # the search leaves the number of nodes of this kind to the recipe
            return self.case
        trainer = recipe.layout.trainer.model_copy(update={"nodes": space.nodes})
        layout = recipe.layout.model_copy(update={"trainer": trainer})
        return replace(self.case, recipe=recipe.model_copy(update={"layout": layout}))

    def with_staleness(self, sized: Sized) -> Sized:
        """Return the best layout with the better transport, and the least staleness that is as fast as more."""
        most = STALENESS[-1]
        by_transport = {
            transport: self._changed(transport, most).best(sized.space) or sized
            for transport in (TRANSPORTS if self.case.recipe.lora is None else TRANSPORTS[:1])
        }
        fastest = min(layout.step_s for layout in by_transport.values())
        transport = next(name for name, layout in by_transport.items() if _is_near(layout.step_s, fastest))
        found = {age: self._changed(transport, age).best(sized.space) or sized for age in STALENESS[:-1]}
        found[most] = by_transport[transport]
        steps = {age: layout.step_s for age, layout in found.items()}
        least = min(age for age, step in steps.items() if _is_near(step, min(steps.values())))
        return replace(found[least], steps_by_staleness=steps, staleness=least)

    def _changed(self, transport: str, staleness: int) -> _LayoutSearch:
        recipe = self.case.recipe
        rollouts = recipe.rollouts.model_copy(update={"max_off_policy_steps": staleness})
        weights = recipe.weights.model_copy(update={"transport": transport})
        changed = recipe.model_copy(update={"rollouts": rollouts, "weights": weights})
        return replace(self, case=replace(self.case, recipe=changed))

    def _engines(self, space: Space) -> Sized | None:
        if (size := _engine_gpus(self.case, space.gpus_per_node)) is None:
            return None
        engines = space.nodes * (space.gpus_per_node // size)
        prediction = predict(self.case, _engine_choice(size, engines, space.nodes), depth="closed_form")
        return Sized(prediction, space, engines * size, self.case.engine_gpu.name)


def _shared(recipe: Recipe) -> Recipe:
    """Return the recipe with engines and trainer in turns on the same GPUs; itself if that is not possible."""
    if recipe.kind != Kind.RL:
        return recipe
    layout = recipe.layout.model_copy(update={"colocated": Colocated()})
    rollouts = recipe.rollouts.model_copy(update={"max_off_policy_steps": 0})
    shared = recipe.model_copy(update={"layout": layout, "rollouts": rollouts})
    return recipe if any(colocation_conflicts(shared)) else shared


def _is_near(step_s: float, fastest_s: float) -> bool:
    return step_s <= fastest_s * (1 + NEAR)


def _teacher_gpus(recipe: Recipe, profile: Profile) -> int:
    """Return the GPUs of one engine of the teacher. Raises ConfigError if no node can serve it."""
    if (teacher := recipe.served_models.get(Role.TEACHER)) is None:
        return 0
    served = recipe.for_frozen(Role.TEACHER).model_copy(update={"kind": Kind.EVAL})
    case = make_case(served, profile, load_config(teacher.model.name).shape)
    if (size := _engine_gpus(case, profile.node.gpus)) is None:
        raise ConfigError(
            f"teacher {teacher.model.name} does not fit on a node of profile '{profile.name}' "
            f"({profile.node.gpus} GPUs)",
            hint="choose a smaller teacher, or nodes with more memory",
        )
    return size


def _engine_gpus(case: Case, most: int) -> int | None:
    """Return the fewest GPUs, by tensor parallelism, of an engine that holds the weights and one sequence."""
    heads = [layer.attention.heads for layer, _ in case.shape.groups if layer.attention is not None]
    for size in (2**power for power in range(most.bit_length())):
        if any(count % size for count in heads):
            continue
        if predict(case, _engine_choice(size, 1, 1), depth="closed_form").fits:
            return size
    return None


def _engine_choice(size: int, engines: int, nodes: int) -> LayoutChoice:
    return LayoutChoice(engines, size, 1, False, 0, 0, engine_nodes=nodes)


def _with_auto(recipe: Recipe) -> Recipe:
    """Return the recipe with every key that the search decides left to it."""
    memory = ("activation_checkpointing", "activation_offload", "optimizer_offload", "cpu_offload")
    options: dict[str, str] = dict.fromkeys(memory, "auto")
    changes = {
        "trainer": recipe.trainer.model_copy(update=options),
        "rollouts": recipe.rollouts.model_copy(update={"max_in_flight": "auto"}),
    }
    return with_auto_layout(recipe).model_copy(update=changes)
