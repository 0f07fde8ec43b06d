"""Is this cluster ready for a run? Each finding says what was looked at, what was found, and the mend.

Asks SLURM's own commands with the profile's own words; the last word is ``sbatch --test-only`` on the directives that a
run would have. Nothing is queued.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from primerl_hpc.cluster.schema import Node, Profile, Scheduler
from primerl_hpc.common.errors import ConfigError, SchedulerError
from primerl_hpc.common.slurm import COMMAND_TIMEOUT_S, SEPARATOR, ask, minutes
from primerl_hpc.launch.estimate import estimate_start
from primerl_hpc.launch.finding import Finding
from primerl_hpc.launch.prepare import runs_folder
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.job import cpu_component, own_templates


def examine(profile: Profile, ask: Callable[[list[str]], str] = ask) -> Iterator[Finding]:
    """Findings in the order in which they build on each other; stops where the rest cannot be asked."""
    yield Finding("profile", True, _about(profile))
    yield _runs_folder(profile)
    if profile.scheduler.type == "local":
        yield Finding("scheduler", True, "this machine, no SLURM needed")
        return
    missing = [
        name for name in ("sbatch", "srun", "squeue", "scancel", "scontrol") if shutil.which(name) is None
    ]
    if missing:
        yield Finding(
            "SLURM commands",
            False,
            f"not in PATH: {', '.join(missing)}",
            "run this on a login node of the cluster",
        )
        return
    try:
        yield Finding("SLURM", True, ask(["sinfo", "--version"]).strip())
        parts = parts_of(profile)
        rows = _partitions(ask)
        for part in parts:
            yield from _partition(part, rows)
        yield _accounting(ask)
        by_account = {
            part.scheduler.account: part for part in reversed(parts)
        }  # one that both name is asked once
        for part in by_account.values():
            if part.scheduler.account is not None:
                yield _account(part, ask)
    except SchedulerError as error:
        yield Finding("controller", False, str(error), "try again; if it stays so, ask the site")
        return
    for part in parts:
        yield _test_submission(part, profile)


def _about(profile: Profile) -> str:
    """What the profile says of its site, for whoever compares it with what is found."""
    node = profile.node
    facts = [f"{node.gpus} × {node.gpu or 'GPU'}" if node.gpus else "no GPUs"]
    facts += [f"{node.gpu_memory_gib:g} GiB each"] if node.gpus and node.gpu_memory_gib else []
    facts += [f"{node.cores} cores"] if node.cores > 1 else []
    facts += [f"{node.memory_gib:g} GiB"] if node.memory_gib else []
    verified = f"verified: {profile.verified}" if profile.verified else ""
    parts = (profile.description, f"nodes of {', '.join(facts)}", verified, profile.docs_url)
    return f"{profile.name}: {'; '.join(filter(None, parts))}"


def _runs_folder(profile: Profile) -> Finding:
    mend = "name a shared folder you may write: runs_dir in the profile, or PRIMERL_RUNS_DIR"
    try:
        folder = runs_folder(profile)
    except ConfigError as error:
        return Finding("run directory", False, error.cause, error.mend)
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-"):
            free_gib = shutil.disk_usage(existing).free / 2**30
    except OSError as error:
        return Finding("run directory", False, f"{existing}: {error.strerror}", mend)
    return Finding("run directory", free_gib > 1, f"{folder.resolve()}: {free_gib:,.0f} GiB free", mend)


@dataclass(frozen=True)
class Part:
    """Nodes of one shape that a run may ask for: those of ``scheduler``, or those of ``cpu_partition``."""

    scheduler: Scheduler
    node: Node
    nodes: int
    is_cpu: bool = False

    def what(self, name: str) -> str:
        return f"CPU {name}" if self.is_cpu else name

    def mend(self, words: str) -> str:
        """With the keys that say it for this part."""
        if not self.is_cpu:
            return words
        words = re.sub(
            r"\bscheduler\.(partition|account|qos|constraint|memory)\b", r"cpu_partition.\1", words
        )
        return words.replace("node.cores", "cpu_partition.cores")


def parts_of(profile: Profile) -> list[Part]:
    parts = [Part(profile.scheduler, profile.node, profile.nodes)]
    if profile.cpu_partition is not None:
        parts.append(Part(*cpu_component(profile), nodes=1, is_cpu=True))
    return parts


def _partitions(ask: Callable[[list[str]], str]) -> list[list[str]]:
    """(name, state, walltime, nodes, generic resources, CPUs) by partition and node shape."""
    fields = SEPARATOR.join(["%R", "%a", "%l", "%D", "%G", "%c"])
    rows = [row.split(SEPARATOR) for row in ask(["sinfo", "--noheader", f"--format={fields}"]).splitlines()]
    return [row for row in rows if len(row) == 6]


def _partition(part: Part, rows: list[list[str]]) -> Iterator[Finding]:
    """Name, state, walltime, nodes and their shape, as far as the profile claims something."""
    what, wanted = part.what("partition"), part.scheduler.partition
    if wanted is None:
        yield Finding(what, True, "the site's default (the profile names none)")
        return
    mine = [row for row in rows if row[0] in wanted.split(",")]
    if not mine:
        mend = f"scheduler.partition: one of {', '.join(sorted({row[0] for row in rows}))}"
        yield Finding(what, False, f"there is no {wanted}", part.mend(mend))
        return
    is_up = any(row[1] == "up" for row in mine)
    mend = part.mend("wait, or choose another scheduler.partition")
    yield Finding(what, is_up, f"{wanted} is {mine[0][1]}", mend)
    asked, limits = minutes(part.scheduler.time), {row[2]: minutes(row[2]) for row in mine}
    if asked is not None and None not in limits.values():  # "infinite" is none
        longest, limit = max(limits.items(), key=lambda each: each[1] or 0)
        said = f"{part.scheduler.time} of at most {longest}"
        yield Finding(
            part.what("walltime"), asked <= (limit or 0), said, f"lower scheduler.time to {longest}"
        )
    count = sum(int(row[3]) for row in mine)
    said = f"{count}, the profile says {part.nodes}"
    yield Finding(part.what("nodes"), count >= part.nodes, said, "lower nodes")
    cores = max(int(row[5].rstrip("+")) for row in mine)
    mend = part.mend(f"lower node.cores to {cores}")
    yield Finding(part.what("cores of a node"), cores >= part.node.cores, f"{cores}", mend)
    if part.node.gpus and part.scheduler.gpu_request == "gres":
        gpus = max(count_gpus(row[4]) for row in mine)
        said, mend = f"{gpus} ({mine[0][4]})", f"node.gpus: {gpus}, or another scheduler.gpu_request"
        yield Finding("GPUs of a node", gpus >= part.node.gpus, said, mend)


def count_gpus(gres: str) -> int:
    """``gpu:h100:8(S:0-1),nvme:2`` → 8"""
    return sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres))


def _accounting(ask: Callable[[list[str]], str]) -> Finding:
    mend = "ended jobs are known from the run directory only; nothing to do"
    try:
        ask(["sacct", "--noheader", "--allocations", "--jobs=1", "--format=JobID"])
    except SchedulerError as error:
        return Finding("accounting", True, f"not usable here ({error})", mend)
    return Finding("accounting", True, "sacct answers")


def _account(part: Part, ask: Callable[[list[str]], str]) -> Finding:
    wanted, user, what = part.scheduler.account, getpass.getuser(), part.what("account")
    try:
        words = [
            "sacctmgr",
            "--noheader",
            "--parsable2",
            "show",
            "associations",
            f"user={user}",
            "format=Account",
        ]
        mine = sorted(set(ask(words).split()))
    except SchedulerError as error:
        return Finding(what, True, f"{wanted} (cannot be looked up: {error})")
    known = ", ".join(mine) or "none"
    mend = part.mend(f"scheduler.account: one of {known}")
    return Finding(what, wanted in mine, f"{wanted}; yours: {known}", mend)


def _test_submission(part: Part, profile: Profile) -> Finding:
    """One node, with everything the profile asks for."""
    what = part.what("test submission")
    plan = SimpleNamespace(name="doctor", nodes=(0,), spare_nodes=0)
    directives = render_template(
        "partials/directives.j2",
        first=own_templates(profile),
        plan=plan,
        scheduler=part.scheduler,
        node=part.node,
        output=os.devnull,
    )
    try:
        found = estimate_start(f"#!/bin/bash\n{directives}\ntrue\n", timeout_s=COMMAND_TIMEOUT_S)
    except SchedulerError as error:
        mend = error.mend or "change what the profile asks for: the site refuses it"
        return Finding(what, False, error.cause, part.mend(mend))
    return Finding(what, True, f"one node of {found.partition} would start at {found.start}")
