"""Load of a mixture's experts: counted in every forward, summed over all ranks once per step; balancing by biases."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.parallel.context import Packing
from primerl_hpc.trainer.parallel.expert import expert_modules

ROUTER_BIAS = "e_score_correction_bias"


class LayerLoads:
    """Counts the calls of one layer's experts. Compiled blocks trace it: layers differ only in their tensors."""

    def __init__(self, routing: Routing, loads: Tensor) -> None:
        self.routing, self.loads = routing, loads

    @torch.no_grad()
    def __call__(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Count a call. ``arguments`` of the experts interface: hidden [N, H], index [N, k], weights [N, k]."""
        _, index, weights = arguments
        is_counted, shares = self.routing.is_counted, self.routing.shares
        counts = is_counted[:, None].expand(index.shape).flatten()
        # float32 is exact for the tokens of one call, and its atomic additions are faster than those of float64
        self.loads += torch.zeros_like(self.loads, dtype=torch.float32).index_add_(0, index.flatten(), counts)
        shares[0] += (weights.amax(-1) / weights.sum(-1) * is_counted).sum()
        shares[1] += is_counted.sum()


class Routing:
    """Token counts by expert, without padding. A layer recomputed in backward counts twice, which changes no ratio."""

    def __init__(self, hf: nn.Module) -> None:
        self.modules = expert_modules(hf)
        self.sizes = [module.num_experts for module in self.modules]
        self.routers = [biased_router(hf, module) for module in self.modules]

    def attach(self, device: torch.device, bias_rate: float = 0.0) -> None:
        """Register the counting hooks. Call after sharding: FSDP's own hooks must run first.

        Raises ConfigError if the routers are to be balanced (``bias_rate``), but have no biases.
        """
        if bias_rate and not any(self.routers):
            raise ConfigError(
                f"trainer.router_bias_rate changes the routers' {ROUTER_BIAS}, which this model does not have",
                hint="set it to 0",
            )
        shape = (len(self.sizes), max(self.sizes, default=0))
        self.loads = torch.zeros(shape, dtype=torch.float64, device=device)  # tokens
        self.shares = torch.zeros(2, dtype=torch.float64, device=device)  # sum, tokens
        for loads, module in zip(self.loads, self.modules, strict=True):
            module.register_forward_pre_hook(LayerLoads(self, loads))

    def begin_forward(self, packing: Packing) -> None:
        if self.sizes:
            positions = packing.positions  # padding consists of samples of one token
            following = torch.cat([positions[:, 1:], torch.zeros_like(positions[:, :1])], 1)
            is_real = (positions > 0) | (following == 1)
            self.is_counted = is_real[:, packing.residual].flatten().float()

    def reset(self) -> None:
        self.loads.zero_()
        self.shares.zero_()

    def take_metrics(self, bias_rate: float = 0.0) -> dict[str, float]:
        """Return the metrics since the last call; empty for a dense model. Collective.

        ``bias_rate``: change of the routers' biases (`balance`).

        ``max_vio``: load of the busiest expert over the mean load, minus 1, averaged over layers (arXiv 2408.15664).
        ``routing_confidence``: the largest weight of a token over the sum of its weights, averaged over tokens and
        layers.
        """
        if not self.sizes:
            return {}
        values = torch.cat([self.loads.flatten(), self.shares])
        self.reset()
        dist.all_reduce(values)
        if bias_rate:
            self.balance(values[:-2].view_as(self.loads), bias_rate)
        *loads, total, count = values.tolist()
        widest = self.loads.shape[1]
        excess = []
        for layer, size in enumerate(self.sizes):
            layer_loads = loads[layer * widest : layer * widest + size]
            excess.append(max(layer_loads) * size / max(sum(layer_loads), 1) - 1)
        return {"max_vio": sum(excess) / len(excess), "routing_confidence": total / max(count, 1)}

    @torch.no_grad()
    def balance(self, loads: Tensor, rate: float) -> None:
        """Change each layer's biases: b += rate · sign(mean load - load) (arXiv 2408.15664, algorithm 1).

        ``loads`` [layers, experts]: of all ranks, so that every rank makes the same change.
        """
        for router, size, layer in zip(self.routers, self.sizes, loads, strict=True):
            if router is not None:
                bias: Tensor = getattr(router, ROUTER_BIAS)
                bias += (rate * (layer[:size].mean() - layer[:size]).sign()).to(bias)


def biased_router(hf: nn.Module, experts: nn.Module) -> nn.Module | None:
    """Return the module with the buffer [experts] that is added to the scores by which ``experts`` are chosen, or None.

    Memory is allocated later, so the buffer itself must not be kept.
    """
    parent = next(module for module in hf.modules() if experts in list(module.children()))
    return next((module for module in parent.modules() if ROUTER_BIAS in module._buffers), None)
