"""Differences between vLLM and transformers in a model family, and the options with which vLLM computes the same.

engine_options({"model_type": "cohere2", "sliding_window": 4096})   # {"hf-overrides": {"sliding_window": 4095}}

The trainer computes what transformers computes (docs/models.md). An engine with another forward pass would sample from
another policy than the one that is trained. Each entry was found by comparing vLLM 0.31 with transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.errors import ConfigError

_WIDER_WINDOW = ("cohere2", "cohere2_moe")
ADJUSTED = frozenset({*_WIDER_WINDOW, "llama4_text"})
"""Families for which `engine_options` returns any."""
BIASED_CHOICE = {
    "ernie4_5_moe": "ignores the bias with which its routers choose experts",
    "minimax_m2": "has no routers with sigmoid scores",
}
"""Families that vLLM's router for CPUs computes differently or not at all (``CPURouter._compute_routing``: without
groups of experts it reads neither ``e_score_correction_bias`` nor scores other than softmax). GPUs have other code."""


def text_family(config: Mapping[str, Any]) -> object:
    """Return the ``model_type`` of the part of a model that computes text."""
    return (config.get("text_config") or config).get("model_type")


def engine_options(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return options of vLLM by name, without dashes in front, for a model with this configuration."""
    family = text_family(config)
    if family in _WIDER_WINDOW and (window := config.get("sliding_window")):
        # vLLM attends to `sliding_window` tokens before the current one, transformers counts the current one too
        return {"hf-overrides": {"sliding_window": window - 1}}
    if family == "llama4_text":
        # vLLM replaces the config's value: it scales queries only if engines serve more than 32,768 tokens
        is_scaled = bool(config.get("attn_temperature_tuning", True))
        return {"override-generation-config": {"attn_temperature_tuning": is_scaled}}
    return {}


def check_engine(model_type: object, name: str, accelerator: str, *, is_accepted: bool) -> None:
    """Raise ConfigError if engines on CPUs compute another policy than the trainer, unless the recipe accepts it."""
    if accelerator != "cpu" or is_accepted or model_type not in BIASED_CHOICE:
        return
    raise ConfigError(
        f"model {name} is of family {model_type}: vLLM on CPUs {BIASED_CHOICE[str(model_type)]}, "
        "so its engines would sample from another policy than the trainer trains",
        hint="use engines on GPUs, train it with kind sft, or set model.accept_uncompared to true",
    )
