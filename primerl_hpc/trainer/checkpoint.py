"""The trainer's side of ``checkpoints/step_N``: weights, optimizer and progress, readable by any number of ranks.

Tensors go through torch's distributed checkpoint into safetensors shards whose headers say where each chunk lies,
so no pickle is written or read (see docs/decisions/0002-checkpoint-format.md). What is not a tensor is in
``state.json``. Random state needs no place: it is a function of seed, step and rank (`setup.seed_step`).
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import fsync_dir, read_json, write_json
from primerl_hpc.common.rundir import COMPLETE, RunDir
from primerl_hpc.recipe.training_schema import Checkpoint
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.optim import make_state, num_updates, state_kinds, state_tensors

STATE = "state.json"
SCHEMA_VERSION = 1
SIDE = "trainer"

log = logging.getLogger("primerl_hpc.trainer")


def save_checkpoint(
    run: RunDir, core: Core, step: int, sides: tuple[str, ...], progress: dict[str, Any] | None = None
) -> None:
    """Write the side under another name, make it durable, rename it, mark it done. Collective."""
    side = run.checkpoint_side(step, SIDE)
    temporary = side.with_name(f"{SIDE}.tmp")
    if core.world.is_leader:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(side, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    dcp.save(_tensors(core), storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True))
    if core.world.is_leader:
        state = {
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "world_size": core.world.size,
            "optimizer": core.recipe.optimizer.type,
            "optimizer_kinds": state_kinds(core.optimizer),
            "optimizer_updates": num_updates(core.optimizer),
            "num_tokens": core.num_tokens,
            "progress": progress or {},
        }
        write_json(temporary / STATE, state)
        fsync_dir(temporary)
        os.rename(temporary, side)
        fsync_dir(side.parent)
        run.finish_checkpoint_side(step, SIDE, sides)
    dist.barrier()


def load_checkpoint(run: RunDir, core: Core, step: int) -> dict[str, Any]:
    """Read weights and optimizer into ``core``; returns the loop's progress. Collective.

    Raises DataError when the checkpoint is of another schema version or optimizer.
    """
    side = run.checkpoint_side(step, SIDE)
    state = read_json(side / STATE)
    if state["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"checkpoint of schema version {state['schema_version']}, this trainer reads {SCHEMA_VERSION}",
            place=str(side),
        )
    if state["optimizer"] != core.recipe.optimizer.type:
        raise DataError(
            f"checkpoint was made with optimizer {state['optimizer']}, the recipe says {core.recipe.optimizer.type}",
            place=str(side),
        )
    make_state(core.optimizer, state["optimizer_kinds"], state["optimizer_updates"])
    dcp.load(_tensors(core), storage_reader=HuggingFaceStorageReader(str(side)))
    core.num_tokens = state["num_tokens"]
    return state["progress"]


def _tensors(core: Core) -> dict[str, Tensor]:
    weights = {f"model.{name}": value.detach() for name, value in core.policy.tensors()}
    return weights | state_tensors(core.optimizer, core.names)


def is_due(config: Checkpoint, step: int, max_steps: int) -> bool:
    if step == max_steps:
        return config.at_end
    return config.interval is not None and step % config.interval == 0


def kept_checkpoints(complete: list[int], config: Checkpoint) -> set[int]:
    """Which of the complete steps stay: the newest ``keep_last`` and every multiple of ``keep_interval``."""
    kept = set(sorted(complete)[-config.keep_last :])
    if config.keep_interval is not None:
        kept |= {step for step in complete if step % config.keep_interval == 0}
    return kept


def prune_checkpoints(run: RunDir, config: Checkpoint) -> list[int]:
    """Delete complete checkpoints that need not be kept. Incomplete ones are not counted and not touched."""
    complete = run.complete_checkpoints()
    surplus = sorted(set(complete) - kept_checkpoints(complete, config))
    for step in surplus:
        run.delete_step(run.checkpoint(step), COMPLETE)
    return surplus


def present_checkpoints(run: RunDir) -> set[int]:
    """Steps with a checkpoint folder, complete or on its way: their policy versions must stay too."""
    return {int(path.name.removeprefix("step_")) for path in _step_folders(run.checkpoints)}


def _step_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.removeprefix("step_").isdigit()]
