"""The requests of a job: for each component the number of nodes, its scheduler keys and the hardware of a node.

(request,) = requests_of(plan, profile)                    # an ordinary job
cpu, engines, trainer = requests_of(plan, profile)         # a heterogeneous job of three components
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from primerl_hpc.cluster.limits import shortest_time, walltime
from primerl_hpc.cluster.node_types import Node, NodeType
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.plan.plan import Plan


@dataclass(frozen=True)
class Request:
    """One component: what its ``#SBATCH`` lines contain."""

    scheduler: Scheduler
    node: Node
    num_nodes: int = 1
    """With spare nodes."""
    survives_node_loss: bool = False
    """True with spare nodes: SLURM must not end the job when a node is lost."""


def requests_of(plan: Plan, profile: Profile) -> tuple[Request, ...]:
    """Return the request of each component, in SLURM's order."""
    found = []
    for component in plan.all_components:
        if component.is_cpu:
            request = cpu_request(profile)
        else:
            request = type_request(profile, component.node_type)
        num_nodes = len(component.nodes) + component.spare_nodes
        has_spares = component.spare_nodes > 0
        found.append(replace(request, num_nodes=num_nodes, survives_node_loss=has_spares))
    first, *others = found
    # dependency, start time and mail are given once, in the leading component
    quiet = {"dependency": None, "begin": None, "mail_type": (), "mail_user": None}
    return (first, *(replace(other, scheduler=other.scheduler.model_copy(update=quiet)) for other in others))


def type_request(profile: Profile, node_type: str | None) -> Request:
    """Return the request of one node of a type of ``node_types``, or of the profile's ``node`` (None)."""
    if node_type is None:
        return Request(profile.requested, profile.node)
    node = profile.node_types[node_type]
    return Request(profile.scheduler.model_copy(update=_own_keys(node, profile.scheduler)), node)


def with_walltimes(requests: tuple[Request, ...], profile: Profile) -> tuple[Request, ...]:
    """Return the requests with the walltime of the site's limits for their size, if they have none.

    All components of a job have the shortest one.
    """
    times = [
        time
        for request in requests
        if (time := walltime(profile, request.scheduler, request.num_nodes, request.node.gpus)) is not None
    ]
    shortest = shortest_time(times)
    return tuple(
        replace(request, scheduler=request.scheduler.model_copy(update={"time": shortest}))
        if request.scheduler.time is None
        else request
        for request in requests
    )


def _own_keys(node: NodeType, common: Scheduler) -> dict[str, object]:
    """Return the scheduler keys that differ from ``common`` for a node type."""
    keys: dict[str, object] = {
        name: own for name in ("partition", "account", "qos") if (own := getattr(node, name)) is not None
    }
    # these keys of `scheduler` name features and nodes of its own partition
    keys |= {name: getattr(node, name) for name in ("constraint", "reservation", "gpu_type", "gres")}
    keys |= {"nodelist": None, "switches": None}
    if "memory" in node.model_fields_set:
        keys |= {"memory": node.memory, "memory_per_cpu": None, "memory_per_gpu": None}
    elif common.memory_per_cpu is None and common.memory_per_gpu is None:
        keys["memory"] = node.memory
    return keys


def cpu_request(profile: Profile) -> Request:
    """Return the request for the node of ``cpu_partition``, with the account, walltime and other keys of the run."""
    cpu_partition, common = profile.cpu_partition, profile.scheduler
    assert cpu_partition is not None
    kept = ("qos", "time", "dependency", "begin", "nice", "wckey")
    kept += ("comment", "mail_type", "mail_user", "signal_margin_s", "requeue")
    values = {name: getattr(common, name) for name in kept}
    values["account"] = common.charged_cpu_account
    values |= {
        "partition": cpu_partition.partition,
        "constraint": cpu_partition.constraint,
        "exclusive": cpu_partition.exclusive,
    }
    values |= {name: own for name in ("account", "qos") if (own := getattr(cpu_partition, name)) is not None}
    scheduler = Scheduler().model_copy(update={**values, "memory": cpu_partition.memory})
    return Request(scheduler, Node(gpus=0, cores=cpu_partition.cores))
