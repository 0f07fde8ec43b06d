"""Throughput, model FLOP/s utilisation and peak memory."""

from __future__ import annotations

import re
import resource
from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from primerl_hpc.trainer.batch import predicted_tokens
from primerl_hpc.trainer.model import Policy
from primerl_hpc.transport.rollouts import MicroBatch

PEAK_FLOPS = {
    "B200": 2250e12,  # NVIDIA Blackwell datasheet, HGX B200
    "GB200": 2500e12,  # NVIDIA GB200 NVL72 datasheet: 360 PFLOP/s with sparsity of 72 GPUs
    "H100": 989.4e12,  # NVIDIA H100 datasheet, SXM
    "H100 PCIe": 756e12,  # the same, PCIe
    "H100 NVL": 835e12,  # the same, NVL
    "H200": 989.4e12,  # NVIDIA H200 datasheet, SXM
    "H200 NVL": 835.5e12,  # the same, NVL
    "GH200": 989.4e12,  # NVIDIA GH200 datasheet
    "A100": 312e12,  # NVIDIA A100 datasheet
    "A40": 149.7e12,  # NVIDIA A40 datasheet
    "A10": 125e12,  # NVIDIA A10 datasheet
    "RTX A6000": 154.8e12,  # NVIDIA RTX A6000 datasheet
    "L40S": 362e12,  # NVIDIA L40S datasheet
    "L4": 121e12,  # NVIDIA L4 datasheet
    "MI250X": 191.5e12,  # AMD MI250X datasheet: one of its two dies, which is what torch calls a device
    "MI300X": 1307.4e12,  # AMD MI300X datasheet
}
"""Dense bf16 peak per device, without sparsity: half of what NVIDIA's datasheets print in large. Keys are parts of the
names that torch gives; the longest that fits counts."""


def peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """``NVIDIA H100 80GB HBM3`` → 989.4e12; None for a device that is not in `PEAK_FLOPS`."""
    found = [key for key in PEAK_FLOPS if re.search(rf"\b{key}\b", name)]
    return PEAK_FLOPS[max(found, key=len)] if found else None


class FlopCounter:
    """FLOP of forward and backward: 6 per active matmul weight and token, 4 where it is frozen, and attention within
    each sample. The head works for those tokens alone that are predicted.

    Attention of one layer: QKᵀ and PV are 2·heads·(d_qk + d_v) forward for each query and key it sees, thrice with backward.
    Causal these are len²/2, and within a window of w tokens w·len − w²/2: 6·heads·head_dim·len² where d_qk = d_v and no window.
    Embedding look-ups cost none; of the experts only those chosen per token count. A vision tower is not counted.
    """

    def __init__(self, policy: Policy) -> None:
        config = policy.hf.config.get_text_config()
        self.attention = 6 * config.num_attention_heads * sum(head_dims(config))  # of a layer, query and key
        self.windows = windows_of(config)
        self.blocks, self.head = matmul_flops(policy)
        self.naive_attention = 12 * config.num_hidden_layers * config.hidden_size

    def __call__(self, rows: list[MicroBatch]) -> float:
        tokens = sum(row.num_tokens for row in rows)
        predicted = sum(len(predicted_tokens(row)) for row in rows)
        # a rank may have no row
        lengths = np.array([length for row in rows for length in row.sample_lengths], float)
        pairs = sum(count * seen_keys(lengths, window) for window, count in self.windows.items())
        return self.blocks * tokens + self.head * predicted + self.attention * pairs

    def prime_rl(self, num_tokens: int, seq_len: int) -> float:
        """The same as prime-rl counts it, to compare figures: each token is predicted and attends to ``seq_len`` others, those
        after it too, with hidden_size / heads for head_dim (of Qwen3-0.6B half of the true one): 12·layers·hidden_size·seq_len.
        """
        return (self.blocks + self.head + self.naive_attention * seq_len) * num_tokens


def head_dims(config: PreTrainedConfig) -> tuple[int, int]:
    """Of queries and keys, of values. Of latent attention (DeepSeek) ``head_dim`` is the rotary part alone."""
    if nope := getattr(config, "qk_nope_head_dim", None):
        return nope + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def windows_of(config: PreTrainedConfig) -> Counter[int | None]:
    """How many layers have each window, None: full attention. Without ``layer_types`` all have the model's, if it has one."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return Counter(window if kind == "sliding_attention" else None for kind in kinds)


def seen_keys(lengths: NDArray[np.float64], window: int | None) -> float:
    """Pairs of a query and a key it sees, of samples of these lengths."""
    widths = lengths if window is None else np.minimum(lengths, window)
    return float((widths * lengths - widths**2 / 2).sum())


def matmul_flops(policy: Policy) -> tuple[float, float]:
    """Of the blocks per token and of the head per predicted one: 2 forward, 2 for the input's gradient, 2 for the weight's own."""
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
    total = 0.0
    for name, parameter in policy.hf.named_parameters():
        if parameter.ndim < 2 or "embed_tokens" in name or ".visual." in name or parameter is head:
            continue
        active = share if ".experts." in name else 1.0
        total += parameter.numel() * active * (6 if parameter.requires_grad else 4)
    return total, float(head.numel()) * (6 if head.requires_grad else 4)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that the clock tells how long it took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory ever reserved on the GPU; the process's peak resident memory on CPU."""
    peak = peak_memory(device)
    return peak.get("reserved", peak["resident"])


def peak_memory(device: torch.device) -> dict[str, float]:
    """GiB: ``resident`` of this process on the host; on a GPU also ``allocated`` and ``reserved`` of torch's allocator."""
    peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        peak["allocated"] = torch.cuda.max_memory_allocated(device) / 2**30
        peak["reserved"] = torch.cuda.max_memory_reserved(device) / 2**30
    return peak
