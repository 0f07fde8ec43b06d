"""Ask SLURM whether a run of the profile can start: partitions, accounting, accounts, and ``sbatch --test-only``.

Nothing is submitted. The final check has the directives of a run.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from primerl_hpc.checks.findings import Finding, judged, ok
from primerl_hpc.checks.table import Subject
from primerl_hpc.cluster.directives import options
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.plan.container import batch_options
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.job import mib, own_templates
from primerl_hpc.render.requests import Request, cpu_request, type_request, with_walltimes
from primerl_hpc.slurm.command_lines import (
    COMMANDS,
    accounting_command,
    accounts_command,
    partitions_command,
    version_command,
)
from primerl_hpc.slurm.commands import COMMAND_TIMEOUT_S, UnansweredError
from primerl_hpc.slurm.commands import ask as ask_slurm
from primerl_hpc.slurm.estimate import estimate_start
from primerl_hpc.slurm.jobs import SEPARATOR, minutes
from primerl_hpc.slurm.refusals import DOCTOR


def scheduler(subject: Subject) -> Iterator[Finding]:
    """Yield the results in the order in which they depend on each other; stop if the rest cannot be checked."""
    profile, ask = subject.profile, subject.ask or ask_slurm
    if profile.scheduler.type == "local":
        yield ok("this machine; SLURM is not needed")
        return
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        message, hint = f"not in PATH: {', '.join(missing)}", "run this on a login node of the cluster"
        yield judged(False, message, hint, "SLURM commands")
        return
    try:
        yield judged(True, ask(version_command()).strip(), check="SLURM")
        parts = parts_of(profile)
        yield from _partitions(parts, ask)
        yield _accounting(ask)
        # an account that both parts use is checked once
        by_account = {part.scheduler.charged_account: part for part in reversed(parts)}
        for part in by_account.values():
            if part.scheduler.charged_account is not None:
                yield _account(part, ask)
    except SchedulerError as error:
        yield judged(False, str(error), "try again; if it persists, ask the site", "controller")
        return
    for part in parts:
        yield _test_submission(part, profile)


@dataclass(frozen=True)
class Part:
    """Nodes of one shape that a run may request: those of ``scheduler``, ``cpu_partition`` or a node type."""

    request: Request
    nodes: int
    key: str = ""
    """Block of the profile; empty: ``scheduler`` and ``node``."""

    @property
    def scheduler(self) -> Scheduler:
        return self.request.scheduler

    @property
    def node(self) -> Node:
        return self.request.node

    def what(self, name: str) -> str:
        if self.key == "cpu_partition":
            return f"CPU {name}"
        return f"{self.key.removeprefix('node_types.')} {name}" if self.key else name

    def judged(self, name: str, is_ok: bool, message: str, hint: str = "", details: str = "") -> Finding:
        """Return the finding about this part, whose hint names its keys of the profile."""
        return judged(is_ok, message, self.hint(hint), self.what(name), details)

    def hint(self, text: str) -> str:
        """Return the hint with the profile keys of this part."""
        if not self.key:
            return text
        keys = "partition|account|qos|constraint|memory|reservation|gpu_type|gres"
        text = re.sub(rf"\bscheduler\.({keys})\b", rf"{self.key}.\1", text)
        return re.sub(r"\bnode\.(cores|gpus)\b", rf"{self.key}.\1", text)


def parts_of(profile: Profile) -> list[Part]:
    parts = [Part(type_request(profile, None), profile.nodes)]
    for name, node_type in profile.node_types.items():
        parts.append(Part(type_request(profile, name), node_type.nodes, f"node_types.{name}"))
    if profile.cpu_partition is not None:
        parts.append(Part(cpu_request(profile), 1, "cpu_partition"))
    return parts


def _partitions(parts: list[Part], ask: Callable[[list[str]], str]) -> Iterator[Finding]:
    """Raise UnansweredError. A site may hide its partitions (PrivateData); the test submission then decides."""
    fields = SEPARATOR.join(["%R", "%a", "%l", "%D", "%G", "%c", "%m"])
    try:
        text = ask(partitions_command(fields))
    except UnansweredError:
        raise
    except SchedulerError as error:
        if "denied" not in error.cause:
            raise
        message = f"this site does not show its partitions ({error.cause}): the test submission decides"
        yield judged(True, message, check="partition")
        return
    # (name, state, walltime, nodes, generic resources, CPUs, MB) by partition and node shape
    rows = [row for line in text.splitlines() if len(row := line.split(SEPARATOR)) == 7]
    for part in parts:
        yield from _partition(part, rows)


def _partition(part: Part, rows: list[list[str]]) -> Iterator[Finding]:
    """Check name, state, walltime, nodes and their shape against the claims of the profile."""
    wanted = part.scheduler.partition
    if wanted is None:
        yield part.judged("partition", True, "the site's default (not set in the profile)")
        return
    matching = [row for row in rows if row[0] in wanted.split(",")]
    if not matching:
        hint = f"scheduler.partition: one of {', '.join(sorted({row[0] for row in rows}))}"
        yield part.judged("partition", False, f"there is no {wanted}", hint)
        return
    is_up = any(row[1] == "up" for row in matching)
    hint = "wait, or choose another scheduler.partition"
    yield part.judged("partition", is_up, f"{wanted} is {matching[0][1]}", hint)
    requested, limits = minutes(part.scheduler.time), {row[2]: minutes(row[2]) for row in matching}
    if requested is not None and None not in limits.values():  # None: "infinite"
        longest, limit = max(limits.items(), key=lambda item: item[1] or 0)
        message = f"{part.scheduler.time} of at most {longest}"
        hint = f"lower scheduler.time to {longest}" + _longer_partition(part, requested, rows)
        yield part.judged("walltime", requested <= (limit or 0), message, hint)
    count = sum(int(row[3]) for row in matching)
    message = f"{count} found, {part.nodes} in the profile"
    hint = f"lower {part.key}.nodes" if part.key.startswith("node_types.") else "lower nodes"
    yield part.judged("nodes", count >= part.nodes, message, hint)
    cores = max(int(row[5].rstrip("+")) for row in matching)
    hint = f"lower node.cores to {cores}"
    yield part.judged("cores of a node", cores >= part.node.cores, f"{cores}", hint)
    yield from _memory(part, [row[6] for row in matching])
    yield from _gpu_types(part, [row[4] for row in matching])
    if part.node.gpus and part.scheduler.gpu_request == "gres":
        gpus = max(count_gpus(row[4]) for row in matching)
        hint = f"set node.gpus to {gpus}, or use another scheduler.gpu_request"
        yield part.judged("GPUs of a node", gpus >= part.node.gpus, f"{gpus} ({matching[0][4]})", hint)


def _memory(part: Part, sizes: list[str]) -> Iterator[Finding]:
    """Check what the profile claims about a node and what a job requests. ``sizes``: %m of sinfo."""
    memory_gib = max(int(re.sub(r"\D.*", "", size) or 0) for size in sizes) / 1024
    if memory_gib <= 1:
        return  # SLURM reports 1 MB where memory is not configured
    if part.node.memory_gib is not None:
        hint = f"lower node.memory_gib to {memory_gib:.0f}"
        message = f"{memory_gib:.0f} GiB, {part.node.memory_gib:g} in the profile"
        yield part.judged("memory of a node", memory_gib >= part.node.memory_gib, message, hint)
    if requested_gib := requested_mib(part.scheduler, part.node) / 1024:
        keys = ("memory_per_cpu", "memory_per_gpu")
        key = next((key for key in keys if getattr(part.scheduler, key) is not None), "memory")
        lower = f" to {memory_gib:.0f}G or less" if key == "memory" else ""
        hint = f"lower scheduler.{key}{lower}, or set scheduler.memory to 0: all memory of a node"
        message = f"{requested_gib:g} GiB of at most {memory_gib:.0f} GiB"
        yield part.judged("requested memory", memory_gib >= requested_gib, message, hint)


def requested_mib(scheduler: Scheduler, node: Node) -> float:
    """Return the memory that a job requests on each node; 0: all of it, or the partition's default."""
    if scheduler.memory_per_cpu is not None:
        return mib(scheduler.memory_per_cpu) * node.cores
    if scheduler.memory_per_gpu is not None:
        return mib(scheduler.memory_per_gpu) * node.gpus
    return mib(scheduler.memory or "0")


