"""From packed rows (NumPy) to what one forward takes (torch): rows stacked, trained tokens picked out.

Streams come aligned with the token they belong to; the model predicts token t at position t−1. ``predictors`` [T]
holds the flat positions whose hidden states predict the T trained tokens, so that the head works on those alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from primerl_hpc.transport.rollouts import MicroBatch

FORWARD_TOKENS = 4096  # short rows are stacked until a forward holds about so many tokens


@dataclass
class TokenBatch:
    """B rows padded to N tokens; T trained tokens."""

    input_ids: Tensor  # [B, N]
    position_ids: Tensor  # [B, N], restarting at 0 with each sample: attention stays inside
    predictors: Tensor  # [T] index into B·N
    targets: Tensor  # [T]
    temperatures: Tensor  # [T]
    loss_mask: Tensor  # [T] bool
    advantages: Tensor
    inference_logprobs: Tensor
    rl_weights: Tensor
    ce_weights: Tensor
    ref_kl_weights: Tensor
    ref_logprobs: Tensor
    env_ids: Tensor  # [T] int64
    sequence_ids: Tensor  # [T] int64
    num_sequences: int


PER_TOKEN = (
    "loss_mask",
    "advantages",
    "inference_logprobs",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "ref_logprobs",
    "temperatures",
)


def stack_rows(rows: list[MicroBatch], seq_len: int) -> list[list[MicroBatch]]:
    """Rows per forward: as many as `FORWARD_TOKENS` allow at ``seq_len`` tokens each, at least one."""
    size = max(1, FORWARD_TOKENS // seq_len)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def make_batch(rows: list[MicroBatch], device: torch.device) -> TokenBatch:
    length = max(row.num_tokens for row in rows)
    input_ids = np.zeros((len(rows), length), np.int64)
    # a pad is a sample of its own: position 0, so it attends to nothing and nobody attends to it
    position_ids = np.zeros((len(rows), length), np.int64)
    predictors, picked, sequence_ids, num_sequences = [], [], [], 0
    for index, row in enumerate(rows):
        input_ids[index, : row.num_tokens] = row.input_ids
        position_ids[index, : row.num_tokens] = row.position_ids
        used = row.loss_mask | (row.rl_weights != 0) | (row.ce_weights != 0) | (row.ref_kl_weights != 0)
        tokens = np.flatnonzero(used & (row.position_ids != 0))
        predictors.append(index * length + tokens - 1)
        picked.append(tokens)
        samples = np.repeat(np.arange(len(row.sample_lengths)), row.sample_lengths)
        sequence_ids.append(samples[tokens] + num_sequences)
        num_sequences += len(row.sample_lengths)

    def pick(name: str) -> Tensor:
        parts = [getattr(row, name)[tokens] for row, tokens in zip(rows, picked, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return TokenBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        predictors=torch.from_numpy(np.concatenate(predictors)).to(device),
        targets=pick("input_ids"),
        env_ids=pick("env_ids").long(),
        sequence_ids=torch.from_numpy(np.concatenate(sequence_ids)).to(device),
        num_sequences=num_sequences,
        **{name: pick(name) for name in PER_TOKEN},
    )
