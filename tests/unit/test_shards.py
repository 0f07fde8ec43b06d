"""Weights as files: what is written is what safetensors reads, and the checksum is the file's."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from primerl_hpc.common.files import crc32_of_file  # noqa: E402
from primerl_hpc.trainer.shards import DTYPE_NAMES, PIECE_ELEMENTS, safetensors_image, write_safetensors  # noqa: E402


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_tensors_come_back_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 5), generator=generator).to(dtype)
    tensors = {"a": whole, "part.of.it": whole[:, 1:3], "one": whole[0, 0], "none": whole[:0]}
    path = tmp_path / "x.safetensors"
    assert write_safetensors(path, tensors, {"format": "pt"}, with_crc32=True) == crc32_of_file(path)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], value) and found[name].dtype == dtype for name, value in tensors.items()
    )
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_floating_point_is_converted_piece_by_piece_and_nothing_else(tmp_path: Path) -> None:
    large = torch.randn(PIECE_ELEMENTS + 7, generator=torch.Generator().manual_seed(0))
    tensors = {"large": large, "transposed": large[:6].view(2, 3).t(), "count": torch.tensor(2**40)}
    path = tmp_path / "x.safetensors"
    crc32 = write_safetensors(path, tensors, {}, dtype=torch.bfloat16, with_crc32=True)
    assert crc32 == crc32_of_file(path)
    found = load_file(path)
    assert torch.equal(found["large"], large.bfloat16())
    assert torch.equal(found["transposed"], tensors["transposed"].bfloat16())
    assert found["count"].item() == 2**40
    assert safetensors_image(tensors, {}, dtype=torch.bfloat16).tobytes() == path.read_bytes()
