"""The layers of model families: ``model_type`` of config.json → the layers that its config.json describes.

To add a family of the table in `common/model_families.py`, add an entry to `ARCHITECTURES`, and its configuration to
``tests/unit/plan/predict/test_shape.py``, which compares the number of parameters with transformers' own model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from primerl_hpc.plan.predict.architectures import vision
from primerl_hpc.plan.predict.architectures.attention import (
    GroupedQuery,
    delta_net,
    latent,
    mamba2,
    sparse_latent,
)
from primerl_hpc.plan.predict.architectures.config_reader import ConfigReader
from primerl_hpc.plan.predict.architectures.feedforward import EXPERT_KEYS, Experts, Mlp
from primerl_hpc.plan.predict.architectures.parts import Layer, Mixer, Vectors, WeightKind

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
SPARSE, SHARED = "deepseek_sparse_attention", "shared_sparse_attention"
OTHER_LAYER_TYPES = {"attention": FULL, "mamba": LINEAR, "indexed_attention": SPARSE}
"""Names in older config.json files, and in those of transformers from 5.19 on."""

PLAIN_ATTENTION, GATED_MLP = GroupedQuery(), Mlp()


@dataclass(frozen=True)
class Family:
    """How the layers of a family follow from its config.json."""

    attention: Callable[[ConfigReader, int | None], Mixer] = PLAIN_ATTENTION
    mlp: Mlp = GATED_MLP
    experts: Experts | None = None
    is_sparse: Callable[[ConfigReader, int], bool] = lambda reader, index: False
    """True if the layer with this index has experts."""
    layer_type: Callable[[ConfigReader, int], str] = lambda reader, index: FULL
    """Type of a layer where config.json has no ``layer_types``."""
    linear: Callable[[ConfigReader], Mixer] | None = None
    """Mixer of linear-attention layers."""
    has_indexer: Callable[[ConfigReader, int], bool] = lambda reader, index: True
    """True if a layer of sparse attention selects its keys itself; others use the selection of an earlier layer."""
    block_norms: int = 2
    """Norms per block, of the model's width."""
    is_tied: bool = False
    """Embedding and head share a matrix where config.json has no ``tie_word_embeddings``."""
    tower: Callable[[ConfigReader, int], int] | None = None
    """Parameters of the vision tower."""
    blocks: Callable[[ConfigReader, Family], tuple[Layer, ...]] | None = None
    """All layers, where they are not a mixer followed by a feed-forward part each."""

    def layers(self, reader: ConfigReader) -> tuple[Layer, ...]:
        """Return the layers in order. Equal layers are one object."""
        if self.blocks is not None:
            return self.blocks(reader, self)
        types = layer_types(reader, self)
        built: dict[tuple[str, bool], Layer] = {}
        layers = []
        for index, named in enumerate(types):
            is_shared = named == SPARSE and not self.has_indexer(reader, index)
            kind = SHARED if is_shared else named
            key = (kind, self.experts is not None and self.is_sparse(reader, index))
            if key not in built:
                built[key] = self._layer(reader, *key)
            layers.append(built[key])
        return tuple(layers)

    def _layer(self, reader: ConfigReader, kind: str, has_experts: bool) -> Layer:
        if kind == LINEAR:
            if self.linear is None:
                raise reader.error(f"layer_types has {kind}, which this family does not have")
            mixer = self.linear(reader)
        elif kind in (FULL, SLIDING):
            mixer = self.attention(reader, reader.size("sliding_window") if kind == SLIDING else None)
        elif kind in (SPARSE, SHARED):
            mixer = sparse_latent(reader, has_indexer=kind == SPARSE)
        else:
            raise reader.error(f"layer_types has {kind}, which the planner does not know")
        feedforward = self.experts(reader) if has_experts and self.experts else self.mlp(reader)
        return block(reader, self.block_norms, mixer, feedforward)


def block(reader: ConfigReader, norms: int, *parts: Mixer) -> Layer:
    return Layer(
        tuple(matrix for part in parts for matrix in part.matrices),
        (
            Vectors(WeightKind.NORM, norms * reader.hidden),
            *(vector for part in parts for vector in part.vectors),
        ),
        next((part.attention for part in parts if part.attention), None),
        next((part.state for part in parts if part.state), None),
    )


def layer_types(reader: ConfigReader, family: Family) -> tuple[str, ...]:
    """Return the type of each layer, from ``layer_types`` or the family's rule."""
    number = reader.num_layers
    if reader.has("layer_types"):
        names = reader.names("layer_types", number)
        return tuple(OTHER_LAYER_TYPES.get(name, name) for name in names)
    return tuple(family.layer_type(reader, index) for index in range(number))


# -- types of layers -------------------------------------------------------------------------------


def always_sliding(reader: ConfigReader, index: int) -> str:
    return SLIDING if reader.has("sliding_window") else FULL


def sliding_after(reader: ConfigReader, index: int) -> str:
    """Return Qwen's rule: layers from ``max_window_layers`` on, if ``use_sliding_window``."""
    if not reader.flag("use_sliding_window", default=False) or not reader.has("sliding_window"):
        return FULL
    return SLIDING if index >= reader.size("max_window_layers", least=0) else FULL


