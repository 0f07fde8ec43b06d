"""Models whose training would be wrong without a word: refused by name, with what they have."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError, DataError  # noqa: E402
from primerl_hpc.recipe.schema import Recipe  # noqa: E402
from primerl_hpc.trainer.model import (  # noqa: E402
    check_head,
    check_layers,
    choose_attention,
    decoder_blocks,
    read_config,
)
from primerl_hpc.trainer.parallel.attention import ATTENTION_NAME, register_attention  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing  # noqa: E402


def model(family: str, **changes):
    shape = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, **shape | changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_head_that_does_more_than_multiply_is_refused():
    with pytest.raises(ConfigError, match=r"model org/it has final_logit_softcapping, which this version"):
        check_head(model("gemma2", intermediate_size=16, num_key_value_heads=1, head_dim=8), "org/it")
    with pytest.raises(ConfigError, match="has a bias in its head"):
        check_head(model("phi", intermediate_size=16), "org/it")
    with pytest.raises(ConfigError, match="has logits_soft_cap"):
        check_head(model("recurrent_gemma"), "org/it")
    check_head(model("llama", intermediate_size=16), "org/it")


@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("qwen3_next", "linear_attention"),
        ("mamba2", "linear_attention"),
        ("deepseek_v32", "deepseek_sparse_attention"),
        ("recurrent_gemma", "convolution"),  # says nothing in layer_types
    ],
)
def test_layers_that_carry_state_along_a_row_are_refused(family, what):
    config = AutoConfig.for_model(family, num_hidden_layers=4)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=f"model org/it has {what} layers"):
        check_layers(decoder_blocks(hf), config, "org/it")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_layers_of_attention_alone_are_not_refused(family):
    hf = model(family)
    check_layers(decoder_blocks(hf), hf.config, "org/it")


@pytest.mark.parametrize(
    ("family", "what"),
    [("gemma2", "Gemma2Attention gives its attention softcap"), ("doge", "attention_mask")],
)
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
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no list of decoder layers"):
        decoder_blocks(model("gpt2"))


def test_a_model_that_transformers_does_not_know_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "from_tomorrow"}')
    recipe = Recipe.model_validate({"kind": "inference", "name": "x", "model": {"name": "org/it"}})
    with pytest.raises(DataError, match=r"model org/it: .*`from_tomorrow`") as refused:
        read_config(tmp_path, recipe)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("family", "param_dtype", "device", "expected"),
    [
        ("qwen3", "bfloat16", "cuda", "flash_attention_2"),
        ("qwen3_vl", "bfloat16", "cuda", "flash_attention_2"),
        ("qwen3", "float32", "cuda", "sdpa"),  # flash kernels know no float32
        ("gpt_oss", "bfloat16", "cuda", "eager"),  # nor attention sinks
        ("qwen3", "bfloat16", "cpu", "sdpa"),
        ("gpt_oss", "bfloat16", "cpu", "eager"),
    ],
)
def test_attention_is_flash_where_it_is_installed_and_serves(
    monkeypatch, family, param_dtype, device, expected
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn")
    recipe = Recipe.model_validate(
        {
            "kind": "inference",
            "name": "x",
            "model": {"name": "org/it"},
            "trainer": {"param_dtype": param_dtype},
        }
    )
    assert choose_attention(recipe, AutoConfig.for_model(family), torch.device(device)) == expected
