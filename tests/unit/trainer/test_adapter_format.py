"""PEFT loads every tensor of an exported adapter, also in mixtures with dense layers and shared experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from safetensors.torch import load_file  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.export.merge import merge_adapter  # noqa: E402
from primerl_hpc.recipe.load import parse_recipe  # noqa: E402
from primerl_hpc.recipe.schema.training import LoRA  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.model.families import decoder_blocks  # noqa: E402
from primerl_hpc.trainer.model.lora import attach_adapters  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.tiny_adapters import SHAPES, export_random_adapter, load, make_base  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")

IDS = torch.arange(20)[None]


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


# PEFT gives fused experts a pattern of ranks, and then looks for it among modules alone
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "auto") for family in SHAPES if family != "granitemoe"),
        ("deepseek_v3", ("shared_experts.gate_proj", "q_b_proj")),
        ("deepseek_v3", ("mlp.experts",)),
        ("deepseek_v3", ("down_proj",)),
        ("glm4_moe", ("layers.0.mlp.up_proj",)),
        ("qwen2_moe", ("mlp.experts", "o_proj")),
    ],
)
def test_peft_loads_every_tensor_of_an_adapter(tmp_path: Path, family: str, targets) -> None:
    assert_peft_agrees(tmp_path, family, LoRA(rank=8, alpha=12.0, dropout=0.1, target_modules=targets))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
@pytest.mark.parametrize("targets", ["auto", ("self_attn.*_proj", "mlp.experts")])
def test_peft_agrees_on_rank_stabilized_adapters_and_on_patterns_of_modules(
    tmp_path: Path, family, targets
) -> None:
    assert_peft_agrees(
        tmp_path, family, LoRA(rank=8, alpha=6.0, rank_stabilized=True, target_modules=targets)
    )


def assert_peft_agrees(tmp_path: Path, family: str, lora: LoRA) -> None:
    """Compare logits with the trainer's to 1e-5, of the model that PEFT adapts and of the one that it merges."""
    base = tmp_path / "base"
    hf = make_base(family, base)
    plain = logits(hf)
    adapter = export_random_adapter(hf, base, RunDir(tmp_path / "run"), lora)
    expected = logits(hf)
    assert (expected - plain).abs().max() > 0.01
    loaded = peft.PeftModel.from_pretrained(load(base), adapter).eval()
    assert (logits(loaded) - expected).abs().max() <= 1e-5
    assert (logits(loaded.merge_and_unload()) - expected).abs().max() <= 1e-5
    (tmp_path / "merged").mkdir()
    merge_adapter(base, adapter, tmp_path / "merged", version=1)
    assert (logits(load(tmp_path / "merged")) - expected).abs().max() <= 1e-5


def test_tensors_have_the_names_of_single_modules_which_engines_read(tmp_path: Path) -> None:
    """vLLM reads rank and alpha from the configuration, and the adapted modules from the tensors' names."""
    hf = make_base("deepseek_v3", tmp_path / "base")
    adapter = export_random_adapter(hf, tmp_path / "base", RunDir(tmp_path / "run"), LoRA(rank=8))
    tensors = load_file(adapter / "adapter_model.safetensors")
    weights = {name for name in load_file(tmp_path / "base" / "model.safetensors") if "_proj" in name}
    expected = {name.removesuffix(".weight") for name in weights if "kv_b_proj" not in name}
    prefix = "base_model.model."
    assert {name.removeprefix(prefix).rsplit(".", 2)[0] for name in tensors} == expected
    assert all(8 in value.shape for value in tensors.values())
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8


def test_experts_whose_files_hold_all_in_one_tensor_are_refused(tmp_path: Path) -> None:
    hf = make_base("granitemoe", tmp_path / "base")
    with pytest.raises(ConfigError, match="hold all experts in one tensor"):
        attach_adapters(hf, decoder_blocks(hf), LoRA(rank=8))


def test_experts_that_the_files_hold_in_one_tensor_have_no_adapters(one_rank, tmp_path: Path) -> None:
    """Qwen3.5 is published so; transformers would write them one by one."""
    model = make_family("qwen3_5_moe", tmp_path)
    recipe = parse_recipe(small_sft(model).model_dump() | {"lora": {"rank": 8}})
    with pytest.raises(ConfigError, match="hold all experts in one tensor"):
        build_policy(recipe, model, one_rank)
