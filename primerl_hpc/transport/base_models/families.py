"""Model families that the trainer trains as transformers does: docs/models.md lists what is compared for each.

check_family("qwen3", model)      # ConfigError for another family, unless the recipe sets model.untested
"""

from __future__ import annotations

from primerl_hpc.common.errors import ConfigError

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families that differ from another one by their name only."""

STATEFUL = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe"),
    *("nemotron_h", "bamba", "granitemoehybrid"),
)
"""Families with layers that carry state along a sequence (linear attention, Mamba, short convolutions)."""

# fmt: off
COMPARED = frozenset({
    "apertus", "arcee", "bamba", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3",
    "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax",
    "jais2", "lfm2", "lfm2_moe", "llama", "llama4_text", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3",
    "olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "seed_oss", "smollm3", "stablelm", "starcoder2",
    "vaultgemma",
})
# fmt: on
"""``model_type`` of every compared family; tests/unit/docs/test_models.py checks that tests compare exactly these."""


def check_family(model_type: object, name: str, *, is_untested: bool) -> None:
    """Raise ConfigError for a family that no test compares, unless the recipe accepts it (``is_untested``)."""
    if is_untested or (isinstance(model_type, str) and ALIASES.get(model_type, model_type) in COMPARED):
        return
    if not isinstance(model_type, str):
        raise ConfigError(
            f"the config.json of model {name} names no family (model_type)",
            hint="use the config.json of the model's repository",
        )
    raise ConfigError(
        f"model {name} is of family {model_type}, which no test compares with transformers",
        hint="choose a family of docs/models.md, or set model.untested to true",
    )
