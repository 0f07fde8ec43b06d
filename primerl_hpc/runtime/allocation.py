"""The job's SLURM allocation: hosts in order, CPUs per node. Read once, by the batch process.

SLURM_JOB_CPUS_PER_NODE reads ``64(x4)`` or ``64,32(x3)``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.plan.plan import Plan
from primerl_hpc.slurm.command_lines import queue_command, rows_of, topology_command
from primerl_hpc.slurm.commands import retry_slurm, run_slurm
from primerl_hpc.slurm.topology import by_switch, parse_topology


@dataclass(frozen=True)
class HostGroup:
    """Hosts of one component of a heterogeneous job."""

    hosts: frozenset[str]
    cpus_per_node: int
    """CPUs of the smallest node."""
    gpus_per_node: int
    job_id: str
    """Steps on these hosts are listed under this id."""


@dataclass(frozen=True)
class Allocation:
    hosts: tuple[str, ...]
    """Host names by node index of the plan."""
    cpus_per_node: int
    """CPUs of the smallest node: what every step may request."""
    has_gpus: bool
    gpus_per_node: int
    job_id: str
    spares: tuple[str, ...] = ()
    """Healthy hosts without assigned processes."""
    order: tuple[str, ...] = ()
    """All hosts in SLURM's order: the tasks of a step follow it, regardless of the order of --nodelist."""
    groups: tuple[HostGroup, ...] = ()
    """One per component of a heterogeneous job; empty: an ordinary job."""
    step_memory: bool = True
    """Steps request all memory of the job."""
    step_gres: bool = True
    """Steps without GPUs request none."""

    @property
    def all_hosts(self) -> tuple[str, ...]:
        return (*self.hosts, *self.spares)

    def component(self, hosts: Sequence[str]) -> tuple[int | None, int]:
        """Return (component of a heterogeneous job, else None; CPUs that a task on these hosts may request)."""
        index = self._group_of(hosts[0])
        return index, self.cpus_per_node if index is None else self.groups[index].cpus_per_node

    def gpus_of(self, hosts: Sequence[str]) -> int:
        """Return the number of accelerators of each of these hosts, which are in one component."""
        index = self._group_of(hosts[0])
        return self.gpus_per_node if index is None else self.groups[index].gpus_per_node

    def _group_of(self, host: str) -> int | None:
        return next((index for index, group in enumerate(self.groups) if host in group.hosts), None)

    def by_component(self, hosts: Iterable[str]) -> list[list[str]]:
        """Group hosts by component, in SLURM's order: a step cannot span components."""
        found: dict[int | None, list[str]] = {}
        for host in self.in_order(hosts):
            found.setdefault(self.component([host])[0], []).append(host)
        return list(found.values())

    def hosts_of(self, nodes: Iterable[int]) -> list[str]:
        """Return the host of each task of a step over these nodes of the plan."""
        return self.in_order([self.hosts[node] for node in nodes])

    def in_order(self, hosts: Iterable[str]) -> list[str]:
        return sorted(hosts, key=self.order.index) if self.order else list(hosts)

    def without(self, bad: Collection[str]) -> Allocation | None:
        """Replace every host in ``bad`` by a spare of its component; None if there are too few spares."""
        spares = [host for host in self.spares if host not in bad]
        replacements: dict[str, str] = {}
        for host in self.hosts:
            if host not in bad:
                continue
            spare = next((spare for spare in spares if self._group_of(spare) == self._group_of(host)), None)
            if spare is None:
                return None
            spares.remove(spare)
            replacements[host] = spare
        hosts = tuple(replacements.get(host, host) for host in self.hosts)
        return replace(self, hosts=hosts, spares=tuple(spares))


