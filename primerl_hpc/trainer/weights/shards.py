"""Writes the safetensors format piece by piece.

No copy of a file or tensor is in memory, and Python's lock is not held while bytes are written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib
from numpy.typing import NDArray
from torch import Tensor

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Types = Mapping[str, torch.dtype]  # by names of tensors
PIECE_ELEMENTS = 1 << 19  # converted, checksummed and written while it is in the processor's cache


def write_safetensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    *,
    types: Types | None = None,
    with_crc32: bool = False,
) -> int:
    """Write a new file and sync it. ``types``: of tensors that are written in another type than their own.

    Returns its CRC-32, or 0 without ``with_crc32``.
    """
    types = types or {}
    text, _ = _header(tensors, metadata, types)
    crc32 = isal_zlib.crc32(text) if with_crc32 else 0
    with path.open("wb") as file:
        file.write(text)
        for name, value in tensors.items():
            for data in _pieces(value, types.get(name, value.dtype)):
                file.write(data)
                if with_crc32:
                    crc32 = isal_zlib.crc32(data, crc32)
        file.flush()
        os.fsync(file.fileno())
    return crc32


def safetensors_image(
    tensors: dict[str, Tensor], metadata: dict[str, str], *, types: Types
) -> NDArray[np.uint8]:
    """Return the bytes of the file that `write_safetensors` would write."""
    text, data_bytes = _header(tensors, metadata, types)
    image = np.empty(len(text) + data_bytes, np.uint8)
    image[: len(text)] = np.frombuffer(text, np.uint8)
    position = len(text)
    for name, value in tensors.items():
        for data in _pieces(value, types.get(name, value.dtype)):
            image[position : position + len(data)] = data
            position += len(data)
    return image


def _header(tensors: dict[str, Tensor], metadata: dict[str, str], types: Types) -> tuple[bytes, int]:
    """Return the file up to its data, and the number of bytes of data that follow."""
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, value in tensors.items():
        to = types.get(name, value.dtype)
        size = value.numel() * to.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[to],
            "shape": list(value.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position


def _pieces(value: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """Yield the tensor's bytes as ``dtype``; a piece is valid until the next one is requested."""
    flat = value.cpu().contiguous().reshape(-1)
    converted = torch.empty(min(PIECE_ELEMENTS, len(flat)), dtype=dtype)
    for piece in flat.split(PIECE_ELEMENTS):
        if piece.dtype != dtype:
            piece = converted[: len(piece)].copy_(piece)  # noqa: PLW2901
        yield piece.view(torch.uint8).numpy().data
