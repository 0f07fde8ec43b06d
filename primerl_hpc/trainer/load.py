"""From safetensors files into a sharded model on the meta device's structure: each rank reads what it owns.

Files of a mixture of experts hold one tensor per expert and matrix while the model holds them fused. transformers' own
conversion makes one from the other; a rank feeds it its own experts alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from primerl_hpc.common.errors import DataError
from primerl_hpc.trainer.parallel.mesh import local
from primerl_hpc.transport.weights_filesystem import INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from primerl_hpc.trainer.model import Policy

NOISE_STD = 0.02
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types that need no scale beside them
DEQUANTISE = "train its bfloat16 version"


@torch.no_grad()
def load_weights(policy: Policy, folder: Path) -> None:
    """Copy each rank's part out of the folder's safetensors files.

    Raises DataError naming the first tensor that is missing, unreadable, quantised or of another shape.
    """
    refuse_quantised_config(policy.hf.config, folder)
    targets = dict(policy.tensors())
    files = weight_files(folder)
    groups = group_sources(policy.hf, sorted(files))
    missing = set(targets)
    with ExitStack() as stack:
        handles = {
            path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))
        }
        for target, (converter, sources) in groups.items():
            slices = {key: handles[files[key]].get_slice(key) for key, _ in sources}
            if converter is None and target not in targets:
                continue  # a tied head, or a buffer of older versions
            if target not in targets or targets[target].is_floating_point():
                refuse_quantised(slices, folder)
            if converter is None:
                (source,) = slices.values()
                copy_part(targets[target], source, target, folder)
                missing.discard(target)
            elif target in targets and stacks_experts(converter, sources, targets[target]):
                copy_experts(targets[target], converter, sources, slices, target, policy.hf, folder)
                missing.discard(target)
            else:
                for key, pattern in sources:
                    converter.add_tensor(target, key, pattern, slices[key][...])
                for name, value in convert(converter, target, policy.hf).items():
                    copy_part(targets[name], value, name, folder)
                    missing.discard(name)
    if missing:
        raise DataError(
            f"{len(missing)} weights of {type(policy.hf).__name__} are in no file, e.g. {min(missing)}",
            place=str(folder),
        )


def refuse_quantised_config(config: PreTrainedConfig, folder: Path) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method", "unknown method")
        raise DataError(f"the model is quantised ({method})", place=str(folder), mend=DEQUANTISE)


def refuse_quantised(slices: dict[str, Any], folder: Path) -> None:
    """Numbers that mean nothing without their scales would fit by their shape."""
    for key, source in slices.items():
        if (dtype := source.get_dtype()) not in FLOATS:
            raise DataError(f"{key} is quantised ({dtype})", place=str(folder), mend=DEQUANTISE)


def convert(converter: WeightConverter, target: str, hf: nn.Module) -> dict[str, Tensor]:
    converted = converter.convert(target, model=hf, config=hf.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


@torch.no_grad()
def fill_with_noise(policy: Policy) -> None:
    """Weights for measuring speed: matrices from N(0, 0.02²), vectors of norms 1, biases 0."""
    for name, target in policy.tensors():
        part = local(target)
        if part.ndim >= 2:
            part.normal_(std=NOISE_STD)
        else:
            part.fill_(0.0 if name.endswith("bias") else 1.0)


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name → file, from the index or by looking into every safetensors file."""
    index = folder / INDEX
    if index.is_file():
        return {key: folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise DataError("no safetensors weights here", place=str(folder), mend="convert them to safetensors")
    return found


def group_sources(
    hf: nn.Module, keys: list[str]
) -> dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]]:
    """Model tensor → (conversion or None, its file tensors with the pattern each matched)."""
    transforms = get_model_conversion_mapping(hf)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = hf.state_dict()
    groups: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
    for key in sorted(keys, key=_natural):
        target, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if pattern is None:
            groups[target] = (None, [(key, "")])
        else:
            if target not in groups:
                groups[target] = (deepcopy(by_pattern[pattern]), [])
            groups[target][1].append((key, pattern))
    return groups


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort key that counts: expert 2 before expert 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def stacks_experts(converter: WeightConverter, sources: list[tuple[str, str]], target: Tensor) -> bool:
    """Whether the conversion stacks one tensor per expert in dim 0, so that a part of them makes a part of the target."""
    counts: dict[str, int] = defaultdict(int)
    for _, pattern in sources:
        counts[pattern] += 1
    stack, *rest = converter.operations
    return (
        isinstance(stack, MergeModulelist)
        and stack.dim == 0
        and all(isinstance(each, Concatenate) and each.dim != 0 for each in rest)
        and set(counts.values()) == {target.shape[0]}
    )


def copy_experts(
    target: Tensor,
    converter: WeightConverter,
    sources: list[tuple[str, str]],
    slices: dict[str, Any],
    name: str,
    hf: nn.Module,
    folder: Path,
) -> None:
    """Read and stack this rank's experts alone, then copy its part of their other dims."""
    part = own_part(target)
    mine = range(target.shape[0])[part[0]]
    if not mine:
        return
    seen: dict[str, int] = defaultdict(int)
    for key, pattern in sources:  # of each pattern, in order of experts
        if seen[pattern] in mine:
            converter.add_tensor(name, key, pattern, slices[key][...])
        seen[pattern] += 1
    (stacked,) = convert(converter, name, hf).values()
    check_shape(name, [target.shape[0], *stacked.shape[1:]], target, folder)
    local(target).copy_(stacked[(slice(None), *part[1:])])


def copy_part(target: Tensor, source: Any, name: str, folder: Path) -> None:
    """Copy ``source`` (tensor or safetensors slice), or this rank's part of it, into ``target``."""
    check_shape(
        name, list(source.get_shape() if hasattr(source, "get_shape") else source.shape), target, folder
    )
    part = own_part(target)
    if all(each.stop > each.start for each in part):
        local(target).copy_(source[part] if part else source[...])


def check_shape(name: str, shape: list[int], target: Tensor, folder: Path) -> None:
    if shape != list(target.shape):
        raise DataError(
            f"{name} has shape {shape} in the file, {list(target.shape)} in the model", place=str(folder)
        )


def own_part(target: Tensor) -> tuple[slice, ...]:
    """Where this rank's part lies in the whole tensor."""
    if not isinstance(target, DTensor):
        return tuple(slice(0, size) for size in target.shape)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