def _gpu_types(part: Part, resources: list[str]) -> Iterator[Finding]:
    """Check that some nodes have as many GPUs of each type that the job names. ``resources``: %G of sinfo."""
    present = [gpus_by_type(text) for text in resources]
    for wanted, count in requested_gpus(part.scheduler, part.node).items():
        if not wanted:
            continue
        most = max(types.get(wanted, 0) for types in present)
        known = sorted({name for types in present for name in types if name})
        message = f"{wanted}:{count} requested; nodes have {', '.join(dict.fromkeys(resources))}"
        key = "gpu_type" if part.scheduler.gpu_type is not None else "gres"
        types = f"name one of {', '.join(known)}" if known else "name no type: the site's GPUs have none"
        hint = f"scheduler.{key}: {types if most == 0 else f'request at most {most} of {wanted}'}"
        yield part.judged("GPU type", most >= count, message, hint)


def requested_gpus(scheduler: Scheduler, node: Node) -> dict[str, int]:
    """Return the GPUs that a job requests on a node, by type in lower case; "" for those of any type."""
    values = dict(options(scheduler, node))
    found = gpus_by_type(values.get("gres") or "")
    for name in ("gpus", "gpus-per-node", "gpus-per-task"):
        if (text := values.get(name)) is not None:
            kind, _, count = text.rpartition(":")
            found[kind.lower()] = int(count)
    return found


