"""Safetensors files: write tensors from parts without joining them in memory, and memory-map them instead of reading.

write_parts(path, {"a": [first, second]}, metadata={})      # fsynced; one tensor "a"
map_tensor(path, "a")
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.model_files import read_header

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "float32": "F32"
}  # fmt: skip
"""NumPy type name → safetensors type name."""


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
