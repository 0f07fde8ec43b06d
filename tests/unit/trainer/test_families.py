"""Models that would be trained wrongly without an error are refused by name, with the unsupported feature."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError, DataError  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.trainer.model.families import check_head, check_layers, decoder_blocks  # noqa: E402
from primerl_hpc.trainer.model.policy import choose_attention, read_config  # noqa: E402
from primerl_hpc.trainer.parallel.attention import ATTENTION_NAME, register_attention  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402


def model(family: str, **changes):
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, **shape | changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_model_whose_head_is_not_one_matrix_is_refused():
    hf = model("llama", intermediate_size=16)
    check_head(hf, "org/it")
    hf.lm_head = torch.nn.Sequential(hf.lm_head)
    with pytest.raises(ConfigError, match=r"the head of model org/it is not a single matrix"):
        check_head(hf, "org/it")


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("mamba2", "linear_attention"),
        ("recurrent_gemma", "convolution"),  # has no entry in layer_types
    ],
)
def test_layers_that_carry_state_along_a_row_are_refused(family, what):
    config = AutoConfig.for_model(family, num_hidden_layers=4)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ConfigError, match=f"model org/it has {what} layers, which this version does not train"
    ):
        check_layers(decoder_blocks(hf), config, "org/it")


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "glm_moe_dsa"]
)
def test_layers_of_attention_alone_are_not_refused(family):
    hf = model(family)
    check_layers(decoder_blocks(hf), hf.config, "org/it")


@pytest.mark.parametrize(("family", "what"), [("doge", "attention_mask to its attention")])
def test_scores_that_the_model_would_have_changed_are_refused(family, what):
    register_attention()
    config = AutoConfig.for_model(
        family,
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    positions = torch.arange(4)[None]
    with pytest.raises(ConfigError, match=f"{what}, which this version does not train"):
        hf.base_model(
            input_ids=positions,
            position_ids=positions,
            use_cache=False,
            packing=Packing(Context(), positions),
        )


def test_an_architecture_without_a_list_of_layers_is_refused():
    with pytest.raises(ConfigError, match="MptForCausalLM has no list of decoder layers"):
        decoder_blocks(model("mpt"))


def test_a_model_that_transformers_does_not_know_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "from_tomorrow"}')
    recipe = Recipe.model_validate({"kind": "inference", "name": "x", "model": {"name": "org/it"}})
    with pytest.raises(DataError, match=r"model org/it: .*`from_tomorrow`") as refused:
        read_config(tmp_path, recipe)
    assert "\n" not in str(refused.value)


def test_kimi_k2_is_read_as_deepseek_v3_without_the_code_of_its_repository(tmp_path):
    content = AutoConfig.for_model("deepseek_v3", num_hidden_layers=1).to_dict()
    content |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    content |= {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = {"name": "org/it", "trust_remote_code": True}
    recipe = Recipe.model_validate({"kind": "inference", "name": "x", "model": model})
    config = read_config(tmp_path, recipe)
    assert config.model_type == "deepseek_v3"
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert type(hf).__module__.startswith("transformers.")


def recipe_with(attention: str, param_dtype: str = "bfloat16") -> Recipe:
    return Recipe.model_validate(
        {
            "kind": "inference",
            "name": "x",
            "model": {"name": "org/it", "attention": attention},
            "trainer": {"param_dtype": param_dtype},
        }
    )


@pytest.mark.parametrize(
    ("family", "param_dtype", "device", "expected"),
    [
        ("qwen3", "bfloat16", "cuda", "varlen"),
        ("qwen3_vl", "bfloat16", "cuda", "varlen"),
        ("gemma3_text", "bfloat16", "cuda", "varlen"),  # windows
        ("gpt_oss", "bfloat16", "cuda", "varlen"),  # windows and sinks
        ("deepseek_v3", "bfloat16", "cuda", "varlen"),  # values narrower than keys
        ("qwen3", "float32", "cuda", "sdpa"),  # flash kernels do not support float32
        ("qwen3", "bfloat16", "cpu", "sdpa"),
        ("gpt_oss", "bfloat16", "cpu", "eager"),
        ("gemma2", "bfloat16", "cuda", "eager"),  # no kernel of torch caps scores
    ],
)
def test_automatic_attention_is_torchs_flash_attention_on_gpus(family, param_dtype, device, expected):
    config = AutoConfig.for_model(family)
    assert choose_attention(recipe_with("auto", param_dtype), config, torch.device(device)) == expected


def test_heads_that_are_too_wide_for_flash_attention_use_sdpa():
    config = AutoConfig.for_model("qwen3", head_dim=264)
    assert choose_attention(recipe_with("auto"), config, torch.device("cuda")) == "sdpa"


@pytest.mark.parametrize(("rate", "expected"), [(0.1, "sdpa"), (0.0, "varlen")])
def test_a_model_that_keeps_attention_dropout_uses_an_attention_that_computes_it(tmp_path, rate, expected):
    plain = small_sft(tmp_path)
    recipe = plain.model_copy(
        update={
            "sft": plain.sft.model_copy(update={"model_dropout": True}),
            "trainer": plain.trainer.model_copy(update={"param_dtype": "bfloat16"}),
        }
    )
    config = AutoConfig.for_model("phi3", attention_dropout=rate, embd_pdrop=0.1)
    assert choose_attention(recipe, config, torch.device("cuda")) == expected


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_a_flash_package_that_cannot_be_imported_is_refused(monkeypatch, attention):
    """flash-attn-4 installs a folder flash_attn without the kernels of version 2: finding a package is not enough."""
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(
        ConfigError, match=rf"model.attention: {attention} requires flash_attn.* set it to auto"
    ):
        choose_attention(recipe_with(attention), AutoConfig.for_model("qwen3"), torch.device("cuda"))