def read_allocation(plan: Plan, environ: Mapping[str, str] | None = None) -> Allocation:
    """Read the allocation from the job's environment. Raises SchedulerError outside of a job."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in environ:
        raise SchedulerError(
            "this run was planned for SLURM, but the process is not part of a SLURM job",
            hint="submit it with: sbatch launch/job.sbatch",
        )
    if plan.is_heterogeneous:
        return _heterogeneous(plan, environ)
    hosts = tuple(SlurmJobEnvironment().hostnames)
    return Allocation(
        hosts=hosts[: len(plan.nodes)],
        cpus_per_node=smallest(environ.get("SLURM_JOB_CPUS_PER_NODE", "1")),
        has_gpus=plan.accelerator == "gpu",
        gpus_per_node=plan.accelerators_per_node,
        job_id=environ["SLURM_JOB_ID"],
        spares=hosts[len(plan.nodes) :],
        order=hosts,
        step_memory=plan.step_memory,
        step_gres=plan.step_gres,
    )


def _heterogeneous(plan: Plan, environ: Mapping[str, str]) -> Allocation:
    """Assign the hosts of each component to the plan's nodes of that component."""
    from submitit.slurm.slurm import _parse_node_list

    def of(name: str, component: int) -> str:
        try:
            return environ[f"{name}_HET_GROUP_{component}"]
        except KeyError:
            raise SchedulerError(
                f"the plan requires a heterogeneous job of {len(plan.components)} components, but "
                f"{name}_HET_GROUP_{component} is not set",
                hint="submit it with: sbatch launch/job.sbatch",
            ) from None

    groups, order, spares = [], [], []
    host_of_node: dict[int, str] = {}
    for index, component in enumerate(plan.components):
        hosts = _parse_node_list(of("SLURM_JOB_NODELIST", index))
        host_of_node |= dict(zip(component.nodes, hosts, strict=False))
        spares += hosts[len(component.nodes) :]
        order += hosts
        cpus = smallest(of("SLURM_JOB_CPUS_PER_NODE", index))
        accelerators = component.accelerators_per_node
        groups.append(HostGroup(frozenset(hosts), cpus, accelerators, of("SLURM_JOB_ID", index)))
    return Allocation(
        hosts=tuple(host_of_node[node.index] for node in plan.nodes),
        cpus_per_node=min(group.cpus_per_node for group in groups),
        has_gpus=plan.accelerator == "gpu",
        gpus_per_node=plan.accelerators_per_node,
        job_id=environ["SLURM_JOB_ID"],
        spares=tuple(spares),
        order=tuple(order),
        groups=tuple(groups),
        step_memory=plan.step_memory,
        step_gres=plan.step_gres,
    )


def near_each_other(
    allocation: Allocation, plan: Plan, switches: Mapping[str, tuple[int, ...]]
) -> Allocation:
    """Assign hosts to the plan's nodes so that neighbors in the plan share a switch (`slurm.topology`).

    A role then uses as few switches as possible. The first host stays the first, because this process runs there. The
    tasks of a step follow SLURM's order, so hosts of processes on several nodes do too, among themselves. Components of
    a heterogeneous job are left as they are.
    """
    if allocation.groups:
        return allocation
    hosts = by_switch(allocation.all_hosts, switches)
    num_nodes = len(allocation.hosts)
    for nodes in _spans(plan):
        for node, host in zip(nodes, allocation.in_order([hosts[node] for node in nodes]), strict=True):
            hosts[node] = host
    return replace(allocation, hosts=tuple(hosts[:num_nodes]), spares=tuple(hosts[num_nodes:]))


def _spans(plan: Plan) -> list[list[int]]:
    """Return the sets of nodes that processes on several nodes share; sets that overlap are one."""
    spans: list[set[int]] = []
    for phase in plan.phases:
        for process in phase.processes:
            if len(process.nodes) > 1:
                joined = set(process.nodes)
                for span in [span for span in spans if span & joined]:
                    spans.remove(span)
                    joined |= span
                spans.append(joined)
    return [sorted(span) for span in spans]


async def arrange_by_switch(allocation: Allocation, plan: Plan) -> Allocation:
    """Ask SLURM for the network's topology and apply `near_each_other`; without an answer nothing changes."""
    from submitit.slurm.slurm import _parse_node_list

    if len(allocation.all_hosts) <= 2 or allocation.groups:
        return allocation
    reply = await run_slurm(*topology_command())
    if reply.code != 0:
        return allocation
    return near_each_other(allocation, plan, parse_topology(reply.output, _parse_node_list))


def smallest(counts: str) -> int:
    """``64,32(x3)`` → 32"""
    return min((int(number) for number in re.findall(r"(?:^|,)(\d+)", counts)), default=1)


async def components_started_together(allocation: Allocation) -> bool:
    """True if all components of a heterogeneous job were started together; also True for any other job.

    SLURM requeues only the component whose first node is lost. The others continue, with the processes of the
    previous attempt and a walltime that ends earlier. Its start time is before the requeue of the lost component, while
    components that start together do so after the last of them was submitted or requeued.
    """
    if not allocation.groups:
        return True
    reply = await retry_slurm(
        *queue_command(allocation.job_id, "%S", "%V"), environment={"SLURM_TIME_FORMAT": "%s"}
    )
    rows = rows_of(allocation.job_id, reply.output, 2) if reply.code == 0 else []
    if not all(time.isdigit() for row in rows for time in row):
        return True  # squeue returned no timestamps: unknown
    starts, submits = ([int(row[column]) for row in rows] for column in (0, 1))
    return min(starts, default=0) >= max(submits, default=0)
