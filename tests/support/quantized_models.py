"""Tiny models in the formats of published quantized checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_MAX = 448.0
LEFT_OUT = ("embed_tokens", "lm_head", "norm", ".mlp.gate.", "router")


def quantize_fp8(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return e4m3 values and one float32 scale for each block; the last blocks of a side may be smaller."""
    grid = [-(-size // length) for size, length in zip(matrix.shape, block, strict=True)]
    scales = torch.empty(grid)
    values = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid[0]):
        for column in range(grid[1]):
            part = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            scales[row, column] = matrix[part].abs().max() / FP8_MAX
            values[part] = (matrix[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return values, scales


def store_fp8(folder: Path, block: tuple[int, int] = (16, 16)) -> None:
    """DeepSeek-V3's form: ``weight`` and ``weight_scale_inv`` for each block."""

    def store(key: str, matrix: Tensor) -> dict[str, Tensor]:
        values, scales = quantize_fp8(matrix, block)
        return {key: values, f"{key}_scale_inv": scales}

    _rewrite(folder, store, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)})


def store_packed(folder: Path, num_bits: int = 4, group: int = 16) -> None:
    """Kimi K2 Thinking's form, packed by compressed-tensors itself."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    def store(key: str, matrix: Tensor) -> dict[str, Tensor]:
        groups = matrix.unflatten(1, (-1, group))
        most = 2 ** (num_bits - 1) - 1
        scale = (groups.abs().amax(-1) / most).to(torch.bfloat16)
        values = (groups / scale.float()[..., None]).round().clamp(-most - 1, most).flatten(1).to(torch.int8)
        base = key.removesuffix(".weight")
        return {
            f"{base}.weight_packed": pack_to_int32(values, num_bits),
            f"{base}.weight_scale": scale,
            f"{base}.weight_shape": torch.tensor(matrix.shape),
        }

    weights = {
        "num_bits": num_bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    _rewrite(
        folder,
        store,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
    )


def store_mxfp4(folder: Path) -> None:
    """GPT-OSS' form, with random experts: ``_blocks`` and ``_scales`` of transposed matrices."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(key).shape
        tensors[f"{key}_blocks"] = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8
        )
        tensors[f"{key}_scales"] = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    _set_config(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


def _rewrite(
    folder: Path, store: Callable[[str, Tensor], dict[str, Tensor]], quantization: dict[str, Any]
) -> None:
    file = folder / "model.safetensors"
    stored: dict[str, Tensor] = {}
    for key, value in load_file(file).items():
        is_linear = key.endswith(".weight") and value.ndim == 2 and not any(part in key for part in LEFT_OUT)
        stored |= store(key, value) if is_linear else {key: value}
    save_file(stored, file, metadata={"format": "pt"})
    _set_config(folder, quantization)


def _set_config(folder: Path, quantization: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
