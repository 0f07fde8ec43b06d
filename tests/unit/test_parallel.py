"""Degrees that fit a model, pieces of sequences, and blocks of attention, without a process group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import LlamaConfig, Qwen3MoeConfig  # noqa: E402
from transformers.integrations.moe import grouped_mm_experts_forward  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.layout_schema import TrainerLayout  # noqa: E402
from primerl_hpc.trainer.parallel import ring  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing, Share, choose_style, pad  # noqa: E402
from primerl_hpc.trainer.parallel.dispatch import Received, sum_rows  # noqa: E402
from primerl_hpc.trainer.parallel.expert import run_pairs, shard_dim  # noqa: E402
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


@pytest.mark.parametrize("num_here", [0, 1, 3])
def test_experts_compute_for_their_own_pairs_alone_and_give_the_same(num_here):
    """Of each token ``num_here`` of its 4 experts are on this rank."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=8)
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    chosen = torch.rand(50, 8).argsort(1)[:, :4]
    chosen[:, num_here:] = 8
    states = [torch.randn(50, 16), torch.rand(50, 4).masked_fill(chosen == 8, 0.0)]
    found, expected = ([each.clone().requires_grad_() for each in states] for _ in range(2))
    with LargestTensor() as largest:
        out = run_pairs(experts, Received(found[0], chosen, found[1], 50 * num_here, None))
        out.square().sum().backward()
    gradients = [each.grad.clone() for each in experts.parameters()]
    experts.zero_grad()
    wanted = grouped_mm_experts_forward(experts, expected[0], chosen, expected[1])
    wanted.square().sum().backward()
    torch.testing.assert_close(out, wanted)
    for one, other in zip([*found, *gradients], [*expected, *experts.parameters()], strict=True):
        torch.testing.assert_close(one.grad if one.requires_grad else one, other.grad, rtol=1e-4, atol=1e-5)
    of_weights = experts.gate_up_proj.numel()
    assert largest.numel == max(of_weights, 50 * num_here * 2 * 24)


class Sums(TorchDispatchMode):
    """What types rows are added up in."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "index_add":
            self.types.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_parts_of_a_tokens_result_are_summed_in_float32_and_rounded_once():
    parts = torch.tensor([[1.0], *[[2.0**-9]] * 8, [3.0]], dtype=torch.bfloat16, requires_grad=True)
    with Sums() as sums:  # a CPU does so anyway
        found = sum_rows(parts, torch.tensor([0] * 9 + [1]), 2)
    assert sums.types == {torch.float32}
    assert found.dtype == torch.bfloat16 and found.tolist() == [[1 + 2.0**-6], [3.0]]
    (found * torch.tensor([[5.0], [7.0]])).sum().backward()
    assert parts.grad.flatten().tolist() == [5.0] * 9 + [7.0]


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
