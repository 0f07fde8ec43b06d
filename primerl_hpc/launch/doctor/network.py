"""Measure the network between nodes and their reads of shared files, in one step over all of them.

Without bandwidth, nodes only connect to each other, which takes a second. With it, the measurement takes less than 30 s
for any number of nodes: each node all-reduces with up to three others (`runtime.job.network`). Slow nodes are named,
with the key of the profile that excludes them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.findings import Finding
from primerl_hpc.plan.env import network_variables
from primerl_hpc.plan.preflight import sums_of_profile
from primerl_hpc.runtime.job.network import probe
from primerl_hpc.runtime.job.network.schedule import LEAST_SHARE, slow_nodes
from primerl_hpc.runtime.job.sums import result_file

_WALL = "a firewall between the nodes, or network.interface of the profile is not their common network"


def check_network(
    profile: Profile,
    folder: Path,
    srun: Sequence[str],
    *,
    num_nodes: int,
    python_path: str,
    has_bandwidth: bool,
) -> Iterator[Finding]:
    """Yield the results for ``num_nodes`` nodes. ``srun``: the command that starts a task on each of them."""
    wants = sums_of_profile(profile, str(folder), sys.executable, num_nodes=num_nodes, is_due=True)
    assert wants is not None  # it is due
    shape = {"ranks_per_node": wants.ranks_per_node, "accelerator": wants.accelerator}
    request = folder / "network.json"
    wanted = probe.make_probe_request(
        nonce=secrets.token_hex(4), has_bandwidth=has_bandwidth, timeout_s=wants.timeout_s, **shape
    )
    write_json(request, wanted)
    if has_bandwidth:
        command, variables = [*srun, *wants.srun_args, *wants.argv], wants.env
    else:
        python = profile.software.python_here
        command, variables = [*srun, python], network_variables(profile)
    done = subprocess.run(
        [*command, "-m", probe.__name__, str(request)],
        env=os.environ | variables | {"PYTHONPATH": python_path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    found = [read_json_or_none(result_file(request, node)) for node in range(num_nodes)]
    results = [result for result in found if result is not None and result["nonce"] == wanted["nonce"]]
    yield judge_connections(results, num_nodes, done.stderr)
    if has_bandwidth:
        yield judge_rates(
            "file reads", {row["node"]: row.get("read_gb_s") for row in results}, _reason(results)
        )
        best = {row["node"]: max(row.get("pairs_gb_s", {}).values(), default=None) for row in results}
        yield judge_rates("all-reduce", best, _reason(results))


def _reason(results: Sequence[dict[str, Any]]) -> str:
    reasons = [f"{row['node']}: {row['error'] or row.get('skipped')}" for row in results]
    return next((reason for reason in reasons if not reason.endswith(": None")), "a node did not respond")


def judge_connections(results: Sequence[dict[str, Any]], num_nodes: int, output: str) -> Finding:
    what = "nodes: connections"
    failed = [
        f"{row['node']} cannot connect to {peer} ({reason})"
        for row in results
        for peer, reason in row.get("unreachable", {}).items()
    ]
    if failed:
        more = f", and {len(failed) - 1} other pairs" if len(failed) > 1 else ""
        return Finding.judged(what, False, failed[0] + more, _WALL, "\n".join(failed[1:]))
    errors = [f"{row['node']}: {row['error']}" for row in results if "address" not in row]
    if errors or len(results) < num_nodes:
        last = "".join(output.strip().splitlines()[-1:])
        message = errors[0] if errors else f"{len(results)} of {num_nodes} nodes responded: {last}"
        return Finding.judged(what, False, message, _WALL)
    addresses = ", ".join(sorted(row["address"] for row in results)[:3])
    return Finding.judged(what, True, f"{num_nodes} nodes connect to each other ({addresses}, …)")


def judge_rates(what: str, rates: dict[str, float | None], reason: str) -> Finding:
    """Return the result for GB/s by node; ``reason``: why a rate is missing."""
    what, known = f"nodes: {what}", {node: rate for node, rate in rates.items() if rate is not None}
    if not known or len(known) < len(rates):
        return Finding.judged(what, False, f"not measured: {reason}", "see the messages of the nodes")
    middle = median(known.values())
    facts = f"median {middle:.3g} GB/s of {len(known)} nodes"
    if slow := slow_nodes(known):
        named = ", ".join(
            f"{node} {known[node]:.3g} GB/s ({share:.0%})" for node, share in sorted(slow.items())
        )
        hint = f"exclude it: --profile-set scheduler.exclude={','.join(sorted(slow))}; report it to the site"
        return Finding.judged(what, False, f"less than {LEAST_SHARE:.0%} of the {facts}: {named}", hint)
    return Finding.judged(what, True, f"{facts}, {min(known.values()):.3g} to {max(known.values()):.3g}")
