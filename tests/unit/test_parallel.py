"""Degrees that fit a model, pieces of sequences, and blocks of attention, without a process group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.layout_schema import TrainerLayout  # noqa: E402
from primerl_hpc.trainer.parallel import ring  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing, Share, choose_style, pad  # noqa: E402
from primerl_hpc.trainer.parallel.expert import shard_dim  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import choose_expert_degree  # noqa: E402


@pytest.mark.parametrize(
    ("shard", "local", "experts", "degree"),
    [
        (8, 8, 128, 8),
        (16, 4, 128, 4),
        (6, 6, 128, 2),
        (8, 8, 0, 1),
        (64, 8, 60, 4),
        (1, 1, 8, 1),
        (12, 8, 6, 6),
    ],
)
def test_auto_spreads_experts_over_the_most_ranks_that_divide_them_within_a_node(
    shard, local, experts, degree
):
    assert choose_expert_degree(TrainerLayout(), experts, shard=shard, local=local) == degree


def test_expert_weights_are_cut_in_a_dim_that_divides_or_refused_with_the_numbers():
    assert shard_dim([8, 96, 32], 4) == 1
    assert shard_dim([8, 90, 32], 4) == 2
    with pytest.raises(ConfigError, match=r"\[90, 31\] is a multiple"):
        shard_dim([8, 90, 31], 4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "style"),
    [
        (32, 8, 8, "ulysses"),
        (32, 8, 16, "ulysses"),
        (32, 8, 3, "ring"),
        (12, 3, 4, "ring"),
        (64, 64, 2, "ulysses"),
    ],
)
def test_auto_takes_ulysses_where_heads_divide(heads, kv_heads, size, style):
    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    assert choose_style(TrainerLayout(), config, size) == style


def test_positions_that_depend_on_the_whole_length_are_refused():
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ConfigError, match="dynamic rope"):
        choose_style(TrainerLayout(), config, 2)


@given(size=st.integers(1, 6), pieces=st.integers(1, 5), style=st.sampled_from(["ulysses", "ring"]))
def test_every_token_is_one_ranks_and_all_have_as_many(size, pieces, style):
    context = Context(style, 0, size)
    length = context.multiple * pieces
    shares = [context.tokens_of(rank, length, torch.device("cpu")) for rank in range(size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(length))
    assert {len(share) for share in shares} == {length // size}
    if style == "ring":  # causal attention costs all alike
        assert len({int((share + 1).sum()) for share in shares}) == 1


def test_a_share_finds_the_hidden_states_of_its_tokens():
    """Two rows of 7, padded to 8; every state is its own flat index before padding."""
    positions = torch.zeros(2, 8, dtype=torch.long)
    states = torch.full((2, 8), -1)
    states[:, :7] = torch.arange(14).view(2, 7)
    predictors = torch.tensor([0, 3, 6, 8, 12])
    found = []
    for rank in range(2):
        packing = Packing(Context("ring", rank, 2), positions)
        share = Share(packing, predictors, length=7)
        own = states[:, packing.own].flatten()[share.predictors]
        assert own.tolist() == predictors[share.mine].tolist()
        found += own.tolist()
    assert sorted(found) == predictors.tolist()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    size=st.integers(1, 4),
    style=st.sampled_from(["ulysses", "ring"]),
    window=st.none() | st.integers(1, 6),
)
def test_a_block_is_left_out_only_where_no_query_sees_a_key(lengths, size, style, window):
    flat = torch.cat([torch.arange(each) for each in lengths])[None]
    for rank in range(size):
        context = Context(style, rank, size)
        packing = Packing(context, pad(torch.cat([flat, torch.zeros_like(flat)]), context))
        for source in range(size):
            seen = packing.visible(packing.own, packing.tokens[source], window)
            assert packing.sees(source, window) == bool(seen.any())


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        self.numel = max([self.numel, *(each.numel() for each in made)])
        return out


def test_attention_in_blocks_makes_nothing_of_all_queries_by_all_keys(monkeypatch):
    monkeypatch.setattr(ring, "BLOCK_BYTES", 4 * 2 * 256 * 16)  # sixteen queries at a time
    query, key, value = (torch.randn(1, 2, 256, 4, requires_grad=True) for _ in range(3))
    packing = Packing(Context(), torch.arange(256)[None])
    with LargestTensor() as largest:
        ring.ring_attention(query, key, value, packing, 0.3, 100)[0].sum().backward()
    assert largest.numel == 2 * 256 * 16


@pytest.mark.parametrize("window", [None, 3])
def test_attention_in_blocks_of_queries_is_softmax_attention_within_each_sample(monkeypatch, window):
    monkeypatch.setattr(ring, "BLOCK_BYTES", 4 * 2 * 4 * 12 * 5)  # five queries at a time
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 12, width, requires_grad=True) for heads, width in ((4, 6), (2, 6), (2, 5))
    )
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0]])
    packing = Packing(Context(), positions)
    mask = packing.visible(packing.own, packing.own, window)[:, None]
    scores = (query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    found, log_sums = ring.ring_attention(query, key, value, packing, 0.3, window)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(log_sums, scores.logsumexp(-1))
    weights, sum_weights = torch.randn_like(expected), torch.randn_like(log_sums)
    inputs = (query, key, value)
    grads = torch.autograd.grad(
        (expected * weights).sum() + (scores.logsumexp(-1) * sum_weights).sum(), inputs, retain_graph=True
    )
    for grad, want in zip(
        torch.autograd.grad((found * weights).sum() + (log_sums * sum_weights).sum(), inputs),
        grads,
        strict=True,
    ):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)
