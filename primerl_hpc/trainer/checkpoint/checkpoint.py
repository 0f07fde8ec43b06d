"""The trainer's side of ``checkpoints/step_N``: weights, optimizer and progress, readable by any number of ranks.

Tensors are stored by torch's distributed checkpoint in safetensors shards whose headers record the position of each
chunk, so no pickle is written or read (see docs/decisions/0002-checkpoint-format.md). Everything else is in
``state.json``, with names, sizes and checksums of the shards. Random state is not stored: it is a function of seed,
step and rank (`setup.seed_step`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import crc32_of_file, listed_file, read_json
from primerl_hpc.common.safety.decoding import decoding, file_entries, is_count
from primerl_hpc.recipe.schema.run import Checkpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE
from primerl_hpc.trainer.optim.loss_scale import MIN_SCALE
from primerl_hpc.trainer.optim.optimizers import make_state, num_updates, state_kinds, state_tensors
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.setup import broadcast_from_rank0, gather_to_rank0
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.transport.weights.filesystem import LAG_S, files_fault, wait_while

STATE = "state.json"
SCHEMA_VERSION = 1
SIDE = "trainer"

log = logging.getLogger("primerl_hpc.trainer")


def adapter_state(trainer: Trainer) -> dict[str, Any] | None:
    """Return the adapter settings that a checkpoint must match; None without adapters."""
    lora = trainer.recipe.lora
    if lora is None:
        return None
    # absent if false, as in checkpoints that were written before the key existed
    left_out = {"dropout"} if lora.rank_stabilized else {"dropout", "rank_stabilized"}
    return lora.model_dump(mode="json", exclude=left_out)


def checkpoint_state(trainer: Trainer, step: int, progress: dict[str, Any] | None) -> dict[str, Any]:
    """Return the part of a checkpoint that is not tensors."""
    weights_only = trainer.recipe.checkpoint.weights_only
    scale = {} if trainer.loss_scale is None else {"loss_scale": trainer.loss_scale.state()}
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "world_size": trainer.world.size,
        "lora": adapter_state(trainer),
        "optimizer": trainer.recipe.optimizer.type,
        "optimizer_kinds": [] if weights_only else state_kinds(trainer.optimizer),
        "optimizer_updates": 0 if weights_only else num_updates(trainer.optimizer),
        "num_tokens": trainer.num_tokens,
        "schedule_start": trainer.schedule_start,
        "progress": progress or {},
        **scale,
    }


def checkpoint_tensors(trainer: Trainer, *, weights_only: bool) -> dict[str, Tensor]:
    """Return weights by name, and unless ``weights_only`` the optimizer's state.

    A run that trains adapters stores only those: the model's own weights remain in its folder.
    """
    if trainer.recipe.lora is None:
        weights = {f"model.{name}": value.detach() for name, value in trainer.policy.tensors()}
    else:
        weights = {f"adapter.{name}": value.detach() for name, value in trainer.policy.adapters()}
    return weights if weights_only else weights | state_tensors(trainer.optimizer, trainer.names)


def load_checkpoint(run: RunDir, trainer: Trainer, step: int, *, lag_s: float = LAG_S) -> dict[str, Any]:
    """Read weights and optimizer into ``trainer``. Returns the loop's progress. Collective.

    In a checkpoint from another run, the parts named in its fork note are not read.
    Raises DataError if the checkpoint has another schema version, model or optimizer, or is damaged.
    """
    side = run.checkpoint_side(step, SIDE)
    state = read_state(side)
    skipped = run.fork_skips(step)
    if state["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"the checkpoint has schema version {state['schema_version']}, this trainer reads "
            f"{SCHEMA_VERSION}",
            location=str(side),
        )
    if (saved_lora := state.get("lora")) != (recipe_lora := adapter_state(trainer)):
        raise DataError(
            f"the checkpoint has {_describe_adapters(saved_lora)}, the recipe trains "
            f"{_describe_adapters(recipe_lora)}",
            location=str(side),
        )
    kinds = [] if "optimizer" in skipped else state["optimizer_kinds"]
    if kinds and state["optimizer"] != trainer.recipe.optimizer.type:
        raise DataError(
            f"the checkpoint has optimizer {state['optimizer']}, the recipe uses "
            f"{trainer.recipe.optimizer.type}",
            location=str(side),
            hint="start from it in a new run with checkpoint.fork and skip: [optimizer]",
        )
    check_shards(run, step, state.get("shards", []), trainer.world, lag_s)
    make_state(trainer.optimizer, kinds, state["optimizer_updates"])
    tensors = checkpoint_tensors(trainer, weights_only=not kinds)
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(side)))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, SafetensorError) as error:
        raise DataError(
            f"the checkpoint is damaged or belongs to another model: {cause_of(error)}", location=str(side)
        ) from error
    if trainer.loss_scale is not None and "loss_scale" in state and "optimizer" not in skipped:
        trainer.loss_scale.load(state["loss_scale"])
    trainer.num_tokens = 0 if "progress" in skipped else state["num_tokens"]
    trainer.schedule_start = step if "scheduler" in skipped else state["schedule_start"]
    return {} if "data" in skipped else state["progress"]


def read_state(side: Path) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint. Raises DataError if a value is missing or has another type."""
    state = read_json(side / STATE)
    with decoding("the trainer's state is incomplete", location=side / STATE):
        if not is_count(state["schema_version"]):
            raise ValueError("schema_version is not an integer")
        if state["schema_version"] != SCHEMA_VERSION:
            return state
        if not all(is_count(state[name]) for name in ("num_tokens", "schedule_start")):
            raise ValueError("a count is not an integer of at least 0")
        kinds = state["optimizer_kinds"]
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise ValueError("optimizer_kinds is not a list of names")
        if not isinstance(state["optimizer"], str) or not isinstance(state["progress"], dict):
            raise ValueError("optimizer or progress has another type")
        if not is_count(state["optimizer_updates"]):
            raise ValueError("optimizer_updates is not an integer of at least 0")
        if not isinstance(state.get("lora"), dict | None):
            raise ValueError("lora is not a mapping")
        if (scale := state.get("loss_scale")) is not None and not (
            isinstance(scale["scale"], float)
            and scale["scale"] >= MIN_SCALE
            and is_count(scale["good_steps"])
        ):
            raise ValueError(f"loss_scale is not a factor of at least {MIN_SCALE:g} and a count")
        file_entries(state.get("shards", []))
    return state


