"""Show how the supervisor will start the processes of a plan: the command and the variables of each role.

    for step in planned_steps(plan, profile.profile, python):
        print(step.title, step.command, step.env)

Hosts are not known before the job starts, so they are named ``node0``, ``node1``, … by their index in the plan.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.plan.plan import PhasePlan, Plan, ProcessPlan
from primerl_hpc.render.requests import requests_of
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation, HostGroup
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.srun import srun_command

WIDTH = 100


@dataclass(frozen=True)
class PlannedStep:
    """The first process of a role in a phase; the others differ by their index, nodes and accelerators."""

    phase: str
    name: str
    num_processes: int
    command: list[str]
    env: dict[str, str]
    """Variables of profile and recipe."""
    inherited_env: dict[str, str]
    """Variables whose values are taken from the job's environment: name → name in the job."""

    @property
    def title(self) -> str:
        others = f" and {self.num_processes - 1} more" if self.num_processes > 1 else ""
        return f"{self.name}{others}, phase {self.phase}"

    @property
    def text(self) -> str:
        """Variables and command as a shell would take them."""
        words = [shlex.quote(word) for word in self.command]
        lines, rest = [words[0]], words[1:]
        for word, following in zip(rest, [*rest[1:], ""], strict=True):
            starts_program = word == "--" or (following == "-m" and not lines[-1].endswith("--"))
            if starts_program or len(lines[-1]) + len(word) > WIDTH:
                lines.append(word)
            else:
                lines[-1] += f" {word}"
        taken = (f"{name}=${source}" for name, source in self.inherited_env.items())
        values = (f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        return "\n".join((*values, *taken, " \\\n  ".join(lines)))


def planned_steps(plan: Plan, profile: Profile, python: str) -> list[PlannedStep]:
    """Return one step for each role of each phase. ``python``: the interpreter of the supervisor."""
    allocation = _planned_allocation(plan, profile) if plan.scheduler == "slurm" else None
    return [
        _step(plan, phase, list(processes), allocation, python)
        for phase in plan.phases
        for _, processes in groupby(phase.processes, key=lambda process: process.role)
    ]


def _step(
    plan: Plan, phase: PhasePlan, processes: list[ProcessPlan], allocation: Allocation | None, python: str
) -> PlannedStep:
    first = processes[0]
    launch = Launch(first, RunDir(Path(plan.run_dir)), phase.name, 1, 0)
    command = list(first.argv) if allocation is None else srun_command(launch, allocation, python)
    return PlannedStep(phase.name, first.name, len(processes), command, first.env, first.inherited_env)


def _planned_allocation(plan: Plan, profile: Profile) -> Allocation:
    """Return the allocation that the plan requests."""
    requests = requests_of(plan, profile)
    groups = tuple(
        HostGroup(
            frozenset(f"node{node}" for node in component.nodes),
            request.node.cores,
            component.accelerators_per_node,
            job_id="",
        )
        for component, request in zip(plan.all_components, requests, strict=True)
    )
    return Allocation(
        hosts=tuple(f"node{node.index}" for node in plan.nodes),
        cpus_per_node=min(group.cpus_per_node for group in groups),
        has_gpus=plan.accelerator == "gpu",
        gpus_per_node=plan.accelerators_per_node,
        job_id="",
        groups=groups if plan.is_heterogeneous else (),
        step_memory=plan.step_memory,
        step_gres=plan.step_gres,
    )
