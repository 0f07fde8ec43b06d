"""Policy versions as HF folders: every layer is gathered in turn, ranks share the writing.

Memory is bounded by one layer per rank. Fused experts are written under their per-expert names, as engines expect.
A policy of adapters is a folder in PEFT's format, which the leader gathers and writes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from primerl_hpc.common.files import write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.recipe.training_schema import LoRA
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.model import Policy
from primerl_hpc.trainer.setup import World
from primerl_hpc.transport.weights_filesystem import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    WeightWriter,
)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def publish_policy(run: RunDir, core: Core, version: int) -> None:
    """Write ``weights/step_<version>``: the model, or its adapters where only they are trained. Collective."""
    recipe = core.recipe
    if recipe.lora is None:
        export_weights(
            run, core.policy, version, model_folder=core.folder, dtype=recipe.model.dtype, world=core.world
        )
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
def export_weights(
    run: RunDir, policy: Policy, version: int, *, model_folder: Path, dtype: str, world: World
) -> None:
    """Write ``weights/step_<version>``. Collective; when it returns, rank 0 has marked the version stable."""
    writer = WeightWriter(run, version)
    if world.is_leader:
        writer.begin()
    dist.barrier()
    groups = _by_layer(policy)
    weight_map: dict[str, str] = {}
    entries, total_bytes = [], 0
    for number, group in enumerate(groups, start=1):
        is_mine = (number - 1) % world.size == world.rank
        part: dict[str, Tensor] = {}
        for name, value in group:
            whole = value.to(world.device)  # shards may live on the host
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole  # collective
            if is_mine:
                to = DTYPES[dtype] if whole.is_floating_point() else whole.dtype
                part[name] = whole.detach().to(device="cpu", dtype=to)
        if not is_mine:
            continue
        path = writer.shard_path(number, of=len(groups))
        tensors = {
            name: value.contiguous() for name, value in revert_weight_conversion(policy.hf, part).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
        entries.append(writer.finish_file(path))
        weight_map |= dict.fromkeys(tensors, path.name)
        total_bytes += sum(value.numel() * value.element_size() for value in tensors.values())
    gathered: list = [None] * world.size
    dist.gather_object((weight_map, entries, total_bytes), gathered if world.is_leader else None)
    if world.is_leader:
        everything = {name: file for each, _, _ in gathered for name, file in each.items()}
        all_entries = [entry for _, each, _ in gathered for entry in each]
        all_entries += writer.copy_model_files(model_folder, dtype=dtype)
        all_entries.append(writer.write_index(everything, total_bytes=sum(each for _, _, each in gathered)))
        writer.commit(all_entries)


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
        whole = value.to(world.device)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole  # collective
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
