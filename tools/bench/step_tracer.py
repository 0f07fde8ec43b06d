"""What a step of the trainer allocates, sends and waits for, on a GPU that does not exist (fake_gpu.py).

    fake_gpu.load()                                      # before torch is imported
    found = trace_steps(recipe, folder, rows, ranks=64, ranks_per_node=8)
    found.peak, found.collectives, found.waits

The code is the trainer's own, and the process is of no other use afterwards. Replaced is only what needs numbers from
the device: values that the host reads (ones), copies of a batch (empty tensors), and the sizes of the experts'
all-to-all, which are those of an even router.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_gpu
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

BLOCK_BYTES = 512
"""The allocator's unit."""
NOTED_BYTES = 8 << 20
"""Tensors whose origin is recorded."""


@dataclass
class Block:
    """Memory of one storage."""

    device: str
    num_bytes: int
    origin: tuple[Any, ...] = ()


@dataclass
class Collective:
    phase: str
    name: str
    ranks: int
    num_bytes: int


class StepTracer(TorchDispatchMode):
    """Records the memory of live storages, collectives, and reads of the device by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "build"
        self.live: Counter[str] = Counter()
        self.peak = 0
        self.peak_phase = ""
        self.collectives: list[Collective] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        self.blocks: weakref.WeakKeyDictionary[Any, Block] = weakref.WeakKeyDictionary()
        self.snapshot_at: float = math.inf
        self.snapshot: Counter[tuple[Any, ...]] = Counter()

    def phase_of(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """Return the function, whose calls are of ``phase``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.phase = phase
            result = function(*args, **kwargs)
            self.phase = "rest"
            return result

        return call

    def restart(self) -> None:
        self.peak, self.peak_phase = self.live["cuda"], self.phase
        self.collectives, self.waits = [], Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            self.wait("item")
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **kwargs)
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._note_collective(name.rpartition("::")[2], args, kwargs)
        elif name == "aten::_to_copy" and args[0].is_cuda and not (out.is_cuda or kwargs.get("non_blocking")):
            self.wait("copy to the host")
        for value in pytree.tree_leaves(out):
            if isinstance(value, Tensor):
                self._note(value, name)
        return out

    def wait(self, what: str) -> None:
        self.waits[what, origin(1)[-1] if origin(1) else "?"] += 1

    def _note(self, value: Tensor, operation: str) -> None:
        storage = getattr(value, "_local_tensor", value).untyped_storage()
        if storage in self.blocks:
            return
        block = Block(value.device.type, 0)
        self.blocks[storage] = block
        weakref.finalize(storage, self._change, block, 0)
        size = storage.nbytes()
        if size >= NOTED_BYTES:
            dtype = str(value.dtype).removeprefix("torch.")
            block.origin = (tuple(value.shape), dtype, operation.removeprefix("aten::"), *origin())
        self._change(block, size)

    def _change(self, block: Block, num_bytes: int) -> None:
        size = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
        self.live[block.device] += size - block.num_bytes
        block.num_bytes = size
        if block.device == "cuda" and self.live["cuda"] > self.peak:
            self.peak, self.peak_phase = self.live["cuda"], self.phase
            if self.peak >= self.snapshot_at:
                self._take_snapshot()

    def _take_snapshot(self) -> None:
        self.snapshot_at = math.inf
        for block in self.blocks.values():
            if block.device == "cuda" and block.num_bytes:
                self.snapshot[block.origin or ("small",)] += block.num_bytes

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if (block := self.blocks.get(storage)) is not None:
            self._change(block, num_bytes)

    def _note_collective(self, name: str, args: tuple, kwargs: dict) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        size = max((value.nbytes for value in leaves if isinstance(value, Tensor)), default=0)
        self.collectives.append(
            Collective(self.phase, name.partition(".")[0].strip("_"), ranks_of(leaves), size)
        )


