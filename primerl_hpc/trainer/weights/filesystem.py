"""Policy versions as HF folders: layers are gathered in turn, and ranks share the writing.

A rank's part is converted to the engines' types before it is gathered, and files are written concurrently with
gathering: checksums and the disk take their time in parallel. Memory is bounded by one tensor on the device and
`WRITERS` + 1 layers on the host per rank, in those types. Full tensors on a CPU are converted when they are written.
Fused experts are written under their per-expert names, as engines expect. A policy of adapters is a folder in PEFT's
format, which the leader gathers and writes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from primerl_hpc.common.files import write_json
from primerl_hpc.recipe.schema.training import LoRA
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.trainer.model.families import file_tensors, parameters_in_float32, standard_tensors
from primerl_hpc.trainer.model.policy import Policy
from primerl_hpc.trainer.parallel.expert import expert_modules
from primerl_hpc.trainer.parallel.mesh import to_local
from primerl_hpc.trainer.setup import World, broadcast_from_rank0, gather_to_rank0
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.trainer.weights.peft_targets import peft_targets
from primerl_hpc.trainer.weights.shards import Types, write_safetensors
from primerl_hpc.transport.weights.filesystem import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    WeightWriter,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
METADATA = {"format": "pt"}  # in every shard's header besides its tensors
COPIES_IN_FLIGHT = 2  # from a GPU to the host
WRITERS = 3
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Shard:
    """A written file."""

    entry: dict[str, Any]  # for the manifest
    names: list[str]  # of its tensors
    num_bytes: int  # of their data


def has_full_version(run: RunDir, version: int, world: World) -> bool:
    """True if the version is already complete: it is never written again, since it may be in use. Collective."""
    return broadcast_from_rank0((run.weights_step(version) / STABLE).exists() if world.is_leader else None)


def publish_policy(run: RunDir, trainer: Trainer, version: int) -> None:
    """Write ``weights/step_<version>``: the model, or its adapters where only they are trained. Collective."""
    recipe = trainer.recipe
    if recipe.lora is None:
        export_weights(run, trainer, version)
    else:
        export_adapters(
            run,
            trainer.policy,
            version,
            config=adapter_config(recipe.lora, trainer.model_path),
            dtype=recipe.model.dtype,
            world=trainer.world,
        )


@torch.no_grad()
def export_weights(run: RunDir, trainer: Trainer, version: int) -> None:
    """Write ``weights/step_<version>``. Collective; on return rank 0 has marked the version stable."""
    policy, world = trainer.policy, trainer.world
    types = export_types(policy, DTYPES[trainer.recipe.model.dtype])
    writer = WeightWriter(run, version)
    if world.is_leader:
        writer.begin()
    dist.barrier()
    written: list[Future[Shard]] = []
    with ThreadPoolExecutor(WRITERS, "weights") as pool:
        for number, num_shards, gathered in gather_shards(policy, world, types):
            if len(written) >= WRITERS:
                written[-WRITERS].result()
            path = writer.shard_path(number, of=num_shards)
            written.append(pool.submit(_write_shard, path, gathered, policy.hf, types))
    commit_shards(writer, [future.result() for future in written], trainer)


class ArrivingTensors(dict[str, Tensor]):
    """Tensors on the host whose copies from a GPU may not have ended."""

    copied: torch.Event | None = None

    def wait(self) -> None:
        """Wait for the copies."""
        if self.copied is not None:
            self.copied.synchronize()


class HostCopies:
    """Copies gathered tensors from a GPU to pinned memory while the next ones are gathered.

    A blocking copy would make all ranks wait in the next tensor's gathering: the links of their GPUs to the host would
    be used one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._events: deque[torch.Event] = deque()

    def copy(self, value: Tensor) -> Tensor:
        """Return a tensor on the host that has the content when the last copy has ended, see `last`."""
        if self.stream is None:
            return value.to("cpu")
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host.copy_(value, non_blocking=True)
        value.record_stream(self.stream)
        self._events.append(self.stream.record_event())
        if len(self._events) > COPIES_IN_FLIGHT:
            self._events.popleft().synchronize()  # bounds the memory of gathered tensors on the GPU
        return host

    @property
    def last(self) -> torch.Event | None:
        return self._events[-1] if self._events else None


def gather_shards(
    policy: Policy, world: World, types: Types, *, for_leader: bool = False
) -> Iterator[tuple[int, int, ArrivingTensors]]:
    """Yield (number from 1, total number, tensors on the host) of the shards that this rank keeps.

    Collective: every rank must exhaust it. ``types``: see `export_types`. ``for_leader``: rank 0 keeps all shards, one
    after another, on its device.
    """
    groups = _by_layer(policy)
    copies = HostCopies(world.device)
    for number, group in enumerate(groups, start=1):
        keeper = 0 if for_leader else (number - 1) % world.size
        is_keeper = keeper == world.rank
        gathered = ArrivingTensors()
        for name, value in group:
            on_device = value.to(world.device)  # shards may be on the host
            full = _gather(on_device, types[name], may_wait=not for_leader)
            if is_keeper:  # on other ranks the memory is freed before the next tensor
                gathered[name] = full.to(world.device) if for_leader else copies.copy(full)
            del full
        if is_keeper:
            gathered.copied = copies.last
            yield number, len(groups), gathered


def export_types(policy: Policy, dtype: torch.dtype) -> Types:
    """Return the type of each of `Policy.tensors` for engines: ``dtype`` with the exceptions of transformers.

    Buffers keep their type (a router's score correction), and so do the parameters that a family keeps in float32.
    """
    hf = policy.hf
    kept = parameters_in_float32(hf, dtype)
    buffers = dict(hf.named_buffers())
    return {
        name: value.dtype if name in buffers or any(part in name for part in kept) else dtype
        for name, value in policy.tensors()
    }


