"""The process group that receives a policy version from the trainer: gloo on CPUs, NCCL on GPUs. Requires torch.

    group = BroadcastGroup.join(store, "a3f1", rank=0, size=3, device=device)   # RoleError if a member does not join
    group.send(tensors)                                                         # rank 0, any number of times
    group.send_end()
    for name, tensor in group.receive(): …                                      # all other ranks

Tensors are cut into pieces and sent in buckets of at most `BUCKET_BYTES`, of which two are on the way at a time: a
member needs memory for two buckets and the tensor that it receives, however large a layer is. A bucket is two messages,
its sizes and its bytes: a description (JSON: name, dtype, shape, offset in the tensor, number of bytes and offset in
the bucket of each piece), then the pieces.

Every operation raises RuntimeError after `SILENCE_S`, so a member that died or hangs blocks the others no longer than
that.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from primerl_hpc.common.env import nccl_waits_on_the_host
from primerl_hpc.common.errors import RoleError
from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.transport.members import require_proofs
from primerl_hpc.transport.store import SecureStore

JOIN_S = 60.0  # time limit for all members to join
SILENCE_S = 60.0  # time limit of one operation
ALIGN_BYTES = 16  # alignment of each piece in a bucket
BUCKET_BYTES = 512 << 20  # bound of the pieces of a bucket
IN_FLIGHT = 2  # buckets on the way


def connect_store(keys: RunKeys, host: str, port: int) -> SecureStore:
    """Connect a member to the trainer's store. Raises RoleError if the trainer does not respond."""
    try:
        return SecureStore(keys, host, port, timeout_s=JOIN_S)
    except RoleError as error:
        raise RoleError(f"the trainer does not respond at {host}:{port}: {error.cause}") from error


@dataclass(frozen=True)
class Piece:
    """Consecutive bytes of a tensor."""

    name: str
    tensor: Tensor
    start: int
    num_bytes: int

    def description(self) -> list[Any]:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return [self.name, dtype, list(self.tensor.shape), self.start, self.num_bytes]

    def data(self) -> Tensor:
        flat = self.tensor.contiguous().reshape(-1).view(torch.uint8)
        return flat[self.start : self.start + self.num_bytes]


def cut_into_buckets(tensors: dict[str, Tensor]) -> Iterator[list[Piece]]:
    """Yield the pieces of each bucket: at most `BUCKET_BYTES`, in the order of the tensors."""
    bucket: list[Piece] = []
    free = BUCKET_BYTES
    for name, tensor in tensors.items():
        start = 0
        while True:
            size = min(tensor.nbytes - start, free)
            bucket.append(Piece(name, tensor, start, size))
            free -= math.ceil(size / ALIGN_BYTES) * ALIGN_BYTES
            start += size
            if free < ALIGN_BYTES:
                yield bucket
                bucket, free = [], BUCKET_BYTES
            if start == tensor.nbytes:
                break
    if bucket:
        yield bucket


@dataclass
class _Partial:
    """A tensor of which not all pieces have arrived."""

    data: Tensor  # bytes
    missing: int


