"""Throughput, model FLOP/s utilisation and peak memory."""

from __future__ import annotations

import resource

import torch

from primerl_hpc.trainer.model import Policy
from primerl_hpc.transport.rollouts import MicroBatch

PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "GB200": 2250e12,
}
"""Dense bf16 peak per GPU (vendor data sheets)."""


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = [key for key in PEAK_FLOPS if key in name]
    return PEAK_FLOPS[max(found, key=len)] if found else None


class FlopCounter:
    """FLOP of forward and backward: 6 per active matmul weight and token, and attention within each sample.

    Attention of one layer: QKᵀ and PV are 2·2·heads·head_dim·len² forward, half of it causal, thrice with backward:
    6·heads·head_dim·len². Embedding look-ups cost none; of the experts only those chosen per token count.
    """

    def __init__(self, policy: Policy) -> None:
        config = policy.hf.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim
        self.dense = 6.0 * active_matmul_weights(policy)

    def __call__(self, rows: list[MicroBatch]) -> float:
        tokens = sum(row.num_tokens for row in rows)
        squares = sum(float((row.sample_lengths.astype(float) ** 2).sum()) for row in rows)
        return self.dense * tokens + self.attention * squares


def active_matmul_weights(policy: Policy) -> float:
    config = policy.hf.config.get_text_config()
    experts = next(
        (
            value
            for key in ("num_experts", "num_local_experts", "n_routed_experts")
            if (value := getattr(config, key, 0))
        ),
        0,
    )
    share = config.num_experts_per_tok / experts if experts else 1.0
    head = policy.hf.get_output_embeddings().weight
    total = float(head.numel())
    for name, parameter in policy.hf.named_parameters():
        if parameter.ndim < 2 or "embed_tokens" in name or parameter is head:
            continue
        total += parameter.numel() * (share if ".experts." in name else 1.0)
    return total


def peak_memory_gib(device: torch.device) -> float:
    """Most memory ever reserved on the GPU; the process's peak resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
