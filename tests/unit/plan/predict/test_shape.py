"""Parameters from config.json against transformers' own models on the meta device, published counts, bad input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.plan.predict.architectures.families import ARCHITECTURES
from primerl_hpc.plan.predict.shape import ModelShape, known_config, known_models, known_shape, shape_of

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from primerl_hpc.recipe.schema.training import LoRA  # noqa: E402
from primerl_hpc.trainer.model.families import decoder_blocks  # noqa: E402
from primerl_hpc.trainer.model.lora import attach_adapters  # noqa: E402

DENSE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    **MOE,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "head_dim": 32,
}
SHARED = {"shared_expert_intermediate_size": 40, "num_experts": 8, **MOE}
INDEXED = {**LATENT, "index_head_dim": 16, "index_n_heads": 4, "index_topk": 32}
QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 4,
    "out_hidden_size": 48,
    "num_position_embeddings": 64,
}

CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 12},
    "ministral3": {"head_dim": 12},
    "phi3": {"pad_token_id": 0},
    "granite": {"tie_word_embeddings": True},
    "smollm3": {"pad_token_id": 0},
    "seed_oss": {"head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 5},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**SHARED, "decoder_sparse_step": 2},
    "qwen3_moe": {**MOE, "num_local_experts": 8, "mlp_only_layers": [0, 3], "head_dim": 16},
    "glm4_moe": {
        **MOE,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 2,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 16,
        "pad_token_id": 0,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "afmoe": {**MOE, "num_experts": 8, "num_shared_experts": 2, "num_dense_layers": 2, "head_dim": 16},
    "exaone_moe": {**MOE, "num_experts": 8, "num_shared_experts": 2, "sliding_window": 16},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0},
    "hy_v3": {**MOE, "num_experts": 8, "num_shared_experts": 1, "mlp_bias": True, "head_dim": 16},
    "solar_open": {**MOE, "n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 16},
    "youtu": {key: value for key, value in LATENT.items() if "expert" not in key},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 16},
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 1, "attention_bias": True},
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 3},
    "deepseek_v32": INDEXED,
    "glm4_moe_lite": {**LATENT, "pad_token_id": 0},
    "glm_moe_dsa": {**INDEXED, "pad_token_id": 0, "index_topk_freq": 3},
    "qwen3_next": {**DELTA, **SHARED},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 20,
        "n_groups": 2,
        "n_routed_experts": 8,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 16,
        "head_dim": 16,
        **MOE,
    },
    "qwen2_vl": {"vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 48, "num_heads": 4}},
    "qwen2_5_vl": {"vision_config": {key: QWEN_TOWER[key] for key in list(QWEN_TOWER)[:5]}},
    "qwen3_vl": {
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0, 2]},
        "text_config": {"head_dim": 16},
    },
    "qwen3_vl_moe": {
        "vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0, 2]},
        "text_config": {**MOE, "num_local_experts": 8, "head_dim": 16},
    },
    "qwen3_5": {"vision_config": QWEN_TOWER, "text_config": DELTA},
    "qwen3_5_moe": {"vision_config": QWEN_TOWER, "text_config": {**DELTA, **SHARED}},
    "kimi_k25": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 44,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "pos_emb_height": 5,
            "pos_emb_width": 7,
        },
        "text_config": {**LATENT, "model_type": "deepseek_v3"},
        "projection_hidden_size": 32,
    },
}
"""Per family: what differs from `DENSE` in a small model that has all of its kinds of layers."""


def small_config(family: str) -> Any:
    changes = dict(CHANGES[family])
    if "vision_config" in changes:
        text = {**DENSE, **changes.pop("text_config", {})}
        return CONFIG_MAPPING[family](text_config=text, **changes)
    dense = {
        key: value for key, value in DENSE.items() if (family, key) != ("nemotron_h", "num_hidden_layers")
    }
    return CONFIG_MAPPING[family](**{**dense, **changes})


def meta_model(config: Any) -> Any:
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def active_of(model: Any, shape: ModelShape) -> int:
    """Parameters of a model that process a token of text: of routed experts only those chosen."""
    total = 0
    for name, parameter in model.named_parameters():
        if (
            ".visual." in name
            or ".vision_tower." in name
            or ".mm_projector." in name
            or "multi_modal" in name
        ):
            continue
        used = shape.experts_per_token if ".experts." in name else 1
        count = parameter.numel() * used
        total += count // shape.num_experts if ".experts." in name else count
    return total


FAMILIES_HERE = sorted(ARCHITECTURES.keys() - {"kimi_k2"})  # kimi_k2: deepseek_v3's code under another name


def test_each_family_of_the_table_is_compared_with_its_model():
    assert sorted(CHANGES) == FAMILIES_HERE
    assert ARCHITECTURES["kimi_k2"] == ARCHITECTURES["deepseek_v3"]


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_parameters_are_those_of_transformers_model(family):
    config = small_config(family)
    shape = shape_of(config.to_dict(), family)
    model = meta_model(config)
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert shape.active == active_of(model, shape)
    assert len(shape.layers) == len(decoder_blocks(model)) if family != "nemotron_h" else 6


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "gemma3_text", "olmo3", "gpt_oss", "smollm3"])
def test_layers_without_layer_types_follow_the_rule_of_the_family(family):
    config = small_config(family)
    written = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
    layers = shape_of(written, family).layers
    assert [layer.attention.window for layer in layers] == windows


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_each_fourth_layer_of_a_hybrid_has_full_attention(family):
    written = {key: value for key, value in small_config(family).to_dict().items() if key != "layer_types"}
    shape = shape_of(written, family)
    assert [layer.attention is not None for layer in shape.layers] == [False, False, False, True] * 2
    full = shape.layers[3].attention
    assert shape.kv_elements == 2 * 2 * full.kv_heads * 32
    assert shape.state_elements == 6 * 6 * 16 * 20


LORA_FAMILIES = ["llama", "phi3", "qwen3_moe", "glm4_moe", "deepseek_v3", "mixtral", "glm4"]


@pytest.mark.parametrize("family", LORA_FAMILIES)
@pytest.mark.parametrize("targets", ["auto", ("o_proj",), ("mlp.experts", "o_proj"), ("self_attn.*",)])
def test_adapters_have_the_parameters_that_the_trainer_attaches(family, targets):
    config = small_config(family)
    shape = shape_of(config.to_dict(), family)
    if "mlp.experts" in targets and not shape.is_mixture:
        with pytest.raises(ConfigError, match=r"names mlp\.experts"):
            shape.adapter_parameters(8, targets)
        return
    model = meta_model(config)
    attach_adapters(model, decoder_blocks(model), LoRA(rank=8, target_modules=targets))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert shape.adapter_parameters(8, targets) == trained


PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
    "deepseek-ai/DeepSeek-V3": 671_026_404_352,
}
"""Parameters on the model's page or in its weight index."""
ROUNDED = {
    "openai/gpt-oss-120b": (116.83, None),
    "moonshotai/Kimi-K2-Instruct": (1_026, 32.9),
    "MiniMaxAI/MiniMax-M2.5": (229, None),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.6),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (120.7, 12.8),
    "zai-org/GLM-4.5-Air": (106.9, None),
    "zai-org/GLM-5": (744, None),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.35),
    "Qwen/Qwen3-235B-A22B": (235, 22.2),
}
"""Billions in all and per token, as model cards and papers round them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_known_models_have_their_published_number_of_parameters(name):
    assert known_shape(name).total == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_known_models_agree_with_rounded_numbers(name):
    total, active = ROUNDED[name]
    shape = known_shape(name)
    assert shape.total / 1e9 == pytest.approx(total, rel=0.005)
    assert active is None or shape.active / 1e9 == pytest.approx(active, rel=0.01)


def test_each_known_model_has_a_shape_and_a_source():
    assert len(known_models()) > 40
    for name in known_models():
        assert len(known_config(name)["source"]) > 20
        assert known_shape(name).layers


def test_an_unknown_model_is_not_guessed():
    with pytest.raises(NotFoundError, match=r"no config\.json of acme/model-7B is known"):
        known_shape("acme/model-7B")


def test_keys_and_values_per_token_are_those_of_the_published_models():
    in_bf16 = {name: 2 * known_shape(name).kv_elements / 1024 for name in PUBLISHED}
    assert in_bf16["Qwen/Qwen3-0.6B"] == 112
    assert in_bf16["Qwen/Qwen3-32B"] == 256
    assert in_bf16["Qwen/Qwen3-30B-A3B"] == 96
    assert in_bf16["Qwen/Qwen3-235B-A22B"] == 188
    assert in_bf16["deepseek-ai/DeepSeek-V3"] == pytest.approx(61 * 576 * 2 / 1024)  # latent


# -- bad input -------------------------------------------------------------------------------------

TINY = {"model_type": "qwen3", **DENSE, "head_dim": 16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "brandnew"}, "does not know the family brandnew"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "48"}, "hidden_size is '48', not an integer"),
        ({"hidden_size": True}, "hidden_size is True, not an integer"),
        ({"hidden_size": -1}, "hidden_size is -1, not between"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, not between 1 and 2,000"),
        ({"hidden_size": 10**7, "intermediate_size": 10**7}, "more than any model has"),
        ({"num_key_value_heads": 4}, "not a multiple of num_key_value_heads 4"),
        ({"head_dim": None, "hidden_size": 47}, "head_dim is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 8 layers"),
        ({"layer_types": ["new_attention"] * 8}, "has new_attention, which the planner does not know"),
        ({"layer_types": ["linear_attention"] * 8}, "has linear_attention, which this family does not have"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', not true or false"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "moe_intermediate_size is missing"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 4,
                "moe_intermediate_size": 8,
                "num_experts_per_tok": 5,
            },
            "num_experts_per_tok is 5, not between 1 and 4",
        ),
        ({"model_type": "qwen3_vl", "text_config": 5}, "text_config is missing"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "missing or have unknown letters"),
    ],
)
def test_a_bad_config_is_one_sentence_that_names_model_and_key(change, message):
    config = {key: value for key, value in {**TINY, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        shape_of(config, "acme/model")
    assert message in caught.value.cause
    assert "acme/model" in caught.value.cause
    assert "\n" not in str(caught.value)


SIZES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=3), st.integers(-2, 10**9), st.floats(), st.just([])
)


@given(st.sampled_from(FAMILIES_HERE), st.dictionaries(st.sampled_from(sorted(TINY)[:-1]), SIZES, min_size=1))
def test_any_value_gives_a_shape_or_a_config_error(family, changes):
    config = {**TINY, "model_type": family, **changes}
    try:
        shape = shape_of(config, "m")
    except ConfigError:
        return
    assert 0 < shape.active <= shape.total


def test_a_composite_of_an_unknown_family_has_the_shape_of_its_text_model():
    text = small_config("gemma3_text").to_dict()
    composite = shape_of({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "org/it")
    alone = shape_of(text, "org/it")
    assert (composite.total, composite.layers, composite.vision) == (alone.total, alone.layers, 0)
    with pytest.raises(ConfigError, match="does not know the family of_nobody"):
        shape_of({"model_type": "of_nobody", "text_config": {"model_type": "nor_this"}}, "org/it")
