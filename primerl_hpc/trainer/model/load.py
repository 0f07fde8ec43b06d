"""Load safetensors files into a sharded model: each rank reads what it owns.

Files of a mixture of experts hold one tensor for each expert and matrix, while the model holds them fused.
transformers' own conversion (`families.group_sources`) makes one from the other; a rank feeds it its own experts alone.

    load_weights(hf, policy.tensors(), folder)
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.model_files import INDEX, tensor_files
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.trainer.model.families import convert, group_sources, remember_names
from primerl_hpc.trainer.parallel.mesh import local_slice, to_local
from primerl_hpc.transport.base_models.quantized import StoredTensors, check_readable, quantization_of
from primerl_hpc.transport.base_models.untrained import is_prediction_tensor, is_tower_tensor

RANDOM_STD = 0.02
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types that need no separate scales
PROGRESS_S = 10.0
log = logging.getLogger("primerl_hpc.trainer")


@torch.no_grad()
def load_weights(hf: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Copy each rank's part of ``tensors`` (name, tensor of ``hf``) from the folder's safetensors files.

    Quantized checkpoints are dequantized (`transport.base_models.quantized`). Raises ConfigError for an unknown
    quantization, DataError naming the first tensor that is missing, unreadable, without scales or of another shape.
    """
    quantization = stored_quantization(folder)
    config = hf.config.to_dict()
    targets = dict(tensors)
    files = tensor_files(folder)
    missing = set(targets)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_opened(path)) for path in sorted(set(files.values()))}
        stored = StoredTensors(files, handles, quantization)
        groups = group_sources(hf, stored.names)
        remember_names(hf, groups, lambda key: list(stored.slice(key).get_shape()))
        progress = Progress(len(groups)) if quantization else None
        for target, (converter, sources) in groups.items():
            if progress is not None:
                progress.count(target)
            first = sources[0][0]
            if target not in targets and (is_prediction_tensor(first, config) or is_tower_tensor(first)):
                continue
            slices: dict[str, Any] = {key: stored.slice(key) for key, _ in sources}
            if converter is None and target not in targets:
                continue  # a tied head, or a buffer of older versions
            if target not in targets or targets[target].is_floating_point():
                refuse_quantized(slices, folder)
            if converter is None:
                (source,) = slices.values()
                copy_part(targets[target], source, target, folder)
                missing.discard(target)
            elif target in targets and stacks_experts(converter, sources, targets[target]):
                copy_experts(targets[target], converter, sources, slices, target, folder)
                missing.discard(target)
            else:
                for key, pattern in sources:
                    converter.add_tensor(target, key, pattern, slices[key][...])
                for name, value in convert(converter, target, hf).items():
                    copy_part(targets[name], value, name, folder)
                    missing.discard(name)
    if missing:
        raise DataError(
            f"{len(missing)} weights of {type(hf).__name__} are in no file, e.g. {min(missing)}",
            location=str(folder),
        )


def stored_quantization(folder: Path) -> Mapping[str, Any] | None:
    """Return the quantization that the folder's config.json names, or None. Raises ConfigError if it is unknown."""
    path = folder / "config.json"
    quantization = quantization_of(read_json(path)) if path.is_file() else None
    if quantization is not None:
        check_readable(quantization, str(folder))
    return quantization


class Progress:
    """Log how many of a quantized model's tensors are read, once every `PROGRESS_S` seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.read, self.next_line = total, 0, time.monotonic() + PROGRESS_S

    def count(self, name: str) -> None:
        self.read += 1
        if time.monotonic() >= self.next_line:
            log.info("Dequantizing weights: tensor %d of %d (%s)", self.read, self.total, name)
            self.next_line += PROGRESS_S


def refuse_quantized(slices: dict[str, Any], folder: Path) -> None:
    """Raise DataError for a tensor that is meaningless without its scales; its shape alone would fit."""
    for key, source in slices.items():
        if (dtype := source.get_dtype()) not in FLOATS:
            raise DataError(
                f"{key} is quantized ({dtype}) without scales, or without a quantization_config in config.json",
                location=str(folder),
                hint="train its bfloat16 version",
            )


def has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def joins_experts(folder: Path) -> bool:
    """True if the folder's files hold the experts of a layer in one tensor, whatever transformers would write."""
    return has_weights(folder) and any(re.search(r"\.experts\.\w+$", name) for name in tensor_files(folder))


