"""Group the nodes of a plan by kind: the components of a heterogeneous job.

The node of the CPU partition is the first component, because the supervisor runs there with the orchestrator. Other
components follow in the order of their first nodes. A job whose nodes are all of one kind has one component.
"""

from __future__ import annotations

import re

from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.plan.plan import ComponentPlan
from primerl_hpc.plan.pools import Pools
from primerl_hpc.plan.split import NodeSplit

_GPUS = re.compile(r"gpu(?::[A-Za-z][^:]*)?(?::(\d+))?")


def plan_components(layout: NodeSplit, profile: Profile) -> tuple[ComponentPlan, ...]:
    """Return the components in SLURM's order."""
    pools = Pools(profile)
    found = []
    if layout.cpu_node is not None:
        found.append(ComponentPlan(is_cpu=True, nodes=(layout.cpu_node,)))
    for node_type in dict.fromkeys(layout.node_types):
        pool = pools.by_type[node_type]
        nodes = tuple(index for index, other in enumerate(layout.node_types) if other == node_type)
        found.append(
            ComponentPlan(
                node_type=node_type,
                nodes=nodes,
                spare_nodes=pool.spare_nodes,
                accelerators_per_node=pool.per_node,
            )
        )
    return tuple(found)


def node_of(layout: NodeSplit, profile: Profile, index: int) -> Node:
    """Return the hardware of a node of the plan."""
    if index == layout.cpu_node:
        assert profile.cpu_partition is not None  # checked by the planner
        return Node(gpus=0, cores=profile.cpu_partition.cores)
    return Pools(profile).by_type[layout.node_types[index]].node


def allocated_gpus(components: tuple[ComponentPlan, ...], profile: Profile) -> int:
    """Return the GPUs that SLURM allocates to the job: those of the nodes, or else those among the generic resources
    that the profile requests (``gpu:8``, ``gpu:h100:8``)."""
    total = 0
    for component in components:
        if component.is_cpu:
            continue
        named = profile.node_types.get(component.node_type or "")
        resources = profile.scheduler.gres if named is None else named.gres
        gres = sum(int(match[1] or 1) for name in resources if (match := _GPUS.fullmatch(name)))
        gpus = Pools(profile).by_type[component.node_type].node.gpus or gres
        total += gpus * (len(component.nodes) + component.spare_nodes)
    return total


def gpus_to_check(component: ComponentPlan, profile: Profile) -> int:
    """Return the number of GPUs that the preflight expects on each node."""
    return 0 if component.is_cpu else Pools(profile).by_type[component.node_type].node.gpus
