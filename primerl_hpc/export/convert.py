"""Write a quantized model as a bfloat16 folder, which a trainer and its engines can share.

    done = convert_model("/models/Kimi-K2-Thinking", Path("/models/Kimi-K2-bf16"), on_progress=show)

Tensors are read one by one and written in shards of at most `SHARD_BYTES`, so memory does not grow with the model. The
folder appears under its name when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.files import fsync_dir, read_json, write_json
from primerl_hpc.common.model_files import INDEX, weight_files
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.export.export import check_target
from primerl_hpc.transport.base_models.quantized import (
    StoredTensors,
    check_readable,
    quantization_of,
    without_quantization,
)
from primerl_hpc.transport.base_models.snapshots import base_folder
from primerl_hpc.transport.weights.filesystem import COPIED_SUFFIXES, WeightWriter

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 5 * 10**9
BYTES_OF = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}

Progress = Callable[[int, int], None]
"""Called with the number of written bytes and their total."""


@dataclass(frozen=True)
class Converted:
    folder: Path
    method: str  # the quantization of the source
    num_tensors: int
    num_bytes: int  # of all tensors


def convert_model(
    model: str, to: Path, *, on_progress: Progress = lambda *_: None, shard_bytes: int = SHARD_BYTES
) -> Converted:
    """Write the dequantized weights of ``model`` (folder or hub id), and its other files, to the folder ``to``.

    Raises NotFoundError (no such model), OccupiedError (``to`` is not empty), ConfigError (not quantized, or by an
    unknown method; not enough space), DataError (damaged weights); ``to`` is not created then.
    """
    to = to.expanduser().absolute()
    check_target(to)
    source = base_folder(model)
    config_path = source / "config.json"
    config = read_json(config_path)
    quantization = quantization_of(config)
    if quantization is None:
        raise ConfigError(
            f"model {model} is not quantized, so there is nothing to convert", location=str(config_path)
        )
    check_readable(quantization, model)
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        num_tensors, num_bytes = _write_weights(source, quantization, temporary, on_progress, shard_bytes)
        for path in sorted(source.iterdir()):
            is_of_weights = path.name.endswith(".index.json") or path.name == config_path.name
            if path.suffix in COPIED_SUFFIXES and path.is_file() and not is_of_weights:
                shutil.copyfile(path, temporary / path.name)
        plain = without_quantization(config)
        plain.pop("torch_dtype", None)
        write_json(temporary / config_path.name, plain | {"dtype": "bfloat16"})
        fsync_dir(temporary)
        check_target(to)
        os.rename(temporary, to)
        fsync_dir(to.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Converted(to, quantization["quant_method"], num_tensors, num_bytes)


def _write_weights(
    source: Path, quantization: Any, to: Path, on_progress: Progress, shard_bytes: int
) -> tuple[int, int]:
    """Write shards and their index; return the number of tensors and their bytes."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for path in weight_files(source):
            with decoding("not a complete safetensors file", location=path, more=(SafetensorError, OSError)):
                handles[path] = stack.enter_context(safe_open(path, framework="pt"))
        files = {key: path for path, handle in handles.items() for key in handle.keys()}  # noqa: SIM118 (no dict)
        stored = StoredTensors(files, handles, quantization)
        sizes = {name: _num_bytes(stored, name) for name in stored.names}
        total = sum(sizes.values())
        _check_space(to, total)
        shards = WeightShards(to, shard_bytes)
        for name in sorted(stored.names, key=lambda name: (stored.file_of(name), name)):
            shards.add(name, stored.slice(name)[...])
            on_progress(shards.num_bytes, total)
        shards.finish()
    return len(sizes), total


def _num_bytes(stored: StoredTensors, name: str) -> int:
    part = stored.slice(name)
    size = BYTES_OF.get(dtype := part.get_dtype())
    if size is None:
        raise DataError(f"{name} is quantized ({dtype}) without scales", location=str(stored.file_of(name)))
    return size * prod(part.get_shape())


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(
            f"the bfloat16 weights need {num_bytes / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            location=str(folder.parent),
            hint="choose another --to",
        )


class WeightShards:
    """Collect tensors and write a safetensors file whenever they reach ``shard_bytes``."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.num_bytes = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + num_bytes > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += num_bytes
        self.num_bytes += num_bytes

    def finish(self) -> None:
        """Write the last file, name all files by their number, and write the index."""
        self._flush()
        weight_map = {}
        for number, names in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            os.rename(self._path(number), self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        write_json(
            self.folder / INDEX, {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        )

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._shards.append(list(self._pending))
        path = self._path(len(self._shards))
        save_file(self._pending, path, metadata={"format": "pt"})
        WeightWriter.finish_file(path)
        self._pending, self._pending_bytes = {}, 0

    def _path(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors"
