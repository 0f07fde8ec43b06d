"""Writes the trainer's side of checkpoints while training goes on.

    with Saver(run, core, sides) as saver:
        saver.save(step, progress)                      # returns when the shards are copied to host memory
        saver.save(step, progress, in_background=False) # returns when the checkpoint is on disk
    # leaving waits for what is on its way, and raises what went wrong with it

The writing thread of each rank meets its peers in a gloo group of its own, so that nothing it does can be taken for a
collective of training. One checkpoint is on its way at most: the next save waits for it. The folder is written under
another name, made durable, renamed and then marked: a process killed at any moment leaves no half checkpoint behind.

What goes wrong on one rank goes wrong on all. A save beside training that failed is tried once more, at the next step
(`control.read_requests`): a full disk should be known, and may be mended, long before the next save is due.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torch.futures import Future

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import fsync_dir, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.trainer.checkpoint import SIDE, STATE, cause_of, checkpoint_state, checkpoint_tensors
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.parallel.mesh import local
from primerl_hpc.trainer.setup import from_leader
from primerl_hpc.trainer.shards import write_safetensors
from primerl_hpc.transport.weights_filesystem import WeightWriter

log = logging.getLogger("primerl_hpc.trainer")


class Saver:
    def __init__(self, run: RunDir, core: Core, sides: tuple[str, ...]) -> None:
        self.run, self.core, self.sides = run, core, sides
        self.config = core.recipe.checkpoint
        self._group = None
        if self.config.asynchronous:
            self._group = dist.new_group(backend="gloo", timeout=core.world.timeout)
        self._copies: dict[str, Tensor] = {}  # host memory, used again by every save
        self._thread: threading.Thread | None = None
        self._fault: RoleError | None = None
        self._is_second_try = False
        self._num_failed = 0

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.finish()

    @property
    def has_failed(self) -> bool:
        """Whether the last save failed beside training, as far as this rank knows by now."""
        return self._fault is not None

    @property
    def metrics(self) -> dict[str, int]:
        """How many saves of this life failed beside training, once one has."""
        return {"checkpoint/failed": self._num_failed} if self._num_failed else {}

    def save(self, step: int, progress: dict[str, Any] | None = None, *, in_background: bool = True) -> None:
        """Collective. Raises RoleError when it fails, or when the last two that were on their way did."""
        if self.wait() and self._is_second_try:
            self.finish()
        self._is_second_try, self._fault = self.has_failed, None
        state = checkpoint_state(self.core, step, progress)
        tensors = checkpoint_tensors(self.core, weights_only=self.config.weights_only)
        if self._group is None or not in_background:
            self._write(step, state, tensors)
            return
        tensors = self._copy(tensors)
        self._thread = threading.Thread(
            target=self._work, args=(step, state, tensors), name="saver", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until nothing is on its way. Raises RoleError when it failed."""
        if self.wait() and (fault := self._fault) is not None:
            self._fault = None
            raise fault

    def wait(self) -> bool:
        """Until nothing is on its way. Whether it failed: the same on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.has_failed

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, in host memory."""
        on_gpu = self.core.world.device.type == "cuda"
        result = {}
        for name, value in tensors.items():
            shard = local(value)
            if name not in self._copies:
                self._copies[name] = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=on_gpu)
            copy = self._copies[name]
            copy.copy_(shard, non_blocking=True)
            result[name] = (
                DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy
            )
        if on_gpu:
            torch.cuda.synchronize()
        return result

    def _work(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        started = time.perf_counter()
        try:
            self._write(step, state, tensors)
            log.info(
                "checkpoint %d is written, in %.1f s beside training", step, time.perf_counter() - started
            )
        except RoleError as error:
            if self.core.world.is_leader:
                log.error("%s", error)
            self._num_failed += 1
            self._fault = error

    def _write(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Raises RoleError on all ranks when it fails on any; what was written so far is gone then."""
        side = self.run.checkpoint_side(step, SIDE)
        temporary = side.with_name(f"{SIDE}.tmp")
        writer = ShardWriter(temporary)

        def make_folder() -> None:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(side, ignore_errors=True)
            temporary.mkdir(parents=True)

        def finish_folder() -> None:
            write_json(temporary / STATE, state | {"shards": writer.written})
            fsync_dir(temporary)
            os.rename(temporary, side)
            fsync_dir(side.parent)
            self.run.finish_checkpoint_side(step, SIDE, self.sides)

        try:
            self._as_leader(make_folder)
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            self._as_leader(finish_folder)
        except (Exception, dcp.api.CheckpointException) as error:
            if self.core.world.is_leader:  # space for the next try
                shutil.rmtree(temporary, ignore_errors=True)
                with contextlib.suppress(OSError):
                    side.parent.rmdir()
            raise RoleError(f"checkpoint {step} was not written: {cause_of(error)}") from error

    def _as_leader(self, work: Callable[[], None]) -> None:
        """Rank 0 does it, and all ranks hear of its fault. Collective."""
        fault = ""
        if self.core.world.is_leader:
            try:
                work()
            except Exception as error:  # noqa: BLE001 told below, here and on all ranks
                fault = cause_of(error)
        if fault := from_leader(fault, self._group):
            raise RoleError(fault)


class ShardWriter(HuggingFaceStorageWriter):
    """torch's writer of sharded safetensors, but tensor by tensor: its own makes one bytes object of a whole shard,
    which needs the memory twice and holds Python's lock, and with it the training thread, for seconds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.written: list[dict[str, Any]] = []
        """Name, size and CRC-32 of all ranks' files; on rank 0, once they are written."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list]:
        entries = []
        shards = {}
        offsets = {}
        for item in plan.items:
            shards[item.index.fqn] = planner.resolve_data(item).detach()
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if shards:
            path = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            # the keys that torch's reader looks for: where in the whole tensor each shard lies
            header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            crc32 = write_safetensors(path, shards, header, with_crc32=True)
            entries.append(WeightWriter.entry(path, crc32))
        done: Future[list] = Future()
        done.set_result(entries)
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list]) -> None:
        """On rank 0, with what `write_data` gave on each rank."""
        self.written = sorted((entry for each in results for entry in each), key=lambda entry: entry["name"])
