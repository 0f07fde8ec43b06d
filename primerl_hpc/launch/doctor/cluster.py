"""Check whether this cluster is ready for a run. Each result names the check, what was found, and a hint.

Runs SLURM's commands with the profile's settings; the final check is ``sbatch --test-only`` with the directives of a
run. Nothing is submitted.
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

from primerl_hpc.cluster.directives import options
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError, OccupiedError, SchedulerError
from primerl_hpc.common.findings import Finding
from primerl_hpc.launch.doctor.site import site_facts
from primerl_hpc.plan.container import batch_options
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.job import mib, own_templates
from primerl_hpc.render.requests import Request, cpu_request, type_request, with_walltimes
from primerl_hpc.run.access.ownership import check_parents
from primerl_hpc.slurm.command_lines import (
    COMMANDS,
    accounting_command,
    accounts_command,
    partitions_command,
    version_command,
)
from primerl_hpc.slurm.commands import COMMAND_TIMEOUT_S, UnansweredError, ask
from primerl_hpc.slurm.estimate import estimate_start
from primerl_hpc.slurm.jobs import SEPARATOR, minutes
from primerl_hpc.slurm.refusals import DOCTOR


def examine(profile: Profile, ask: Callable[[list[str]], str] = ask) -> Iterator[Finding]:
    """Yield the results in the order in which the checks depend on each other; stop if the rest cannot be checked."""
    yield Finding.judged("profile", True, _about(profile))
    yield _runs_folder(profile)
    yield from (Finding.judged(*fact) for fact in site_facts(profile))
    if profile.variants:
        yield Finding.judged("variants", True, f"--variant {' | '.join(profile.variants)}")
    if profile.scheduler.type == "local":
        yield Finding.judged("scheduler", True, "this machine; SLURM is not needed")
        return
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        yield Finding.judged(
            "SLURM commands",
            False,
            f"not in PATH: {', '.join(missing)}",
            "run this on a login node of the cluster",
        )
        return
    try:
        yield Finding.judged("SLURM", True, ask(version_command()).strip())
        parts = parts_of(profile)
        yield from _partitions(parts, ask)
        yield _accounting(ask)
        # an account that both parts use is checked once
        by_account = {part.scheduler.charged_account: part for part in reversed(parts)}
        for part in by_account.values():
            if part.scheduler.charged_account is not None:
                yield _account(part, ask)
    except SchedulerError as error:
        yield Finding.judged("controller", False, str(error), "try again; if it persists, ask the site")
        return
    for part in parts:
        yield _test_submission(part, profile)


def _about(profile: Profile) -> str:
    """Summarize what the profile claims about its site, for comparison with what is found."""
    node = profile.node
    facts = [f"{node.gpus} × {node.gpu or 'GPU'}" if node.gpus else "without GPUs"]
    facts += [f"{node.gpu_memory_gib:g} GiB each"] if node.gpus and node.gpu_memory_gib else []
    facts += [f"{node.cores} cores"] if node.cores > 1 else []
    facts += [f"{node.memory_gib:g} GiB"] if node.memory_gib else []
    verified = f"verified: {profile.verified}" if profile.verified else ""
    parts = (
        profile.description,
        f"nodes {'of ' if node.gpus else ''}{', '.join(facts)}",
        verified,
        profile.docs_url,
    )
    return f"{profile.name}: {'; '.join(filter(None, parts))}"


def _runs_folder(profile: Profile) -> Finding:
    hint = "set a shared, writable folder: runs_dir in the profile, or PRIMERL_RUNS_DIR"
    try:
        folder = profile.runs_folder()
    except ConfigError as error:
        return Finding.judged("run directory", False, error.cause, error.hint)
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-"):
            free_gib = shutil.disk_usage(existing).free / 2**30
    except OSError as error:
        return Finding.judged("run directory", False, f"{existing}: {error.strerror}", hint)
    message = f"{folder.resolve()}: {free_gib:,.0f} GiB free"
    try:
        check_parents(folder.resolve() / "run", is_allowed=profile.allow_shared_parent)
    except OccupiedError as error:
        return Finding.judged("run directory", False, f"{message}, but {error.cause}", error.hint)
    return Finding.judged("run directory", free_gib > 1, message, hint)


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
        yield Finding.judged("partition", True, message)
        return
    # (name, state, walltime, nodes, generic resources, CPUs, MB) by partition and node shape
    rows = [row for line in text.splitlines() if len(row := line.split(SEPARATOR)) == 7]
    for part in parts:
        yield from _partition(part, rows)


def _partition(part: Part, rows: list[list[str]]) -> Iterator[Finding]:
    """Check name, state, walltime, nodes and their shape against the claims of the profile."""
    what, wanted = part.what("partition"), part.scheduler.partition
    if wanted is None:
        yield Finding.judged(what, True, "the site's default (not set in the profile)")
        return
    matching = [row for row in rows if row[0] in wanted.split(",")]
    if not matching:
        hint = f"scheduler.partition: one of {', '.join(sorted({row[0] for row in rows}))}"
        yield Finding.judged(what, False, f"there is no {wanted}", part.hint(hint))
        return
    is_up = any(row[1] == "up" for row in matching)
    hint = part.hint("wait, or choose another scheduler.partition")
    yield Finding.judged(what, is_up, f"{wanted} is {matching[0][1]}", hint)
    requested, limits = minutes(part.scheduler.time), {row[2]: minutes(row[2]) for row in matching}
    if requested is not None and None not in limits.values():  # None: "infinite"
        longest, limit = max(limits.items(), key=lambda item: item[1] or 0)
        message = f"{part.scheduler.time} of at most {longest}"
        hint = f"lower scheduler.time to {longest}" + _longer_partition(part, requested, rows)
        yield Finding.judged(part.what("walltime"), requested <= (limit or 0), message, hint)
    count = sum(int(row[3]) for row in matching)
    message = f"{count} found, {part.nodes} in the profile"
    hint = f"lower {part.key}.nodes" if part.key.startswith("node_types.") else "lower nodes"
    yield Finding.judged(part.what("nodes"), count >= part.nodes, message, hint)
    cores = max(int(row[5].rstrip("+")) for row in matching)
    hint = part.hint(f"lower node.cores to {cores}")
    yield Finding.judged(part.what("cores of a node"), cores >= part.node.cores, f"{cores}", hint)
    yield from _memory(part, [row[6] for row in matching])
    yield from _gpu_types(part, [row[4] for row in matching])
    if part.node.gpus and part.scheduler.gpu_request == "gres":
        gpus = max(count_gpus(row[4]) for row in matching)
        hint = part.hint(f"set node.gpus to {gpus}, or use another scheduler.gpu_request")
        yield Finding.judged(
            part.what("GPUs of a node"), gpus >= part.node.gpus, f"{gpus} ({matching[0][4]})", hint
        )


def _memory(part: Part, sizes: list[str]) -> Iterator[Finding]:
    """Check what the profile claims about a node and what a job requests. ``sizes``: %m of sinfo."""
    memory_gib = max(int(re.sub(r"\D.*", "", size) or 0) for size in sizes) / 1024
    if memory_gib <= 1:
        return  # SLURM reports 1 MB where memory is not configured
    if part.node.memory_gib is not None:
        hint = part.hint(f"lower node.memory_gib to {memory_gib:.0f}")
        message = f"{memory_gib:.0f} GiB, {part.node.memory_gib:g} in the profile"
        yield Finding.judged(part.what("memory of a node"), memory_gib >= part.node.memory_gib, message, hint)
    if requested_gib := requested_mib(part.scheduler, part.node) / 1024:
        keys = ("memory_per_cpu", "memory_per_gpu")
        key = next((key for key in keys if getattr(part.scheduler, key) is not None), "memory")
        lower = f" to {memory_gib:.0f}G or less" if key == "memory" else ""
        hint = part.hint(f"lower scheduler.{key}{lower}, or set scheduler.memory to 0: all memory of a node")
        message = f"{requested_gib:g} GiB of at most {memory_gib:.0f} GiB"
        yield Finding.judged(part.what("requested memory"), memory_gib >= requested_gib, message, hint)


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
        hint = part.hint(f"scheduler.{key}: {types if most == 0 else f'request at most {most} of {wanted}'}")
        yield Finding.judged(part.what("GPU type"), most >= count, message, hint)


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
        return Finding.judged("accounting", True, f"not available ({error})", hint)
    return Finding.judged("accounting", True, "sacct answers")


def _account(part: Part, ask: Callable[[list[str]], str]) -> Finding:
    wanted, user, what = part.scheduler.charged_account, getpass.getuser(), part.what("account")
    try:
        accounts = sorted(set(ask(accounts_command(user)).split()))
    except SchedulerError as error:
        return Finding.judged(what, True, f"{wanted} (cannot be verified: {error})")
    known = ", ".join(accounts) or "none"
    hint = part.hint(f"set scheduler.account to one of {known}")
    return Finding.judged(what, wanted in accounts, f"{wanted}; yours: {known}", hint)


def _test_submission(part: Part, profile: Profile) -> Finding:
    """Test-submit a job of one node with all settings of the profile."""
    what = part.what("test submission")
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
        return Finding.judged(what, False, error.cause, part.hint(hint), error.details)
    return Finding.judged(what, True, f"one node of {found.partition} would start at {found.start}")
