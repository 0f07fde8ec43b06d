"""Code of the trainer for model families: refusals, tensor names, routers, float32 parameters.

Models run by transformers' own code; this module holds what the trainer needs in addition. The facts of a family are in
the table of `common/model_families.py`. Code of a new family:

- `decoder_blocks`, `check_head`, `check_layers`, `check_sharing`, `check_rope`: what this version would train wrongly;
- `logit_form`, `head_bias`, `prepare_attention`: what a family adds to its head's matrix and to attention;
- `group_sources`, `convert`, `file_tensors`: names and shapes of tensors in files and in the model;
- `parameters_in_float32`: tensors that engines read as float32 whatever the model's type;
- `mixture_of`, `num_routed_experts`: the module with the router of fused experts, the experts of a configuration;
- `head_dims`, `fused_sizes`, `head_rows`: widths of attention heads, projections that share a parameter;
- `tensor_plan`: how tensor parallelism divides the linear layers of a block.

The experts interface itself is read in `parallel.expert.expert_modules`, images in `vision`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.model_families import family_of
from primerl_hpc.common.names import Kind
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.model.recurrent.by_sample import run_by_sample
from primerl_hpc.trainer.parallel.attention import CHUNK, PACKING, TEMPERATURE
from primerl_hpc.trainer.parallel.fused_experts import FusedExperts
from primerl_hpc.trainer.parallel.indexed import index_packed_rows
from primerl_hpc.trainer.parallel.mesh import World

# -- refusals --------------------------------------------------------------------------------------

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
INDEXED_LAYERS = {"deepseek_sparse_attention", "indexed_attention"}
"""Names up to transformers 5.17 and from 5.19 on."""


class DecoderBlock(nn.Module):
    """Declarations only: what checkpointing sets on a decoder layer. No layer derives from this class."""

    gradient_checkpointing: bool
    _gradient_checkpointing_func: Callable[..., Any]


def decoder_of(hf: PreTrainedModel) -> nn.Module:
    """Return the model without head and towers. In Llama 4 the prefix names no attribute."""
    model: Any = hf
    for name in (hf.base_model_prefix, "model", "language_model", "model", "decoder"):
        model = getattr(model, name, model)
    return model


def decoder_blocks(hf: PreTrainedModel) -> list[DecoderBlock]:
    """Return the decoder's layers. Raises ConfigError for an architecture that has no list of them."""
    decoder = decoder_of(hf)
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))
    if layers is None:
        raise ConfigError(
            f"{type(hf).__name__} has no list of decoder layers: this architecture is not supported"
        )
    return list(layers)


def check_head(hf: PreTrainedModel, name: str) -> None:
    """Raise ConfigError for a model whose head is not one matrix."""
    if not isinstance(hf.get_output_embeddings(), nn.Linear):
        raise ConfigError(f"the head of model {name} is not a single matrix; this version cannot train it")


def head_weight(hf: PreTrainedModel) -> nn.Parameter:
    """Return the head's weight, [V, H], of a model that has passed `check_head`."""
    head = hf.get_output_embeddings()
    assert head is not None  # check_head has refused a model without a head
    return head.weight


def head_bias(hf: PreTrainedModel) -> Tensor | None:
    """Return the head's bias, [V], if it has one (Phi)."""
    head = hf.get_output_embeddings()
    assert isinstance(head, nn.Linear)  # check_head has refused other models
    return head.bias