def check_shards(run: RunDir, step: int, shards: list[dict[str, Any]], world: World, lag_s: float) -> None:
    """Raise DataError if a saved file is missing or changed: the first such file, on all ranks.

    Collective: each rank reads its share of the files. The check is necessary because torch infers a tensor's size from
    the parts that it finds and leaves a hole between them unread. ``shards``: names, sizes and CRC-32; empty in older
    checkpoints.
    """
    side = run.checkpoint_side(step, SIDE)
    fault = wait_while(lambda: files_fault(side, shards, STATE), lag_s) if world.is_leader else ""
    if not (fault := broadcast_from_rank0(fault)):
        # a file is read by the rank with the number of its writer: its node then has it in memory for the load
        faults = gather_to_rank0(_checksum_fault(side, shards[world.rank :: world.size]))
        fault = broadcast_from_rank0(next(filter(None, faults), ""))
    if fault:
        older = [number for number in run.complete_checkpoints() if number < step]
        hint = f"remove {run.checkpoint(step)} to continue from checkpoint {older[-1]}" if older else ""
        raise DataError(f"the checkpoint is damaged: {fault}", location=str(side), hint=hint)


def _checksum_fault(side: Path, shards: list[dict[str, Any]]) -> str:
    for entry in shards:
        try:
            found = crc32_of_file(listed_file(side, entry["name"]))
        except DataError as error:
            return error.cause
        except OSError as error:
            return f"{entry['name']} cannot be read ({error.strerror})"
        if found != entry["crc32"]:
            return f"{entry['name']} has CRC-32 {found:08x}, {STATE} expects {entry['crc32']:08x}"
    return ""


def _describe_adapters(lora: dict[str, Any] | None) -> str:
    if lora is None:
        return "all weights"
    targets = lora["target_modules"]
    where = "" if targets == "auto" else f" on {', '.join(targets)}"
    stabilized = ", rank-stabilized" if lora.get("rank_stabilized") else ""
    return f"adapters of rank {lora['rank']}, alpha {lora['alpha']:g}{stabilized}{where}"


def cause_of(error: BaseException) -> str:
    """Return the first failed rank's message, in one line."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def is_due(config: Checkpoint, step: int, max_steps: int) -> bool:
    """True if the recipe's schedule saves a checkpoint at ``step``."""
    if step == max_steps:
        return config.at_end
    return config.interval is not None and step % config.interval == 0


def kept_checkpoints(complete: list[int], config: Checkpoint) -> set[int]:
    """Return the complete steps to keep: the newest ``keep_last`` and every multiple of ``keep_interval``."""
    kept = set(sorted(complete)[-config.keep_last :])
    if config.keep_interval is not None:
        kept |= {step for step in complete if step % config.keep_interval == 0}
    return kept


def prune_checkpoints(run: RunDir, config: Checkpoint) -> list[int]:
    """Delete complete checkpoints that need not be kept. Incomplete ones are neither counted nor deleted."""
    complete = run.complete_checkpoints()
    surplus = sorted(set(complete) - kept_checkpoints(complete, config))
    for step in surplus:
        run.delete_step(run.checkpoint(step), COMPLETE)
    return surplus


def present_checkpoints(run: RunDir) -> set[int]:
    """Return steps with a checkpoint folder, complete or in progress: their policy versions must be kept too."""
    return {int(path.name.removeprefix("step_")) for path in _step_folders(run.checkpoints)}


def _step_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.removeprefix("step_").isdigit()]
