"""Writes the trainer's side of checkpoints while training continues.

    with Saver(run, trainer, sides) as saver:
        saver.save(step, progress)                      # returns when the shards are copied to host memory
        saver.save(step, progress, in_background=False) # returns when the checkpoint is on disk
    # on exit it waits for a background save and raises its failure

The writing thread of each rank uses a separate gloo group, so that its collectives cannot match those of training. At
most one background save runs: the next save waits for it. The folder is written under a temporary name, synced, renamed
and then marked complete: a process killed at any moment leaves no partial checkpoint.

A failure on one rank fails the save on all. A failed background save is retried once, at the next step
(`control.read_requests`): a full disk should be reported, and can be fixed, long before the next scheduled save.
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
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.checkpoint.checkpoint import (
    SIDE,
    STATE,
    cause_of,
    checkpoint_state,
    checkpoint_tensors,
)
from primerl_hpc.trainer.host_slabs import HostSlabs
from primerl_hpc.trainer.parallel.mesh import to_local
from primerl_hpc.trainer.setup import broadcast_from_rank0
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.trainer.weights.shards import write_safetensors
from primerl_hpc.transport.weights.filesystem import WeightWriter

PATIENCE_S = 1.0
"""Time that training waits for the last save before it postpones a scheduled one."""

log = logging.getLogger("primerl_hpc.trainer")


class Saver:
    def __init__(self, run: RunDir, trainer: Trainer, sides: tuple[str, ...]) -> None:
        self.run, self.trainer, self.sides = run, trainer, sides
        self.config = trainer.recipe.checkpoint
        self._group: dist.ProcessGroup | None = None
        if self.config.asynchronous:
            group = dist.new_group(backend="gloo", timeout=trainer.world.timeout)
            assert isinstance(group, dist.ProcessGroup)  # not the number that ranks outside of a group get
            self._group = group
        self._copies: dict[str, Tensor] = {}  # in these slabs, reused by every save
        self._slabs = HostSlabs(is_pinned=trainer.world.device.type == "cuda")
        self._thread: threading.Thread | None = None
        self._fault: RoleError | None = None
        self._is_retry = False
        self._has_waited = False
        self._num_failed = 0

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.finish()

    @property
    def has_failed(self) -> bool:
        """True if the last background save failed, as far as this rank knows."""
        return self._fault is not None

    @property
    def metrics(self) -> dict[str, int]:
        """Return the number of failed background saves of this process, if any."""
        return {"checkpoint/failed": self._num_failed} if self._num_failed else {}

    def save(self, step: int, progress: dict[str, Any] | None = None, *, in_background: bool = True) -> None:
        """Save a checkpoint. Collective. Raises RoleError if it fails, or if the last two background saves failed."""
        if self.wait() and self._is_retry:
            self.finish()
        self._is_retry, self._fault = self.has_failed, None
        state = checkpoint_state(self.trainer, step, progress)
        tensors = checkpoint_tensors(self.trainer, weights_only=self.config.weights_only)
        if self._group is None or not in_background:
            self._write(step, state, tensors)
            return
        tensors = self._copy(tensors)
        self._has_waited = False
        self._thread = threading.Thread(
            target=self._save_in_background, args=(step, state, tensors), name="saver", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait for a background save. Raises RoleError if it failed."""
        if self.wait() and (fault := self._fault) is not None:
            self._fault = None
            raise fault

    def is_late(self) -> bool:
        """True if rank 0 still writes the last checkpoint. Waits up to `PATIENCE_S`, once for each save. Collective."""
        thread, is_alive = self._thread, False
        if thread is not None and self.trainer.world.is_leader:
            thread.join(0 if self._has_waited else PATIENCE_S)
            is_alive, self._has_waited = thread.is_alive(), True
        return broadcast_from_rank0(is_alive)

    def wait(self) -> bool:
        """Wait for a background save. Returns True if it failed: the same on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.has_failed

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of the tensors in host memory."""
        on_gpu = self.trainer.world.device.type == "cuda"
        result = {}
        for name, value in tensors.items():
            shard = to_local(value)
            if name not in self._copies:
                self._copies[name] = self._slabs.take(shard.shape, shard.dtype)
            copy = self._copies[name]
            copy.copy_(shard, non_blocking=True)
            result[name] = (
                DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy
            )
        if on_gpu:
            torch.cuda.synchronize()
        return result

    def _save_in_background(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        started = time.perf_counter()
        try:
            self._write(step, state, tensors)
            log.info("checkpoint %d written in the background in %.1f s", step, time.perf_counter() - started)
        except RoleError as error:
            if self.trainer.world.is_leader:
                log.error("%s", error)
            self._num_failed += 1
            self._fault = error

    def _write(self, step: int, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write the checkpoint. If it fails on any rank, delete the written part and raise RoleError on all ranks."""
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
            self._run_on_leader(make_folder)
            dcp.save(tensors, storage_writer=writer, process_group=self._group)
            self._run_on_leader(finish_folder)
        except (Exception, dcp.api.CheckpointException) as error:
            if self.trainer.world.is_leader:  # free space for the retry
                shutil.rmtree(temporary, ignore_errors=True)
                with contextlib.suppress(OSError):
                    side.parent.rmdir()
            raise RoleError(f"writing checkpoint {step} failed: {cause_of(error)}") from error

    def _run_on_leader(self, work: Callable[[], None]) -> None:
        """Run ``work`` on rank 0. Raises RoleError on all ranks if it fails. Collective."""
        fault = ""
        if self.trainer.world.is_leader:
            try:
                work()
            except Exception as error:  # noqa: BLE001 raised below on all ranks
                fault = cause_of(error)
        if fault := broadcast_from_rank0(fault, self._group):
            raise RoleError(fault)


class ShardWriter(HuggingFaceStorageWriter):
    """torch's writer of sharded safetensors, but tensor by tensor.

    torch's own builds one bytes object of a complete shard, which needs the memory twice and holds Python's lock, and
    with it the training thread, for seconds.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.written: list[dict[str, Any]] = []
        """Name, size and CRC-32 of all ranks' files; set on rank 0 after the write."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list]:
        entries = []
        shards = {}
        offsets = {}
        for item in plan.items:
            shards[item.index.fqn] = planner.resolve_data(item).detach()
            assert item.tensor_data is not None  # a checkpoint's values are tensors
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if shards:
            path = Path(self.path) / f"shard-{plan.storage_data['shard_index']:05d}.safetensors"
            # the keys that torch's reader expects: the position of each shard in the full tensor
            header = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            crc32 = write_safetensors(path, shards, header, with_crc32=True)
            entries.append(WeightWriter.entry(path, crc32))
        done: Future[list] = Future()
        done.set_result(entries)
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list]) -> None:
        """Collect the results of `write_data` of all ranks. Runs on rank 0."""
        self.written = sorted(
            (entry for entries in results for entry in entries), key=lambda entry: entry["name"]
        )
