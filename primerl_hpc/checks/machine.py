"""Facts of one node: names, network, scratch, memory, limits, versions of packages, and the commands of the site.

Each function takes the `Subject` of the table and yields findings.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from primerl_hpc.checks.findings import Finding, bad, judged, ok, warn
from primerl_hpc.checks.node import COMMAND_S, versions_of
from primerl_hpc.checks.table import Subject
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.locks import IN_MEMORY, filesystem_of
from primerl_hpc.common.node.limits import RAISED, raise_limits
from primerl_hpc.run.access.ownership import writable_by_others
from primerl_hpc.run.access.private_tmp import delete_abandoned, expand
from primerl_hpc.run.ports import address_of, listen_host, suffixed_address

GIB = 2**30
LONGEST_SCRATCH = 107 - 26 - 37
"""Paths of Unix sockets have at most 107 bytes. The run's folder adds up to 26 of them (`run/access/private_tmp.py`: a
name of 14 and the job's id), and an engine's socket in it 37 (a UUID)."""
MIN_LOCKED_GIB = 1
"""Below it, NCCL over RDMA cannot start; a higher limit may still be too low for many channels."""
MIN_FILES, MIN_PROCESSES, MIN_SHARED_GIB = 4096, 4096, 1
SHARED = Path("/dev/shm")


def request_is_visible(_: Subject) -> Iterator[Finding]:
    yield ok("the request is visible here")


def host_names(subject: Subject) -> Iterator[Finding]:
    names = dict.fromkeys(filter(None, (socket.gethostname(), subject.head)))
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except socket.gaierror as error:
            yield bad(f"{name} does not resolve: {error.strerror}", "add the name to DNS or /etc/hosts")
            return
    yield ok(f"resolved: {', '.join(names)}")


def network(subject: Subject) -> Iterator[Finding]:
    """Bind a port on the address that peers will use, and connect to it."""
    interface, suffix = subject.wants["interface"], subject.wants.get("host_suffix")
    if interface is None and suffix is not None:
        host = suffixed_address(suffix)
    else:
        host = address_of(interface) if interface else listen_host(2)
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            yield ok(f"ports of {host} can be bound and reached")


def scratch(subject: Subject) -> Iterator[Finding]:
    wants = subject.wants
    size_gib = wants.get("scratch_gib")
    yield from check_scratch(wants["scratch"], wants["min_scratch_gib"], wants.get("scratch_kind"), size_gib)


def check_scratch(
    folder: str | None, least_gib: float, kind: str | None = None, size_gib: float | None = None
) -> Iterator[Finding]:
    path = None
    try:
        path = expand(folder, os.environ) if folder else Path(tempfile.gettempdir())
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".preflight-") as file:
            file.write(b"x" * 4096)
            file.flush()
        deleted = delete_abandoned(path)
        space = shutil.disk_usage(path)
    except OSError as error:
        is_missing = path is not None and not path.is_dir()
        state = "does not exist and cannot be created" if is_missing else "is not writable"
        hint = "set scratch in the profile to a writable node-local folder with enough space"
        yield bad(f"{path or folder} {state}: {error.strerror}", hint)
        return
    filesystem = filesystem_of(path)
    disk_hint = "set scratch.kind of the profile to ram, or choose a folder on a disk"
    if kind == "disk" and filesystem in IN_MEMORY:
        yield bad(f"{path} is in memory ({filesystem}), but the profile describes a disk", disk_hint)
        return
    if folder and kind is None and filesystem in IN_MEMORY:
        yield warn(f"{path} is in memory ({filesystem}): its files may count as memory of the job", disk_hint)
    if size_gib is not None and space.total < 0.9 * size_gib * GIB:
        message = f"{path} has {space.total / GIB:,.0f} GiB in total, {size_gib:g} in the profile"
        yield warn(message, "correct scratch.size_gib")
    if (shared := writable_by_others(path)) is not None:
        yield warn(
            f"other users can rename the entries of {shared}, which has no sticky bit: they could replace files of a "
            "run, so bundles are not unpacked there, and what killed runs left is not deleted",
            f"set scratch of the profile to another folder, or ask the site for chmod +t {shared}",
        )
    if folder and len(os.fsencode(path)) > LONGEST_SCRATCH:
        message = f"{path} is longer than {LONGEST_SCRATCH} bytes: paths of sockets in it may be too long"
        yield warn(message, "set scratch of the profile to a shorter path")
    where = f"{path} ({filesystem})" if folder and filesystem else f"{path}"
    left = f"; folders of killed runs deleted: {len(deleted)}" if deleted else ""
    yield judged(
        space.free >= least_gib * GIB,
        f"{where} has {space.free / GIB:,.1f} GiB free, required {least_gib:g}{left}",
        "set scratch in the profile to a writable node-local folder with enough space",
    )


def memory(subject: Subject) -> Iterator[Finding]:
    least_gib = subject.wants["min_memory_gib"]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    hint = "other processes use the node's memory: ask the site, or lower preflight.min_memory_gib"
    message = f"{free_kib / 2**20:,.1f} GiB available, required {least_gib:g}"
    yield judged(free_kib / 2**20 >= least_gib, message, hint)


def limits(subject: Subject) -> Iterator[Finding]:
    """Check what a process may lock, open and start: on a node after `raise_limits`, as every step of a run."""
    if subject.is_node:
        raise_limits()
    locked, files, processes = (resource.getrlimit(limit)[0 if subject.is_node else 1] for limit in RAISED)
    uses_rdma = subject.is_node and subject.wants.get("uses_rdma", False) and has_rdma_device()
    free_gib = shutil.disk_usage(SHARED).free / GIB if SHARED.is_dir() else None
    yield from judge_limits(locked, files, processes, uses_rdma=uses_rdma, shared_gib=free_gib)


def has_rdma_device(folder: str = "/sys/class/infiniband") -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def judge_limits(
    locked: int, files: int, processes: int, *, uses_rdma: bool, shared_gib: float | None = None
) -> Iterator[Finding]:
    """``locked`` in bytes; ``shared_gib``: free space of /dev/shm, None without one.

    NCCL registers its buffers with the adapter, and fails if it may not lock them.
    """
    low: list[Finding] = []
    if uses_rdma and locked != resource.RLIM_INFINITY:
        message = f"locked memory is limited to {_amount(locked, GIB)} GiB (ulimit -H -l), but RDMA locks its buffers"
        hint = "ask the site for an unlimited memlock in SLURM's daemons (LimitMEMLOCK of slurmd)"
        low.append((bad if locked < MIN_LOCKED_GIB * GIB else warn)(message, hint))
    limited = (("open files", "n", files, MIN_FILES), ("processes", "u", processes, MIN_PROCESSES))
    for name, option, value, least in limited:
        if value != resource.RLIM_INFINITY and value < least:
            message = f"{name} are limited to {value:,} (ulimit -H -{option}), {least:,} are recommended"
            low.append(warn(message, "ask the site"))
    shared = "" if shared_gib is None else f"{shared_gib:,.1f} GiB free in {SHARED}"
    if shared_gib is not None and shared_gib < MIN_SHARED_GIB:
        low.append(warn(f"{shared}, {MIN_SHARED_GIB} is recommended", "ask the site"))
    yield from low
    if not low:
        amounts = (_amount(locked, GIB), _amount(files), _amount(processes))
        text = "locked memory {} GiB, open files {}, processes {}".format(*amounts)
        yield ok(", ".join(filter(None, (text, shared))))


def _amount(limit: int, unit: int = 1) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{limit / unit:,.3g}" if unit > 1 else f"{limit:,}"


def versions(subject: Subject) -> Iterator[Finding]:
    """Start every interpreter of the plan and compare its packages with the head's; a difference is a warning only."""
    for python, head in subject.versions.items():
        try:
            here = versions_of(python)
        except PrimerlError as error:
            yield bad(error.cause, "install it on a shared filesystem")
            continue
        names = sorted(name for name in head.keys() | here.keys() if head.get(name) != here.get(name))
        pairs = [f"{name} {here.get(name, 'none')}, head {head.get(name, 'none')}" for name in names]
        if pairs:
            yield warn(f"{python}: {', '.join(pairs)}", "use one environment on all nodes")
        else:
            yield ok(f"{python}: Python {here['python']} and {len(here) - 1} packages as on the head")


def health_commands(subject: Subject) -> Iterator[Finding]:
    """Run each command of the site in a shell; its last output line is the message."""
    for command in subject.wants["health_checks"]:
        done = subprocess.run(
            ["bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            check=False,
        )
        lines = done.stdout.strip().splitlines() or ["no output"]
        message = f"{command!r} exited with {done.returncode}: {lines[-1]}"
        yield judged(done.returncode == 0, message, "see preflight.health_checks")
