"""Move the tensors that a trainer keeps between steps to host memory and back, in place.

    copy = HostCopy(trainer)
    copy.to_host()         # the device's memory is free, for the engines
    copy.to_device()       # every tensor has its content again

The memory below a tensor (its storage) is resized to 0 and back. Parameters, their shards, views of them inside FSDP
and the optimizer's state stay the same objects, so nothing that refers to them has to be rebuilt. The host memory is
allocated once, in slabs of a power of two, because torch rounds pinned blocks up to one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor

from primerl_hpc.trainer.host_slabs import SLAB_BYTES
from primerl_hpc.trainer.optim.optimizers import Optimizers
from primerl_hpc.trainer.parallel.mesh import to_local


class HostCopy:
    def __init__(self, model: torch.nn.Module, optimizer: Optimizers, device: torch.device) -> None:
        """Only tensors on ``device`` are moved: offloaded ones are on the host already."""
        self.model, self.optimizer, self.device = model, optimizer, device
        self._slabs: list[Tensor] = []
        self._moved: list[tuple[torch.UntypedStorage, int]] = []  # and its size in bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host now."""
        return sum(size for _, size in self._moved)

    @torch.no_grad()
    def to_host(self) -> None:
        """Copy all tensors to the host and free their memory on the device."""
        if self._moved:
            return
        moved = [(storage, storage.nbytes()) for storage in self._storages()]
        self._reserve(sum(size for _, size in moved))
        for part, piece in self._pieces(moved):
            piece.copy_(part, non_blocking=True)
        self._synchronize()
        for storage, _ in moved:
            storage.resize_(0)
        self._moved = moved
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def to_device(self) -> None:
        """Allocate the memory on the device again and copy the content back."""
        for storage, size in self._moved:
            storage.resize_(size)
        for part, piece in self._pieces(self._moved):
            part.copy_(piece, non_blocking=True)
        self._synchronize()
        self._moved = []

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storage of every parameter, buffer and optimizer state on the device, each once."""
        seen: set[int] = set()
        for tensor in self._tensors():
            local = to_local(tensor)
            storage = local.untyped_storage()
            address = storage.data_ptr()
            # on CPUs, writing a policy version exports tensors to NumPy, and torch does not resize those again
            if local.device.type != self.device.type or not storage.resizable():
                continue
            if not address or address in seen:
                continue
            seen.add(address)
            yield storage

    def _tensors(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _reserve(self, num_bytes: int) -> None:
        while len(self._slabs) * SLAB_BYTES < num_bytes:
            pinned = self.device.type == "cuda"
            self._slabs.append(torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=pinned))

    def _pieces(self, storages: list[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (bytes on the device, the same number of bytes on the host); a storage may span slabs."""
        filled = 0
        for storage, size in storages:
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                slab, offset = divmod(filled, SLAB_BYTES)
                length = min(size - start, SLAB_BYTES - offset)
                yield content[start : start + length], self._slabs[slab][offset : offset + length]
                start, filled = start + length, filled + length

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
