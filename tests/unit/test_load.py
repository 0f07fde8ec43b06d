"""What of a model's folder is refused before anything is trained: weights that mean nothing without their scales."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from primerl_hpc.common.errors import DataError  # noqa: E402
from primerl_hpc.recipe.layout_schema import TrainerLayout  # noqa: E402
from primerl_hpc.trainer.model import build_policy  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import World, make_world  # noqa: E402
from tests.e2e.tiny_models import make_family  # noqa: E402
from tests.support import small_sft  # noqa: E402


@pytest.fixture
def one_rank() -> Iterator[World]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_world(TrainerLayout(), torch.device("cpu"), local_rank=0, local_size=1)
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "self_attn.q_proj"), ("qwen3_moe", "mlp.experts.3.up_proj")],  # one of them is converted
)
def test_a_quantised_weight_is_refused_by_its_name(one_rank, tmp_path, family, name, dtype):
    model = make_family(family, tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    key = f"model.layers.0.{name}.weight"
    tensors[f"{key}_scale_inv"] = torch.ones(1, 1)
    tensors[key] = tensors[key].to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=rf"{key} is quantised \((F8_E4M3|I8)\); train its bfloat16 version"):
        build_policy(small_sft(model), model, one_rank)


def test_a_model_whose_config_says_it_is_quantised_is_refused(one_rank, tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"model: the model is quantised \(fp8\)"):
        build_policy(small_sft(model), model, one_rank)
