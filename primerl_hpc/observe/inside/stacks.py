"""Collect the stacks of every process of a running run, from all of its nodes at once.

    found = collect_stacks(run)
    found.processes[0].stack, found.problems       # text of py-spy; nodes that did not respond

A step on each node runs ``primerl_hpc.runtime.steps.stacks``. Nodes that do not respond within the time limit are
reported, and the others are shown.
"""

from __future__ import annotations

import base64
import binascii
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from primerl_hpc.observe.inside.steps import Place, all_places, python_path, step_command, step_environ
from primerl_hpc.run.rundir import RunDir

LIMIT_S = 15.0
"""Time limit of one collection."""
MODULE, MARK = "primerl_hpc.runtime.steps.stacks", "@stacks"
"""The program on each node, and the first word of its lines."""


@dataclass(frozen=True)
class ProcessStack:
    node: str
    process: str
    """Name of the role's process that it belongs to, or ``supervisor``."""
    pid: int
    command: str
    state: str
    """State in /proc: R, S, D (blocked in the kernel), T, Z."""
    wchan: str = ""
    """Kernel function in which its first blocked thread waits."""
    path: str = ""
    """File of the system call in which that thread waits."""
    stack: str = ""
    note: str = ""
    """Why there is no stack."""

    @property
    def is_blocked(self) -> bool:
        return self.state == "D"

    @property
    def blocked_sentence(self) -> str:
        where = f" on {self.path}" if self.path else ""
        return (
            f"{self.process} on {self.node}: process {self.pid} ({self.command}) is blocked in the kernel, in "
            f"{self.wchan or 'an unknown function'}{where}"
        )


@dataclass(frozen=True)
class StackReport:
    processes: list[ProcessStack]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        return {"processes": [asdict(process) for process in self.processes], "problems": self.problems}


def collect_stacks(run: RunDir, *, only_blocked: bool = False, limit_s: float = LIMIT_S) -> StackReport:
    """Return the processes of all nodes; ``only_blocked``: those in state D, without stacks.

    Raises NotFoundError if the run is not running, OccupiedError for the run of another user.
    """
    deadline = time.monotonic() + limit_s
    environ = step_environ(PYTHONPATH=python_path())
    words = [
        sys.executable,
        "-m",
        MODULE,
        str(run.root),
        str(limit_s * 0.6),
        *(["blocked"] if only_blocked else []),
    ]
    started = [
        (
            place,
            subprocess.Popen(
                step_command(place, words, name="stacks"),
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            ),
        )
        for place in all_places(run)
    ]
    found, problems = list[ProcessStack](), list[str]()
    for place, child in started:
        output, errors = _output_of(child, deadline)
        answers = parse_stacks(output.splitlines())
        found += [ProcessStack(**entry) for entries in answers.values() for entry in entries]
        problems += _silent_nodes(place, set(answers), errors, limit_s)
    return StackReport(found, problems)


def _output_of(child: subprocess.Popen[str], deadline: float) -> tuple[str, str]:
    try:
        return child.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.terminate()  # srun ends its step
        try:
            return child.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.communicate()


def _silent_nodes(place: Place, answered: set[str], errors: str, limit_s: float) -> list[str]:
    is_here = place.job_id is None and answered
    silent = [] if is_here else [host for host in place.hosts if host not in answered]
    last = errors.strip().splitlines()[-1:]
    reason = f": {last[0]}" if last else f" within {limit_s:.0f} s"
    return [f"{', '.join(silent)} did not respond{reason}"] if silent else []


def parse_stacks(lines: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of each node that responded completely; other lines are output of the site."""
    chunks: dict[str, list[str]] = {}
    complete: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        match line.split():
            case [mark, node, "."] if mark == MARK:
                try:
                    text = zlib.decompress(base64.b64decode("".join(chunks.get(node, []))))
                    complete[node] = json.loads(text)
                except (binascii.Error, zlib.error, ValueError):
                    continue
            case [mark, node, chunk] if mark == MARK:
                chunks.setdefault(node, []).append(chunk)
            case _:
                continue
    return complete
