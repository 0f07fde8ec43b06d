"""Who gets which accelerators: nodes first, then GPUs (or CPU slots) inside a shared node.

Order inside the allocation: inference nodes, then trainer nodes, then those of engines beside: prefill, teacher, judge. A run that
fits into one node shares it; nothing is ever given twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.recipe.layout_schema import EngineLayout
from primerl_hpc.recipe.schema import Recipe


@dataclass(frozen=True)
class Placement:
    """Nodes of the allocation, and the accelerators taken on each of them."""

    nodes: tuple[int, ...]
    accelerators: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    num_nodes: int
    replicas: tuple[Placement, ...]  # one per inference engine
    trainer: Placement | None
    head: int  # node of orchestrator, router and environment servers
    notes: tuple[str, ...]
    elastic: tuple[Placement, ...] = ()  # one per engine that has a job of its own
    cpu_node: int | None = None  # node of the CPU partition, counted after all others
    beside: dict[Role, tuple[Placement, ...]] = field(
        default_factory=dict
    )  # one per engine that prefills, of a teacher, of a judge


def split(recipe: Recipe, profile: Profile) -> Split:
    """Raises ConfigError, with the numbers, when the recipe asks for more than the profile has."""
    layout = recipe.layout.inference
    if recipe.is_external:
        return Split(1, (), None, head=0, notes=("the model is served elsewhere: no engines",))
    needs_inference = recipe.kind != Kind.SFT and not layout.elastic
    needs_trainer = recipe.kind in (Kind.RL, Kind.SFT)
    if needs_inference:
        _check_replica(layout, profile, "layout.inference")
    for role, each in recipe.engines_beside.items():
        _check_replica(each, profile, _key(role))
    notes: list[str] = []
    elastic = _elastic(recipe, profile, notes) if layout.elastic else ()
    if _shares_one_node(recipe, profile, needs_inference, needs_trainer):
        result = _split_one_node(recipe, profile, needs_inference, needs_trainer, notes)
    else:
        result = _split_nodes(recipe, profile, needs_inference, needs_trainer, notes)
    if result.num_nodes > profile.work_nodes:
        spares = f", {profile.scheduler.spare_nodes} of them spare" if profile.scheduler.spare_nodes else ""
        raise ConfigError(
            f"the recipe asks for {result.num_nodes} nodes, profile '{profile.name}' has {profile.nodes}{spares}",
            mend=_fewer_nodes(recipe, profile, needs_inference, needs_trainer),
        )
    result = replace(result, elastic=elastic)
    if recipe.layout.orchestrator.place != "cpu-partition" or recipe.kind == Kind.SFT:
        return result
    cpu_node = result.num_nodes
    notes.append(f"layout.orchestrator.place: node {cpu_node} is of the CPU partition")
    return replace(result, num_nodes=cpu_node + 1, head=cpu_node, cpu_node=cpu_node, notes=tuple(notes))


def _fewer_nodes(recipe: Recipe, profile: Profile, needs_inference: bool, needs_trainer: bool) -> str:
    """The keys that can be lowered."""
    inference, trainer = recipe.layout.inference, recipe.layout.trainer
    asked: list[tuple[str, int | str, int]] = []  # key, value, the least that another value may be
    if needs_inference:
        key = "replicas" if inference.nodes == "auto" else "nodes"
        asked.append((f"layout.inference.{key}", getattr(inference, key), 1))
    if needs_trainer and trainer.nodes == "auto":
        asked.append(("layout.trainer.ranks", trainer.ranks, profile.accelerators_per_node))
    elif needs_trainer:
        asked.append(("layout.trainer.nodes", trainer.nodes, 1))
    asked += [(f"{_key(role)}.replicas", each.replicas, 1) for role, each in recipe.engines_beside.items()]
    lower = [key for key, value, least in asked if value != "auto" and int(value) > least]
    if lower:
        return f"lower {' or '.join(lower)}"
    if profile.work_nodes == 1:
        return "leave out layout.inference.nodes and layout.trainer.nodes: all share the one node then"
    return "choose a profile with more nodes"


def _key(role: Role) -> str:
    return "layout.inference.prefill" if role == Role.PREFILL else f"{role.value}.layout"


def _elastic(recipe: Recipe, profile: Profile, notes: list[str]) -> tuple[Placement, ...]:
    layout = recipe.layout.inference
    assert layout.replicas != "auto"  # the schema asks for a number
    if recipe.kind != Kind.RL:
        raise ConfigError(f"layout.inference.elastic belongs to kind rl, this is kind {recipe.kind}")
    if profile.scheduler.type != "slurm":
        raise ConfigError(
            f"profile '{profile.name}' is local, and elastic engines are SLURM jobs",
            mend="leave layout.inference.elastic out here",
        )
    if profile.software.of_role(Role.INFERENCE).container.kind == "pyxis":
        raise ConfigError(
            "elastic engines are no SLURM steps, and a pyxis container needs one",
            mend="use apptainer for inference",
        )
    size, per_node = layout.accelerators_per_replica, profile.accelerators_per_node
    if size > per_node:
        raise ConfigError(
            f"an elastic engine has one node, of {per_node} accelerators, and is to have {size}",
            mend="lower layout.inference.tensor_parallel or data_parallel",
        )
    notes.append(f"layout.inference.elastic: {layout.replicas} engines, each in a job of its own")
    return (Placement((0,), tuple(range(size))),) * layout.replicas


def _check_replica(layout: EngineLayout, profile: Profile, key: str) -> None:
    """An engine larger than a node takes whole nodes, and no tensor parallel group lies across two data parallel ones."""
    per_node, asked = profile.accelerators_per_node, layout.accelerators_per_replica
    if asked <= per_node:
        return
    said = (
        f"one engine needs {asked} accelerators (tensor_parallel {layout.tensor_parallel} × data_parallel "
        f"{layout.data_parallel}), a node of profile '{profile.name}' has {per_node}"
    )
    if profile.work_nodes < -(-asked // per_node):
        mend = f"lower {key}.tensor_parallel or data_parallel"
        raise ConfigError(f"{said} and there are {profile.work_nodes}", mend=mend)
    if asked % per_node:
        raise ConfigError(
            f"{said}: an engine over several nodes takes whole ones",
            mend=f"make tensor_parallel × data_parallel a multiple of {per_node}",
        )
    if layout.data_parallel > 1 and per_node % layout.tensor_parallel:
        raise ConfigError(
            f"{said}: a data parallel rank of {layout.tensor_parallel} accelerators would lie across nodes",
            mend=f"choose a tensor_parallel that divides {per_node}, or data_parallel 1 and more replicas",
        )


def _shares_one_node(recipe: Recipe, profile: Profile, needs_inference: bool, needs_trainer: bool) -> bool:
    """Explicit node counts mean nodes of their own; otherwise a run that fits into one node gets one."""
    layout = recipe.layout
    if layout.inference.nodes != "auto" or layout.trainer.nodes != "auto":
        return False
    if profile.work_nodes == 1:
        return True
    ranks = layout.trainer.ranks if needs_trainer else 0
    replicas = layout.inference.replicas if needs_inference else 0
    if ranks == "auto" or replicas == "auto":
        return False
    asked = (
        ranks
        + replicas * layout.inference.accelerators_per_replica
        + sum(_accelerators_beside(recipe).values())
    )
    return asked <= profile.accelerators_per_node


def _accelerators_beside(recipe: Recipe) -> dict[Role, int]:
    return {
        role: each.replicas * each.accelerators_per_replica for role, each in recipe.engines_beside.items()
    }


def _split_one_node(
    recipe: Recipe, profile: Profile, needs_inference: bool, needs_trainer: bool, notes: list[str]
) -> Split:
    beside = _accelerators_beside(recipe)
    total = profile.accelerators_per_node - sum(beside.values())
    per_replica = recipe.layout.inference.accelerators_per_replica
    ranks = recipe.layout.trainer.ranks if needs_trainer else 0
    replicas = recipe.layout.inference.replicas if needs_inference else 0
    if ranks == "auto":
        reserved = 0 if replicas == 0 else (per_replica if replicas == "auto" else replicas * per_replica)
        ranks = max(1, min(total // 2, total - reserved) if replicas == "auto" else total - reserved)
        notes.append(
            f"layout.trainer.ranks: {ranks} of the node's {profile.accelerators_per_node} accelerators"
        )
    if replicas == "auto":
        replicas = max(1, (total - ranks) // per_replica)
        notes.append(f"layout.inference.replicas: {replicas} beside {ranks} trainer ranks")
    asked = ranks + replicas * per_replica
    if asked > total:
        parts = f"{replicas} engines × {per_replica} + {ranks} trainer ranks"
        parts += "".join(f" + {count} for {role.value}" for role, count in beside.items())
        raise ConfigError(
            f"the recipe asks for {asked + sum(beside.values())} accelerators ({parts}), "
            f"the one node of profile '{profile.name}' has {profile.accelerators_per_node}",
            mend=_fewer_accelerators(recipe, profile, replicas, ranks),
        )
    engines = _in_one_node(replicas, per_replica, first=0)
    trainer = _in_one_node(1, ranks, first=replicas * per_replica)[0] if ranks else None
    placed: dict[Role, tuple[Placement, ...]] = {}
    for role, each in recipe.engines_beside.items():
        placed[role] = _in_one_node(each.replicas, each.accelerators_per_replica, first=asked)
        asked += beside[role]
    return Split(1, engines, trainer, head=0, notes=tuple(notes), beside=placed)


def _fewer_accelerators(recipe: Recipe, profile: Profile, replicas: int, ranks: int) -> str:
    """The keys that can be lowered, and what else helps."""
    engines: dict[str, tuple[int, EngineLayout]] = {"layout.inference": (replicas, recipe.layout.inference)}
    engines |= {_key(role): (each.replicas, each) for role, each in recipe.engines_beside.items()}
    lower = [f"{key}.replicas" for key, (count, _) in engines.items() if count > 1]
    lower += [f"{key}.tensor_parallel" for key, (_, each) in engines.items() if each.tensor_parallel > 1]
    lower += ["layout.trainer.ranks"] if ranks > 1 else []
    mends = [f"lower {' or '.join(lower)}"] if lower else []
    is_cpu = profile.accelerator == "cpu"
    mends.append("raise node.cpu_slots of the profile" if is_cpu else "choose a profile with more")
    return ", or ".join(mends)


def _in_one_node(count: int, size: int, first: int) -> tuple[Placement, ...]:
    starts = range(first, first + count * size, size)
    return tuple(Placement((0,), tuple(range(start, start + size))) for start in starts)


def _split_nodes(
    recipe: Recipe, profile: Profile, needs_inference: bool, needs_trainer: bool, notes: list[str]
) -> Split:
    per_node = profile.accelerators_per_node
    trainer_nodes = _trainer_nodes(recipe, profile, notes) if needs_trainer else 0
    nodes_beside = _nodes_beside(recipe, per_node, notes)
    others = trainer_nodes + sum(nodes_beside.values())
    inference_nodes, replicas = (
        _inference_nodes(recipe, profile, others, notes) if needs_inference else (0, 0)
    )
    size = recipe.layout.inference.accelerators_per_replica
    engines = _place_replicas(replicas, size, range(inference_nodes), per_node)
    trainer = None
    if trainer_nodes:
        ranks = recipe.layout.trainer.ranks
        per_trainer_node = per_node if ranks == "auto" else ranks // trainer_nodes
        if ranks != "auto" and (ranks % trainer_nodes or per_trainer_node > per_node):
            raise ConfigError(
                f"layout.trainer.ranks {ranks} on {trainer_nodes} nodes of {per_node} accelerators: "
                "every node must run the same number of ranks"
            )
        nodes = tuple(range(inference_nodes, inference_nodes + trainer_nodes))
        trainer = Placement(nodes, tuple(range(per_trainer_node)))
    head = inference_nodes if recipe.layout.orchestrator.place == "trainer" and trainer_nodes else 0
    num_nodes = inference_nodes + trainer_nodes
    beside: dict[Role, tuple[Placement, ...]] = {}
    for role, each in recipe.engines_beside.items():
        nodes = range(num_nodes, num_nodes + nodes_beside[role])
        size, num_nodes = each.accelerators_per_replica, nodes.stop
        beside[role] = _place_replicas(each.replicas, size, nodes, per_node)
    return Split(num_nodes, engines, trainer, head, tuple(notes), beside=beside)


def _nodes_beside(recipe: Recipe, per_node: int, notes: list[str]) -> dict[Role, int]:
    """Nodes of their own for prefill, teacher and judge, as few as their engines need."""
    nodes: dict[Role, int] = {}
    for role, layout in recipe.engines_beside.items():
        size = layout.accelerators_per_replica
        span, together = max(1, size // per_node), max(1, per_node // size)
        nodes[role] = -(-layout.replicas // together) * span
        notes.append(f"{role.value}: {nodes[role]} nodes of its own for {layout.replicas} engines")
    return nodes


def _trainer_nodes(recipe: Recipe, profile: Profile, notes: list[str]) -> int:
    layout = recipe.layout.trainer
    if layout.nodes != "auto":
        return layout.nodes
    nodes = 1 if layout.ranks == "auto" else -(-layout.ranks // profile.accelerators_per_node)
    notes.append(f"layout.trainer.nodes: {nodes}")
    return nodes


def _inference_nodes(recipe: Recipe, profile: Profile, other_nodes: int, notes: list[str]) -> tuple[int, int]:
    """(nodes, replicas); ``other_nodes``: those of the trainer and of engines beside."""
    layout = recipe.layout.inference
    per_node, size = profile.accelerators_per_node, layout.accelerators_per_replica
    span, together = max(1, size // per_node), max(1, per_node // size)  # `together` engines on `span` nodes
    if layout.nodes == "auto":
        if layout.replicas == "auto":
            nodes = max(span, (profile.work_nodes - other_nodes) // span * span)
            roles = [role.value for role in recipe.engines_beside]
            others = " and ".join(["trainer", *roles]) if roles else "the trainer"
            notes.append(f"layout.inference.nodes: {nodes}, all that {others}'s {other_nodes} leave")
        else:
            nodes = -(-layout.replicas // together) * span
            notes.append(f"layout.inference.nodes: {nodes} for {layout.replicas} engines")
    else:
        nodes = layout.nodes
    most = nodes // span * together
    replicas = most if layout.replicas == "auto" else layout.replicas
    if replicas > most or nodes < span:
        raise ConfigError(
            f"{max(replicas, 1)} engines of {size} accelerators do not fit on {nodes} nodes of {per_node}",
            mend=f"at most {most}; lower layout.inference.replicas or raise its nodes",
        )
    if replicas * span < nodes:
        raise ConfigError(
            f"{replicas} engines leave {nodes - replicas * span} of {nodes} inference nodes idle",
            mend="lower layout.inference.nodes or raise its replicas",
        )
    return nodes, replicas


def _place_replicas(replicas: int, size: int, nodes: range, per_node: int) -> tuple[Placement, ...]:
    """Round robin over nodes, so that fewer engines than fit are spread; an engine over several nodes has them alone."""
    span = max(1, size // per_node)
    placements = []
    for index in range(replicas):
        if span > 1:
            first = index * span
            placements.append(Placement(tuple(nodes[first : first + span]), tuple(range(per_node))))
        else:
            node, slot = nodes[index % len(nodes)], index // len(nodes)
            placements.append(Placement((node,), tuple(range(slot * size, (slot + 1) * size))))
    return tuple(placements)
