"""Random tiny models of several families, as folders that the trainer loads: name → (config, model class)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "llama": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "head_dim": 8, "norm_topk_prob": True},
    "glm4_moe": {**EXPERTS, **GROUPS, "head_dim": 8},
    "deepseek_v3": {
        **EXPERTS, **GROUPS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    },
    "gpt_oss": {"num_experts_per_tok": 2, "num_local_experts": 8, "head_dim": 8, "sliding_window": 5},
}  # fmt: skip


WINDOW_THEN_FULL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CAPPED = {
    "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 1.0,
}  # fmt: skip
SCALED = {
    "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
DELTA = {
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
SPARSE = {**EXPERTS, "num_experts": 8, "head_dim": 8}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
INDEXER = {"index_topk": 5, "index_head_dim": 8, "index_n_heads": 2}
GEMMA4 = {
    **WINDOW_THEN_FULL, "head_dim": 8, "global_head_dim": 8, "pad_token_id": 0, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8,
}  # fmt: skip
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "seed_oss": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "qwen2": {},
    "gemma3_text": {"head_dim": 8},
    "mistral": {},
    "olmo2": {},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 16},
    # logits or scores that are scaled, capped or shifted, scaled embeddings
    "gemma": {"head_dim": 8},
    "gemma2": CAPPED,
    "vaultgemma": CAPPED,
    "nanochat": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "phi": {},
    "granite": SCALED,
    "granite_swa": SCALED,
    "granitemoe": {**SCALED, "num_experts_per_tok": 2, "num_local_experts": 8},
    "granitemoeshared": {
        **SCALED, "num_experts_per_tok": 2, "num_local_experts": 8, "shared_intermediate_size": 16,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, **WINDOW_THEN_FULL},
    "cohere2_moe": {"logit_scale": 0.25, "num_experts": 8, "num_experts_per_tok": 2},
    "minicpm3": {**LATENT, "num_key_value_heads": 4},
    # families without keyword arguments in their blocks
    "nemotron": {"head_dim": 8},
    "stablelm": {"qk_layernorm": True},
    # chunks of tokens, and layers without rope whose queries grow with the position
    "llama4_text": {
        "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 5, "no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.5,
    },
    # latent attention
    "deepseek_v2": {**EXPERTS, **GROUPS, **LATENT, "num_key_value_heads": 4, "topk_method": "greedy"},
    "glm4_moe_lite": {**EXPERTS, **GROUPS, **LATENT, "num_key_value_heads": 4},
    # layers that carry state along a row
    "qwen3_next": {**EXPERTS, **DELTA, "num_experts": 8, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "num_experts": 8, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_experts": 8, "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"], "num_hidden_layers": 3,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "head_dim": 8, "chunk_size": 8,
    },
    "olmo_hybrid": {**DELTA, "linear_num_value_heads": 2, "pad_token_id": 0},
    "kimi_linear": {
        **EXPERTS, **LATENT, **DENSE_FIRST, "q_lora_rank": None, "num_key_value_heads": 4, "num_local_experts": 8,
        "pad_token_id": 0, "layer_types": DELTA["layer_types"], "linear_head_dim": 8, "linear_num_heads": 4,
    },
    "jamba": {
        "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA, **SCALED, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
    },
    # others
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "persimmon": {},
    "diffllama": {},
    "bitnet": {},
    "apertus": {},
    "arcee": {},
    "cwm": {"head_dim": 8},
    "dots1": {**EXPERTS, **GROUPS, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": {"head_dim": 8, **WINDOW_THEN_FULL},
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "gpt_neox": {},
    "helium": {"head_dim": 8, "pad_token_id": 0},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 8, "moe_topk": 2},
    "hyperclovax": {},
    "jais2": {},
    "minimax_m2": {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    "ministral": {"head_dim": 8, "sliding_window": 5},
    "ministral3": {"head_dim": 8},
    "olmo": {},
    "olmo3": {"sliding_window": 5},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "afmoe": {
        **SPARSE, "num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True, "route_scale": 2.0,
        **WINDOW_THEN_FULL,
    },
    "axk1": {**EXPERTS, **GROUPS, **LATENT, "num_key_value_heads": 4},
    "exaone_moe": {**SPARSE, **DENSE_FIRST, **WINDOW_THEN_FULL},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0},
    "hy_v3": {**SPARSE, **DENSE_FIRST, "num_shared_experts": 1},
    "laguna": {
        **SPARSE, **DENSE_FIRST, **WINDOW_THEN_FULL, "shared_expert_intermediate_size": 16,
        "moe_routed_scaling_factor": 2.0,
    },
    "mellum": {**SPARSE, **DENSE_FIRST, **WINDOW_THEN_FULL},
    "mimo_v2_flash": {
        **EXPERTS, **DENSE_FIRST, **WINDOW_THEN_FULL, "n_routed_experts": 8, "head_dim": 8, "v_head_dim": 8,
    },
    "solar_open": {**EXPERTS, "n_routed_experts": 8, "head_dim": 8},
    "youtu": {**LATENT, "num_key_value_heads": 4},
    # keys that an indexer chooses
    "deepseek_v32": {**EXPERTS, **GROUPS, **LATENT, **INDEXER, "num_key_value_heads": 4},
    "glm_moe_dsa": {**EXPERTS, **GROUPS, **LATENT, **INDEXER, "num_key_value_heads": 4},
    "glm_moe_dsa/shared": {
        **EXPERTS, **GROUPS, **LATENT, **INDEXER, "num_key_value_heads": 4, "indexer_types": ["full", "shared"],
    },
    # embeddings of each layer, keys and values of an earlier layer, experts in addition to an MLP
    "gemma4_text": GEMMA4,
    "gemma4_text/shared": {
        **GEMMA4, "num_hidden_layers": 4, "layer_types": 2 * WINDOW_THEN_FULL["layer_types"],
        "num_kv_shared_layers": 2,
    },
    "gemma4_text/experts": {
        **GEMMA4, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "starcoder2": {},
}  # fmt: skip
"""Families that are compared with transformers on one rank, without every layout."""


TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 64, "deepstack_visual_indexes": [],
}  # fmt: skip
MROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    }
}  # fmt: skip
HALF_MROPE = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 0]}}
PIXTRAL = {**TOWER, "model_type": "pixtral", "image_size": 16, "patch_size": 4}
GLM_TOWER = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "image_size": 16, "out_hidden_size": 32,
    "intermediate_size": 24,
}  # fmt: skip
COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen3_5": {"text_config": COMMON | DELTA, "vision_config": QWEN_TOWER},
    "qwen3_5_moe": {
        "text_config": COMMON | MORE_FAMILIES["qwen3_5_moe_text"], "vision_config": QWEN_TOWER,
    },
    "qwen3_vl_moe": {
        "text_config": COMMON | FAMILIES["qwen3_moe"] | MROPE, "vision_config": QWEN_TOWER,
    },
    "gemma3": {
        "text_config": COMMON | {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2},
        "vision_config": {**TOWER, "image_size": 16, "patch_size": 4},
    },
    "llama4": {
        "text_config": COMMON | MORE_FAMILIES["llama4_text"],
        "vision_config": {
            **TOWER, "image_size": 16, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "mistral3": {"text_config": COMMON | {"model_type": "ministral3", "head_dim": 8}, "vision_config": PIXTRAL},
    "mistral3/mistral": {
        "text_config": COMMON | {"model_type": "mistral", "head_dim": 8}, "vision_config": PIXTRAL,
    },
    "mistral3/mistral4": {
        "text_config": COMMON | {
            "model_type": "mistral4", **EXPERTS, **GROUPS, **LATENT, "num_key_value_heads": 4, "pad_token_id": 0,
        },
        "vision_config": PIXTRAL,
    },
    "gemma4": {
        "text_config": COMMON | GEMMA4,
        "vision_config": {**TOWER, "patch_size": 4, "head_dim": 8, "num_key_value_heads": 2},
        "audio_config": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4], "output_proj_dims": 16,
        },
    },
    "glm4v": {"text_config": COMMON | {"pad_token_id": 0, **MROPE}, "vision_config": GLM_TOWER},
    "glm4v_moe": {
        "text_config": COMMON | {**EXPERTS, **GROUPS, **HALF_MROPE, "head_dim": 8, "pad_token_id": 0},
        "vision_config": GLM_TOWER,
    },
    "lfm2_vl": {
        "text_config": COMMON | MORE_FAMILIES["lfm2"] | {"model_type": "lfm2"},
        "vision_config": {**TOWER, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 16},
    },
    "internvl": {
        "text_config": COMMON | {"model_type": "qwen3", "head_dim": 8},
        "vision_config": {**TOWER, "model_type": "internvl_vision", "patch_size": [4, 4], "image_size": [16, 16]},
    },
    "qwen2_vl": {
        "text_config": COMMON | MROPE,
        "vision_config": {
            "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
        },
    },
    "qwen2_5_vl": {
        "text_config": COMMON | MROPE,
        "vision_config": {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [0]},
    },
    "qwen3_vl": {"text_config": COMMON | {"head_dim": 8} | MROPE, "vision_config": QWEN_TOWER},
    "kimi_k25": {
        "text_config": COMMON | FAMILIES["deepseek_v3"] | {"model_type": "kimi_k2"},
        "vision_config": {**TOWER, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 16,
    },
}  # fmt: skip
"""Models with a tower, as they are published: text alone is compared. What follows "/" names a variant."""


LONGROPE: dict[str, Any] = {
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 5.0, 9.0, 14.0],
        "original_max_position_embeddings": 32,
    },
}
"""LongRoPE factors of a phi3 with heads of 8."""


IMAGE_TOKEN, VISION_START = 98, 97


VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen2_vl": {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 32},
    "qwen3_vl_moe": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "qwen3_5": {"num_position_embeddings": 64},
    "qwen3_5_moe": {"num_position_embeddings": 64},
}
"""Towers of families that are compared with images."""
VISION_TEXTS = {
    "qwen3_vl_moe": FAMILIES["qwen3_moe"],
    "qwen3_5": DELTA,
    "qwen3_5_moe": MORE_FAMILIES["qwen3_5_moe_text"],
}


def make_vision_language(folder: Path, family: str = "qwen3_vl") -> Path:
    """A model with two layers each for text and images, and an image processor: 8 × 8 pixels are a token."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = AutoConfig.for_model(
        family,
        text_config=COMMON | {"head_dim": 8} | VISION_TEXTS.get(family, {}) | {"rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
            "out_hidden_size": COMMON["hidden_size"], **VISION_FAMILIES[family],
        },
        image_token_id=IMAGE_TOKEN, video_token_id=99, vision_start_token_id=VISION_START, vision_end_token_id=96,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    Qwen2VLImageProcessorPil(patch_size=4, size=size).save_pretrained(folder)
    return folder


