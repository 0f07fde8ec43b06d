"""CPU time by role of a local run, from /proc: `CpuByRole`, and profiles by role with py-spy."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_API_SERVER, _ENGINE_CORE = "api_server", "engine_core"
_NAMES = {"inference": _API_SERVER}
PROFILE_RATE_HZ = 200
ALWAYS = 0.95
"""Functions in this share of samples are not listed: they are the path to the event loop."""


def role_of(words: list[str], parent: str | None) -> str | None:
    """Return the role of a process with this command line; None if it does not belong to one.

    ``parent``: the role of its parent process. A child of an API server is its engine.
    """
    for word in words:
        if word.startswith("primerl_hpc.roles."):
            name = word.removeprefix("primerl_hpc.roles.")
            return _NAMES.get(name, name)
        if word.startswith(("primerl_hpc.trainer", "primerl_hpc.runtime")):
            return "trainer" if ".trainer" in word else "supervisor"
    if parent == _API_SERVER and any("Core" in word for word in words):
        return _ENGINE_CORE
    return parent


def processes_of(root: int) -> dict[int, str]:
    """Return the role by process id of all descendants of ``root``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := _stat(int(entry.name))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    pending: list[tuple[int, str | None]] = [(root, "command")]
    while pending:
        process, parent = pending.pop()
        role = role_of(_words(process), parent)
        if role is not None:
            found[process] = role
        pending += [(child, role) for child in children.get(process, [])]
    return found


def cpu_by_role(root: int) -> Counter[str]:
    """Return the CPU seconds used so far by the live descendants of ``root``, by role."""
    seconds: Counter[str] = Counter()
    for process, role in processes_of(root).items():
        if (stat := _stat(process)) is not None:
            seconds[role] += (int(stat[11]) + int(stat[12])) / TICKS_PER_S
    return seconds


def pss_mib(root: int) -> float:
    """Return the sum of the proportional set sizes of the live descendants of ``root`` in MiB."""
    total_kib = 0
    for process in processes_of(root):
        try:
            lines = (Path("/proc") / str(process) / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kib / 1024


def start_profiles(root: int, folder: Path, seconds: float) -> list[subprocess.Popen[bytes]]:
    """Start py-spy for each role's busiest process. Writes ``folder/ROLE.txt`` (collapsed stacks).

    Raises FileNotFoundError if py-spy is not installed.
    """
    program = shutil.which("py-spy")
    if program is None:
        raise FileNotFoundError("py-spy is not installed; pip install py-spy")
    folder.mkdir(parents=True, exist_ok=True)
    busiest: dict[str, tuple[int, int]] = {}
    for process, role in processes_of(root).items():
        if (stat := _stat(process)) is not None:
            busiest[role] = max(busiest.get(role, (-1, 0)), (int(stat[11]), process))
    words = [program, "record", "--format", "raw", "--rate", str(PROFILE_RATE_HZ), "--gil"]
    words += ["--duration", str(round(seconds))]
    return [
        subprocess.Popen(
            [*words, "--output", str(folder / f"{role}.txt"), "--pid", str(process)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for role, (_, process) in busiest.items()
        if role not in ("command", "supervisor")
    ]


def hottest(path: Path, count: int = 40) -> list[tuple[float, str]]:
    """Return (share of samples, function) of the functions in most samples, outer ones left out."""
    total, inclusive = 0, Counter[str]()
    for line in path.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        total += int(number)
        for frame in set(stack.split(";")):
            inclusive[frame] += int(number)
    inner = [(frame, number) for frame, number in inclusive.most_common() if number < ALWAYS * total]
    return [(number / max(1, total), frame) for frame, number in inner[:count]]


def _stat(process: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, beginning with the state; None if it has ended."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _words(process: int) -> list[str]:
    try:
        return (Path("/proc") / str(process) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
