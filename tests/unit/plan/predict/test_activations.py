"""Activations of a block against transformers' blocks: each storage is followed on fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.architectures.activations import kept_elements, kept_products, working_elements
from primerl_hpc.plan.predict.shape import known_shape, shape_of
from tests.unit.plan.predict.test_shape import small_config

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer  # noqa: E402

SHAPES = [(1024, 16, 8, 3072), (2560, 32, 8, 9728), (5120, 64, 8, 25600)]  # width, heads, kv heads, MLP
EXPERT_SHAPES = [
    (2048, 32, 4, 768, 8),
    (4096, 64, 4, 1536, 8),
]  # width, heads, kv heads, expert, experts per token
FEW, MANY = 2048, 4096


class LiveBytes(TorchDispatchMode):
    """Follow the bytes of storages that operations allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs or {})):
            self.follow(tensor, is_new=False)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            self.follow(tensor, is_new=True)
        return made

    def follow(self, tensor: Any, *, is_new: bool) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes() if is_new else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.live -= size
        self.known.discard(key)


def bytes_of(kinds: tuple, config: Any, tokens: int, *, is_trained: bool) -> tuple[int, int]:
    """Bytes kept after a forward without recomputation, and the peak of recomputing a block and its backward."""
    make_layer, make_rotary = kinds
    config._attn_implementation = "sdpa"
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            layer = make_layer(config, 0)
        finally:
            torch.set_default_dtype(torch.float32)
        layer.requires_grad_(is_trained)
        positions = torch.arange(tokens)[None]
        hidden = torch.zeros(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        angles = make_rotary(config)(hidden, positions)

        def run(value):
            made = layer(value, position_embeddings=angles, position_ids=positions)
            return made[0] if isinstance(made, tuple) else made

        with LiveBytes() as forward:
            output = run(hidden)
            kept = forward.live
        gradient = torch.zeros_like(output)
        del output
        recomputed = checkpoint(run, hidden, use_reentrant=False)
        with LiveBytes() as backward:
            recomputed.backward(gradient)
        return kept, backward.peak


def elements_per_token(kinds: tuple, config: Any, *, is_trained: bool = False) -> list[float]:
    few, many = (bytes_of(kinds, config, tokens, is_trained=is_trained) for tokens in (FEW, MANY))
    return [(after - before) / (MANY - FEW) / 2 for before, after in zip(few, many, strict=True)]


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_dense_blocks_keep_the_elements_of_the_formula(family, sizes):
    width, heads, kv_heads, inner = sizes
    make = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family]
    config = make(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        num_hidden_layers=1,
    )
    kinds = {
        "qwen3": (Qwen3DecoderLayer, Qwen3RotaryEmbedding),
        "llama": (LlamaDecoderLayer, LlamaRotaryEmbedding),
    }[family]
    kept, peak = elements_per_token(kinds, config)
    layer = shape_of(config.to_dict(), family).layers[0]
    assert kept_elements(layer, width).dense == pytest.approx(kept, rel=0.01)
    assert working_elements(layer, width).dense == pytest.approx(peak, rel=0.01)
    kept, _ = elements_per_token(kinds, config, is_trained=True)
    assert kept_elements(layer, width, is_trained=True).dense == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("sizes", EXPERT_SHAPES)
def test_blocks_of_experts_keep_the_elements_of_the_formula(sizes):
    width, heads, kv_heads, inner, active = sizes
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=inner,
        num_local_experts=16,
        num_experts_per_tok=active,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        num_hidden_layers=1,
    )
    config._experts_implementation = "grouped_mm"
    kept, peak = elements_per_token((Qwen3MoeDecoderLayer, Qwen3RotaryEmbedding), config)
    layer = shape_of(config.to_dict(), "qwen3_moe").layers[0]
    formula = kept_elements(layer, width)
    assert formula.dense + formula.experts == pytest.approx(kept, rel=0.02)
    formula = working_elements(layer, width)
    assert formula.dense + formula.experts == pytest.approx(peak, rel=0.02)
    kept, _ = elements_per_token((Qwen3MoeDecoderLayer, Qwen3RotaryEmbedding), config, is_trained=True)
    formula = kept_elements(layer, width, is_trained=True)
    assert formula.dense + formula.experts == pytest.approx(kept, rel=0.02)


def test_recomputing_operations_keeps_every_second_product():
    layer = known_shape("meta-llama/Llama-3.1-8B").layers[0]
    products = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert kept_products(layer, 4096) == 4096 + 4096 + products / 2


def test_linear_attention_is_not_guessed():
    layer = shape_of(small_config("qwen3_5_text").to_dict(), "m").layers[0]
    for function in (kept_elements, working_elements):
        with pytest.raises(ConfigError, match="linear attention"):
            function(layer, 48)
