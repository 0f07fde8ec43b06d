"""Start further steps in the job of a running run: ``srun --overlap`` on the nodes of a role, or on all nodes.

    (place,) = find_places(run, role="trainer")
    subprocess.run(step_command(place, ["nvidia-smi"], name="exec"), env=step_environ())

A run on this machine needs no step: the command itself is returned.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from primerl_hpc.common import env
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.package import package_folder
from primerl_hpc.observe.log_files import LogFiles
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.access.ownership import check_may_change
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.command_lines import srun_command
from primerl_hpc.slurm.commands import UnknownJobError, ask
from primerl_hpc.slurm.jobs import parse_squeue, squeue_command

_KEPT_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS")
"""Variables of SLURM that locate the cluster; the others describe the job in which the user's shell may be."""


@dataclass(frozen=True)
class Place:
    """Nodes of one job, on which a step can start."""

    job_id: str | None
    """None: this machine."""
    hosts: tuple[str, ...]
    component: int | None = None
    """Component of a heterogeneous job; None: an ordinary job."""
    has_memory: bool = True
    """Steps request all memory of the job."""
    mpi: tuple[str, ...] = ()
    """Option ``--mpi`` of the run's own steps."""


def find_places(run: RunDir, *, node: str | None = None, role: str | None = None) -> list[Place]:
    """Return the nodes of ``role`` (a role or a process), or ``node``; without both, the run's first node.

    A list has one entry, except for a role whose nodes are in several components or jobs. Raises NotFoundError if the
    run is not running, or has no such node or role; OccupiedError for the run of another user.
    """
    files, places = LogFiles(run), all_places(run)
    if role is not None:
        chosen = files.choose(role, node=node)
        hosts = [_short(file.node) for file in chosen if file.node]
        if not hosts:
            raise NotFoundError(f"the nodes of '{role}' are not known yet", hint=_status(run))
    else:
        hosts = [_short(node or places[0].hosts[0])]
    found = [_only(place, hosts) for place in places]
    if found := [place for place in found if place.hosts]:
        return found
    known = ", ".join(host for place in places for host in place.hosts)
    raise NotFoundError(f"this run has no node '{', '.join(hosts)}'", hint=f"its nodes: {known}")


def all_places(run: RunDir) -> list[Place]:
    """Return all nodes of a running run, with those of its elastic engines. Raises as `find_places`."""
    check_may_change(run, hint="only its owner can start steps in its job")
    snapshot = take_snapshot(run, JobWatcher().facts_of([run]))
    state, plan = read_json_or_none(run.state) or {}, read_json_or_none(run.plan) or {}
    hosts = LogFiles(run).hosts(snapshot.attempt)
    if not snapshot.state.is_alive or not hosts:
        raise NotFoundError(f"this run is {snapshot.state.value}: it has no processes", hint=_status(run))
    if plan.get("scheduler") != "slurm":
        if state.get("host") not in (None, socket.gethostname()):
            raise NotFoundError(f"this run is on {state['host']}", hint="run this command there")
        return [Place(None, (socket.gethostname(),))]
    job, has_memory = str(state.get("job_id") or snapshot.job["job_id"]), plan.get("step_memory", True)
    mpi = mpi_option(run)
    components = plan.get("components") or []
    if len(components) < 2:
        places = [Place(job, tuple(map(_short, hosts)), None, has_memory, mpi)]
    else:
        of_component = [
            tuple(_short(hosts[node]) for node in part["nodes"] if node < len(hosts)) for part in components
        ]
        places = [Place(job, own, index, has_memory, mpi) for index, own in enumerate(of_component) if own]
    return [*places, *_elastic_places(snapshot.job.get("engines_job_id"), mpi)]


def _elastic_places(job: str | None, mpi: tuple[str, ...]) -> list[Place]:
    """Return the node of each running engine with a job of its own."""
    if job is None:
        return []
    try:
        tasks = parse_squeue(ask(squeue_command([str(job)]))).values()
    except UnknownJobError:
        return []
    return [Place(task.job_id, (task.nodes,), mpi=mpi) for task in tasks if task.state == "RUNNING"]


def mpi_option(run: RunDir) -> tuple[str, ...]:
    """Return the option ``--mpi`` of the plan's steps: with the cluster's default, srun could start a PMI server."""
    phases = (read_json_or_none(run.plan) or {}).get("phases", [])
    processes = [process for phase in phases for process in phase.get("processes", [])]
    words = processes[0].get("srun_args", []) if processes else []
    return tuple(word for word in words if word.startswith("--mpi="))


def _only(place: Place, hosts: Sequence[str]) -> Place:
    kept = tuple(host for host in place.hosts if host in hosts)
    return replace(place, hosts=kept)


def _short(host: str) -> str:
    return host.split(".", maxsplit=1)[0]


def _status(run: RunDir) -> str:
    return f"primerl-hpc status {shlex.quote(run.root.name)}"


def step_command(place: Place, command: Sequence[str], *, name: str, is_terminal: bool = False) -> list[str]:
    """Return the command that runs ``command`` once on each node of ``place``."""
    if place.job_id is None:
        return list(command)
    count = len(place.hosts)
    options = [
        f"--jobid={place.job_id}",
        "--overlap",
        "--quiet",
        f"--job-name={name}",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(place.hosts)}",
        *([] if place.component is None else [f"--het-group={place.component}"]),
        *(["--mem=0"] if place.has_memory else []),
        *place.mpi,
        *(["--pty"] if is_terminal else []),
        *(["--input=none"] if count > 1 else []),
    ]
    return srun_command(options, command)


def step_environ(**more: str) -> dict[str, str]:
    """Return this process's environment for `step_command`, without the variables of a job in which it may be."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SRUN_")) or name in _KEPT_OF_SLURM
    }
    return kept | more


def python_path() -> str:
    """Return PYTHONPATH with which this interpreter finds the package on any node, also from a checkout."""
    return env.join_pythonpath(str(package_folder().parent), os.environ.get(env.PYTHONPATH))
