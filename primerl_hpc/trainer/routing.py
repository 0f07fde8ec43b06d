"""How a mixture's tokens spread over its experts: counted as they are called, summed over all ranks once a step."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from primerl_hpc.trainer.parallel.context import Packing
from primerl_hpc.trainer.parallel.expert import expert_modules


class Routing:
    """Pads are not counted. A layer that is recomputed in backward is counted twice, each of its experts alike."""

    def __init__(self, hf: nn.Module) -> None:
        self.modules = expert_modules(hf)
        self.sizes = [module.num_experts for module in self.modules]

    def attach(self, device: torch.device) -> None:
        """After sharding: FSDP's own hooks go first."""
        shape = (len(self.sizes), max(self.sizes, default=0))
        self.loads = torch.zeros(shape, dtype=torch.float64, device=device)  # tokens
        self.shares = torch.zeros(2, dtype=torch.float64, device=device)  # sum, tokens
        for layer, module in enumerate(self.modules):
            module.register_forward_pre_hook(partial(self._note, layer))

    def begin_forward(self, packing: Packing) -> None:
        if self.sizes:
            positions = packing.positions  # a pad is a sample of one token
            following = torch.cat([positions[:, 1:], torch.zeros_like(positions[:, :1])], 1)
            is_real = (positions > 0) | (following == 1)
            self.is_counted = is_real[:, packing.own].flatten().double()

    @torch.compiler.disable
    @torch.no_grad()
    def _note(self, layer: int, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """``arguments`` of the experts interface: hidden [N, H], index [N, k], weights [N, k]."""
        _, index, weights = arguments
        counts = self.is_counted[:, None].expand(index.shape)
        self.loads[layer].index_add_(0, index.flatten(), counts.flatten())
        self.shares[0] += (weights.amax(-1) / weights.sum(-1) * self.is_counted).sum()
        self.shares[1] += self.is_counted.sum()

    def forget(self) -> None:
        self.loads.zero_()
        self.shares.zero_()

    def take_metrics(self) -> dict[str, float]:
        """Since the last call; empty for a dense model. Collective.

        ``max_vio``: how far the busiest expert is above the mean, over the mean, averaged over layers (arXiv 2408.15664).
        ``routing_confidence``: the largest weight of a token over the sum of its weights, averaged over tokens and layers.
        """
        if not self.sizes:
            return {}
        values = torch.cat([self.loads.flatten(), self.shares])
        self.forget()
        dist.all_reduce(values)
        *loads, total, count = values.tolist()
        widest = self.loads.shape[1]
        excess = []
        for layer, size in enumerate(self.sizes):
            of_layer = loads[layer * widest : layer * widest + size]
            excess.append(max(of_layer) * size / max(sum(of_layer), 1) - 1)
        return {"max_vio": sum(excess) / len(excess), "routing_confidence": total / max(count, 1)}
