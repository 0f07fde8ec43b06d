"""Measure the bandwidth of an attempt's nodes before its first process, and find the slow ones.

found = await measure_nodes(run, plan.preflight.bandwidth, allocation, log)
found.slow                           # {"n3": "all-reduce 0.9 GB/s, 12% of the median"}
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.plan.plan import SumsPlan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.job.network.schedule import slow_nodes
from primerl_hpc.runtime.job.preflight import RanksStep

MODULE = "primerl_hpc.runtime.job.network.probe"


@dataclass(frozen=True)
class Measured:
    slow: dict[str, str]
    """Slow host → its rate."""
    message: str
    """The medians, or why there are none."""


async def measure_nodes(run: RunDir, wants: SumsPlan, allocation: Allocation, log: Path) -> Measured:
    """Measure the nodes of the trainer's component, with its spares: a spare that replaces a slow node must be fast."""
    trainer = allocation.component(allocation.hosts_of(wants.nodes)[:1])
    hosts = [host for host in allocation.all_hosts if allocation.component([host]) == trainer]
    hosts = allocation.in_order(hosts)
    request = {
        "nonce": secrets.token_hex(8),
        "has_bandwidth": True,
        "ranks_per_node": wants.ranks_per_node,
        "accelerator": wants.accelerator,
        "timeout_s": wants.timeout_s,
    }
    step = RanksStep("network", MODULE, run.network_request)
    results = await step.run(request, hosts, wants, allocation, log)
    return judge_nodes({row["node"]: row for row in results if row}, len(hosts))


def judge_nodes(results: Mapping[str, dict[str, Any]], num_nodes: int) -> Measured:
    """Judge the results by host. Nothing is slow if a rate is missing: a run can start without this measurement."""
    reads = {host: row.get("read_gb_s") for host, row in results.items()}
    pairs = {host: max(row.get("pairs_gb_s", {}).values(), default=None) for host, row in results.items()}
    slow, facts = dict[str, str](), []
    for what, rates in (("all-reduce", pairs), ("file reads", reads)):
        known = {host: rate for host, rate in rates.items() if rate is not None}
        if len(known) < num_nodes:
            facts.append(f"{what}: {len(known)} of {num_nodes} nodes have a rate")
            continue
        facts.append(f"{what}: {min(known.values()):.3g} to {max(known.values()):.3g} GB/s")
        for host, share in slow_nodes(known).items():
            slow.setdefault(host, f"{what} {known[host]:.3g} GB/s, {share:.0%} of the median")
    return Measured(slow, "; ".join(facts))
