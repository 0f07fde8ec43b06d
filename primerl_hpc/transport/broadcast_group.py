"""The group that receives a policy version from the trainer: gloo between CPUs, NCCL between GPUs. Needs torch.

    group = Group.join(store, "a3f1", rank=0, size=3, device=device)      # raises RoleError when somebody does not come
    group.send(tensors)                                                   # rank 0, once per bucket
    group.send_end()
    for name, tensor in group.receive(): …                                # everybody else

A bucket is its description (JSON: name, dtype and shape of each tensor) and one flat tensor of bytes. Every operation ends after
`SILENCE_S`, with RuntimeError: a member that died or hangs holds nobody longer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from primerl_hpc.common.env import nccl_waits_on_the_host
from primerl_hpc.common.errors import RoleError

JOIN_S = 60.0  # for the members to meet
SILENCE_S = 60.0  # for one bucket
ALIGN_BYTES = 16  # of each tensor in a bucket


def open_store(host: str) -> TCPStore:
    """The trainer's, on a free port of ``host``: ``store.port``."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_S))


def connect_store(host: str, port: int) -> TCPStore:
    """A member's. Raises RoleError when the trainer is not there."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_S))
    except RuntimeError as error:
        raise RoleError(f"the trainer does not answer at {host}:{port}: {_first_line(error)}") from error


class Group:
    def __init__(self, name: str, group: ProcessGroup, device: torch.device) -> None:
        self.name, self.group, self.device = name, group, device

    @classmethod
    def join(cls, store: Store, name: str, *, rank: int, size: int, device: torch.device) -> Group:
        """Meet the others first, for `JOIN_S` at most: making a group with somebody missing would take its whole time limit."""
        store = PrefixStore(name, store)
        limit = timedelta(seconds=SILENCE_S)
        try:
            store.set(f"here/{rank}", "")
            store.wait([f"here/{each}" for each in range(size)], timedelta(seconds=JOIN_S))
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
            raise RoleError(f"group {name} did not come together: {_first_line(error)}") from error
        return cls(name, group, device)

    def send(self, tensors: dict[str, Tensor]) -> None:
        """One bucket. Raises RuntimeError when a member is gone."""
        entries, num_bytes = [], 0
        for name, value in tensors.items():
            entries.append([name, str(value.dtype).removeprefix("torch."), list(value.shape), num_bytes])
            num_bytes += math.ceil(value.nbytes / ALIGN_BYTES) * ALIGN_BYTES
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        for (_, _, _, start), value in zip(entries, tensors.values(), strict=True):
            flat[start : start + value.nbytes] = value.contiguous().reshape(-1).view(torch.uint8)
        text = torch.frombuffer(bytearray(json.dumps([num_bytes, entries]).encode()), dtype=torch.uint8)
        self._send(torch.tensor([len(text)], device=self.device))
        self._send(text.to(self.device))
        self._send(flat)

    def send_end(self) -> None:
        self._send(torch.zeros(1, dtype=torch.int64, device=self.device))

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) to the end. Raises RuntimeError when the sender is gone, or silent."""
        while length := int(self._receive(1, torch.int64).item()):
            text = self._receive(length, torch.uint8).cpu().numpy().tobytes()
            num_bytes, entries = json.loads(text)
            flat = self._receive(num_bytes, torch.uint8)
            for name, dtype, shape, start in entries:
                kind = getattr(torch, dtype)
                data = flat[start : start + math.prod(shape) * kind.itemsize]
                yield name, data.view(kind).view(shape)

    def _send(self, value: Tensor) -> None:
        if value.numel():
            self.group.broadcast(value, 0).wait(timedelta(seconds=SILENCE_S))

    def _receive(self, num: int, dtype: torch.dtype) -> Tensor:
        value = torch.empty(num, dtype=dtype, device=self.device)
        self._send(value)
        return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
