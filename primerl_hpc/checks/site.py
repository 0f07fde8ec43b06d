"""Facts of a profile about its site: login host, architecture, shared folders, modules; `submit` refuses by some.

check_site(plan, profile)       # raises ConfigError; returns warnings
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from primerl_hpc.checks.findings import Finding, bad, judged, ok
from primerl_hpc.checks.images import image_arch
from primerl_hpc.checks.login import nearest
from primerl_hpc.checks.surroundings import foreign_programs
from primerl_hpc.checks.table import Subject
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.site_schema import StorageFolder
from primerl_hpc.common.errors import ConfigError, OccupiedError
from primerl_hpc.plan.plan import Plan
from primerl_hpc.run.access.ownership import check_parents

_GIB = 2**30


# -- before a submission ---------------------------------------------------------------------------


def check_site(plan: Plan, profile: Profile) -> list[str]:
    """Return warnings about the run directory's folder.

    Raises ConfigError for a machine from which the site does not accept jobs, and for interpreters and images that are
    built for another architecture than the nodes.
    """
    if profile.scheduler.type == "local":
        return []
    host = socket.gethostname()
    if not profile.login.admits(host):
        raise ConfigError(
            f"jobs of profile '{profile.name}' cannot be submitted from {host}",
            hint=f"log in to {' or '.join(profile.login.hosts)} (login.hosts of the profile)",
        )
    if profile.node.arch is not None:
        _check_arches(plan, profile, profile.node.arch)
    return list(_purge_warnings(plan, profile))


def _purge_warnings(plan: Plan, profile: Profile) -> Iterator[str]:
    folder = storage_of(Path(plan.run_dir), profile)
    if folder is not None and folder.purge_days is not None:
        yield (
            f"{plan.run_dir} is in {folder.path}, whose files the site deletes after {folder.purge_days} days without "
            "access; copy what you keep (primerl-hpc export)"
        )
    for part, holder in profile.held_parts.items():
        if holder.purge_days is not None:
            yield (
                f"{part} are kept in {holder.path}, whose files the site deletes after {holder.purge_days} days "
                "without access"
            )


def _check_arches(plan: Plan, profile: Profile, arch: str) -> None:
    processes = [process for phase in plan.phases for process in (*phase.processes, *phase.elastic)]
    pythons = {process.argv[0]: process for process in processes if process.container == "none"}
    for python, found in foreign_programs([*pythons], arch).items():
        raise ConfigError(
            f"{python}, the interpreter of {pythons[python].name}, is built for {found}, but the nodes of profile "
            f"'{profile.name}' are {arch}",
            location="software.default.python and software.roles of the profile",
            hint=f"create an environment on a {arch} node, and set its interpreter"
            + (f" (this machine is {platform.machine()})" if platform.machine() != arch else ""),
        )
    software = (profile.software.default, *profile.software.roles.values())
    for container in dict.fromkeys(role.container for role in software):
        if (found := image_arch(container)) not in (None, arch):
            raise ConfigError(
                f"{container.image} is built for {found}, but the nodes of profile '{profile.name}' are {arch}",
                location="software.default.container.image and software.roles of the profile",
                hint=f"build the image for {arch}",
            )


def storage_of(path: Path, profile: Profile) -> StorageFolder | None:
    """Return the innermost shared folder of the profile that contains ``path``."""
    found = [
        (len(root.parts), folder)
        for folder in profile.storage.values()
        if (root := folder.expanded_path) is not None and path.resolve().is_relative_to(root.resolve())
    ]
    return max(found, key=lambda item: item[0])[1] if found else None


# -- of doctor -------------------------------------------------------------------------------------


def about(subject: Subject) -> Iterator[Finding]:
    """Summarize what the profile claims about its site, for comparison with what is found."""
    profile, node = subject.profile, subject.profile.node
    facts = [f"{node.gpus} × {node.gpu or 'GPU'}" if node.gpus else "without GPUs"]
    facts += [f"{node.gpu_memory_gib:g} GiB each"] if node.gpus and node.gpu_memory_gib else []
    facts += [f"{node.cores} cores"] if node.cores > 1 else []
    facts += [f"{node.memory_gib:g} GiB"] if node.memory_gib else []
    nodes = f"nodes {'of ' if node.gpus else ''}{', '.join(facts)}"
    verified = f"verified: {profile.verified}" if profile.verified else ""
    parts = filter(None, (profile.description, nodes, verified, profile.docs_url))
    yield ok(f"{profile.name}: {'; '.join(parts)}")


def runs_folder(subject: Subject) -> Iterator[Finding]:
    profile = subject.profile
    folder = profile.runs_folder().resolve()
    existing = nearest(folder)
    hint = "set a shared, writable folder: runs_dir in the profile, or PRIMERL_RUNS_DIR"
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-"):
            free_gib = shutil.disk_usage(existing).free / _GIB
    except OSError as error:
        yield bad(f"{existing}: {error.strerror}", hint)
        return
    message = f"{folder}: {free_gib:,.0f} GiB free"
    try:
        check_parents(folder / "run", is_allowed=profile.allow_shared_parent)
    except OccupiedError as error:
        yield bad(f"{message}, but {error.cause}", error.hint)
    else:
        yield judged(free_gib > 1, message, hint)


def login_host(subject: Subject) -> Iterator[Finding]:
    login, host = subject.profile.login, socket.gethostname()
    if login.hosts:
        hint = f"log in to {' or '.join(login.hosts)}, or correct login.hosts"
        yield judged(login.admits(host), host, hint)


def storage(subject: Subject) -> Iterator[Finding]:
    for name, folder in subject.profile.storage.items():
        is_ok, message = describe_storage(folder)
        yield judged(is_ok, message, f"correct storage.{name} of the profile", f"storage {name}")


def modules(subject: Subject) -> Iterator[Finding]:
    software, names = subject.profile.software, list[str]()
    for module in software.module_names:
        found = find_module(module.name, software.module_paths, names)
        names.append(module.name)
        if found is not None:
            message = "is available" if found else "is not available"
            hint = "module avail lists them"
            yield judged(found or module.optional, message, hint, f"module {module.name}")


def variants(subject: Subject) -> Iterator[Finding]:
    if subject.profile.variants:
        yield ok(f"--variant {' | '.join(subject.profile.variants)}")


def find_module(name: str, paths: Sequence[str], earlier: Sequence[str] = ()) -> bool | None:
    """True if a login shell can load the module, by ``module is-avail``; None if it has no ``module`` command.

    ``earlier``: modules that are loaded before it. In a hierarchy they make further modules available.
    """
    lines = [f"module use {shlex.quote(path)}" for path in paths]
    lines += [f"module load {shlex.quote(module)}" for module in earlier]
    before = "".join(f"{line} >/dev/null 2>&1; " for line in lines)
    script = f"type module >/dev/null 2>&1 || exit 9; {before}module is-avail {shlex.quote(name)}"
    try:
        done = subprocess.run(
            ["bash", "-lc", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode == 9 else done.returncode == 0


def describe_storage(folder: StorageFolder) -> tuple[bool, str]:
    """Return (True if it exists and is writable, a description with its free space and its limits)."""
    path = folder.expanded_path
    if path is None:
        return False, f"{folder.path} contains a variable that is not set here"
    if not path.is_dir():
        return False, f"{path} does not exist"
    words = [f"{path}: {shutil.disk_usage(path).free / _GIB:,.0f} GiB free"]
    words += [f"quota {folder.quota_gib:g} GiB"] if folder.quota_gib else []
    words += [f"quota {folder.quota_files:,} files"] if folder.quota_files else []
    words += [f"files are deleted after {folder.purge_days} days"] if folder.purge_days else []
    return os.access(path, os.W_OK), ", ".join(words)
