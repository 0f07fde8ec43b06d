"""What SLURM gave this job: hosts in order, CPUs of a node, and when it takes them back. Read once, from the batch process.

Facts that shaped it: SLURM_JOB_END_TIME exists since 23.02 and tells the end that was planned at the start, while
`squeue` knows a limit that was changed since; SLURM_JOB_CPUS_PER_NODE reads ``64(x4)`` or ``64,32(x3)``.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.slurm import UNANSWERED, query_environ
from primerl_hpc.plan.types import Plan

ANSWER_S = 10.0
"""For one question: whoever asks has a run to look after, or a save that must not be held up."""
NO_ANSWER = 124
PATIENCE_S = 20.0
"""How long a SLURM that does not answer is tried again when a job ends: all of it inside `walltime.RESERVE_S`."""
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 4.0


@dataclass(frozen=True)
class Allocation:
    hosts: tuple[str, ...]
    """Host names by node index of the plan."""
    cpus_per_node: int
    """Of the smallest node: what every step may ask for."""
    has_gpus: bool
    gpus_per_node: int
    job_id: str
    spares: tuple[str, ...] = ()
    """Healthy hosts without work."""
    order: tuple[str, ...] = ()
    """All hosts as SLURM counts them: the tasks of a step follow this order, whatever order it is asked in."""
    cpu_host: str | None = None
    """Last of ``hosts`` in a heterogeneous job: alone in component 0, whose leader the batch process is."""
    cpu_host_cpus: int = 1
    job_ids: tuple[str, ...] = ()
    """One per component; steps are counted under their component's own."""

    def component(self, hosts: Sequence[str]) -> tuple[int | None, int]:
        """(component of a heterogeneous job, or None; CPUs that a task on these hosts may ask for)"""
        if self.cpu_host is None:
            return None, self.cpus_per_node
        return (0, self.cpu_host_cpus) if hosts[0] == self.cpu_host else (1, self.cpus_per_node)

    def by_component(self, hosts: Iterable[str]) -> list[list[str]]:
        """One step cannot cross components: hosts that one may cover, in SLURM's order."""
        found: dict[int | None, list[str]] = {}
        for host in self.in_order(hosts):
            found.setdefault(self.component([host])[0], []).append(host)
        return list(found.values())

    def hosts_of(self, nodes: Iterable[int]) -> list[str]:
        """Host of each task of a step over these nodes of the plan."""
        return self.in_order([self.hosts[node] for node in nodes])

    def in_order(self, hosts: Iterable[str]) -> list[str]:
        return sorted(hosts, key=self.order.index) if self.order else list(hosts)

    def without(self, bad: Collection[str]) -> Allocation | None:
        """With a spare in place of every host in ``bad``; None when there are too few spares."""
        spares = [host for host in self.spares if host not in bad]
        lacking = [host for host in self.hosts if host in bad]
        if len(lacking) > len(spares):
            return None
        instead = dict(zip(lacking, spares, strict=False))
        return replace(
            self,
            hosts=tuple(instead.get(host, host) for host in self.hosts),
            spares=tuple(spares[len(lacking) :]),
        )


