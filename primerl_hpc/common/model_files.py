"""Files of a model folder: which file contains a tensor, and is each file complete?

    tensor_files(folder)         # {"lm_head.weight": folder / "model-00002.safetensors", …}, by the index
    read_weights(folder)         # the same with shapes, from the headers; raises DataError for the first damaged file
    check_pointers(folder)       # raises DataError for a file that Git LFS did not download

Only headers and sizes are read, which takes milliseconds for a model of any size. Uses the standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import listed_file, read_json
from primerl_hpc.common.safety.decoding import decoding, is_count, parse_json

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_POINTER, _MAX_POINTER_BYTES = b"version https://git-lfs.github.com/spec/", 1024
"""How a file begins that stands for one which Git LFS has not downloaded, and its largest size."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in a safetensors file."""

    dtype: str
    """Safetensors type name."""
    shape: tuple[int, ...]
    start: int
    """Offset of the first byte in the file."""
    end: int
    """Offset after the last byte in the file."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is, and its shape."""

    file: Path
    shape: tuple[int, ...]


def shards_of_index(folder: Path) -> dict[str, str]:
    """Return tensor name → file name from a model's index. Raises DataError if the index is malformed."""
    index = read_json(folder / INDEX)
    with decoding("malformed index of the weights", location=folder / INDEX):
        for name in index["weight_map"].values():
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.80} is not a file name")
        return index["weight_map"]


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model: those of its index alone, without one all of the folder.

    Other files may be copies in the format of another program (``consolidated.safetensors``). Raises DataError if there
    is none, a listed shard is missing, or its name is not a file in the folder.
    """
    if not (folder / INDEX).is_file():
        if not (files := sorted(folder.glob("*.safetensors"))):
            raise DataError("the weights folder contains no *.safetensors", location=str(folder))
        return files
    names = sorted(set(shards_of_index(folder).values()))
    files = [listed_file(folder, name) for name in names]
    for file in files:
        if not file.is_file():
            raise DataError(f"shard {file.name}, which the index lists, is missing", location=str(folder))
    return files


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map tensor names to files: by the index, without one by the headers. Raises DataError as `read_weights`."""
    if (folder / INDEX).is_file():
        return {tensor: listed_file(folder, name) for tensor, name in shards_of_index(folder).items()}
    return {name: info.file for name, info in read_weights(folder).items()}


def read_weights(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a model by name.

    Raises DataError naming the file: as `weight_files`, if a file is incomplete or its header is damaged, and if a
    tensor is in another file than the index assigns, or in two. The trainer reads by the index and vLLM by file, so
    they would load different tensors.
    """
    assigned = shards_of_index(folder) if (folder / INDEX).is_file() else None
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(folder):
        for name, entry in file_header(file).items():
            if name in tensors:
                raise DataError(f"tensor {name} is also in {tensors[name].file.name}", location=str(file))
            if assigned is not None and assigned.get(name) != file.name:
                where = f"assigns it to {assigned[name]}" if name in assigned else "does not list it"
                raise DataError(
                    f"contains tensor {name}, but {INDEX} {where}",
                    location=str(file),
                    hint="trainer and engine would load different tensors: correct the index, or save the model again "
                    "with save_pretrained",
                )
            tensors[name] = TensorInfo(file, entry.shape)
    if assigned is not None and (missing := sorted(assigned.keys() - tensors.keys())):
        file = listed_file(folder, assigned[missing[0]])
        raise DataError(f"has no tensor {missing[0]}, which {INDEX} assigns to it", location=str(file))
    return tensors


def file_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file. Raises DataError if it is incomplete or cannot be read."""
    with decoding("not a complete safetensors file", location=file, more=(OSError,)):
        if is_pointer(file):
            raise pointer_error(file)
        return read_header(file)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file: 8 bytes of header length (little-endian), a JSON header, the data.

    Raises ValueError if the header is truncated, or an entry is outside the file or does not match its shape.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 or not 0 < length <= min(size_bytes - 8, MAX_HEADER_BYTES):
            raise ValueError("not a safetensors file, or its header is truncated")
        header = parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    first, entries = 8 + length, {}
    for name, value in header.items():
        if name != "__metadata__":
            entries[name] = _entry(name, value, first, size_bytes)
    end = max((entry.end for entry in entries.values()), default=first)
    if end != size_bytes:
        raise ValueError(f"the file has {size_bytes} bytes, but its header describes {end}")
    return entries


def _entry(name: str, value: Any, first: int, size_bytes: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise ValueError(f"the entry of tensor {name:.80} is not a JSON object: {value!r:.80}")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(is_count, shape)):
        raise ValueError(f"tensor {name:.80} has invalid type {dtype!r:.40} or shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise ValueError(f"tensor {name:.80} has invalid data_offsets {offsets!r:.80}")
    start, end = first + offsets[0], first + offsets[1]
    if not first <= start <= end <= size_bytes:
        raise ValueError(
            f"tensor {name:.80} has data_offsets {offsets}, outside the {size_bytes - first} bytes of data"
        )
    if dtype in _ITEM_BYTES and math.prod(shape) * _ITEM_BYTES[dtype] != end - start:
        raise ValueError(f"tensor {name:.80} has {end - start} bytes, which do not match shape {shape!r:.80}")
    return TensorEntry(dtype, tuple(shape), start, end)


def check_pointers(folder: Path) -> None:
    """Raise DataError for a file of the folder that Git LFS did not download."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and is_pointer(file):
            raise pointer_error(file)


def is_pointer(file: Path) -> bool:
    """True if the file stands for one that Git LFS has not downloaded."""
    if file.stat().st_size > _MAX_POINTER_BYTES:
        return False
    with file.open("rb") as opened:
        return opened.read(len(_POINTER)) == _POINTER


def pointer_error(file: Path) -> DataError:
    return DataError(
        "is a pointer of Git LFS, not the file itself",
        location=str(file),
        hint="run git lfs pull in its repository, or download the model with hf download",
    )
