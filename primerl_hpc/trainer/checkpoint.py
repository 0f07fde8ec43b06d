"""The trainer's side of ``checkpoints/step_N``: weights, optimizer and progress, readable by any number of ranks.

Tensors go through torch's distributed checkpoint into safetensors shards whose headers say where each chunk lies,
so no pickle is written or read (see docs/decisions/0002-checkpoint-format.md). What is not a tensor is in
``state.json``, with names, sizes and checksums of the shards. Random state needs no place: it is a function of seed, step
and rank (`setup.seed_step`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import crc32_of_file, read_json
from primerl_hpc.common.rundir import COMPLETE, RunDir
from primerl_hpc.recipe.training_schema import Checkpoint
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.optim import make_state, num_updates, state_kinds, state_tensors
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.setup import from_leader
from primerl_hpc.transport.weights_filesystem import LAG_S, files_fault, wait_while

STATE = "state.json"
SCHEMA_VERSION = 1
SIDE = "trainer"

log = logging.getLogger("primerl_hpc.trainer")


def adapter_state(core: Core) -> dict[str, Any] | None:
    """What adapters of the recipe must have in common with those of a checkpoint; None without."""
    lora = core.recipe.lora
    return None if lora is None else lora.model_dump(mode="json", exclude={"dropout"})


def checkpoint_state(core: Core, step: int, progress: dict[str, Any] | None) -> dict[str, Any]:
    """What of a checkpoint is not a tensor."""
    weights_only = core.recipe.checkpoint.weights_only
    return {
        "schema_version": SCHEMA_VERSION,
        "step": step,
        "world_size": core.world.size,
        "lora": adapter_state(core),
        "optimizer": core.recipe.optimizer.type,
        "optimizer_kinds": [] if weights_only else state_kinds(core.optimizer),
        "optimizer_updates": 0 if weights_only else num_updates(core.optimizer),
        "num_tokens": core.num_tokens,
        "schedule_start": core.schedule_start,
        "progress": progress or {},
    }


def checkpoint_tensors(core: Core, *, weights_only: bool) -> dict[str, Tensor]:
    """Weights by name, and with them what state the optimizer has.

    Of a run that trains adapters these are all: the model's own weights are in its folder, as ever.
    """
    if core.recipe.lora is None:
        weights = {f"model.{name}": value.detach() for name, value in core.policy.tensors()}
    else:
        weights = {f"adapter.{name}": value.detach() for name, value in core.policy.adapters()}
    return weights if weights_only else weights | state_tensors(core.optimizer, core.names)


def load_checkpoint(run: RunDir, core: Core, step: int, *, lag_s: float = LAG_S) -> dict[str, Any]:
    """Read weights and optimizer into ``core``; returns the loop's progress. Collective.

    Of a checkpoint that came from another run, the parts named in its fork note are left as they are at the start.
    Raises DataError when the checkpoint is of another schema version, model or optimizer, or is damaged.
    """
    side = run.checkpoint_side(step, SIDE)
    state = read_json(side / STATE)
    skipped = run.fork_skips(step)
    if state["schema_version"] != SCHEMA_VERSION:
        raise DataError(
            f"checkpoint of schema version {state['schema_version']}, this trainer reads {SCHEMA_VERSION}",
            place=str(side),
        )
    if (theirs := state.get("lora")) != (ours := adapter_state(core)):
        raise DataError(
            f"checkpoint is of {_adapters_in_words(theirs)}, the recipe asks for {_adapters_in_words(ours)}",
            place=str(side),
        )
    kinds = [] if "optimizer" in skipped else state["optimizer_kinds"]
    if kinds and state["optimizer"] != core.recipe.optimizer.type:
        raise DataError(
            f"checkpoint was made with optimizer {state['optimizer']}, the recipe says {core.recipe.optimizer.type}",
            place=str(side),
            mend="start from it in a new run with checkpoint.fork and skip: [optimizer]",
        )
    check_shards(run, step, state.get("shards", []), core.world, lag_s)
    make_state(core.optimizer, kinds, state["optimizer_updates"])
    tensors = checkpoint_tensors(core, weights_only=not kinds)
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(side)))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, SafetensorError) as error:
        raise DataError(
            f"the checkpoint is damaged or of another model: {cause_of(error)}", place=str(side)
        ) from error
    core.num_tokens = 0 if "progress" in skipped else state["num_tokens"]
    core.schedule_start = step if "scheduler" in skipped else state["schedule_start"]
    return {} if "data" in skipped else state["progress"]


def check_shards(run: RunDir, step: int, shards: list[dict[str, Any]], world: World, lag_s: float) -> None:
    """Whether all that was saved is there, bit for bit. Collective: each rank reads its share of the files.

    torch takes a tensor's size from the parts it finds and leaves in place what lies in a hole between them.
    ``shards``: their names, sizes and CRC-32; none in checkpoints of older versions.
    Raises DataError naming the first file that is missing or not what was saved, on all ranks.
    """
    side = run.checkpoint_side(step, SIDE)
    fault = wait_while(lambda: files_fault(side, shards, STATE), lag_s) if world.is_leader else ""
    if not (fault := from_leader(fault)):
        everyones: list = [""] * world.size
        # the rank of the same number as the one that saved: what it reads here is in its node's memory for the load
        dist.all_gather_object(everyones, _checksum_fault(side, shards[world.rank :: world.size]))
        fault = next(filter(None, everyones), "")
    if fault:
        older = [each for each in run.complete_checkpoints() if each < step]
        mend = f"remove {run.checkpoint(step)} to go on from checkpoint {older[-1]}" if older else ""
        raise DataError(f"the checkpoint is damaged: {fault}", place=str(side), mend=mend)


def _checksum_fault(side: Path, shards: list[dict[str, Any]]) -> str:
    for entry in shards:
        try:
            found = crc32_of_file(side / entry["name"])
        except OSError as error:
            return f"{entry['name']} cannot be read ({error.strerror})"
        if found != entry["crc32"]:
            return f"{entry['name']} has CRC-32 {found:08x}, {STATE} says {entry['crc32']:08x}"
    return ""


def _adapters_in_words(lora: dict[str, Any] | None) -> str:
    if lora is None:
        return "all weights"
    targets = lora["target_modules"]
    where = "" if targets == "auto" else f" on {', '.join(targets)}"
    return f"adapters of rank {lora['rank']}, alpha {lora['alpha']:g}{where}"


def cause_of(error: BaseException) -> str:
    """The first rank's own words, in one line."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = error.failures[min(error.failures)][0]
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


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
