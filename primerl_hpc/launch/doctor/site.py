"""Checks of a submission against the site of its profile: login host, architecture, shared folders, job limits.

check_site(plan, profile)       # raises ConfigError; returns warnings
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.site_schema import StorageFolder
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.launch.doctor.images import image_arch
from primerl_hpc.plan.plan import Plan
from primerl_hpc.runtime.job.environment_checks import elf_arch

_GIB = 2**30


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
    for python, process in pythons.items():
        if (found := elf_arch(python)) not in (None, arch):
            raise ConfigError(
                f"{python}, the interpreter of {process.name}, is built for {found}, but the nodes of profile "
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


def site_facts(profile: Profile) -> Iterator[tuple[str, bool, str, str]]:
    """Yield (fact, holds, what was found, hint) for the profile's facts that can be checked on this machine."""
    host = socket.gethostname()
    if profile.login.hosts:
        hint = f"log in to {' or '.join(profile.login.hosts)}, or correct login.hosts"
        yield "login host", profile.login.admits(host), host, hint
    if profile.node.arch is not None:
        here = platform.machine()
        message = f"nodes are {profile.node.arch}, this machine is {here}"
        is_fine = here == profile.node.arch or profile.software.host_python is not None
        yield "architecture", is_fine, message, "set software.default.python to an environment of the nodes"
    for name, folder in profile.storage.items():
        yield f"storage {name}", *describe_storage(folder), f"correct storage.{name} of the profile"
    names: list[str] = []
    for module in profile.software.module_names:
        found = find_module(module.name, profile.software.module_paths, names)
        names.append(module.name)
        if found is not None:
            message = "is available" if found else "is not available"
            yield f"module {module.name}", found or module.optional, message, "module avail lists them"


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
