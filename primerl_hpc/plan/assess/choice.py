"""The part of a plan that a prediction depends on, as plain numbers: what `auto` chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from primerl_hpc.common.names import Kind, Role, counted
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.schema.recipe import Recipe

MAX_AUTO_EXPERT_PARALLEL = 8
"""``layout.trainer.expert_parallel: auto`` is at most this, see `trainer.parallel.expert`."""


@dataclass(frozen=True)
class PrefillChoice:
    """Engines that only process prompts."""

    num_engines: int
    tensor_parallel: int
    data_parallel: int = 1
    expert_parallel: bool = False
    nodes: int = 1

    @property
    def engine_gpus(self) -> int:
        return self.tensor_parallel * self.data_parallel

    def __str__(self) -> str:
        shape = shape_in_words(self.tensor_parallel, self.data_parallel, self.expert_parallel)
        return f"{self.num_engines} prefill{shape}"


@dataclass(frozen=True)
class LayoutChoice:
    """Sizes of both sides, and the options that trade memory for time."""

    num_engines: int
    tensor_parallel: int
    data_parallel: int
    expert_parallel: bool
    trainer_ranks: int
    """0: the run has no trainer."""
    ranks_per_node: int
    replicate: int = 1
    context_parallel: int = 1
    trainer_tensor_parallel: int = 1
    trainer_expert_parallel: int = 1
    checkpointing: Literal["none", "full"] | tuple[str, ...] = "full"
    checkpointing_every: int = 1
    activation_offload: bool = False
    optimizer_offload: bool = False
    cpu_offload: bool = False
    max_in_flight: int = 0
    engine_nodes: int = 0
    trainer_nodes: int = 0
    shares_node: bool = False
    """True if engines and trainer are on the same single node, or on the same nodes with ``layout.colocated``."""
    is_colocated: bool = False
    """True if engines and trainer use the same GPUs."""
    prefill: PrefillChoice | None = None
    """None: every engine processes its own prompts."""

    @property
    def prefill_nodes(self) -> int:
        """Nodes of prefill engines that no other role uses."""
        return 0 if self.prefill is None or self.shares_node else self.prefill.nodes

    @property
    def engine_gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.data_parallel

    @property
    def gpus(self) -> int:
        """GPUs that compute: those of all engines and of the trainer."""
        of_engines = self.num_engines * self.engine_gpus
        if self.prefill is not None:
            of_engines += self.prefill.num_engines * self.prefill.engine_gpus
        return max(of_engines, self.trainer_ranks) if self.is_colocated else of_engines + self.trainer_ranks

    def __str__(self) -> str:
        """Return the layout in one line, without defaults."""
        words = []
        if self.num_engines:
            shape = shape_in_words(self.tensor_parallel, self.data_parallel, self.expert_parallel)
            words.append(f"{counted(self.num_engines, 'engine')}{shape}")
        if self.prefill is not None:
            words.append(str(self.prefill))
        if self.trainer_ranks:
            parts = [counted(self.trainer_ranks, "rank")]
            parts += [f"TP{self.trainer_tensor_parallel}"] if self.trainer_tensor_parallel > 1 else []
            parts += [f"CP{self.context_parallel}"] if self.context_parallel > 1 else []
            parts += [f"HSDP×{self.replicate}"] if self.replicate > 1 else []
            parts += ["no recomputation"] if self.checkpointing == "none" else []
            offloads = ("activation", "optimizer", "cpu")
            parts += [f"{name} offload" for name in offloads if getattr(self, f"{name}_offload")]
            words.append(" ".join(parts))
        return " on the GPUs of ".join(words) if self.is_colocated else " + ".join(words)


def shape_in_words(tensor_parallel: int, data_parallel: int, expert_parallel: bool) -> str:
    """Return the shape of an engine without defaults, after a space; empty for an engine of one GPU."""
    shape = [f" TP{tensor_parallel}"] if tensor_parallel > 1 else []
    shape += [f" DP{data_parallel}"] if data_parallel > 1 else []
    return "".join([*shape, " EP" if expert_parallel else ""])


def choice_of(phase: PhasePlan, experts: int = 0) -> LayoutChoice:
    """Return the layout of a plan's phase. ``experts``: routed experts of the model's layers, 0 for a dense one."""
    recipe = phase.recipe
    inference, trainer = recipe.layout.inference, recipe.layout.trainer
    engines = (*phase.of_role(Role.INFERENCE), *phase.elastic) if recipe.has_engines else ()
    processes = (*phase.of_role(Role.TRAINER), *phase.of_role(Role.SFT))
    per_node = max((len(process.accelerators) for process in processes), default=0)
    ranks = sum(len(process.nodes) * len(process.accelerators) for process in processes)
    context = trainer.context_parallel
    engine_nodes = {node for process in phase.of_role(Role.INFERENCE) for node in process.nodes}
    trainer_nodes = {node for process in processes for node in process.nodes}
    return LayoutChoice(
        num_engines=len(engines),
        tensor_parallel=_number(inference.tensor_parallel),
        data_parallel=_number(inference.data_parallel),
        expert_parallel=inference.expert_parallel is True,
        trainer_ranks=ranks,
        ranks_per_node=per_node,
        replicate=trainer.num_replicas,
        context_parallel=_number(context),
        trainer_tensor_parallel=trainer.tensor_degree,
        trainer_expert_parallel=trainer_experts(recipe, ranks, per_node, experts),
        checkpointing=_checkpointing(recipe),
        checkpointing_every=recipe.trainer.activation_checkpointing_every,
        activation_offload=recipe.trainer.activation_offload is True,
        optimizer_offload=recipe.trainer.optimizer_offload is True,
        cpu_offload=recipe.trainer.cpu_offload is True,
        max_in_flight=recipe.rollouts.in_flight_ceiling if recipe.kind == Kind.RL else 0,
        engine_nodes=len(engine_nodes) + len(phase.elastic),  # elastic engines are in jobs of their own
        trainer_nodes=len(trainer_nodes),
        shares_node=not engine_nodes.isdisjoint(trainer_nodes),
        is_colocated=recipe.layout.colocated is not None,
        prefill=_prefill_of(phase),
    )


def _prefill_of(phase: PhasePlan) -> PrefillChoice | None:
    processes, layout = phase.of_role(Role.PREFILL), phase.recipe.engines_beside.get(Role.PREFILL)
    if layout is None or not processes:
        return None
    nodes = {node for process in processes for node in process.nodes}
    shape = (layout.tensor_parallel, layout.data_parallel, layout.expert_parallel)
    return PrefillChoice(len(processes), *shape, nodes=len(nodes))


def trainer_experts(recipe: Recipe, ranks: int, per_node: int, experts: int, replicas: int = 0) -> int:
    """Return the trainer's degree of expert parallelism; the rule for ``auto`` is that of the trainer.

    ``replicas``: of the model; 0: those of the recipe.
    """
    layout = recipe.layout.trainer
    if layout.expert_parallel != "auto":
        return layout.expert_parallel
    shard = max(1, ranks // (replicas or layout.num_replicas))
    most = min(MAX_AUTO_EXPERT_PARALLEL, max(1, per_node), shard)
    if not experts:
        return 1
    return max(degree for degree in range(1, most + 1) if experts % degree == 0 and shard % degree == 0)


def _checkpointing(recipe: Recipe) -> Any:
    value = recipe.trainer.activation_checkpointing
    return "full" if value == "auto" else value


def _number(value: int | Literal["auto"]) -> int:
    return 1 if value == "auto" else value


def is_counted(recipe: Recipe) -> bool:
    """True if the recipe counts replicas and ranks, from which the planner derives the nodes."""
    layout = recipe.layout
    has_engines = recipe.kind == Kind.RL
    return layout.trainer.ranks != "auto" and (not has_engines or layout.inference.replicas != "auto")


def apply_choice(recipe: Recipe, choice: LayoutChoice) -> Recipe:
    """Return the recipe with the numbers of ``choice`` in place of every ``auto``; explicit values stay."""
    inference, trainer, config = recipe.layout.inference, recipe.layout.trainer, recipe.trainer
    layout = recipe.layout
    if choice.num_engines:
        engines = {
            "nodes": choice.engine_nodes,
            "replicas": choice.num_engines,
            "tensor_parallel": choice.tensor_parallel,
            "data_parallel": choice.data_parallel,
            "expert_parallel": choice.expert_parallel,
        }
        if choice.shares_node or is_counted(recipe):
            del engines["nodes"]  # numbers of nodes would request separate ones
        settled = _settled(inference, engines)
        if inference.prefill is not None and choice.prefill is not None:
            numbers = {
                "replicas": choice.prefill.num_engines,
                "tensor_parallel": choice.prefill.tensor_parallel,
                "data_parallel": choice.prefill.data_parallel,
                "expert_parallel": choice.prefill.expert_parallel,
            }
            settled = settled.model_copy(update={"prefill": _settled(inference.prefill, numbers)})
        layout = layout.model_copy(update={"inference": settled})
    if choice.trainer_ranks:
        ranks = {"nodes": choice.trainer_nodes, "ranks": choice.trainer_ranks}
        ranks |= {"context_parallel": choice.context_parallel, "replicate": choice.replicate}
        ranks |= {"tensor_parallel": choice.trainer_tensor_parallel}
        if choice.shares_node or is_counted(recipe):
            del ranks["nodes"]
        layout = layout.model_copy(update={"trainer": _settled(trainer, ranks)})
    options = {
        "activation_checkpointing": choice.checkpointing,
        "activation_offload": choice.activation_offload,
        "optimizer_offload": choice.optimizer_offload,
        "cpu_offload": choice.cpu_offload,
    }
    rollouts = _settled(recipe.rollouts, {"max_in_flight": choice.max_in_flight or None})
    return recipe.model_copy(
        update={"layout": layout, "trainer": _settled(config, options), "rollouts": rollouts}
    )


def _settled(block: Any, values: dict[str, Any]) -> Any:
    changes = {name: value for name, value in values.items() if getattr(block, name) == "auto"}
    return block.model_copy(update=changes) if changes else block
