"""Assign nodes and accelerators (GPUs or CPU slots) to engines and trainer.

Order of the nodes: inference nodes, trainer nodes, then nodes of prefill, teacher and judge engines. A run that fits on
one node shares it. No accelerator is assigned twice, except with ``layout.colocated``. Roles with different
``node_type`` never share a node.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind, Role, counted
from primerl_hpc.plan.degrees import check_even_ranks
from primerl_hpc.plan.pools import NodePool, Pools, nodes_of
from primerl_hpc.recipe.schema.layout import EngineLayout
from primerl_hpc.recipe.schema.recipe import Recipe


@dataclass(frozen=True)
class Placement:
    """Nodes of the allocation, and the accelerators used on each of them."""

    nodes: tuple[int, ...]
    accelerators: tuple[int, ...]


@dataclass(frozen=True)
class NodeSplit:
    num_nodes: int
    replicas: tuple[Placement, ...]  # one per inference engine
    trainer: Placement | None
    head: int  # node of orchestrator, router and environment servers
    notes: tuple[str, ...]
    elastic: tuple[Placement, ...] = ()  # one per engine in a separate job
    cpu_node: int | None = None  # node of the CPU partition, after all others
    other_engines: dict[Role, tuple[Placement, ...]] = field(default_factory=dict)  # prefill, teacher, judge
    node_types: tuple[str | None, ...] = (None,)  # of each node, without the one of the CPU partition


@dataclass(frozen=True)
class _Request:
    """The recipe to place, the nodes that may be used, and the decisions so far."""

    recipe: Recipe
    pools: Pools
    needs_inference: bool
    needs_trainer: bool
    notes: list[str] = field(default_factory=list)

    @property
    def inference_pool(self) -> NodePool:
        return self.pools.of(self.recipe.layout.inference.node_type, "layout.inference")

    @property
    def trainer_pool(self) -> NodePool:
        return self.pools.of(self.recipe.layout.trainer.node_type, "layout.trainer")

    def pool_of(self, role: Role) -> NodePool:
        """Return the pool of prefill, teacher or judge engines."""
        return self.pools.of(self.recipe.engines_beside[role].node_type, _key(role))

    @property
    def used_pools(self) -> list[NodePool]:
        """The distinct pools of all roles in the job."""
        pools = [self.inference_pool] if self.needs_inference else []
        pools += [self.trainer_pool] if self.needs_trainer else []
        pools += [self.pool_of(role) for role in self.recipe.engines_beside]
        return list({pool.node_type: pool for pool in pools}.values())


def split(recipe: Recipe, profile: Profile) -> NodeSplit:
    """Return the placement of all engines and the trainer. Raises ConfigError if the profile has too few nodes."""
    layout = recipe.layout.inference
    if recipe.is_external:
        return NodeSplit(
            1, (), None, head=0, notes=("the model is served by an external server: no engines",)
        )
    needs_inference = recipe.has_engines and not layout.elastic
    request = _Request(recipe, Pools(profile), needs_inference, recipe.kind in (Kind.RL, Kind.SFT))
    if needs_inference:
        _check_replica(layout, request.inference_pool, "layout.inference")
    for role, engines in recipe.engines_beside.items():
        _check_replica(engines, request.pool_of(role), _key(role))
    elastic = _elastic(request, profile) if layout.elastic else ()
    if recipe.layout.colocated is not None:
        result = _split_colocated(request)
    else:
        result = _split_one_node(request) if _shares_one_node(request) else _split_nodes(request)
    _check_node_counts(request, result)
    result = replace(result, elastic=elastic, notes=tuple(request.notes))
    if recipe.layout.orchestrator.place != "cpu-partition" or not recipe.has_engines:
        return result
    cpu_node = result.num_nodes
    notes = (*result.notes, f"layout.orchestrator.place: node {cpu_node} is in the CPU partition")
    return replace(result, num_nodes=cpu_node + 1, head=cpu_node, cpu_node=cpu_node, notes=notes)


def _check_node_counts(request: _Request, result: NodeSplit) -> None:
    """Raise ConfigError if a pool has fewer nodes than the split uses."""
    for node_type, count in Counter(result.node_types).items():
        pool = request.pools.by_type[node_type]
        if count > pool.work_nodes:
            spares = f", {pool.spare_nodes} of them spare" if pool.spare_nodes else ""
            raise ConfigError(
                f"the recipe requires {count} nodes, {pool.owner} has {pool.total}{spares}",
                hint=_fewer_nodes(request, pool),
            )


def _fewer_nodes(request: _Request, pool: NodePool) -> str:
    """Return a hint with the keys that can be lowered."""
    recipe = request.recipe
    inference, trainer = recipe.layout.inference, recipe.layout.trainer
    requests: list[tuple[str, int | str, int]] = []  # key, value, minimum
    if request.needs_inference and request.inference_pool == pool:
        key = "replicas" if inference.nodes == "auto" else "nodes"
        requests.append((f"layout.inference.{key}", getattr(inference, key), 1))
    if request.needs_trainer and request.trainer_pool == pool:
        is_auto = trainer.nodes == "auto"
        key, minimum = ("ranks", pool.per_node) if is_auto else ("nodes", 1)
        requests.append((f"layout.trainer.{key}", getattr(trainer, key), minimum))
    requests += [
        (f"{_key(role)}.replicas", engines.replicas, 1)
        for role, engines in recipe.engines_beside.items()
        if request.pool_of(role) == pool
    ]
    lower = [key for key, value, minimum in requests if value != "auto" and int(value) > minimum]
    if lower:
        return f"lower {' or '.join(lower)}"
    if pool.work_nodes == 1 and len(request.used_pools) == 1:
        return (
            "remove layout.inference.nodes and layout.trainer.nodes so that all roles share the single node"
        )
    return "choose a profile with more nodes"


def _key(role: Role) -> str:
    return "layout.inference.prefill" if role == Role.PREFILL else f"{role.value}.layout"


def _elastic(request: _Request, profile: Profile) -> tuple[Placement, ...]:
    recipe, layout = request.recipe, request.recipe.layout.inference
    assert layout.replicas != "auto"  # the schema requires a number
    if recipe.kind != Kind.RL:
        raise ConfigError(
            f"layout.inference.elastic requires kind rl, but this recipe has kind {recipe.kind}"
        )
    if profile.scheduler.type != "slurm":
        raise ConfigError(
            f"profile '{profile.name}' is local, but elastic engines are SLURM jobs",
            hint="remove layout.inference.elastic",
        )
    if profile.software.of_role(Role.INFERENCE).container.kind == "pyxis":
        raise ConfigError(
            "elastic engines do not run as SLURM steps, which pyxis containers require",
            hint="use apptainer for inference",
        )
    size, per_node = layout.accelerators_per_replica, request.inference_pool.per_node
    if size > per_node:
        raise ConfigError(
            f"an elastic engine needs {size} accelerators, but has one node with {per_node}",
            hint="lower layout.inference.tensor_parallel or data_parallel",
        )
    request.notes.append(
        f"layout.inference.elastic: {counted(layout.replicas, 'engine')}, each in a separate job"
    )
    return (Placement((0,), tuple(range(size))),) * layout.replicas


def _check_replica(layout: EngineLayout, pool: NodePool, key: str) -> None:
    """Raise ConfigError for an engine larger than a node that does not use full nodes or splits a TP group."""
    per_node, size = pool.per_node, layout.accelerators_per_replica
    if size <= per_node:
        return
    facts = (
        f"one engine needs {size} accelerators (tensor_parallel {layout.tensor_parallel} × data_parallel "
        f"{layout.data_parallel}), a node of {pool.owner} has {per_node}"
    )
    if pool.work_nodes < -(-size // per_node):
        hint = f"lower {key}.tensor_parallel or data_parallel"
        raise ConfigError(f"{facts}, and only {pool.work_nodes} are available", hint=hint)
    if size % per_node:
        raise ConfigError(
            f"{facts}: an engine on several nodes must use full nodes",
            hint=f"make tensor_parallel × data_parallel a multiple of {per_node}",
        )
    if layout.data_parallel > 1 and per_node % layout.tensor_parallel:
        raise ConfigError(
            f"{facts}: a data-parallel rank of {layout.tensor_parallel} accelerators would span nodes",
            hint=f"use a tensor_parallel that divides {per_node}, or data_parallel 1 and more replicas",
        )


def _shares_one_node(request: _Request) -> bool:
    """True if the run fits on one node and neither node counts nor node types request separate nodes."""
    recipe, layout, pools = request.recipe, request.recipe.layout, request.used_pools
    if layout.inference.nodes != "auto" or layout.trainer.nodes != "auto" or len(pools) != 1:
        return False
    if pools[0].work_nodes == 1:
        return True
    ranks = layout.trainer.ranks if request.needs_trainer else 0
    replicas = layout.inference.replicas if request.needs_inference else 0
    if ranks == "auto" or replicas == "auto":
        return False
    others = sum(_other_accelerators(recipe).values())
    needed = ranks + replicas * layout.inference.accelerators_per_replica + others
    return needed <= pools[0].per_node


def _other_accelerators(recipe: Recipe) -> dict[Role, int]:
    """Return the number of accelerators of prefill, teacher and judge engines."""
    return {
        role: engines.replicas * engines.accelerators_per_replica
        for role, engines in recipe.engines_beside.items()
    }


def _split_one_node(request: _Request) -> NodeSplit:
    recipe, notes, (pool,) = request.recipe, request.notes, request.used_pools
    others = _other_accelerators(recipe)
    total = pool.per_node - sum(others.values())
    per_replica = recipe.layout.inference.accelerators_per_replica
    ranks = recipe.layout.trainer.ranks if request.needs_trainer else 0
    replicas = recipe.layout.inference.replicas if request.needs_inference else 0
    if ranks == "auto":
        reserved = 0 if replicas == 0 else (per_replica if replicas == "auto" else replicas * per_replica)
        ranks = max(1, min(total // 2, total - reserved) if replicas == "auto" else total - reserved)
        notes.append(f"layout.trainer.ranks: {ranks} of the node's {pool.per_node} accelerators")
    if replicas == "auto":
        replicas = max(1, (total - ranks) // per_replica)
        notes.append(f"layout.inference.replicas: {replicas} in addition to {counted(ranks, 'trainer rank')}")
    used = ranks + replicas * per_replica
    if used > total:
        parts = f"{replicas} engines × {per_replica} + {ranks} trainer ranks"
        parts += "".join(f" + {count} for {role.value}" for role, count in others.items())
        raise ConfigError(
            f"the recipe requires {used + sum(others.values())} accelerators ({parts}), "
            f"the single node of {pool.owner} has {pool.per_node}",
            hint=_fewer_accelerators(recipe, replicas, ranks, is_cpu=not pool.node.gpus),
        )
    engines = _in_one_node(replicas, per_replica, first=0)
    trainer = _in_one_node(1, ranks, first=replicas * per_replica)[0] if ranks else None
    placed: dict[Role, tuple[Placement, ...]] = {}
    for role, layout in recipe.engines_beside.items():
        placed[role] = _in_one_node(layout.replicas, layout.accelerators_per_replica, first=used)
        used += others[role]
    return NodeSplit(
        1, engines, trainer, head=0, notes=(), other_engines=placed, node_types=(pool.node_type,)
    )


def _fewer_accelerators(recipe: Recipe, replicas: int, ranks: int, *, is_cpu: bool) -> str:
    """Return a hint with the keys that can be lowered, and alternatives."""
    engines: dict[str, tuple[int, EngineLayout]] = {"layout.inference": (replicas, recipe.layout.inference)}
    engines |= {_key(role): (layout.replicas, layout) for role, layout in recipe.engines_beside.items()}
    lower = [f"{key}.replicas" for key, (count, _) in engines.items() if count > 1]
    lower += [f"{key}.tensor_parallel" for key, (_, layout) in engines.items() if layout.tensor_parallel > 1]
    lower += ["layout.trainer.ranks"] if ranks > 1 else []
    hints = [f"lower {' or '.join(lower)}"] if lower else []
    hints.append("raise node.cpu_slots of the profile" if is_cpu else "choose a profile with more")
    return ", or ".join(hints)


def _in_one_node(count: int, size: int, first: int) -> tuple[Placement, ...]:
    starts = range(first, first + count * size, size)
    return tuple(Placement((0,), tuple(range(start, start + size))) for start in starts)


def _split_nodes(request: _Request) -> NodeSplit:
    recipe = request.recipe
    trainer_nodes = _trainer_nodes(request) if request.needs_trainer else 0
    other_nodes = _other_nodes(request)
    inference_nodes, replicas = (
        _inference_nodes(request, trainer_nodes, other_nodes) if request.needs_inference else (0, 0)
    )
    size, pool = recipe.layout.inference.accelerators_per_replica, request.inference_pool
    engines = _place_replicas(replicas, size, range(inference_nodes), pool.per_node)
    node_types = [pool.node_type] * inference_nodes
    trainer = _place_trainer(request, inference_nodes, trainer_nodes) if trainer_nodes else None
    node_types += [request.trainer_pool.node_type] * trainer_nodes
    head = inference_nodes if recipe.layout.orchestrator.place == "trainer" and trainer_nodes else 0
    other_engines: dict[Role, tuple[Placement, ...]] = {}
    for role, layout in recipe.engines_beside.items():
        pool, first = request.pool_of(role), len(node_types)
        node_types += [pool.node_type] * other_nodes[role]
        nodes = range(first, len(node_types))
        size = layout.accelerators_per_replica
        other_engines[role] = _place_replicas(layout.replicas, size, nodes, pool.per_node)
    return NodeSplit(
        len(node_types),
        engines,
        trainer,
        head,
        notes=(),
        other_engines=other_engines,
        node_types=tuple(node_types),
    )


def _place_trainer(request: _Request, first: int, count: int) -> Placement:
    """Place the trainer on ``count`` nodes from node ``first``. Raises ConfigError for an uneven number of ranks."""
    ranks, per_node = request.recipe.layout.trainer.ranks, request.trainer_pool.per_node
    per_trainer_node = per_node if ranks == "auto" else ranks // count
    if ranks != "auto":
        check_even_ranks(ranks, count, per_node)
    return Placement(tuple(range(first, first + count)), tuple(range(per_trainer_node)))


def _other_nodes(request: _Request) -> dict[Role, int]:
    """Return the minimum number of nodes of prefill, teacher and judge, which are not shared."""
    nodes: dict[Role, int] = {}
    for role, layout in request.recipe.engines_beside.items():
        size, per_node = layout.accelerators_per_replica, request.pool_of(role).per_node
        nodes[role] = nodes_of(layout.replicas, size, per_node)
        request.notes.append(
            f"{role.value}: {nodes[role]} separate nodes for {counted(layout.replicas, 'engine')}"
        )
    return nodes


def _trainer_nodes(request: _Request) -> int:
    layout = request.recipe.layout.trainer
    if layout.nodes != "auto":
        return layout.nodes
    nodes = 1 if layout.ranks == "auto" else -(-layout.ranks // request.trainer_pool.per_node)
    request.notes.append(f"layout.trainer.nodes: {nodes}")
    return nodes


def _inference_nodes(request: _Request, trainer_nodes: int, other_nodes: dict[Role, int]) -> tuple[int, int]:
    """Return (nodes, replicas). ``other_nodes``: number of nodes of prefill, teacher and judge engines."""
    layout, pool = request.recipe.layout.inference, request.inference_pool
    per_node, size = pool.per_node, layout.accelerators_per_replica
    span, together = max(1, size // per_node), max(1, per_node // size)  # `together` engines on `span` nodes
    if layout.nodes == "auto":
        if layout.replicas == "auto":
            nodes = _free_inference_nodes(request, trainer_nodes, other_nodes, span)
        else:
            nodes = -(-layout.replicas // together) * span
            request.notes.append(f"layout.inference.nodes: {nodes} for {counted(layout.replicas, 'engine')}")
    else:
        nodes = layout.nodes
    most = nodes // span * together
    replicas = most if layout.replicas == "auto" else layout.replicas
    if replicas > most or nodes < span:
        raise ConfigError(
            f"{counted(max(replicas, 1), 'engine')} of {size} accelerators do not fit on {nodes} nodes of {per_node}",
            hint=f"at most {most} fit; lower layout.inference.replicas or raise layout.inference.nodes",
        )
    if replicas * span < nodes:
        raise ConfigError(
            f"{counted(replicas, 'engine')} would leave {nodes - replicas * span} of {nodes} inference nodes idle",
            hint="lower layout.inference.nodes or raise layout.inference.replicas",
        )
    return nodes, replicas


def _free_inference_nodes(
    request: _Request, trainer_nodes: int, other_nodes: dict[Role, int], span: int
) -> int:
    """Return the number of nodes of the engines' pool that no other role uses, a multiple of ``span``."""
    pool = request.inference_pool
    others = {"trainer": trainer_nodes} if request.trainer_pool == pool else {}
    others |= {role.value: count for role, count in other_nodes.items() if request.pool_of(role) == pool}
    taken = sum(others.values())
    nodes = max(span, (pool.work_nodes - taken) // span * span)
    names = " and ".join(others) if len(others) > 1 else f"the {next(iter(others))}" if others else ""
    rest = f"all but the {taken} of {names}" if others else f"all of {pool.owner}"
    request.notes.append(f"layout.inference.nodes: {nodes}, {rest}")
    return nodes


def _place_replicas(replicas: int, size: int, nodes: range, per_node: int) -> tuple[Placement, ...]:
    """Place engines round robin over nodes. An engine on several nodes does not share them."""
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


def _split_colocated(request: _Request) -> NodeSplit:
    """Place engines and trainer on the same accelerators of the same nodes."""
    layout, pool = request.recipe.layout, request.trainer_pool
    ranks, size = layout.trainer.ranks, layout.inference.accelerators_per_replica
    if size > pool.per_node:
        raise ConfigError(
            f"layout.colocated: an engine of {size} accelerators exceeds a node of {pool.owner}, which has "
            f"{pool.per_node}",
            hint="lower layout.inference.tensor_parallel",
        )
    wanted = [nodes for nodes in (layout.trainer.nodes, layout.inference.nodes) if nodes != "auto"]
    nodes = wanted[0] if wanted else pool.work_nodes if ranks == "auto" else -(-ranks // pool.per_node)
    trainer = _place_trainer(request, 0, nodes)
    together = len(trainer.accelerators) // size
    replicas = together * nodes if layout.inference.replicas == "auto" else layout.inference.replicas
    if not 0 < replicas <= together * nodes:
        raise ConfigError(
            f"layout.colocated: {counted(max(1, replicas), 'engine')} of {size} accelerators do not fit on the "
            f"trainer's {len(trainer.accelerators)} accelerators of {nodes} nodes",
            hint="lower layout.inference.replicas or tensor_parallel, or raise layout.trainer.ranks",
        )
    ranks = nodes * len(trainer.accelerators)
    request.notes.append(
        f"layout.colocated: {counted(replicas, 'engine')} and {counted(ranks, 'trainer rank')} use the same "
        "accelerators"
    )
    engines = _place_replicas(replicas, size, range(nodes), pool.per_node)
    return NodeSplit(nodes, engines, trainer, 0, notes=(), node_types=(pool.node_type,) * nodes)