def commit_shards(writer: WeightWriter, shards: list[Shard], trainer: Trainer) -> None:
    """Complete a version from the files of all ranks; ``shards``: this rank's. Collective."""
    world = trainer.world
    own = (
        {name: shard.entry["name"] for shard in shards for name in shard.names},
        [shard.entry for shard in shards],
        sum(shard.num_bytes for shard in shards),
    )
    gathered = gather_to_rank0(own)
    if world.is_leader:
        file_of = {name: file for files, _, _ in gathered for name, file in files.items()}
        all_entries = [entry for _, entries, _ in gathered for entry in entries]
        all_entries += writer.copy_model_files(
            trainer.folder, dtype=trainer.recipe.model.dtype, tokenizer_folder=trainer.tokenizer_folder
        )
        all_entries.append(
            writer.write_index(file_of, total_bytes=sum(num_bytes for _, _, num_bytes in gathered))
        )
        writer.commit(all_entries)


def _gather(value: Tensor, dtype: torch.dtype, *, may_wait: bool) -> Tensor:
    """Return the full tensor as ``dtype``; a full tensor on a CPU stays as it is if it ``may_wait``. Collective."""
    if may_wait and _is_alone(value) and value.device.type == "cpu":
        return to_local(value).detach()
    return _full_tensor(value.to(dtype)).detach()


def _is_alone(value: Tensor) -> bool:
    return not isinstance(value, DTensor) or value.device_mesh.size() == 1


def _full_tensor(value: Tensor) -> Tensor:
    """Return the full tensor; if one rank holds all of it, without the copy that gathering makes. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) and not _is_alone(value) else to_local(value)


@torch.no_grad()
def _write_shard(path: Path, gathered: ArrivingTensors, hf: PreTrainedModel, types: Types) -> Shard:
    gathered.wait()
    tensors, types = engine_tensors(gathered, hf, types)
    crc32 = write_safetensors(path, tensors, METADATA, types=types, with_crc32=True)
    return Shard(WeightWriter.entry(path, crc32), list(tensors), data_bytes(tensors, types))


def engine_tensors(
    gathered: dict[str, Tensor], hf: PreTrainedModel, types: Types
) -> tuple[dict[str, Tensor], Types]:
    """Return tensors under the names that engines know, and the type of each by that name."""
    tensors: dict[str, Tensor] = {}
    named: dict[str, torch.dtype] = {}
    for dtype in dict.fromkeys(types[name] for name in gathered):
        of_type = {name: value for name, value in gathered.items() if types[name] == dtype}
        found = file_tensors(hf, of_type)
        tensors |= found
        named |= dict.fromkeys(found, dtype)
    return tensors, named


def data_bytes(tensors: dict[str, Tensor], types: Types) -> int:
    """Return the bytes of a shard without its header."""
    return sum(value.numel() * types[name].itemsize for name, value in tensors.items())


def _by_layer(policy: Policy) -> list[list[tuple[str, Tensor]]]:
    """Return one group per decoder layer and one of all other tensors, in the model's order on every rank."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value in policy.tensors():
        match = _LAYER.search(name)
        groups.setdefault(match[1] if match else "rest", []).append((name, value))
    return list(groups.values())


@torch.no_grad()
def export_adapters(
    run: RunDir, policy: Policy, version: int, *, config: dict[str, Any], dtype: str, world: World
) -> None:
    """Write ``weights/step_<version>`` with only the adapters. Collective, like `export_weights`.

    ``config``: ``adapter_config.json`` without the names of adapted modules (`peft_targets`).
    """
    sides: dict[str, dict[str, Tensor]] = {"lora_A": {}, "lora_B": {}}
    for name, value in policy.adapters():
        full = _full_tensor(value.to(world.device))
        if world.is_leader:
            base, side = base_name(name)
            is_fused = side == "lora_A" and base.endswith("gate_up_proj")
            full = torch.cat([full, full], 1) if is_fused else full  # one half for gate, one for up
            sides[side][base] = full.detach().to(device="cpu", dtype=DTYPES[dtype])
    if world.is_leader:
        tensors = {
            f"{ADAPTER_PREFIX}{name.removesuffix('weight')}{side}.weight": value.contiguous()
            for side, part in sides.items()
            for name, value in standard_tensors(policy.hf, part).items()
        }
        is_mixture = bool(expert_modules(policy.hf))
        writer = WeightWriter(run, version)
        writer.begin()
        save_file(tensors, writer.temporary / ADAPTER_WEIGHTS, metadata=METADATA)
        targets = peft_targets(config, sides["lora_A"], is_mixture=is_mixture)
        write_json(writer.temporary / ADAPTER_CONFIG, targets)
        names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
        writer.commit([writer.finish_file(writer.temporary / name) for name in names])
    dist.barrier()


def base_name(name: str) -> tuple[str, str]:
    """Split an adapter's name into the adapted parameter and the side.

    ``q_proj.lora_A`` → (``q_proj.weight``, ``lora_A``);
    ``experts.down_proj_lora_B`` → (``experts.down_proj``, ``lora_B``).
    """
    side = name[-len("lora_A") :]
    of_experts = name.removesuffix(f"_{side}")
    return (of_experts if of_experts != name else f"{name.removesuffix(side)}weight"), side


def adapter_config(lora: LoRA, base_model: str) -> dict[str, Any]:
    """Return the fields of PEFT's LoraConfig."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": lora.rank_stabilized,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