def sliding_if_used(reader: ConfigReader, index: int) -> str:
    is_used = reader.flag("use_sliding_window", default=False) and reader.has("sliding_window")
    return SLIDING if is_used else FULL


def every(period: int, key: str, between: str) -> Callable[[ConfigReader, int], str]:
    """Return the rule: each n-th layer has full attention, the others ``between``. ``key``: n in config.json."""

    def rule(reader: ConfigReader, index: int) -> str:
        return between if (index + 1) % reader.size(key, default=period) else FULL

    return rule


# -- layers with experts ---------------------------------------------------------------------------


def all_layers(reader: ConfigReader, index: int) -> bool:
    return True


def by_step(reader: ConfigReader, index: int) -> bool:
    """Return Qwen's rule: each n-th layer, except ``mlp_only_layers``."""
    if index in reader.indices("mlp_only_layers") or reader.size(*EXPERT_KEYS, default=0, least=0) == 0:
        return False
    return (index + 1) % reader.size("decoder_sparse_step", default=1) == 0


def after_dense(default: int, key: str = "first_k_dense_replace") -> Callable[[ConfigReader, int], bool]:
    """Return DeepSeek's rule: all layers after the first dense ones, whose number is ``key`` of config.json."""

    def rule(reader: ConfigReader, index: int) -> bool:
        if reader.has("mlp_layer_types"):
            return reader.names("mlp_layer_types", reader.num_layers)[index] == "sparse"
        return index >= reader.size(key, default=default, least=0)

    return rule


def by_frequency(reader: ConfigReader, index: int) -> bool:
    """Return GLM-5's rule for indexers: ``indexer_types``, a pattern of F and S, or a frequency and an offset."""
    if reader.has("indexer_types"):
        return reader.names("indexer_types", reader.num_layers)[index] == "full"
    pattern = reader.config.get("index_topk_pattern")
    if isinstance(pattern, str) and len(pattern) == reader.num_layers:
        return pattern[index] == "F"
    if pattern is not None:
        raise reader.error(
            f"index_topk_pattern does not have one letter for each of {reader.num_layers} layers"
        )
    frequency = reader.size("index_topk_freq", default=1)
    offset = reader.size("index_skip_topk_offset", default=2, least=0)
    return max(index - offset + 1, 0) % frequency == 0


# -- Nemotron-H: one mixer or feed-forward part per block ------------------------------------------

PATTERN = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def nemotron_blocks(reader: ConfigReader, family: Family) -> tuple[Layer, ...]:
    if reader.has("layers_block_type"):
        types = tuple(OTHER_LAYER_TYPES.get(name, name) for name in reader.names("layers_block_type"))
    else:
        pattern = reader.config.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - PATTERN.keys():
            raise reader.error(
                "layers_block_type and hybrid_override_pattern are missing or have unknown letters"
            )
        types = tuple(PATTERN[letter] for letter in pattern)
    assert family.experts is not None
    parts: dict[str, Callable[[], Mixer]] = {
        FULL: lambda: family.attention(reader, None),
        LINEAR: lambda: mamba2(reader),
        "mlp": lambda: family.mlp(reader),
        "moe": lambda: family.experts(reader) if family.experts else Mixer(),
    }
    if unknown := set(types) - parts.keys():
        raise reader.error(f"layers_block_type has {min(unknown)}, which the planner does not know")
    built = {kind: block(reader, family.block_norms, parts[kind]()) for kind in set(types)}
    return tuple(built[kind] for kind in types)


# -- the table -------------------------------------------------------------------------------------

LLAMA = Family(GroupedQuery("attention_bias", "attention_bias"), Mlp(bias="mlp_bias"))
QWEN3_ATTENTION = GroupedQuery("attention_bias", "attention_bias", "head")
QWEN3 = Family(QWEN3_ATTENTION, layer_type=sliding_after)
QWEN2 = Family(GroupedQuery(qkv_bias=True), layer_type=sliding_after)
MISTRAL = Family(layer_type=always_sliding)
GEMMA2 = Family(
    GroupedQuery("attention_bias", "attention_bias"),
    layer_type=every(2, "sliding_window_pattern", SLIDING),
    block_norms=4,
    is_tied=True,
)
GEMMA3 = replace(GEMMA2, attention=QWEN3_ATTENTION, layer_type=every(6, "sliding_window_pattern", SLIDING))
QWEN3_MOE = Family(QWEN3_ATTENTION, experts=Experts(), is_sparse=by_step, layer_type=sliding_if_used)
DEEPSEEK_EXPERTS = Experts(shared="n_shared_experts")
DEEPSEEK_V3 = Family(latent, experts=DEEPSEEK_EXPERTS, is_sparse=after_dense(3))
DEEPSEEK_V32 = replace(DEEPSEEK_V3, layer_type=lambda reader, index: SPARSE)
GATED_QUERY = GroupedQuery("attention_bias", "attention_bias", "head", has_output_gate=True)
QWEN_SHARED = Experts(shared="shared_expert_intermediate_size", has_shared_gate=True)
QWEN3_5 = Family(
    GATED_QUERY,
    linear=lambda reader: delta_net(reader, is_fused=False),
    layer_type=every(4, "full_attention_interval", LINEAR),
)
QWEN3_5_MOE = replace(QWEN3_5, experts=QWEN_SHARED, is_sparse=all_layers)

