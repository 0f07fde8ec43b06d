"""Durations of collectives inside and between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from primerl_hpc.plan.predict.timing.curves import Operations, bus_factor

NETWORK_SHARE = 0.8
"""Share of the network's rate that NCCL reaches with large messages. Judgment; nccl-tests of public clusters show
0.75–0.95 of 400 Gbit/s (aiconfigurator assumes the full rate)."""
NETWORK_LATENCY_S = 2e-5
"""Latency of a collective for each doubling of nodes: 10 µs a hop in aiconfigurator's system files, two hops."""


@dataclass(frozen=True)
class Links:
    """Collectives among ``gpus`` neighbors. Groups larger than a node use the network."""

    operations: Operations
    gpus_per_node: int

    def all_reduce(self, size: float, gpus: int) -> float:
        """Return the time of vLLM's all-reduce of ``size`` bytes."""
        return self.collective("all_reduce", size, gpus)

    def collective(self, kind: str, size: float, gpus: int) -> float:
        """Return the time of a collective in seconds; ``size``: bytes of the complete message."""
        if gpus <= 1 or size <= 0:
            return 0.0
        inside = min(gpus, self.gpus_per_node)
        if gpus <= self.gpus_per_node:
            return self.operations.collective(kind, size, inside)
        nodes = math.ceil(gpus / inside)
        return self.between(kind, size, gpus, nodes) + NETWORK_LATENCY_S * math.log2(nodes)

    def between(self, kind: str, size: float, gpus: int, nodes: int) -> float:
        """Return the time of the same collective over the network: all cards of a node carry an equal part."""
        gpu = self.operations.gpu
        rate = gpu.network_bytes_per_s * min(gpus, self.gpus_per_node) * NETWORK_SHARE
        over_network = bus_factor(kind, nodes) * size / rate
        if kind == "alltoall":
            over_network = (nodes - 1) / nodes * size / (gpu.network_bytes_per_s * NETWORK_SHARE)
        inside = self.operations.collective(kind, size, min(gpus, self.gpus_per_node))
        return max(over_network, inside)
