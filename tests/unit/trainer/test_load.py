"""Loading a model folder: each rank reads its own part; quantized ones are dequantized, or refused without scales."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError, DataError  # noqa: E402
from primerl_hpc.export.convert import convert_model  # noqa: E402
from primerl_hpc.trainer.model import load  # noqa: E402
from primerl_hpc.trainer.model.load import copy_part, load_weights  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import local_slice, to_local  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.quantized_models import store_fp8, store_mxfp4, store_packed  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "self_attn.q_proj"), ("qwen3_moe", "mlp.experts.3.up_proj")],  # one of them is converted
)
def test_a_quantized_weight_without_scales_is_refused_by_its_name(one_rank, tmp_path, family, name, dtype):
    model = make_family(family, tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    key = f"model.layers.0.{name}.weight"
    tensors[key] = tensors[key].to(dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(DataError, match=rf"{key} is quantized \((F8_E4M3|I8)\) without scales"):
        build_policy(small_sft(model), model, one_rank)


def test_a_model_of_an_unknown_quantization_is_refused(one_rank, tmp_path):
    model = make_family("qwen3", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="model is quantized by gptq, which this version does not read"):
        build_policy(small_sft(model), model, one_rank)


@pytest.mark.parametrize(
    ("family", "store", "changes"),
    [
        ("qwen3", store_fp8, {}),
        ("deepseek_v3", store_fp8, {}),  # experts are stacked, and some matrices end in smaller blocks
        ("deepseek_v3", store_packed, {}),
        ("qwen3_moe", store_packed, {}),
        ("gpt_oss", store_mxfp4, {"hidden_size": 64, "intermediate_size": 32}),
    ],
)
def test_a_quantized_model_is_loaded_as_its_conversion_to_bfloat16(
    one_rank, tmp_path, family, store, changes
):
    folder = make_family(family, tmp_path / "model", **changes)
    plain = {name: value.clone() for name, value in tensors_of(folder, one_rank).items()}
    store(folder)
    found = tensors_of(folder, one_rank)
    converted = convert_model(str(folder), tmp_path / "converted", shard_bytes=20_000).folder
    assert "quantization_config" not in (converted / "config.json").read_text()
    assert len(list(converted.glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).state_dict()
    assert found.keys() == plain.keys() and any(not torch.equal(found[name], plain[name]) for name in plain)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    if store is not store_mxfp4:  # whose weights are random, not rounded
        assert all(torch.allclose(found[name], plain[name], atol=0.07) for name in plain)


def tensors_of(folder, world):
    policy = build_policy(small_sft(folder), folder, world)
    return {name.removeprefix("hf."): to_local(value) for name, value in policy.tensors()}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dim", [1, 2])
def test_a_rank_reads_its_rows_and_columns_of_its_experts_alone(tmp_path, monkeypatch, rank, dim):
    """Two ranks hold half of the experts each, and two ranks share an expert."""
    folder = make_family("qwen3_moe", tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read: dict[str, int] = {}

    class Counting:
        def __init__(self, file, key: str) -> None:
            self.part, self.key = file.get_slice(key), key

        def __getattr__(self, name: str):
            return getattr(self.part, name)

        def __getitem__(self, index):
            values = self.part[index]
            read[self.key] = read.get(self.key, 0) + values.numel()
            return values

    class CountingFile:
        def __init__(self, path) -> None:
            self.file = safe_open(path, framework="pt")

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None: ...

        def get_slice(self, key: str) -> Counting:
            return Counting(self.file, key)

        def keys(self):
            return self.file.keys()

    def slice_of(value: torch.Tensor) -> tuple[slice, ...]:
        """Return the part of this rank; the fake process group has the parts of rank 0."""
        found = list(local_slice(value))
        if value.ndim == 3:
            for axis, index in ((0, rank // 2), (dim, rank % 2)):
                size = found[axis].stop
                found[axis] = slice(index * size, (index + 1) * size)
        return tuple(found)

    monkeypatch.setattr(load, "_opened", CountingFile)
    monkeypatch.setattr(load, "local_slice", slice_of)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        targets = dict(hf.named_parameters())
        for name in [name for name in targets if ".experts." in name]:
            zeros = torch.zeros(targets[name].shape)
            targets[name] = nn.Parameter(
                distribute_tensor(zeros, mesh, [Shard(0), Shard(dim)], src_data_rank=None)
            )
        load_weights(hf, targets.items(), folder)
    finally:
        dist.destroy_process_group()
    for name, value in targets.items():
        full = expected[name]
        if ".experts." in name:
            full = full.chunk(2, 0)[rank // 2].chunk(2, dim)[rank % 2]
        assert torch.equal(to_local(value), full), name
    of_experts = {key: number for key, number in read.items() if ".experts." in key}
    held = sum(value.to_local().numel() for name, value in targets.items() if ".experts." in name)
    assert sum(of_experts.values()) == held
    assert {int(key.split(".")[5]) // 4 for key in of_experts} == {rank // 2}


def test_values_move_to_the_device_in_the_type_of_the_file():
    copies: list[tuple[str, torch.dtype]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name == "aten::copy_":
                copies.append((args[1].device.type, args[1].dtype))
            return func(*args, **(kwargs or {}))

    target, source = torch.empty(3, 2, device="meta"), torch.ones(3, 2, dtype=torch.bfloat16)
    with Copies():
        copy_part(target, source, "weight", None)
    assert copies == [("meta", torch.bfloat16)]


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("glm4_moe", "model.layers.2."), ("deepseek_v3", "model.layers.2."), ("qwen3_next", "mtp.layers.0.")],
)
def test_layers_for_multi_token_prediction_are_not_loaded(one_rank, tmp_path, family, prefix):
    """They have experts of their own, which no module of the model takes."""
    model = make_family(family, tmp_path / "model")
    expected = {name: value.clone() for name, value in tensors_of(model, one_rank).items()}
    stored = load_file(model / "model.safetensors")
    last = {name: value for name, value in stored.items() if name.startswith("model.layers.1.")}
    assert any(".experts." in name for name in last)
    more = {name.replace("model.layers.1.", prefix): value + 1 for name, value in last.items()}
    save_file(stored | more, model / "model.safetensors", metadata={"format": "pt"})
    found = tensors_of(model, one_rank)
    assert set(found) == set(expected)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
