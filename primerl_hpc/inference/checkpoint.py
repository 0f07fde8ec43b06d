"""Looks at a folder of HF safetensors before anything is loaded from it: is it whole, and is it the model we serve?

Reads only the headers and the file sizes, so it costs milliseconds for any size of model. An engine that started
loading a bad folder would be left without weights, so `check` comes before the first tensor is touched.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json
from primerl_hpc.transport.weights_filesystem import MANIFEST, manifest_fault

_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


@dataclass(frozen=True)
class TensorInfo:
    file: Path
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a folder's safetensors by name.

    Raises DataError naming the file when the folder is missing or has no weights, a file is truncated, a header is
    damaged, a file of the index or manifest is not there or not of its size, or a tensor is in two files.
    """
    if not folder.is_dir():
        raise DataError("no such weights folder", place=str(folder))
    _check_listed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError("no *.safetensors in the weights folder", place=str(folder))
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, shape in _read_header(file).items():
            if name in tensors:
                raise DataError(f"tensor {name} is also in {tensors[name].file.name}", place=str(file))
            tensors[name] = TensorInfo(file, shape)
    return tensors


def check_same_model(
    new: dict[str, TensorInfo], reference: dict[str, TensorInfo], *, is_tied: bool, place: str
) -> None:
    """Raises DataError naming the first tensor that is missing, unknown or of another shape.

    ``is_tied``: the LM head is the embedding, so whether ``lm_head.weight`` is written at all is the writer's habit.
    """
    optional = {"lm_head.weight"} if is_tied else set()
    if missing := sorted(reference.keys() - new.keys() - optional):
        raise DataError(f"{len(missing)} tensors are missing, the first is {missing[0]}", place=place)
    if unknown := sorted(new.keys() - reference.keys() - optional):
        raise DataError(f"{len(unknown)} tensors are not the model's, the first is {unknown[0]}", place=place)
    for name in sorted(new.keys() & reference.keys()):
        if new[name].shape != reference[name].shape:
            raise DataError(
                f"tensor {name} has shape {list(new[name].shape)}, the model's is {list(reference[name].shape)}",
                place=place,
            )


def _check_listed(folder: Path) -> None:
    """Files that the folder's own lists name: the shards of the index, the sizes of the manifest."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        for shard in sorted(set(read_json(index).get("weight_map", {}).values())):
            if not (folder / shard).is_file():
                raise DataError(f"shard {shard} of the index is missing", place=str(folder))
    if (folder / MANIFEST).is_file() and (fault := manifest_fault(folder)):
        raise DataError(fault, place=str(folder))


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one file (format: 8 bytes little-endian length, JSON header, data)."""
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        header_bytes = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < header_bytes <= min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise DataError("not a safetensors file, or its header is cut off", place=str(file))
        try:
            header = json.loads(stream.read(header_bytes))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"damaged safetensors header ({error})", place=str(file)) from error
    if size_bytes != 8 + header_bytes + end:
        raise DataError(
            f"{size_bytes} bytes, but its header describes {8 + header_bytes + end}", place=str(file)
        )
    return shapes