def logit_form(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return what a family multiplies its logits by, and their cap: see `head.LogitForm`.

    Cohere multiplies by ``logit_scale``; Granite and MiniCPM divide by ``logits_scaling``.
    """
    scale = getattr(config, "logit_scale", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale / (getattr(config, "logits_scaling", None) or 1.0), cap


def check_sharing(config: PreTrainedConfig, world: World, name: str) -> None:
    """Raise ConfigError if ranks would share matrices or rows that each needs. ``config``: that of the text."""
    reasons = {
        "tensor": {
            "layers that carry state along a row": family_of(config.model_type).has_state,
            "embeddings of each layer": bool(getattr(config, "hidden_size_per_layer_input", 0)),
            "layers whose keys an indexer chooses": is_indexed(config),
        },
        "context": {"layers that need complete rows": not family_of(config.model_type).shares_rows},
    }
    for axis, size in (("tensor", world.tensor_size), ("context", world.context_size)):
        reason = next((what for what, holds in reasons[axis].items() if holds), "")
        if reason and size > 1:
            raise ConfigError(
                f"layout.trainer.{axis}_parallel is {size}, but model {name} has {reason}", hint="set it to 1"
            )


def is_indexed(config: PreTrainedConfig) -> bool:
    return bool(INDEXED_LAYERS & set(getattr(config, "layer_types", None) or ()))


def check_layers(blocks: Sequence[nn.Module], config: PreTrainedConfig, name: str) -> None:
    """Raise ConfigError for layers that carry state along a row or cut it into chunks: they would mix packed samples.

    Families that do not name such layers in ``layer_types`` (RecurrentGemma, remote code) have convolutions.
    """
    if family_of(config.model_type).has_state:
        return
    unsupported = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS - INDEXED_LAYERS
    if not unsupported and any(
        isinstance(module, nn.Conv1d) for block in blocks for module in block.modules()
    ):
        unsupported = {"convolution"}
    if unsupported:
        raise ConfigError(f"model {name} has {min(unsupported)} layers, which this version does not train")


# -- attention -------------------------------------------------------------------------------------


def has_capped_scores(config: PreTrainedConfig) -> bool:
    """True if attention scores are capped (Gemma 2), which no kernel of torch computes."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def prepare_attention(blocks: Sequence[nn.Module], config: PreTrainedConfig) -> None:
    """Set the attributes of attention modules that `parallel.attention` reads. ``config``: the text configuration."""
    if family_of(config.model_type).has_state:
        run_by_sample(blocks)
    kinds = getattr(config, "layer_types", None) or ()
    if is_indexed(config):
        index_packed_rows(blocks)
    for block, kind in zip(blocks, kinds, strict=False):
        attention: Any = getattr(block, "self_attn", None)
        if kind == "chunked_attention":
            setattr(attention, CHUNK, config.attention_chunk_size)
        if getattr(attention, "attn_temperature_tuning", False) and not attention.use_rope:
            attention.attn_temperature_tuning = False  # its own code counts positions along the row
            setattr(attention, TEMPERATURE, (config.floor_scale, config.attn_scale))
    if not family_of(config.model_type).passes_keywords:
        for block in blocks:
            block.register_forward_pre_hook(set_packing, with_kwargs=True)


def set_packing(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    setattr(block.self_attn, PACKING, kwargs["packing"])


# -- rotary embeddings whose frequencies depend on a length: see `rope` ----------------------------

LENGTH_ROPES = ("longrope", "dynamic")


def rope_type(config: PreTrainedConfig) -> str:
    """Return which of `LENGTH_ROPES` a text configuration names, for all layers or for some; else ``default``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    blocks = [parameters, *(block for block in parameters.values() if isinstance(block, dict))]
    return next((kind for block in blocks if (kind := block.get("rope_type")) in LENGTH_ROPES), "default")


def is_scaled(config: PreTrainedConfig, length: int) -> bool:
    """True if dynamic rope scales frequencies for a document of ``length`` tokens; ``alpha`` makes them constant."""
    return length > config.max_position_embeddings and not config.rope_parameters.get("alpha")


def check_rope(config: PreTrainedConfig, recipe: Recipe) -> None:
    """Raise ConfigError if engines and trainer would use different frequencies. ``config``: the text configuration."""
    kind, name = rope_type(config), recipe.model.name
    if kind == "default":
        return
    parameters = config.rope_parameters
    if "rope_type" not in parameters:
        raise ConfigError(
            f"model {name} has {kind} rope in some of its layers, which this version does not train"
        )
    if kind == "longrope" and "long_mscale" in parameters:
        raise ConfigError(
            f"model {name} has longrope with its own scales (short_mscale, long_mscale), "
            "which this version does not train"
        )
    longest = max(recipe.seq_len, recipe.max_model_len)
    if kind == "dynamic" and recipe.kind == Kind.RL and is_scaled(config, longest):
        raise ConfigError(
            f"model {name} has dynamic rope, which vLLM does not scale beyond "
            f"{config.max_position_embeddings} "
            f"positions, and sequences may have {longest} tokens",
            hint="set seq_len and inference.max_model_len to at most "
            f"{config.max_position_embeddings}, or give "
            "the model yarn rope in its config.json",
        )


# -- tensor names ----------------------------------------------------------------------------------


Groups = Mapping[str, tuple[WeightConverter | None, list[tuple[str, str]]]]
"""For each tensor of a model its conversion (or None) and its file tensors, with the pattern that each matched."""


def group_sources(hf: PreTrainedModel, keys: list[str]) -> Groups:
    """Map each model tensor to its conversion (or None) and its file tensors, with the pattern that each matched."""
    transforms = get_model_conversion_mapping(hf)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known = hf.state_dict()
    groups: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
    for key in sorted(keys, key=_natural):
        target, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if pattern is None:
            groups[target] = (None, [(key, "")])
        else:
            if target not in groups:
                groups[target] = (deepcopy(by_pattern[pattern]), [])
            groups[target][1].append((key, pattern))
    return groups


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Return a sort key that compares numbers by value: expert 2 before expert 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def convert(converter: WeightConverter, target: str, hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's tensors made of the file tensors that were added to ``converter``."""
    converted = converter.convert(target, model=hf, config=hf.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


@dataclass(frozen=True)
class PublishedNames:
    """The names and layout in the files that a model was loaded from; transformers would write others for some."""

    single: Mapping[str, str] = field(default_factory=dict)
    """Names in the files by name in the model, for tensors that the files hold as the model does."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Names in the files by the names that transformers writes, for parts of tensors that the model joins."""
    transposed: frozenset[str] = frozenset()
    """Names in the model of tensors whose last two axes are exchanged in the files (Qwen3-VL-MoE)."""


PUBLISHED = "published_names"
"""Attribute of a model that was loaded from files: their `PublishedNames`."""


def remember_names(hf: PreTrainedModel, groups: Groups, shapes: Callable[[str], list[int]]) -> None:
    """Let `file_tensors` return the names of the files that ``groups`` describes. ``shapes``: of their tensors."""
    single, joined, keys, transposed, known = {}, {}, [], set(), hf.state_dict()
    for target, (converter, sources) in groups.items():
        if target not in known:
            continue
        if len(sources) > 1:
            joined[target] = torch.empty(known[target].shape, device="meta")
            keys += [key for key, _ in sources]
            continue
        single[target] = sources[0][0]
        if converter is not None and shapes(sources[0][0]) != list(known[target].shape):
            transposed.add(target)
    written = standard_tensors(hf, joined)
    parts = dict(zip(sorted(written, key=_natural), sorted(keys, key=_natural), strict=True))
    setattr(hf, PUBLISHED, PublishedNames(single, parts, frozenset(transposed)))


def file_tensors(hf: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's full tensors under the names of its files, which engines know: experts one by one.

    Tensors that were not read from a file (random weights) have the names that transformers would write.
    """
    published = getattr(hf, PUBLISHED, PublishedNames())
    found = {
        published.single[name]: value.transpose(1, 2).contiguous() if name in published.transposed else value
        for name, value in tensors.items()
        if name in published.single
    }
    others = standard_tensors(
        hf, {name: each for name, each in tensors.items() if name not in published.single}
    )
    return found | {published.parts.get(name, name): value for name, value in others.items()}


def standard_tensors(hf: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors, or adapters of them, under the names that transformers writes."""
    return revert_weight_conversion(hf, tensors) if tensors else {}


def has_separate_experts(hf: PreTrainedModel, path: str, experts: FusedExperts) -> bool:
    """True if files of this family hold one matrix for each expert of the module ``experts`` at ``path``."""
    in_files = standard_tensors(hf, {f"{path}.down_proj": experts.down_proj})
    return all(key.endswith(".weight") and value.ndim == 2 for key, value in in_files.items())


def parameters_in_float32(hf: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Return parts of names of parameters that stay float32 in a model of type ``dtype``, as in transformers."""
    kept = set(hf._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        kept |= set(hf._keep_in_fp32_modules or ())
    return kept


# -- routers and experts ---------------------------------------------------------------------------


def mixture_of(block: nn.Module, experts: nn.Module) -> nn.Module:
    """Return the module of ``block`` that holds fused ``experts`` and their router."""
    return next(module for module in block.modules() if experts in list(module.children()))


def num_routed_experts(config: PreTrainedConfig) -> int:
    """Return the routed experts of each layer; 0 for a dense model. ``config``: the text configuration."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((value for key in keys if (value := getattr(config, key, 0))), 0)


# -- shapes ----------------------------------------------------------------------------------------


def head_dims(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the head width of queries and keys, and of values.

    In multi-head latent attention (DeepSeek) ``head_dim`` is the rotary part alone.
    """
    if nope := getattr(config, "qk_nope_head_dim", None):
        return nope + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def head_width(config: PreTrainedConfig) -> int:
    """Return the width of the widest of queries, keys and values of a head."""
    latent = (getattr(config, "qk_nope_head_dim", None) or 0) + (
        getattr(config, "qk_rope_head_dim", None) or 0
    )
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return max(latent or width, getattr(config, "v_head_dim", None) or 0)


def head_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the number of heads of queries, that of keys and values, and `head_width`."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return config.num_attention_heads, kv_heads, head_width(config)


FUSED_LINEARS = ("gate_up_proj", "qkv_proj", "qkv")
"""Linear layers with several projections: dense MLPs (Phi-3, GLM-4), attention (Phi-3), attention of vision towers."""


def fused_sizes(parent: nn.Module, name: str, num_rows: int) -> tuple[int, ...]:
    """Return the rows of each projection in the linear layer ``parent.name``; empty if they are not known."""
    if name == "gate_up_proj":
        return (num_rows // 2, num_rows // 2)
    if name == "qkv":
        return (num_rows // 3,) * 3 if num_rows % 3 == 0 else ()
    config, width = getattr(parent, "config", None), getattr(parent, "head_dim", None)
    config = getattr(parent, "undivided_config", config)  # set by tensor parallelism
    if config is None or width is None:
        return ()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sizes = (config.num_attention_heads * width, kv_heads * width, kv_heads * width)
    return sizes if sum(sizes) == num_rows else ()


def head_rows(attention: nn.Module, name: str, num_rows: int) -> tuple[int, tuple[int, ...]]:
    """Return how often rows of several projections alternate in ``attention.name``, and the rows of each; (1, ()) for
    one projection.

    Latent attention (DeepSeek) stores the parts with and without rope of queries, and keys and values, head by head;
    GPT-NeoX stores query, key and value so.
    """
    config = getattr(attention, "undivided_config", getattr(attention, "config", None))
    heads = getattr(config, "num_attention_heads", 1)
    groups, sizes = 1, ()
    if name == "query_key_value":
        groups, sizes = heads, (num_rows // (3 * heads),) * 3
    elif config is not None and (nope := getattr(config, "qk_nope_head_dim", None)):
        rope = config.qk_rope_head_dim
        latent = {
            "q_proj": (heads, (nope, rope)),
            "q_b_proj": (heads, (nope, rope)),
            "kv_a_proj_with_mqa": (1, (config.kv_lora_rank, rope)),
            "kv_b_proj": (heads, (nope, config.v_head_dim)),
        }
        groups, sizes = latent.get(name, (1, ()))
    return (groups, sizes) if groups * sum(sizes) == num_rows else (1, ())


# -- tensor parallelism ----------------------------------------------------------------------------

TENSOR_STYLES = {
    "colwise": "columns",
    "rowwise": "rows",
    "colwise_gather_output": "fused",
    "rowwise_split_input": "rows",
}
"""Styles of transformers' plans. Routed experts are not divided (`parallel.expert`), and all other modules are full."""


def tensor_plan(config: PreTrainedConfig) -> dict[str, str]:
    """Map the paths of a decoder block's linear layers to ``columns``, ``rows`` or ``fused`` (columns of several
    projections). ``config``: the text configuration.

    A layer that is named like a single projection although its output must be gathered is normalized over all heads
    (OLMo 2): such an attention has no entry.
    """
    plan: dict[str, str] = {}
    for pattern, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
        path = pattern.removeprefix("layers.*.")
        if style in TENSOR_STYLES and ".experts." not in path and path != pattern:
            plan[path] = TENSOR_STYLES[style]
    plan |= family_of(config.model_type).tensor_plan
    undivided = {
        path.rpartition(".")[0]
        for path, style in plan.items()
        if style == "fused" and path.rpartition(".")[2] not in FUSED_LINEARS
    }
    return {path: style for path, style in plan.items() if path.rpartition(".")[0] not in undivided}
