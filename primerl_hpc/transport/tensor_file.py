"""Safetensors files: write tensors from parts without joining them in memory, and memory-map them instead of reading.

write_parts(path, {"a": [first, second]}, metadata={})      # fsynced; one tensor "a"
map_tensor(path, "a")
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.safety.decoding import is_count, parse_json

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "float32": "F32"
}  # fmt: skip
"""NumPy type name → safetensors type name."""
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
}
_ITEM_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format


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


def write_parts(path: Path, tensors: dict[str, list[NDArray]], metadata: dict[str, str]) -> None:
    """Write tensors, each given as one or more parts along its first dimension, and fsync the file.

    Parts of different types are converted to their common NumPy type.
    """
    dtypes = {name: np.result_type(*parts) for name, parts in tensors.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    names = sorted(tensors, key=lambda name: -dtypes[name].itemsize)  # widest first: all are aligned
    for name in names:
        parts, dtype = tensors[name], dtypes[name]
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        end = offset + int(np.prod(shape)) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype.name], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for part in tensors[name]:
                file.write(np.ascontiguousarray(part, dtypes[name]).data)
        file.flush()
        os.fsync(file.fileno())


def map_tensor(path: Path, name: str) -> NDArray:
    """Return a read-only memory map of one tensor. Raises KeyError if it is missing, ValueError as `read_header`."""
    entry = read_header(path)[name]
    dtypes = [dtype for dtype, known in DTYPES.items() if known == entry.dtype]
    if not dtypes:
        raise ValueError(f"tensor {name} has the unsupported type {entry.dtype}")
    if entry.start == entry.end:  # an empty range cannot be mapped
        return np.empty(entry.shape, dtypes[0])
    return np.memmap(path, dtypes[0], "r", entry.start, entry.shape)


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
