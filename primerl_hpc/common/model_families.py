"""The table of model families, which trainer, engines, planner and `new` read: facts of each ``model_type``.

    family_of("qwen3_next").has_state                   # True; a family that is not in the table has the defaults

Models run by transformers' own code. What a family needs of our code is in `trainer/model/families.py`, the layers by
which the planner counts its parameters in `plan/predict/architectures/families.py`, and the options with which vLLM
computes the same in `transport/base_models/engine_options.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from primerl_hpc.common.errors import ConfigError


@dataclass(frozen=True)
class ModelFamily:
    is_compared: bool = True
    """A test compares it with transformers: docs/models.md lists what."""
    has_state: bool = False
    """It has layers that carry state along a sequence (linear attention, Mamba, short convolutions)."""
    shares_rows: bool = True
    """Ranks may share its rows (``context_parallel``)."""
    passes_keywords: bool = True
    """Its blocks pass keyword arguments to their attention; for others, blocks set the packing as an attribute."""
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    """Linear layers that transformers' own plan for tensor parallelism lacks, and how they are divided."""
    may_be_divided: bool = False
    """The planner may choose tensor parallelism, because a test divides the family. Others need an explicit degree."""
    is_compiled: bool = False
    """``trainer.compile: auto`` compiles its blocks: no graph break, and equal gradients in tests without a GPU."""
    has_images: bool = False
    """Batches with images are trained: it processes them as Qwen-VL does."""
    renderer: str = "auto"
    """Renderer in new recipes, where all models of the family have the same chat format."""


_ATTENTION = {f"self_attn.{name}_proj": "columns" for name in "qkv"} | {"self_attn.o_proj": "rows"}
_MLP = {"mlp.gate_proj": "columns", "mlp.up_proj": "columns", "mlp.down_proj": "rows"}
_LATENT = {f"self_attn.{name}_proj": "columns" for name in ("q", "q_b", "kv_b")} | {
    "self_attn.o_proj": "rows"
}
_PLAIN = """
    afmoe apertus arcee axk1 bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 diffllama dots1 ernie4_5 ernie4_5_moe
    exaone4 flex_olmo gemma gemma3 gemma4 gemma4_text glm glm4_moe_lite glm4v glm4v_moe gpt2
    gpt_bigcode gpt_neox granite granite_swa granitemoeshared helium hunyuan_v1_moe hyperclovax internvl jais2 laguna
    llama4 llama4_text mellum mimo_v2_flash minicpm3 ministral mistral3 nanochat olmo olmo2 olmo3 olmoe persimmon phi
    qwen2_moe starcoder2 vaultgemma youtu
"""
_DIVIDED = """
    exaone_moe gemma2 gemma3_text glm4 hy_v3 kimi_k25 ministral3 mistral mixtral phi3 qwen2 seed_oss smollm3 solar_open
"""
_STATE = "bamba granitemoehybrid lfm2 lfm2_moe lfm2_vl nemotron_h qwen3_5_moe_text qwen3_5_text qwen3_next"
_IMAGES = "qwen2_5_vl qwen2_vl qwen3_vl"
_PLANNED = "kimi_k2"
"""Families whose memory and time the planner predicts, but that no test compares."""

FAMILIES: Mapping[str, ModelFamily] = {
    **dict.fromkeys(_PLAIN.split(), ModelFamily()),
    **dict.fromkeys(_STATE.split(), ModelFamily(has_state=True)),
    **dict.fromkeys(("jamba", "kimi_linear", "olmo_hybrid"), ModelFamily(has_state=True, shares_rows=False)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ModelFamily(shares_rows=False)),
    **dict.fromkeys(_IMAGES.split(), ModelFamily(has_images=True)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ModelFamily(has_images=True, has_state=True)),
    **dict.fromkeys(_PLANNED.split(), ModelFamily(is_compared=False)),
    **dict.fromkeys(_DIVIDED.split(), ModelFamily(may_be_divided=True)),
    "qwen3_vl_moe": ModelFamily(has_images=True, may_be_divided=True),
    "deepseek_v3": ModelFamily(tensor_plan=_LATENT, may_be_divided=True, renderer="deepseek-v3"),
    "glm4_moe": ModelFamily(may_be_divided=True, renderer="glm-4.5"),
    "gpt_oss": ModelFamily(tensor_plan=_ATTENTION, may_be_divided=True, renderer="gpt-oss"),
    "granitemoe": ModelFamily(tensor_plan=_ATTENTION),
    "hunyuan_v1_dense": ModelFamily(tensor_plan=_ATTENTION | _MLP),
    "llama": ModelFamily(may_be_divided=True, is_compiled=True),
    "minimax_m2": ModelFamily(renderer="minimax-m2"),
    "nemotron": ModelFamily(passes_keywords=False, tensor_plan=_ATTENTION | _MLP),
    "qwen3": ModelFamily(may_be_divided=True, is_compiled=True, renderer="qwen3"),
    "qwen3_moe": ModelFamily(may_be_divided=True, renderer="qwen3"),
    "stablelm": ModelFamily(passes_keywords=False),
}
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families that differ from another one by their name only."""


def family_of(model_type: object) -> ModelFamily:
    """Return the row of a ``model_type``; the defaults for one that is not in the table."""
    return FAMILIES.get(str(model_type), ModelFamily(is_compared=False))


def check_named(model_type: object, name: str) -> None:
    """Raise ConfigError if a configuration names no family."""
    if not isinstance(model_type, str):
        raise ConfigError(
            f"the config.json of model {name} names no family (model_type)",
            hint="use the config.json of the model's repository",
        )


def check_tower(model_type: object, name: str, what: str, degrees: Mapping[str, int]) -> None:
    """Raise ConfigError if a vision tower cannot be trained. ``what`` asks for it; ``degrees``: ranks that share."""
    for axis, size in degrees.items():
        if size > 1:
            raise ConfigError(
                f"layout.trainer.{axis}_parallel is {size}, but ranks cannot share rows with images ({what})",
                hint="set it to 1, or trainer.vision to none if there are no images",
            )
    if not family_of(model_type).has_images:
        raise ConfigError(
            f"{what}, but this version does not train model {name} with images",
            hint="set trainer.vision to auto, or use a model of the Qwen-VL family",
        )
