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


IMAGE_TOKEN, VISION_START = 98, 97


VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
}


def make_vision_language(folder: Path, family: str = "qwen3_vl") -> Path:
    """Two layers each for text and images, with an image processor: 8 × 8 pixels are a token."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = AutoConfig.for_model(
        family,
        text_config=COMMON | {"head_dim": 8, "rope_parameters": rope},
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


def make_family(family: str, folder: Path) -> Path:
    """Save a model of ``family`` with noise on every parameter, so that no gradient is zero by symmetry."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
