"""Quantized checkpoints, read as the bfloat16 tensors that they stand for.

    check_readable(config, name)                       # ConfigError for an unknown quantization
    stored = StoredTensors(files, handles, config)     # names and shapes of the bfloat16 checkpoint
    stored.names                                       # ["model.layers.0.mlp.up_proj.weight", …]
    stored.slice(name)[:128, :64]                      # reads and dequantizes this part alone

Formats, by the names of a tensor's parts in safetensors files:

- FP8 (DeepSeek-V3, Qwen3) and integers of 8 bits: ``weight``, and ``weight_scale_inv`` or ``weight_scale`` with one
  value for the tensor, for each row, or for each block;
- MXFP4 (GPT-OSS): ``_blocks``, two 4-bit floats a byte, and ``_scales``, an exponent for each 32 of them, transposed;
- compressed-tensors' packed integers (Kimi K2 Thinking): ``weight_packed``, 4 or 8 bits in an int32, ``weight_scale``
  for each group of columns, and ``weight_shape``.

Products are computed in float32 and rounded to bfloat16, so reading a part gives the same bits as reading the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from primerl_hpc.common.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

COMPRESSED = "compressed-tensors"
METHODS = ("fp8", "mxfp4", COMPRESSED)
COMPRESSED_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")

SCALES = ("_scale_inv", "_scale")
PACKED, PACKED_SHAPE = "_packed", "_shape"
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"
ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "k_scale", "v_scale")
"""Scales of activations, which the trainer computes in its own type."""
UNREADABLE = {"_zero_point": "asymmetric", "_g_idx": "ordered by activations"}

# values of the 4-bit float E2M1 by its bits: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127
FP4_PER_SCALE = 32

Index = tuple[slice, ...]


class TensorSlice(Protocol):
    """The interface of the slices that safetensors' ``get_slice`` returns."""

    def get_shape(self) -> Sequence[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of a config.json, or of its text model; None if it has none."""
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    return config.get("quantization_config") or nested or None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as it describes the bfloat16 weights."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = without_quantization(text)
    return plain


def check_readable(quantization: Mapping[str, Any], name: str) -> None:
    """Raise ConfigError if model ``name`` is quantized by a method that this module does not read."""
    method, form = quantization.get("quant_method"), quantization.get("format")
    if method not in METHODS:
        what, known = f"quantized by {method or 'an unknown method'}", METHODS
    elif method == COMPRESSED and form not in COMPRESSED_FORMATS:
        what, known = f"stored in the format {form or 'of no name'} of {COMPRESSED}", COMPRESSED_FORMATS
    else:
        return
    raise ConfigError(
        f"model {name} is {what}, which this version does not read",
        hint=f"use its bfloat16 version; readable: {', '.join(known)}",
    )


class StoredTensors:
    """The tensors of safetensors files under the names, shapes and types of the checkpoint without quantization.

    ``files``: the file of each stored tensor; ``handles``: opened files. Tensors that are not quantized pass as they
    are. Raises DataError for a quantized tensor whose parts are incomplete or cannot be read.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        handles: Mapping[Path, Any],
        quantization: Mapping[str, Any] | None,
    ) -> None:
        self._files, self._handles = files, handles
        block = (quantization or {}).get("weight_block_size")
        self._block_size = (int(block[0]), int(block[1])) if block else None
        self._parts = _parts_of(files) if quantization else {key: (key,) for key in files}
        self.names = sorted(self._parts)

    def file_of(self, name: str) -> Path:
        """Return the file with the first part of the tensor ``name``."""
        return self._files[self._parts[name][0]]

    def slice(self, name: str) -> TensorSlice:
        keys = self._parts[name]
        parts = [self._handles[self._files[key]].get_slice(key) for key in keys]
        if keys[0].endswith(BLOCKS):
            return Microscaled(parts[0], parts[1])
        if keys[0].endswith(PACKED):
            rows, columns = (int(size) for size in parts[2][...].tolist())
            return PackedIntegers(parts[0], parts[1], (rows, columns), _num_bits(parts[0], columns, keys[0]))
        if len(parts) == 1:
            return parts[0]
        if len(shape := parts[0].get_shape()) != 2:
            raise DataError(
                f"{name} is quantized and has {len(shape)} dimensions; this version reads matrices",
                location=str(self._files[keys[0]]),
                hint="use the model's bfloat16 version",
            )
        return Scaled(parts[0], parts[1], self._block_size)