@torch.no_grad()
def init_random_weights(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill ``tensors`` with weights for measuring speed: matrices from N(0, 0.02²), vectors of norms 1, biases 0."""
    for name, target in tensors:
        part = to_local(target)
        if part.ndim >= 2:
            part.normal_(std=RANDOM_STD)
        else:
            part.fill_(0.0 if name.endswith("bias") else 1.0)


def _opened(path: Path) -> Any:
    with decoding("not a complete safetensors file", location=path, more=(SafetensorError, OSError)):
        return safe_open(path, framework="pt")


def stacks_experts(converter: WeightConverter, sources: list[tuple[str, str]], target: Tensor) -> bool:
    """True if the conversion stacks one tensor per expert in dim 0: some experts then make a slice of the target."""
    counts: dict[str, int] = defaultdict(int)
    for _, pattern in sources:
        counts[pattern] += 1
    stack, *rest = converter.operations
    return (
        isinstance(stack, MergeModulelist)
        and stack.dim == 0
        and len(rest) <= 1
        and all(isinstance(operation, Concatenate) and operation.dim != 0 for operation in rest)
        and set(counts.values()) == {target.shape[0]}
    )


def copy_experts(
    target: Tensor,
    converter: WeightConverter,
    sources: list[tuple[str, str]],
    slices: dict[str, Any],
    name: str,
    folder: Path,
) -> None:
    """Read this rank's part of its experts alone: of each source, what belongs to the rank's rows and columns."""
    own_experts, *own = local_slice(target)
    if any(dim.stop == dim.start for dim in (own_experts, *own)):
        return
    by_pattern: dict[str, list[Any]] = defaultdict(list)  # for each pattern in the order of experts
    for key, pattern in sources:
        by_pattern[pattern].append(slices[key])
    joined = {operation.dim for operation in converter.operations if isinstance(operation, Concatenate)}
    axis = joined.pop() - 1 if joined else 0  # the axis of an expert's matrix along which sources are joined
    parts = [by_pattern[pattern] for pattern in converter.source_patterns if pattern in by_pattern]
    shape = list(parts[0][0].get_shape())
    shape[axis] = sum(experts[0].get_shape()[axis] for experts in parts)
    check_shape(name, [target.shape[0], *shape], target, folder)
    into, offset = to_local(target), 0
    for experts in parts:
        size = experts[0].get_shape()[axis]
        for expert in experts:
            check_shape(
                name, list(expert.get_shape()), torch.empty(experts[0].get_shape(), device="meta"), folder
            )
        start, stop = max(own[axis].start, offset), min(own[axis].stop, offset + size)
        if start < stop:
            read, written = list(own), [slice(None)] * len(own)
            read[axis] = slice(start - offset, stop - offset)
            written[axis] = slice(start - own[axis].start, stop - own[axis].start)
            for place, expert in enumerate(range(target.shape[0])[own_experts]):
                copy_values(into[(place, *written)], experts[expert][tuple(read)])
        offset += size


def copy_part(target: Tensor, source: Any, name: str, folder: Path) -> None:
    """Copy ``source`` (tensor or safetensors slice), or this rank's part of it, into ``target``."""
    shape = source.get_shape() if hasattr(source, "get_shape") else source.shape
    check_shape(name, list(shape), target, folder)
    part = local_slice(target)
    if all(dim.stop > dim.start for dim in part):
        copy_values(to_local(target), source[part] if part else source[...])


def copy_values(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` on the CPU into ``target``: moved first, then converted.

    torch would convert on the CPU, in one thread, and move twice as many bytes to a GPU.
    """
    target.copy_(values.to(target.device))


def check_shape(name: str, shape: list[int], target: Tensor, folder: Path) -> None:
    if shape != list(target.shape):
        raise DataError(
            f"{name} has shape {shape} in the file, {list(target.shape)} in the model", location=str(folder)
        )
