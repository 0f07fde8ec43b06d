"""Policy versions as HF folders: every layer is gathered in turn, ranks share the writing.

What a rank holds is converted to the engines' types before it is gathered, and a rank writes beside the gathering: checksums and
the disk take their time together. Memory is bounded by one tensor on the device and `WRITERS` + 1 layers on the host per rank, in
those types. What a CPU holds whole is converted as it is written. Fused experts are written under their per-expert names, as engines
expect. A policy of adapters is a folder in PEFT's format, which the leader gathers and writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from primerl_hpc.common.files import write_json
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.recipe.training_schema import LoRA
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.model import Policy
from primerl_hpc.trainer.parallel.mesh import local
from primerl_hpc.trainer.setup import World, from_leader
from primerl_hpc.trainer.shards import Types, write_safetensors
from primerl_hpc.transport.weights_filesystem import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    WeightWriter,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
METADATA = {"format": "pt"}  # what every shard's header says besides its tensors
WRITERS = 3
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Shard:
    """A file that is written."""

    entry: dict[str, Any]  # of the manifest
    names: list[str]  # of its tensors
    num_bytes: int  # of their data


def is_whole_there(run: RunDir, version: int, world: World) -> bool:
    """Collective. One that is there is never written again: somebody may read it."""
    return from_leader((run.weights_step(version) / STABLE).exists() if world.is_leader else None)


def publish_policy(run: RunDir, core: Core, version: int) -> None:
    """Write ``weights/step_<version>``: the model, or its adapters where only they are trained. Collective."""
    recipe = core.recipe
    if recipe.lora is None:
        export_weights(run, core, version)
    else:
        export_adapters(
            run,
            core.policy,
            version,
            config=adapter_config(recipe.lora, core.model_path),
            dtype=recipe.model.dtype,
            world=core.world,
        )


@torch.no_grad()
def export_weights(run: RunDir, core: Core, version: int) -> None:
    """Write ``weights/step_<version>``. Collective; when it returns, rank 0 has marked the version stable."""
    policy, world = core.policy, core.world
    types = export_types(policy, DTYPES[core.recipe.model.dtype])
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
    commit_shards(writer, [each.result() for each in written], core)


def gather_shards(
    policy: Policy, world: World, types: Types, *, for_leader: bool = False
) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """(number from 1, number of all, tensors on the host) of the shards that this rank keeps. Collective, to its end.

    ``types``: `export_types`. ``for_leader``: rank 0 keeps all, and gets them one after another on its device.
    """
    groups = _by_layer(policy)
    place = world.device if for_leader else torch.device("cpu")
    for number, group in enumerate(groups, start=1):
        keeper = 0 if for_leader else (number - 1) % world.size
        is_mine = keeper == world.rank
        gathered: dict[str, Tensor] = {}
        for name, value in group:
            on_device = value.to(world.device)  # shards may live on the host
            whole = _gather(on_device, types[name], may_wait=not for_leader)
            if is_mine:  # elsewhere the memory is given back before the next one comes
                gathered[name] = whole.to(place)
            del whole
        if is_mine:
            yield number, len(groups), gathered


def export_types(policy: Policy, dtype: torch.dtype) -> Types:
    """The type of each of `Policy.tensors` for engines: ``dtype``, but for what transformers does not convert either.

    Buffers stay as they are (a router's correction of scores), and so does what a family keeps in float32.
    """
    hf = policy.hf
    kept = set(hf._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(hf._keep_in_fp32_modules or ())
    buffers = dict(hf.named_buffers())
    return {
        name: value.dtype if name in buffers or any(part in name for part in kept) else dtype
        for name, value in policy.tensors()
    }


def commit_shards(writer: WeightWriter, shards: list[Shard], core: Core) -> None:
    """Make a version of what all ranks wrote. Collective; ``shards``: this rank's."""
    world = core.world
    mine = (
        {name: shard.entry["name"] for shard in shards for name in shard.names},
        [shard.entry for shard in shards],
        sum(shard.num_bytes for shard in shards),
    )
    everyones: list = [None] * world.size
    dist.gather_object(mine, everyones if world.is_leader else None)
    if world.is_leader:
        everything = {name: file for each, _, _ in everyones for name, file in each.items()}
        all_entries = [entry for _, each, _ in everyones for entry in each]
        all_entries += writer.copy_model_files(
            core.folder, dtype=core.recipe.model.dtype, tokenizer_folder=core.tokenizer_folder
        )
        all_entries.append(writer.write_index(everything, total_bytes=sum(each for _, _, each in everyones)))
        writer.commit(all_entries)


def _gather(value: Tensor, dtype: torch.dtype, *, may_wait: bool) -> Tensor:
    """The whole tensor as ``dtype``; what a CPU holds whole ``may_wait`` as it is until it is written. Collective."""
    if may_wait and _is_alone(value) and value.device.type == "cpu":
        return local(value).detach()
    return _whole(value.to(dtype)).detach()


def _is_alone(value: Tensor) -> bool:
    return not isinstance(value, DTensor) or value.device_mesh.size() == 1


def _whole(value: Tensor) -> Tensor:
    """Collective. What lies on one rank alone is given as it is, not as the copy that gathering makes."""
    return local(value) if _is_alone(value) else value.full_tensor()


@torch.no_grad()
def _write_shard(path: Path, whole: dict[str, Tensor], hf: nn.Module, types: Types) -> Shard:
    tensors, types = engine_tensors(whole, hf, types)
    crc32 = write_safetensors(path, tensors, METADATA, types=types, with_crc32=True)
    return Shard(WeightWriter.entry(path, crc32), list(tensors), data_bytes(tensors, types))


def engine_tensors(whole: dict[str, Tensor], hf: nn.Module, types: Types) -> tuple[dict[str, Tensor], Types]:
    """Tensors under the names that engines know, and the type of each by that name."""
    tensors: dict[str, Tensor] = {}
    named: dict[str, torch.dtype] = {}
    for dtype in dict.fromkeys(types[name] for name in whole):
        of_type = {name: value for name, value in whole.items() if types[name] == dtype}
        found = revert_weight_conversion(hf, of_type)
        tensors |= found
        named |= dict.fromkeys(found, dtype)
    return tensors, named


def data_bytes(tensors: dict[str, Tensor], types: Types) -> int:
    """Of a shard without its header."""
    return sum(value.numel() * types[name].itemsize for name, value in tensors.items())


def _by_layer(policy: Policy) -> list[list[tuple[str, Tensor]]]:
    """One group per decoder layer, and one of everything else, in the model's order on every rank."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value in policy.tensors():
        match = _LAYER.search(name)
        groups.setdefault(match[1] if match else "rest", []).append((name, value))
    return list(groups.values())


@torch.no_grad()
def export_adapters(
    run: RunDir, policy: Policy, version: int, *, config: dict[str, Any], dtype: str, world: World
) -> None:
    """Write ``weights/step_<version>`` with adapters alone. Collective, like `export_weights`.

    ``config``: what ``adapter_config.json`` says besides the names of what is adapted.
    """
    sides: dict[str, dict[str, Tensor]] = {"lora_A": {}, "lora_B": {}}
    for name, value in policy.adapters():
        whole = _whole(value.to(world.device))
        if world.is_leader:
            base, side = base_name(name)
            is_two_in_one = side == "lora_A" and base.endswith("gate_up_proj")
            whole = torch.cat([whole, whole], 1) if is_two_in_one else whole  # each half is gate's, and up's
            sides[side][base] = whole.detach().to(device="cpu", dtype=DTYPES[dtype])
    if world.is_leader:
        tensors = {
            f"{ADAPTER_PREFIX}{name.removesuffix('weight')}{side}.weight": value.contiguous()
            for side, part in sides.items()
            for name, value in revert_weight_conversion(policy.hf, part).items()
        }
        modules = {name.split(".")[-3] for name in tensors}
        writer = WeightWriter(run, version)
        writer.begin()
        save_file(tensors, writer.temporary / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        write_json(writer.temporary / ADAPTER_CONFIG, config | {"target_modules": sorted(modules)})
        names = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)
        writer.commit([writer.finish_file(writer.temporary / name) for name in names])
    dist.barrier()


def base_name(name: str) -> tuple[str, str]:
    """``q_proj.lora_A`` → (``q_proj.weight``, ``lora_A``); ``experts.down_proj_lora_B`` → (``experts.down_proj``, ``lora_B``)."""
    side = name[-len("lora_A") :]
    of_experts = name.removesuffix(f"_{side}")
    return (of_experts if of_experts != name else f"{name.removesuffix(side)}weight"), side


def adapter_config(lora: LoRA, base_model: str) -> dict[str, Any]:
    """PEFT's LoraConfig."""
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
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
