"""Policy versions as HF folders: every layer is gathered in turn, ranks share the writing.

Memory is bounded by one layer per rank. Fused experts are written under their per-expert names, as engines expect.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.trainer.model import Policy
from primerl_hpc.trainer.setup import World
from primerl_hpc.transport.weights_filesystem import WeightWriter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_LAYER = re.compile(r"\blayers\.(\d+)\.")


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
        writer.commit(everything, all_entries, total_bytes=sum(each for _, _, each in gathered))


def _by_layer(policy: Policy) -> list[list[tuple[str, Tensor]]]:
    """One group per decoder layer, and one of everything else, in the model's order on every rank."""
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, value in policy.tensors():
        match = _LAYER.search(name)
        groups.setdefault(match[1] if match else "rest", []).append((name, value))
    return list(groups.values())