def _parts_of(files: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
    """Map the names of tensors to the keys of their parts in files."""
    found: dict[str, tuple[str, ...]] = {}
    for key in files:
        for suffix, form in UNREADABLE.items():
            if key.endswith(suffix):
                raise DataError(
                    f"the quantization of {key.removesuffix(suffix)} is {form}, which this version does not read",
                    location=str(files[key]),
                    hint="use the model's bfloat16 version",
                )
        if key.endswith(PACKED):
            base = key.removesuffix(PACKED)
            found[base] = (
                key,
                _companion(files, key, base + "_scale"),
                _companion(files, key, base + PACKED_SHAPE),
            )
        elif key.endswith(BLOCKS):
            base = key.removesuffix(BLOCKS)
            found[base] = (key, _companion(files, key, base + BLOCK_SCALES))
        elif any(key + suffix in files for suffix in SCALES):
            found[key] = (key, _companion(files, key, *(key + suffix for suffix in SCALES)))
    consumed = {part for parts in found.values() for part in parts}
    plain = (key for key in files if key not in consumed and not key.endswith(ACTIVATIONS))
    return found | {key: (key,) for key in plain}


def _companion(files: Mapping[str, Path], key: str, *names: str) -> str:
    """Return the first of ``names`` that a file has. Raises DataError if none has one."""
    found = next((name for name in names if name in files), None)
    if found is None:
        raise DataError(f"{key} is quantized, but no file has {names[0]}", location=str(files[key]))
    return found


def _num_bits(packed: TensorSlice, columns: int, key: str) -> int:
    """Return the width of packed integers, which follows from the sizes."""
    words = packed.get_shape()[1]
    for bits in (4, 8):
        if words == -(-columns // (32 // bits)):
            return bits
    raise DataError(f"{key} has {words} words for {columns} columns, neither 4 nor 8 bits for each")


@dataclass(frozen=True)
class Scaled:
    """A matrix of 8-bit floats or integers, and its scales: one, one for each row, or one for each block."""

    weight: TensorSlice
    scale: TensorSlice
    block_size: tuple[int, int] | None

    def get_shape(self) -> Sequence[int]:
        return self.weight.get_shape()

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any, /) -> Tensor:
        import torch

        rows, columns = ranges = _ranges(index, self.get_shape())
        values = self.weight[ranges].float()
        grid = list(self.scale.get_shape())
        scale = self.scale[...].float()
        if scale.numel() == 1:
            return (values * scale.reshape(1, 1)).to(torch.bfloat16)
        if len(grid) == 1:
            scale, grid = scale[:, None], [*grid, 1]
        height, width = self._block(grid)
        scale = scale.index_select(0, torch.arange(rows.start, rows.stop) // height)
        scale = scale.index_select(1, torch.arange(columns.start, columns.stop) // width)
        return (values * scale).to(torch.bfloat16)

    def _block(self, grid: Sequence[int]) -> tuple[int, int]:
        """Return rows and columns of a block. The last block of a side may be smaller, so sizes alone do not tell."""
        shape = self.get_shape()
        configured = self.block_size or (0, 0)
        sizes = []
        for size, number, block in zip(shape, grid, configured, strict=True):
            if block and -(-size // block) == number:
                sizes.append(block)
            elif size % number == 0:
                sizes.append(size // number)
            else:
                raise DataError(
                    f"a matrix of {list(shape)} has scales for {list(grid)} blocks of unknown size"
                )
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class Microscaled:
    """MXFP4: [experts, rows, groups, 16] bytes of two values each stand for [experts, groups · 32, rows]."""

    blocks: TensorSlice
    scales: TensorSlice

    def get_shape(self) -> Sequence[int]:
        experts, rows, groups, size = self.blocks.get_shape()
        return (experts, groups * size * 2, rows)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any, /) -> Tensor:
        import torch

        experts, columns, rows = _ranges(index, self.get_shape())
        groups = slice(columns.start // FP4_PER_SCALE, -(-columns.stop // FP4_PER_SCALE))
        packed = self.blocks[experts, rows, groups, :]
        exponents = self.scales[experts, rows, groups].to(torch.int32) - E8M0_BIAS
        table = torch.tensor(E2M1, dtype=torch.bfloat16)
        pairs = torch.stack([table[(packed & 0xF).long()], table[(packed >> 4).long()]], dim=-1)
        values = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)
        offset = columns.start - groups.start * FP4_PER_SCALE
        return values[..., offset : offset + columns.stop - columns.start].transpose(1, 2).contiguous()


@dataclass(frozen=True)
class PackedIntegers:
    """Symmetric integers, ``32 // num_bits`` in each int32 along the columns, lowest bits first, offset by half."""

    packed: TensorSlice
    scale: TensorSlice
    shape: tuple[int, int]
    num_bits: int

    def get_shape(self) -> Sequence[int]:
        return self.shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any, /) -> Tensor:
        import torch

        rows, columns = _ranges(index, self.shape)
        per_word = 32 // self.num_bits
        words = slice(columns.start // per_word, -(-columns.stop // per_word))
        packed = self.packed[rows, words]
        shifts = torch.arange(0, 32, self.num_bits, dtype=torch.int32)
        values = (packed[..., None] >> shifts) & ((1 << self.num_bits) - 1)
        values = values.flatten(-2) - (1 << (self.num_bits - 1))
        offset = columns.start - words.start * per_word
        values = values[:, offset : offset + columns.stop - columns.start].float()
        groups = self.scale.get_shape()[1]
        width = -(-self.shape[1] // groups)
        scale = self.scale[rows, :].float()
        scale = scale.index_select(1, torch.arange(columns.start, columns.stop) // width)
        return (values * scale).to(torch.bfloat16)


def _ranges(index: Any, shape: Sequence[int]) -> Index:
    """Return a slice with start and stop for each dimension; ``index``: ``...``, or slices of the first dimensions."""
    given = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
    full = [*given, *[slice(None)] * (len(shape) - len(given))]
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(full, shape, strict=True))