def gpus_by_type(gres: str) -> dict[str, int]:
    """``gpu:H100:8(S:0-1),nvme:2`` → {"h100": 8}; "" is the type of GPUs without one."""
    found: dict[str, int] = {}
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *more = item.split(":")
        if name == "gpu":
            count = int(more.pop()) if more and more[-1].isdigit() else 1
            kind = more[0].lower() if more else ""
            found[kind] = found.get(kind, 0) + count
    return found


def _longer_partition(part: Part, requested: float, rows: list[list[str]]) -> str:
    """Return a hint that names a partition whose nodes have the GPUs of this part and which admits its walltime."""
    for name, state, limit, _, gres, *_ in rows:
        longest = minutes(limit)
        if state == "up" and (longest is None or longest >= requested) and count_gpus(gres) >= part.node.gpus:
            return f", or use {name}, which admits it (scheduler.partition)"
    return ""


def count_gpus(gres: str) -> int:
    """``gpu:h100:8(S:0-1),nvme:2`` → 8"""
    return sum(gpus_by_type(gres).values())


def _accounting(ask: Callable[[list[str]], str]) -> Finding:
    hint = "ended jobs are known from the run directory only; nothing to fix"
    try:
        ask(accounting_command(["1"], "--allocations", "--format=JobID"))
    except SchedulerError as error:
        return judged(True, f"not available ({error})", hint, "accounting")
    return judged(True, "sacct answers", check="accounting")


def _account(part: Part, ask: Callable[[list[str]], str]) -> Finding:
    wanted, user = part.scheduler.charged_account, getpass.getuser()
    try:
        accounts = sorted(set(ask(accounts_command(user)).split()))
    except SchedulerError as error:
        return part.judged("account", True, f"{wanted} (cannot be verified: {error})")
    known = ", ".join(accounts) or "none"
    hint = f"set scheduler.account to one of {known}"
    return part.judged("account", wanted in accounts, f"{wanted}; yours: {known}", hint)


def _test_submission(part: Part, profile: Profile) -> Finding:
    """Test-submit a job of one node with all settings of the profile."""
    (request,) = with_walltimes((part.request,), profile)
    directives = render_template(
        "partials/directives.j2",
        first=own_templates(profile),
        plan=SimpleNamespace(name="doctor", nodes=(0,), spare_nodes=0),
        requests=(request,),
        scheduler=request.scheduler,
        node=part.node,
        output=os.devnull,
        batch_options=batch_options(profile.software.default.container),
    )
    try:
        found = estimate_start(f"#!/bin/bash\n{directives}\ntrue\n", timeout_s=COMMAND_TIMEOUT_S)
    except SchedulerError as error:
        hint = error.hint.removesuffix(DOCTOR) or "change the settings in the profile that the site refuses"
        return part.judged("test submission", False, error.cause, hint, error.details)
    return part.judged("test submission", True, f"one node of {found.partition} would start at {found.start}")
