"""FLOP from config.json against the trainer's own matrices, and the trainer's count against its earlier formula."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.plan.predict.flops import (
    FORWARD,
    AttentionFlops,
    Flops,
    decode_flops,
    forward_flops,
    layer_state_flops,
    training_flops,
    visible_pairs,
)
from primerl_hpc.plan.predict.shape import known_shape, shape_of
from tests.unit.plan.predict.test_shape import meta_model, small_config

np = pytest.importorskip("numpy")

from primerl_hpc.recipe.schema.training import LoRA  # noqa: E402
from primerl_hpc.trainer.model.families import decoder_blocks, head_dims  # noqa: E402
from primerl_hpc.trainer.model.lora import attach_adapters  # noqa: E402
from primerl_hpc.trainer.model.policy import Policy  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context  # noqa: E402
from primerl_hpc.trainer.perf import FlopCounter, windows_of  # noqa: E402

LENGTHS = st.lists(st.integers(0, 131_072), max_size=40)
WINDOWS = st.one_of(st.none(), st.integers(1, 4096))


def earlier_count(blocks, head, attention, windows, lengths, predicted, tokens):
    """The expression that `FlopCounter` computed with numpy before the count moved to the planner."""
    array = np.array(lengths, float)

    def seen_keys(window):
        widths = array if window is None else np.minimum(array, window)
        return float((widths * array - widths**2 / 2).sum())

    pairs = sum(count * seen_keys(window) for window, count in windows.items())
    return blocks * tokens + head * predicted + attention * pairs


@given(LENGTHS, st.dictionaries(WINDOWS, st.integers(1, 126), max_size=3), st.integers(1, 10**6))
def test_the_trainers_count_is_bit_equal_to_the_earlier_formula(lengths, windows, per_pair):
    blocks, head, predicted = 6.0 * 8_030_261_248 * 1.037, 6.0 * 525_336_576, len(lengths)
    flops = Flops(blocks, head, (AttentionFlops(per_pair, Counter(windows)),))
    tokens = sum(lengths) + 17
    expected = earlier_count(blocks, head, per_pair, windows, lengths, predicted, tokens)
    assert flops.count(lengths, predicted, tokens) == expected


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "olmo3", "qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3"]
)
@pytest.mark.parametrize("rank", [None, 8])
def test_a_shape_gives_the_trainers_flops(family, rank):
    config = small_config(family)
    model, shape = meta_model(config), shape_of(config.to_dict(), family)
    if rank is not None:
        attach_adapters(model, decoder_blocks(model), LoRA(rank=rank))
    counter = FlopCounter(Policy(model, chunk_tokens=64, attention="sdpa", context=Context())).flops
    flops = training_flops(shape, lora_rank=rank)
    assert flops.blocks == pytest.approx(counter.blocks, rel=1e-12)
    assert flops.head == counter.head
    assert flops.count([5, 40, 9], 20) == pytest.approx(counter.count([5, 40, 9], 20), rel=1e-12)
    assert sum(flops.attention[0].windows.values()) == sum(windows_of(config).values())
    assert flops.attention[0].per_pair == 6 * config.num_attention_heads * sum(head_dims(config))


@given(st.integers(1, 400), WINDOWS)
def test_pairs_are_counted_one_by_one(length, window):
    pairs = sum(min(query + 1, window or length) for query in range(length))
    halves = min(length, window or length) / 2
    assert visible_pairs([length], window) == pairs - halves


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "openai/gpt-oss-20b", "Qwen/Qwen3.5-27B", "zai-org/GLM-5"])
def test_backward_takes_twice_the_forward(name):
    shape = known_shape(name)
    indexer = forward_flops(shape).attention[1:] if shape.name == "zai-org/GLM-5" else ()
    scores = sum(part.count([3000.0]) for part in indexer)  # an indexer has no backward
    assert training_flops(shape).count([3000], 100) + 2 * scores == pytest.approx(
        3 * forward_flops(shape).count([3000], 100)
    )


def test_decoding_a_sequence_token_by_token_takes_the_flops_of_its_prefill():
    shape = known_shape("openai/gpt-oss-20b")
    length = 300
    one_by_one = sum(decode_flops(shape, context) for context in range(1, length + 1))
    at_once = forward_flops(shape).count([length], length)
    assert one_by_one == pytest.approx(at_once, rel=1e-3)


def test_published_flops_of_a_dense_model_are_six_per_parameter_without_the_embedding():
    shape = known_shape("meta-llama/Llama-3.1-8B")
    flops = training_flops(shape)
    per_token = flops.blocks + flops.head
    norms = 65 * 4096
    assert per_token == 6 * (shape.total - shape.vocab * shape.hidden - norms)


def test_sparse_attention_reads_selected_keys_and_scores_all():
    shape = known_shape("deepseek-ai/DeepSeek-V3.2")
    own, scores = forward_flops(shape).attention
    assert own.windows == {2048: 61}
    assert scores.windows == {None: 61}
    assert scores.per_pair == FORWARD * 64 * 128


def test_linear_attention_costs_the_same_at_any_length():
    shape = known_shape("Qwen/Qwen3-0.6B")
    assert all(layer_state_flops(layer) == 0 for layer in shape.layers)
    hybrid = shape_of(small_config("qwen3_5_text").to_dict(), "m")
    first = hybrid.layers[0]
    assert layer_state_flops(first) == 2 * (3 * 6 * 16 * 20 + (2 * 2 * 16 + 6 * 20) * 4)
    flops = forward_flops(hybrid)
    doubled = flops.count([200], 0) - 2 * flops.count([100], 0)
    assert doubled == pytest.approx(flops.attention[0].count([200.0]) - 2 * flops.attention[0].count([100.0]))