def ranks_of(leaves: list[Any]) -> int:
    """Return the size of the process group among a collective's arguments; 0 if it is not known."""
    for leaf in leaves:
        if isinstance(leaf, str):  # name of a group, in operations of DTensor
            try:
                return dist.distributed_c10d._resolve_process_group(leaf).size()
            except (RuntimeError, KeyError, ValueError):
                continue
        if isinstance(leaf, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(leaf).size()
            except (RuntimeError, TypeError):
                continue
    return 0


def origin(depth: int = 2) -> tuple[str, ...]:
    """Return the innermost places of the trainer, the model and FSDP in the current stack, outermost last."""
    frame, found = sys._getframe(depth), []
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if any(part in name for part in ("primerl_hpc/", "transformers/", "/fsdp/", "/optim/")):
            short = name.rpartition("site-packages/")[2].rpartition("primerl_hpc/")[2]
            found.append(f"{short.removeprefix('torch/distributed/fsdp/')}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(found)


# -- a trainer without values ----------------------------------------------------------------------


class NoWatchdog:
    def heartbeat(self, *_: Any) -> None: ...


def even_sizes(
    num_tokens: int, num_chosen: int, num_experts: int, ranks: int
) -> tuple[list[int], list[int], int]:
    """Return what `dispatch.read_sizes` returns if each expert is chosen equally often, independently of the others."""
    others = num_experts - num_experts // ranks
    share = 1 - math.comb(others, num_chosen) / math.comb(num_experts, num_chosen)
    rows = [round(num_tokens * share)] * ranks
    return rows, rows, num_tokens * num_chosen


def outside_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without FakeTensorMode: meshes are made of real numbers."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


class Chunks:
    """Parts of a tensor for FSDP, each made when it is read: FSDP has one for each of 1,024 ranks, and reads two."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.dim = tensor, dim
        self.size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, number: int) -> Tensor:
        start = number * self.size
        rest = self.tensor.size(self.dim) - start
        if rest <= 0 < number:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.size, rest))


def replace_reads(tracer: StepTracer) -> None:
    """Replace what needs values."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    from primerl_hpc.trainer import batch, train_step
    from primerl_hpc.trainer.model import policy
    from primerl_hpc.trainer.model.recurrent import by_sample, shared_rows
    from primerl_hpc.trainer.parallel import context, dispatch, ring_flash

    def ones(shape: tuple[int, ...]) -> Any:
        return [ones(shape[1:]) for _ in range(shape[0])] if shape else 1.0

    def tolist(value: Tensor) -> Any:
        tracer.wait("tolist")
        return ones(tuple(value.shape))

    def moved(arrays: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
        return {
            name: torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=device)
            for name, array in arrays.items()
        }

    def totals(trainer: Any, rows: list[Any]) -> tuple[Tensor, int, float, int]:
        device = trainer.world.device
        return (
            torch.empty(4, device=device),
            1,
            1.0,
            len(batch.stack_rows(rows, trainer.recipe.seq_len, device)),
        )

    dispatch_of = dispatch.TorchDispatcher.dispatch

    def dispatched(dispatcher: Any, hidden: Tensor, index: Tensor, weights: Tensor, *more: Any) -> Any:
        ranks = dispatcher.num_ranks
        sizes = even_sizes(len(hidden), index.shape[1], ranks * dispatcher.num_local, ranks)

        def read_sizes(counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int], int]:
            tracer.wait("sizes of the all-to-all")
            return sizes

        dispatch.read_sizes = read_sizes
        return dispatch_of(dispatcher, hidden, index, weights, *more)

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        tracer.resized(storage, num_bytes)
        return result

    FakeTensor.tolist = tolist  # pyright: ignore[reportAttributeAccessIssue]
    torch.UntypedStorage.resize_ = resized
    _fsdp_param._chunk_with_empty = Chunks  # pyright: ignore[reportAttributeAccessIssue]
    for importer in (batch, context, ring_flash, by_sample, shared_rows):
        importer.to_device = moved
    dispatch.TorchDispatcher.dispatch = dispatched  # pyright: ignore[reportAttributeAccessIssue]
    policy.make_expert_mesh = outside_modes(policy.make_expert_mesh)
    policy.init_buffers = lambda hf: None
    train_step.Trainer._step_totals = totals  # pyright: ignore[reportAttributeAccessIssue]
    for name in ("__init__", "__getitem__"):
        setattr(DeviceMesh, name, outside_modes(getattr(DeviceMesh, name)))
    for name in ("_concatenate", "_unflatten", "_flatten", "from_group"):
        value = DeviceMesh.__dict__.get(name)
        if isinstance(value, staticmethod | classmethod):
            setattr(DeviceMesh, name, type(value)(outside_modes(value.__func__)))
        elif value is not None:
            setattr(DeviceMesh, name, outside_modes(value))
    DeviceMesh.mesh = property(outside_modes(DeviceMesh.mesh.fget))  # pyright: ignore


@contextmanager
def traced_trainer(
    recipe: Any, folder: Path, *, ranks: int, ranks_per_node: int
) -> Iterator[tuple[StepTracer, Any]]:
    """Build the trainer of rank 0; the block runs on the fake GPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from primerl_hpc.trainer import train_step
    from primerl_hpc.trainer.parallel.mesh import make_world

    tracer = StepTracer()
    fake_gpu.install(lambda: tracer.wait("synchronize"))
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    device = torch.device("cuda", 0)
    world = make_world(recipe.layout.trainer, device, local_rank=0, local_size=min(ranks, ranks_per_node))
    replace_reads(tracer)
    for name, phase in (("_forward_backward", "forward and backward"), ("_update", "optimizer")):
        setattr(train_step.Trainer, name, tracer.phase_of(getattr(train_step.Trainer, name), phase))
    with FakeTensorMode(allow_non_fake_inputs=True), tracer:
        watchdog: Any = NoWatchdog()
        yield (tracer, train_step.build_trainer(recipe, str(folder), world, watchdog, may_be_random=True))


def trace_steps(
    recipe: Any, folder: Path, rows: list[Any], *, ranks: int, ranks_per_node: int, with_snapshot: bool
) -> StepTracer:
    """Run steps of rank 0 over its ``rows``. Returns the record of the last one.

    The first step creates the optimizer's state, the second one finds the peak. ``with_snapshot``: a third one records
    what is alive then.
    """
    with traced_trainer(recipe, folder, ranks=ranks, ranks_per_node=ranks_per_node) as (tracer, trainer):
        for step in (1, 2, 3) if with_snapshot else (1, 2):
            tracer.snapshot_at = tracer.peak if step == 3 else math.inf
            tracer.restart()
            trainer.train_step(step, rows, ["environment"])
    return tracer
