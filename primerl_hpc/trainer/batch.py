"""From packed rows (NumPy) to what one forward takes (torch): rows stacked, trained tokens picked out.

Streams come aligned with the token they belong to; the model predicts token t at position t−1. ``predictors`` [T]
holds the flat positions whose hidden states predict the T trained tokens, so that the head works on those alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primerl_hpc.transport.rollouts import MicroBatch

FORWARD_TOKENS = 4096  # short rows are stacked until a forward holds about so many tokens


@dataclass
class ImageBatch:
    """The images of B rows, in the order of their tokens."""

    pixels: Tensor  # [patches, numbers of a patch]
    grids: Tensor  # [I, 3] patches of each image in time, height, width; on the CPU
    token_types: Tensor  # [B, N] 1: of an image, 0: text; on the CPU


@dataclass
class TokenBatch:
    """B rows padded to N tokens; T trained tokens."""

    input_ids: Tensor  # [B, N]
    position_ids: Tensor  # [B, N], restarting at 0 with each sample: attention stays inside
    predictors: Tensor  # [T] index into B·N
    targets: Tensor  # [T]
    temperatures: Tensor | None  # [T]; None: all 1
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
    routed_experts: Tensor | None = None  # [B, N, layers, k], zeros alone: not known
    images: ImageBatch | None = None


def stack_rows(rows: list[MicroBatch], seq_len: int) -> list[list[MicroBatch]]:
    """Rows per forward: as many as `FORWARD_TOKENS` allow at ``seq_len`` tokens each, at least one."""
    size = max(1, FORWARD_TOKENS // seq_len)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def predicted_tokens(row: MicroBatch) -> NDArray[np.int64]:
    """Which tokens of the row the model is asked for: those in a loss, but for the first of a sample, which nothing predicts."""
    return np.flatnonzero((row.loss_mask | (row.weights("ce") != 0)) & (row.position_ids != 0))


def make_batch(rows: list[MicroBatch], device: torch.device) -> TokenBatch:
    length = max(row.num_tokens for row in rows)
    input_ids = np.zeros((len(rows), length), np.int64)
    # a pad is a sample of its own: position 0, so it attends to nothing and nobody attends to it
    position_ids = np.zeros((len(rows), length), np.int64)
    predictors, trained, num_sequences = [], [], 0
    for index, row in enumerate(rows):
        input_ids[index, : row.num_tokens] = row.input_ids
        position_ids[index, : row.num_tokens] = row.position_ids
        tokens = predicted_tokens(row)
        predictors.append(index * length + tokens - 1)
        trained.append(_streams(row, tokens) | {"sequence_ids": row.sample_ids[tokens] + num_sequences})
        num_sequences += len(row.sample_lengths)
    picked = {name: np.concatenate([each[name] for each in trained]) for name in trained[0]}
    if (picked["temperatures"] == 1).all():
        del picked["temperatures"]
    streams = {name: torch.from_numpy(values).to(device) for name, values in picked.items()}
    return TokenBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        predictors=torch.from_numpy(np.concatenate(predictors)).to(device),
        num_sequences=num_sequences,
        routed_experts=_routed_experts(rows, length, device),
        images=_images(rows, length, device),
        **{"temperatures": None, **streams},
    )


def _routed_experts(rows: list[MicroBatch], length: int, device: torch.device) -> Tensor | None:
    there = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not there:
        return None
    routed = np.zeros((len(rows), length, *there[0].shape[1:]), np.result_type(*there))
    for index, row in enumerate(rows):
        if row.routed_experts is not None:
            routed[index, : row.num_tokens] = row.routed_experts
    return torch.from_numpy(routed).to(device)


def _images(rows: list[MicroBatch], length: int, device: torch.device) -> ImageBatch | None:
    placed = [each for row in rows for each in row.images]
    if not placed:
        return None
    types = torch.zeros(len(rows), length, dtype=torch.int32)
    for index, row in enumerate(rows):
        for each in row.images:
            types[index, each.start : each.start + each.length] = 1
    pixels = np.concatenate([each.picture.pixels for each in placed])
    grids = torch.tensor([each.picture.grid for each in placed])
    return ImageBatch(torch.from_numpy(pixels).to(device), grids, types)


def _streams(row: MicroBatch, tokens: NDArray[np.int64]) -> dict[str, NDArray]:
    """What `TokenBatch` says of each of ``tokens`` [T]."""
    samples, mask = row.sample_ids[tokens], row.loss_mask[tokens]
    none = np.zeros(len(tokens), np.float32)
    return {
        "targets": row.input_ids[tokens].astype(np.int64),
        "temperatures": row.temperatures[samples],
        "loss_mask": mask,
        "advantages": np.where(mask, row.advantages[samples], np.float32(0)),
        "inference_logprobs": row.inference_logprobs[tokens],
        "rl_weights": row.rl_weights[samples] * mask,
        "ce_weights": none if row.ce_weights is None else row.ce_weights[tokens],
        "ref_kl_weights": row.ref_kl_weights[samples] * mask,
        "ref_logprobs": none if row.ref_logprobs is None else row.ref_logprobs[tokens],
        "env_ids": row.env_ids[samples].astype(np.int64),
    }