PUBLISHED = {"kimi_k25": "layers", "qwen3_5_moe": "joined experts", "qwen3_vl_moe": "transposed experts"}
"""Families that transformers 5.17 writes otherwise than they are published: names of layers, experts in one tensor."""


def auto_model(family: str) -> Any:
    """Return the class of transformers that builds, and reads, a model of ``family``."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if family in COMPOSITES else AutoModelForCausalLM


def make_family(family: str, folder: Path, **changes: Any) -> Path:
    """Save a model of ``family`` with noise on every parameter, so that no gradient is zero by symmetry.

    ``changes``: of the config.
    """
    import torch
    from transformers import AutoConfig

    torch.manual_seed(0)
    parts = COMPOSITES.get(family) or COMMON | (FAMILIES | MORE_FAMILIES)[family]
    config = AutoConfig.for_model(family.partition("/")[0], **parts | changes)
    model = auto_model(family).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("A_log"):
                parameter.sub_(3)  # a state that lasts for more than a token
    model.save_pretrained(folder)
    if family in PUBLISHED:
        publish(model, folder, PUBLISHED[family])
    return folder


def publish(model: Any, folder: Path, what: str) -> None:
    """Write the tensors of ``model`` as its family is published, which transformers reads and does not write."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    stored = {key.replace("model.blocks.", "model.layers."): each for key, each in load_file(path).items()}
    if what != "layers":
        stored = {key: value for key, value in stored.items() if ".experts." not in key}
        for name, value in model.state_dict().items():
            if ".experts." in name:
                stored[name] = (value if what == "joined experts" else value.transpose(1, 2)).contiguous()
    save_file(stored, path, {"format": "pt"})
