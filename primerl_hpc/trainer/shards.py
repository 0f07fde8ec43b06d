"""Writes the format of safetensors piece by piece: no copy of a whole file or tensor in memory, no lock held while bytes move."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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
PIECE_ELEMENTS = 1 << 19  # summed up and handed to the system while they are in the processor's cache


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, with_crc32: bool = False
) -> int:
    """Write a new file and make it durable. Returns its CRC-32, or 0 without ``with_crc32``."""
    text, _ = _header(tensors, metadata)
    crc32 = isal_zlib.crc32(text) if with_crc32 else 0
    with path.open("wb") as file:
        file.write(text)
        for value in tensors.values():
            for data in _pieces(value):
                file.write(data)
                if with_crc32:
                    crc32 = isal_zlib.crc32(data, crc32)
        file.flush()
        os.fsync(file.fileno())
    return crc32


def safetensors_image(tensors: dict[str, Tensor], metadata: dict[str, str]) -> NDArray[np.uint8]:
    """The bytes of the file that `write_safetensors` would write."""
    text, data_bytes = _header(tensors, metadata)
    image = np.empty(len(text) + data_bytes, np.uint8)
    image[: len(text)] = np.frombuffer(text, np.uint8)
    position = len(text)
    for value in tensors.values():
        for data in _pieces(value):
            image[position : position + len(data)] = data
            position += len(data)
    return image


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, int]:
    """The file up to its data, and how many bytes of data follow."""
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": DTYPE_NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [position, position + value.nbytes],
        }
        position += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, position


def _pieces(value: Tensor) -> Iterator[memoryview]:
    for piece in value.cpu().contiguous().reshape(-1).split(PIECE_ELEMENTS):
        yield memoryview(piece.view(torch.uint8).numpy())
