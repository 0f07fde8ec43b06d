"""Weight files: safetensors reads back the written tensors, and the checksum is that of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.files import crc32_of_file  # noqa: E402
from primerl_hpc.trainer.model.policy import Policy  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import World  # noqa: E402
from primerl_hpc.trainer.weights.filesystem import _write_shard, export_types, gather_shards  # noqa: E402
from primerl_hpc.trainer.weights.shards import (  # noqa: E402
    DTYPE_NAMES,
    PIECE_ELEMENTS,
    safetensors_image,
    write_safetensors,
)
from tests.support.tiny_models import COMMON, FAMILIES  # noqa: E402

SHAPES = FAMILIES | {
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    }
}


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


def test_what_shall_have_another_type_is_converted_piece_by_piece_and_nothing_else(tmp_path: Path) -> None:
    large = torch.randn(PIECE_ELEMENTS + 7, generator=torch.Generator().manual_seed(0))
    tensors = {"large": large, "transposed": large[:6].view(2, 3).t(), "own": large[:5]}
    types = dict.fromkeys(("large", "transposed"), torch.bfloat16)
    path = tmp_path / "x.safetensors"
    crc32 = write_safetensors(path, tensors, {}, types=types, with_crc32=True)
    assert crc32 == crc32_of_file(path)
    found = load_file(path)
    assert torch.equal(found["large"], large.bfloat16())
    assert torch.equal(found["transposed"], tensors["transposed"].bfloat16())
    assert torch.equal(found["own"], tensors["own"])
    assert safetensors_image(tensors, {}, types=types).tobytes() == path.read_bytes()


@pytest.mark.parametrize("for_leader", [False, True])  # into files, into the engines' memory
@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("glm4_moe", {"model.layers.1.mlp.gate.e_score_correction_bias"}),
        ("deepseek_v3", {"model.layers.1.mlp.gate.e_score_correction_bias"}),
        (
            "ernie4_5_moe",
            {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.moe_statics.e_score_correction_bias"},
        ),
        ("qwen3", set()),
    ],
)
def test_what_a_family_keeps_in_float32_is_exported_so_bit_for_bit(
    tmp_path: Path, family: str, kept: set[str], for_leader: bool
) -> None:
    """A score correction rounded to bfloat16 would route the engine's tokens to other experts than the trainer's."""
    config = AutoConfig.for_model(family, **COMMON | SHAPES.get(family, {}))
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for value in hf.state_dict().values():
            value.normal_()
    world = World(0, 1, 0, 1, torch.device("cpu"), mesh=None)
    policy = Policy(hf, 64, "sdpa", Context())
    source, found = dict(policy.tensors()), {}
    types = export_types(policy, torch.bfloat16)
    for number, _, gathered in gather_shards(policy, world, types, for_leader=for_leader):
        _write_shard(tmp_path / f"{number}", gathered, hf, types)
        found |= load_file(tmp_path / f"{number}")
        for name, value in gathered.items():
            assert torch.equal(value, source[name].to(value.dtype))
            assert not for_leader or value.dtype == types[name]
    assert {name for name, value in found.items() if value.dtype == torch.float32} == kept
    assert {value.dtype for name, value in found.items() if name not in kept} == {torch.bfloat16}