ARCHITECTURES: Mapping[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral3": MISTRAL,
    "phi3": Family(GroupedQuery(is_fused=True), Mlp(is_fused=True), layer_type=always_sliding),
    "granite": LLAMA,
    "smollm3": replace(LLAMA, is_tied=True),
    "seed_oss": replace(LLAMA, attention=GroupedQuery("attention_bias", "attention_out_bias")),
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "glm4": Family(GroupedQuery("attention_bias"), Mlp(is_fused=True), block_norms=4),
    "olmo2": Family(GroupedQuery("attention_bias", "attention_bias", "all_heads")),
    "olmo3": Family(
        GroupedQuery("attention_bias", "attention_bias", "all_heads"),
        layer_type=every(4, "sliding_window_pattern", SLIDING),
    ),
    "mixtral": Family(experts=Experts("intermediate_size"), is_sparse=all_layers, layer_type=always_sliding),
    "qwen2_moe": Family(
        GroupedQuery("qkv_bias"), experts=QWEN_SHARED, is_sparse=by_step, layer_type=sliding_after
    ),
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": Family(
        GroupedQuery("attention_bias", qk_norm="use_qk_norm"),
        experts=DEEPSEEK_EXPERTS,
        is_sparse=after_dense(1),
    ),
    "afmoe": Family(
        GATED_QUERY,
        experts=Experts(shared="num_shared_experts", has_choice_bias=True),
        is_sparse=after_dense(1, "num_dense_layers"),
        layer_type=every(4, "global_attn_every_n_layers", SLIDING),
        block_norms=4,
    ),
    "exaone_moe": Family(
        GroupedQuery(qk_norm="head"),
        experts=Experts(shared="num_shared_experts"),
        is_sparse=after_dense(1),
        layer_type=every(4, "sliding_window_pattern", SLIDING),
    ),
    "flex_olmo": Family(
        GroupedQuery("attention_bias", "attention_bias", "all_heads"),
        experts=Experts("intermediate_size"),
        is_sparse=all_layers,
    ),
    "hy_v3": Family(
        QWEN3_ATTENTION,
        Mlp(bias="mlp_bias"),
        Experts(shared="num_shared_experts", mlp=Mlp(bias="mlp_bias")),
        is_sparse=after_dense(1),
    ),
    "solar_open": Family(GroupedQuery("attention_bias"), experts=DEEPSEEK_EXPERTS, is_sparse=all_layers),
    "minimax_m2": Family(
        GroupedQuery(qk_norm="all_heads"), experts=Experts("intermediate_size"), is_sparse=all_layers
    ),
    "gpt_oss": Family(
        GroupedQuery("attention_bias", "attention_bias", has_sinks=True),
        experts=Experts("intermediate_size", has_bias=True),
        is_sparse=all_layers,
        layer_type=every(2, "sliding_window_pattern", SLIDING),
    ),
    "deepseek_v2": replace(DEEPSEEK_V3, mlp=Mlp(bias="mlp_bias"), is_sparse=after_dense(0)),
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "youtu": Family(latent, is_tied=True),
    "deepseek_v32": DEEPSEEK_V32,
    "glm4_moe_lite": replace(DEEPSEEK_V3, is_sparse=after_dense(1)),
    "glm_moe_dsa": replace(DEEPSEEK_V32, has_indexer=by_frequency),
    "qwen3_next": replace(
        QWEN3_5,
        linear=lambda reader: delta_net(reader, is_fused=True),
        experts=QWEN_SHARED,
        is_sparse=by_step,
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "nemotron_h": Family(
        GroupedQuery(module="mixer"),
        Mlp(has_gate=False, bias="mlp_bias", module="mixer"),
        Experts(
            has_gate=False,
            shared="moe_shared_expert_intermediate_size",
            latent_key="moe_latent_size",
            mlp=Mlp(has_gate=False, bias="mlp_bias"),
            module="mixer",
        ),
        block_norms=1,
        blocks=nemotron_blocks,
    ),
    # vision-language models: their text model with a tower
    "qwen2_vl": replace(QWEN2, tower=vision.qwen2_vl),
    "qwen2_5_vl": replace(QWEN2, tower=vision.qwen2_5_vl),
    "qwen3_vl": replace(QWEN3, tower=vision.qwen3_vl),
    "qwen3_vl_moe": replace(QWEN3_MOE, tower=vision.qwen3_vl),
    "qwen3_5": replace(QWEN3_5, tower=vision.qwen3_vl),
    "qwen3_5_moe": replace(QWEN3_5_MOE, tower=vision.qwen3_vl),
    "kimi_k25": replace(DEEPSEEK_V3, tower=vision.kimi),
}