def _tensors_of(
    message: Tensor, header_bytes: int, partial: dict[str, _Partial]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a bucket completes. ``partial``: tensors of earlier buckets, changed in place."""
    entries = json.loads(message[:header_bytes].cpu().numpy().tobytes())
    pieces = message[header_bytes:]
    for name, dtype, shape, start, num_bytes, offset in entries:
        kind = getattr(torch, dtype)
        data, total = pieces[offset : offset + num_bytes], math.prod(shape) * kind.itemsize
        if num_bytes < total:
            begun = partial.setdefault(name, _Partial(data.new_empty(total), total))
            begun.data[start : start + num_bytes] = data
            begun.missing -= num_bytes
            if begun.missing:
                continue
            data = partial.pop(name).data
        yield name, data.view(kind).view(shape)


class BroadcastGroup:
    def __init__(self, name: str, group: ProcessGroup, device: torch.device) -> None:
        self.name, self.group, self.device = name, group, device
        self._sent: deque[tuple[Tensor, Any]] = deque()  # buckets on the way, which must not be freed

    @classmethod
    def join(cls, store: Store, name: str, *, rank: int, size: int, device: torch.device) -> BroadcastGroup:
        """Wait for all members and create the group. Raises RoleError if one does not join within `JOIN_S`.

        The members meet in the store first, because creating a process group with a missing member would block for the
        complete time limit of its operations.
        """
        require_proofs()
        store = PrefixStore(name, store)
        limit = timedelta(seconds=SILENCE_S)
        try:
            store.set(f"here/{rank}", "")
            store.wait([f"here/{member}" for member in range(size)], timedelta(seconds=JOIN_S))
            group = ProcessGroup(store, rank, size)
            if device.type == "cuda":
                from torch.distributed import ProcessGroupNCCL

                options = ProcessGroupNCCL.Options()
                options._timeout = limit
                with nccl_waits_on_the_host():
                    backend, kind = (
                        ProcessGroupNCCL(store, rank, size, options),
                        ProcessGroup.BackendType.NCCL,
                    )
            else:
                backend, kind = ProcessGroupGloo(store, rank, size, limit), ProcessGroup.BackendType.GLOO
            group._register_backend(torch.device(device.type), kind, backend)
        except RuntimeError as error:
            raise RoleError(f"not all members joined group {name}: {_first_line(error)}") from error
        return cls(name, group, device)

    def send(self, tensors: dict[str, Tensor]) -> None:
        """Send tensors from rank 0. Raises RuntimeError if a member has failed."""
        for pieces in cut_into_buckets(tensors):
            self._send_bucket(pieces)

    def send_end(self) -> None:
        """Send the end of the version. Raises RuntimeError if a member has failed."""
        self._wait_for_sent(0)
        self._send(torch.zeros(2, dtype=torch.int64, device=self.device))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) until the end of the version. Raises RuntimeError if the sender has failed or hangs.

        The next bucket arrives while the tensors of the last one are in use.
        """
        arriving: tuple[Tensor, int, Any] | None = None
        partial: dict[str, _Partial] = {}
        while True:
            header_bytes, num_bytes = self._receive(2, torch.int64).tolist()
            following = self._start_receiving(header_bytes, num_bytes) if header_bytes else None
            if arriving is not None:
                yield from _tensors_of(*arriving[:2], partial)
            if following is None:
                break
            following[2].wait(timedelta(seconds=SILENCE_S))
            arriving = following
        if partial:
            raise RuntimeError(f"the version ended before {', '.join(partial)} was complete")

    def _send_bucket(self, pieces: list[Piece]) -> None:
        entries, num_bytes = [], 0
        for piece in pieces:
            entries.append([*piece.description(), num_bytes])
            num_bytes += math.ceil(piece.num_bytes / ALIGN_BYTES) * ALIGN_BYTES
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % ALIGN_BYTES)
        message = torch.empty(len(text) + num_bytes, dtype=torch.uint8, device=self.device)
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        for piece, entry in zip(pieces, entries, strict=True):
            start = len(text) + entry[-1]
            message[start : start + piece.num_bytes] = piece.data()
        self._wait_for_sent(IN_FLIGHT - 1)
        self._send(torch.tensor([len(text), num_bytes], device=self.device))
        self._sent.append((message, self.group.broadcast(message, 0)))

    def _wait_for_sent(self, most: int) -> None:
        """Wait until at most so many buckets are on the way."""
        while len(self._sent) > most:
            _, work = self._sent.popleft()
            work.wait(timedelta(seconds=SILENCE_S))

    def _start_receiving(self, header_bytes: int, num_bytes: int) -> tuple[Tensor, int, Any]:
        message = torch.empty(header_bytes + num_bytes, dtype=torch.uint8, device=self.device)
        return message, header_bytes, self.group.broadcast(message, 0)

    def _send(self, value: Tensor) -> None:
        if value.numel():
            self.group.broadcast(value, 0).wait(timedelta(seconds=SILENCE_S))

    def _receive(self, num: int, dtype: torch.dtype) -> Tensor:
        value = torch.empty(num, dtype=dtype, device=self.device)
        self._send(value)
        return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
