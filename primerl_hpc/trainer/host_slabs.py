"""Host memory for a trainer's state, in slabs of a power of two.

    slabs = HostSlabs(is_pinned=True)
    copy = slabs.take(shape, torch.float32)      # a view that stays valid

torch rounds every block of pinned memory up to a power of two: one block per tensor needs up to twice the tensors'
bytes, which cannot be swapped out. Tensors therefore share slabs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_BYTES = 256 << 20
ALIGNMENT = 64
"""Alignment of tensors in a slab, in bytes."""


@dataclass
class Slab:
    memory: Tensor  # uint8
    used: int = 0

    def room(self) -> int:
        return len(self.memory) - self.used


class HostSlabs:
    """``is_pinned``: False on machines without a GPU."""

    def __init__(self, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self.slabs: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(len(slab.memory) for slab in self.slabs)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor that shares a slab with others."""
        size = math.prod(shape) * dtype.itemsize
        slab = next((slab for slab in self.slabs if slab.room() >= size), None)
        if slab is None:
            slab = self.add_slab(size)
        start = slab.used
        slab.used = min(len(slab.memory), -(-(start + size) // ALIGNMENT) * ALIGNMENT)
        return slab.memory[start : start + size].view(dtype).view(torch.Size(shape))

    def add_slab(self, num_bytes: int) -> Slab:
        """Allocate a slab for a tensor of ``num_bytes``: of `SLAB_BYTES`, or of the next power of two."""
        size = max(SLAB_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        slab = Slab(torch.empty(size, dtype=torch.uint8, pin_memory=self.is_pinned))
        self.slabs.append(slab)
        return slab

    def release(self) -> None:
        """Use the slabs again from their start. Tensors taken before must no longer be read."""
        for slab in self.slabs:
            slab.used = 0
