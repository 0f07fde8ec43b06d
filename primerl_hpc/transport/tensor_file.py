"""Safetensors files written from parts that are never joined in memory, and tensors mapped instead of read.

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

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "float32": "F32"
}  # fmt: skip
"""NumPy's names and the format's."""


def write_parts(path: Path, tensors: dict[str, list[NDArray]], metadata: dict[str, str]) -> None:
    """Each tensor in parts along its first dim, at least one; where they differ in type, it is the widest."""
    dtypes = {name: np.result_type(*parts) for name, parts in tensors.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    names = sorted(tensors, key=lambda name: -dtypes[name].itemsize)  # so all are aligned
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
    """A view of the file. Raises KeyError when it has no such tensor."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[name]
    dtype = next(dtype for dtype, known in DTYPES.items() if known == entry["dtype"])
    return np.memmap(path, dtype, "r", 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
