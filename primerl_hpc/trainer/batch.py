"""Converts packed rows (NumPy) to the input of one forward (torch): stacked rows, selected trained tokens.

Per-token streams are aligned with the token they belong to; the model predicts token t at position t−1. ``predictors``
[T] holds the flat positions whose hidden states predict the T trained tokens, so that the head processes only those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primerl_hpc.common.errors import DataError
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch

COMPONENTS = ("rl", "ce", "ref_kl")
"""Components of the loss; each token has a weight in each."""

FORWARD_TOKENS = {"cpu": 4096, "cuda": 16_384}
"""Short rows are stacked up to about this number of tokens per forward, by type of device."""
COPY_ALIGNMENT = 16  # bytes


@dataclass
class ImageBatch:
    """The images of B rows, in the order of their tokens."""

    pixels: Tensor  # [patches, values per patch]
    grids: Tensor  # [I, 3] patches of each image in time, height and width; on the CPU
    token_types: Tensor  # [B, N] 1: image token, 0: text token; on the CPU


@dataclass
class HostBatch:
    """Arrays that decide shapes, on the CPU: reading them from the device would wait for all work there."""

    position_ids: NDArray[np.int64]  # [B, N]
    predictors: NDArray[np.int64]  # [T]


@dataclass(kw_only=True)
class ForwardInputs:
    """Input of one forward: B rows padded to N tokens; T trained tokens."""

    input_ids: Tensor  # [B, N]
    position_ids: Tensor  # [B, N], restarting at 0 with each sample: attention stays inside a sample
    predictors: Tensor  # [T] index into B·N
    targets: Tensor  # [T]
    temperatures: Tensor | None = None  # [T]; None: all 1
    routed_experts: Tensor | None = None  # [B, N, layers, k]; a token's values are all zero if unknown
    images: ImageBatch | None = None
    host: HostBatch | None = None
    """Positions and predictors on the CPU; None: they are copied from the device."""

    def on_host(self) -> HostBatch:
        if self.host is None:
            self.host = HostBatch(self.position_ids.cpu().numpy(), self.predictors.cpu().numpy())
        return self.host


@dataclass(kw_only=True)
class TokenBatch(ForwardInputs):
    """Input of one forward and its loss."""

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
    members: dict[str, Tensor]  # of each loss component: indices of its tokens in T, int64


def stack_rows(rows: list[MicroBatch], seq_len: int, device: torch.device) -> list[list[MicroBatch]]:
    """Group rows into forwards: as many as `FORWARD_TOKENS` allows at ``seq_len`` tokens each, at least one."""
    size = max(1, FORWARD_TOKENS[device.type] // seq_len)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def predicted_tokens(row: MicroBatch) -> NDArray[np.int64]:
    """Return the indices of the row's tokens with a loss, except the first of a sample, which nothing predicts."""
    return np.flatnonzero((row.loss_mask | (row.weights("ce") != 0)) & (row.position_ids != 0))


def check_token_ids(rows: list[MicroBatch], vocab_size: int) -> None:
    """Raise DataError for a token that the model has no embedding for: in a kernel it would be an error without a name.

    ``vocab_size``: number of embeddings.
    """
    for row in rows:
        wrong = np.flatnonzero((row.input_ids < 0) | (row.input_ids >= vocab_size))
        if len(wrong):
            raise DataError(
                f"token id {row.input_ids[wrong[0]]} of a batch is not among the model's {vocab_size} embeddings "
                f"(token {row.position_ids[wrong[0]]} of its sample)",
                hint="set model.tokenizer to the tokenizer of the model, or enlarge the model's embeddings",
            )


def make_batch(rows: list[MicroBatch], device: torch.device) -> TokenBatch:
    """Stack rows and select their trained tokens."""
    length = max(row.num_tokens for row in rows)
    input_ids = np.zeros((len(rows), length), np.int64)
    # each padding token is a separate sample at position 0, so it exchanges no attention with other tokens
    position_ids = np.zeros((len(rows), length), np.int64)
    predictors, trained, num_sequences = [], [], 0
    for index, row in enumerate(rows):
        input_ids[index, : row.num_tokens] = row.input_ids
        position_ids[index, : row.num_tokens] = row.position_ids
        tokens = predicted_tokens(row)
        predictors.append(index * length + tokens - 1)
        trained.append(_streams(row, tokens) | {"sequence_ids": row.sample_ids[tokens] + num_sequences})
        num_sequences += len(row.sample_lengths)
    picked = {name: np.concatenate([streams[name] for streams in trained]) for name in trained[0]}
    if (picked["temperatures"] == 1).all():
        del picked["temperatures"]
    picked["predictors"] = np.concatenate(predictors)
    members = {name: np.flatnonzero(picked[f"{name}_weights"]) for name in COMPONENTS}
    routed, images = _routed_experts(rows, length), _images(rows, length)
    moved = to_device(
        {
            **picked,
            **{f"members.{name}": indices for name, indices in members.items()},
            "input_ids": input_ids,
            "position_ids": position_ids,
            **({} if routed is None else {"routed_experts": routed}),
            **({} if images is None else {"pixels": images.pixels.numpy()}),
        },
        device,
    )
    if images is not None:
        images.pixels = moved.pop("pixels")
    return TokenBatch(
        num_sequences=num_sequences,
        members={name: moved.pop(f"members.{name}") for name in COMPONENTS},
        host=HostBatch(position_ids, picked["predictors"]),
        images=images,
        **moved,
    )


def to_device(arrays: dict[str, NDArray], device: torch.device) -> dict[str, Tensor]:
    """Return the arrays as tensors on ``device``, copied together.

    For a GPU: one copy from pinned memory that the host does not wait for.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    starts, size = {}, 0
    for name, array in arrays.items():
        starts[name] = size
        size += -(-array.nbytes // COPY_ALIGNMENT) * COPY_ALIGNMENT
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pinned[starts[name] : starts[name] + array.nbytes].numpy()[:] = data
    moved = pinned.to(device, non_blocking=True)
    return {
        name: moved[starts[name] : starts[name] + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for name, array in arrays.items()
    }


def _routed_experts(rows: list[MicroBatch], length: int) -> NDArray | None:
    known = [row.routed_experts for row in rows if row.routed_experts is not None]
    if not known:
        return None
    kind = np.result_type(*known)
    # CUDA has few operations on unsigned integers of 16 bits; the ids are below 2^15
    routed = np.zeros((len(rows), length, *known[0].shape[1:]), np.int16 if kind == np.uint16 else kind)
    for index, row in enumerate(rows):
        if row.routed_experts is not None:
            routed[index, : row.num_tokens] = row.routed_experts
    return routed


def _images(rows: list[MicroBatch], length: int) -> ImageBatch | None:
    """Return the images of the rows, with their pixels still on the CPU."""
    images = [image for row in rows for image in row.images]
    if not images:
        return None
    types = torch.zeros(len(rows), length, dtype=torch.int32)
    for index, row in enumerate(rows):
        for image in row.images:
            types[index, image.start : image.start + image.length] = 1
    pixels = np.concatenate([image.picture.pixels for image in images])
    grids = torch.tensor([image.picture.grid for image in images])
    return ImageBatch(torch.from_numpy(pixels), grids, types)


def _streams(row: MicroBatch, tokens: NDArray[np.int64]) -> dict[str, NDArray]:
    """Return the streams of `TokenBatch` for ``tokens`` [T]."""
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
