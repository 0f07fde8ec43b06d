"""Quantized tensors equal reference implementations bit for bit, in full and slice by slice."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from primerl_hpc.common.errors import ConfigError, DataError  # noqa: E402
from primerl_hpc.transport.base_models.quantized import (  # noqa: E402
    StoredTensors,
    check_readable,
    quantization_of,
    without_quantization,
)
from tests.support.quantized_models import quantize_fp8  # noqa: E402

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def stored(folder: Path, tensors: dict[str, Tensor], quantization: dict) -> StoredTensors:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return StoredTensors(dict.fromkeys(tensors, path), {path: safe_open(path, framework="pt")}, quantization)


def assert_equal_in_parts(found: StoredTensors, name: str, expected: Tensor) -> None:
    """Compare the tensor ``name``, and slices whose borders lie inside of blocks, bytes and words."""
    part = found.slice(name)
    assert tuple(part.get_shape()) == tuple(expected.shape) and part.get_dtype() == "BF16"
    assert torch.equal(part[...], expected) and expected.dtype == torch.bfloat16
    ranges = [
        [slice(0, size // 2), slice(size // 2, size), slice(1, size - 3), slice(5, 6)]
        for size in expected.shape[-2:]
    ]
    first = [slice(1, 3)] * (expected.ndim - 2)
    for rows, columns in itertools.product(*ranges):
        assert torch.equal(part[(*first, rows, columns)], expected[(*first, rows, columns)])
    assert torch.equal(part[slice(0, 2)], expected[:2])


@pytest.mark.parametrize("shape", [(256, 384), (576, 200), (64, 96)])
def test_fp8_blocks_equal_deepseeks_own_conversion(tmp_path: Path, shape: tuple[int, int]) -> None:
    """576 rows and 200 columns end in smaller blocks, as DeepSeek-V3's kv_a_proj_with_mqa does."""
    torch.manual_seed(0)
    values, scales = quantize_fp8(torch.randn(shape), (128, 128))
    found = stored(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "b": torch.ones(3)}, FP8)
    assert found.names == ["a.weight", "b"] and torch.equal(found.slice("b")[...], torch.ones(3))
    # fp8_cast_bf16.py of DeepSeek-V3: x.to(float32) * s, by blocks of 128, stored as bfloat16
    expected = torch.empty(shape, dtype=torch.bfloat16)
    for row, column in itertools.product(range(0, shape[0], 128), range(0, shape[1], 128)):
        block = values[row : row + 128, column : column + 128].float() * scales[row // 128, column // 128]
        expected[row : row + 128, column : column + 128] = block.to(torch.bfloat16)
    assert_equal_in_parts(found, "a.weight", expected)


def test_fp8_blocks_equal_transformers(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, scales = quantize_fp8(torch.randn(256, 128), (128, 128))
    found = stored(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, FP8)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(found.slice("a.weight")[...], expected)


@pytest.mark.parametrize("grid", [(), (1,), (24,), (24, 1), (24, 4)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_scales_of_tensors_rows_and_groups_equal_compressed_tensors(
    tmp_path: Path, grid: tuple[int, ...], dtype: torch.dtype
) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    torch.manual_seed(0)
    values = (torch.randn(24, 64) * 20).to(dtype)
    scale = torch.rand(grid).to(torch.bfloat16)
    found = stored(
        tmp_path,
        {"a.weight": values, "a.weight_scale": scale, "a.input_scale": torch.ones(1)},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    )
    assert found.names == ["a.weight"]
    if grid == (24,):  # compressed-tensors stores [rows, 1]; older checkpoints [rows]
        scale = scale[:, None]
    args = QuantizationArgs(
        num_bits=8,
        type="float" if dtype.is_floating_point else "int",
        strategy="tensor" if scale.numel() == 1 else "channel" if scale.shape[1] == 1 else "group",
        group_size=16 if scale.numel() > 24 else None,
    )
    expected = dequantize(values, scale, args=args, dtype=torch.bfloat16)
    assert_equal_in_parts(found, "a.weight", expected)


def test_mxfp4_equals_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (4, 24, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (4, 24, 3), dtype=torch.uint8)
    found = stored(
        tmp_path, {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, {"quant_method": "mxfp4"}
    )
    assert found.names == ["e.down_proj"]
    assert_equal_in_parts(found, "e.down_proj", convert_moe_packed_tensors(blocks, scales))


@pytest.mark.parametrize(
    ("num_bits", "columns", "group"), [(4, 96, 32), (4, 90, 30), (8, 64, 32), (4, 64, 64)]
)
def test_packed_integers_equal_compressed_tensors(
    tmp_path: Path, num_bits: int, columns: int, group: int
) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    torch.manual_seed(0)
    half = 2 ** (num_bits - 1)
    values = torch.randint(-half, half, (24, columns), dtype=torch.int8)
    scale = (torch.rand(24, columns // group) / half).to(torch.bfloat16)
    tensors = {
        "a.weight_packed": pack_to_int32(values, num_bits),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([24, columns]),
    }
    found = stored(tmp_path, tensors, PACKED)
    assert found.names == ["a.weight"]
    assert_equal_in_parts(found, "a.weight", dequantize(values, scale))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "gptq"}, "quantized by gptq"),
        ({}, "quantized by an unknown method"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "format nvfp4-pack-quantized",
        ),
    ],
)
def test_an_unknown_quantization_is_refused_with_the_known_ones(quantization: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=f"model m is .*{words}.*use its bfloat16 version; readable: "):
        check_readable(quantization, "m")
    check_readable(FP8, "m")


MATRIX = torch.zeros(4, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.weight_packed": MATRIX, "a.weight_scale": torch.ones(4, 2)}, "no file has a.weight_shape"),
        ({"a_blocks": MATRIX}, "no file has a_scales"),
        ({"a.weight": MATRIX, "a.weight_zero_point": MATRIX + 1}, "a.weight is asymmetric"),
        ({"a.weight": MATRIX, "a.weight_g_idx": MATRIX + 1}, "a.weight is ordered by activations"),
        ({"a": torch.ones(2, 2, 2), "a_scale": torch.ones(1)}, "a is quantized and has 3 dimensions"),
        ({"a": torch.ones(5, 7), "a_scale": torch.ones(2, 3)}, "blocks of unknown size"),
        (
            {"a_packed": MATRIX, "a_scale": torch.ones(4, 2), "a_shape": torch.tensor([4, 128])},
            "neither 4 nor 8 bits",
        ),
    ],
)
def test_incomplete_parts_are_refused_by_name(tmp_path: Path, tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(DataError, match=words):
        found = stored(tmp_path, tensors, PACKED)
        found.slice("a")[...]


def test_the_quantization_of_a_text_model_is_found_and_removed() -> None:
    config = {"model_type": "x", "text_config": {"hidden_size": 4, "quantization_config": FP8}}
    assert quantization_of(config) == FP8 == quantization_of({"quantization_config": FP8})
    assert without_quantization(config) == {"model_type": "x", "text_config": {"hidden_size": 4}}
    assert quantization_of(without_quantization(config)) is None