def read_allocation(plan: Plan, environ: Mapping[str, str] | None = None) -> Allocation:
    """Raises SchedulerError outside a job."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    environ = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in environ:
        raise SchedulerError(
            "this run was compiled for SLURM and this is no SLURM job", mend="sbatch launch/job.sbatch"
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
    )


def _heterogeneous(plan: Plan, environ: Mapping[str, str]) -> Allocation:
    """Component 1 first, as the plan counts: its CPU node is the last one."""
    from submitit.slurm.slurm import _parse_node_list

    def of(name: str, component: int) -> str:
        try:
            return environ[f"{name}_HET_GROUP_{component}"]
        except KeyError:
            raise SchedulerError(
                f"the plan wants a heterogeneous job, and {name}_HET_GROUP_{component} is not set",
                mend="sbatch launch/job.sbatch",
            ) from None

    (cpu_host,) = _parse_node_list(of("SLURM_JOB_NODELIST", 0))
    others = tuple(_parse_node_list(of("SLURM_JOB_NODELIST", 1)))
    num_others = len(plan.nodes) - 1
    return Allocation(
        hosts=(*others[:num_others], cpu_host),
        cpus_per_node=smallest(of("SLURM_JOB_CPUS_PER_NODE", 1)),
        has_gpus=plan.accelerator == "gpu",
        gpus_per_node=plan.accelerators_per_node,
        job_id=environ["SLURM_JOB_ID"],
        spares=others[num_others:],
        order=(*others, cpu_host),
        cpu_host=cpu_host,
        cpu_host_cpus=smallest(of("SLURM_JOB_CPUS_PER_NODE", 0)),
        job_ids=(of("SLURM_JOB_ID", 0), of("SLURM_JOB_ID", 1)),
    )


def smallest(counts: str) -> int:
    """``64,32(x3)`` → 32"""
    return min((int(number) for number in re.findall(r"(?:^|,)(\d+)", counts)), default=1)


async def came_together(allocation: Allocation) -> bool:
    """Whether the components of a heterogeneous job went through the queue together; True for any other job.

    SLURM puts a component whose first node is lost back into the queue alone. The other one goes on meanwhile, with the
    processes of the attempt before and a walltime that ends earlier. Its start lies before the requeue of the lost one,
    while components that start together do so after the last of them was submitted or requeued.
    """
    if allocation.cpu_host is None:
        return True
    _, said = await insist(
        *("squeue", "--noheader", f"--jobs={allocation.job_id}", "--format=%S %V"),
        environment={"SLURM_TIME_FORMAT": "%s"},
    )
    starts, submits = said.split()[::2], said.split()[1::2]
    if not all(word.isdigit() for word in (*starts, *submits)):
        return True  # SLURM does not say
    return min(map(int, starts), default=0) >= max(map(int, submits), default=0)


async def seconds_left(job_id: str) -> float | None:
    """Until the walltime ends the job; infinite without a limit, None when SLURM does not say."""
    question = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%L")
    code, said = await run_slurm(*question)
    left = parse_time_left(said.split("\n")[0]) if code == 0 else None  # a line per component
    if left is None and code != 0 and (end := os.environ.get("SLURM_JOB_END_TIME")):
        return float(end) - time.time()
    return left


def parse_time_left(text: str) -> float | None:
    """``[days-]hours:minutes:seconds`` with the larger ones left out, or UNLIMITED, as squeue's %L prints it."""
    if text.strip() == "UNLIMITED":
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


async def run_slurm(
    *command: str, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> tuple[int, str]:
    """Exit code (`NO_ANSWER`: none in time) and everything a SLURM command printed.

    ``environment``: on top of our own, without a person's formats and filters; ``timeout_s``: default, `ANSWER_S`.
    """
    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    environ = query_environ(os.environ) | dict(environment or {})
    try:
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environ
        )
    except OSError as error:
        return 127, str(error)
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await child.communicate()
    except TimeoutError:
        child.kill()
        await child.wait()
        return NO_ANSWER, f"{command[0]} did not answer within {timeout_s} s"
    # not strip(): it would take the separator behind an empty last field for white space
    return child.returncode or 0, output.decode(errors="replace").strip(" \n")


def is_answer(code: int, said: str) -> bool:
    """Whether SLURM said something, be it a refusal. A command that dies of a signal did not hear it: a requeue ends the
    processes of the job that asks for it, where SLURM knows them by their parents (proctrack/linuxproc)."""
    return code == 0 or (0 < code != NO_ANSWER and not UNANSWERED.search(said))


async def ask(*command: str) -> str | None:
    """What SLURM answers, "" for a refusal; None when it does not answer."""
    code, said = await run_slurm(*command)
    if not is_answer(code, said):
        return None
    return said if code == 0 else ""


async def insist(*command: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """As `run_slurm`, tried again for `PATIENCE_S` while SLURM does not answer: for what may be done twice."""
    deadline, pause_s = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        code, said = await run_slurm(*command, environment=environment, timeout_s=min(ANSWER_S, left_s))
        if is_answer(code, said) or time.monotonic() + pause_s > deadline:
            return code, said
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
