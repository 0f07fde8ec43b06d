"""Degrees that fit a model, pieces of sequences, and blocks of attention, without a process group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import LlamaConfig, Qwen3MoeConfig  # noqa: E402
from transformers.integrations.moe import grouped_mm_experts_forward  # noqa: E402
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.schema.layout import TrainerLayout  # noqa: E402
from primerl_hpc.trainer.parallel import dispatch, ring  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing, Share, choose_style, pad  # noqa: E402
from primerl_hpc.trainer.parallel.dispatch import Received, TorchDispatcher, sum_rows  # noqa: E402
from primerl_hpc.trainer.parallel.expert import run_pairs  # noqa: E402
from primerl_hpc.trainer.parallel.flash import States  # noqa: E402
from primerl_hpc.trainer.parallel.fsdp import shard_dim  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import choose_expert_degree  # noqa: E402
from tests.support.host_waits import HostWaits  # noqa: E402


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


def test_positions_that_depend_on_the_full_length_are_refused():
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
    """Two rows of 7, padded to 8; the value of each state is its flat index before padding."""
    positions = torch.zeros(2, 8, dtype=torch.long)
    states = torch.full((2, 8), -1)
    states[:, :7] = torch.arange(14).view(2, 7)
    predictors = torch.tensor([0, 3, 6, 8, 12])
    found = []
    for rank in range(2):
        packing = Packing(Context("ring", rank, 2), positions)
        share = Share(packing, predictors.numpy(), length=7)
        own = states[:, packing.own].flatten()[share.predictors]
        assert own.tolist() == predictors[share.own].tolist()
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
        ring.ring_attention(States(query, key, value), packing, 0.3, 100).sum().backward()
    assert largest.numel == 2 * 256 * 16


@pytest.mark.parametrize("num_here", [0, 1, 3])
def test_experts_compute_for_their_own_pairs_alone_and_give_the_same(num_here):
    """``num_here`` of each token's 4 experts are on this rank."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=8)
    experts = Qwen3MoeExperts(config)
    experts._is_expert_parallel = True  # from 5.19 on, transformers masks pairs of other ranks only with it
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


class Operations(TorchDispatchMode):
    """Records operations, the types in which rows are summed, and the rows of the largest float32 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.types: set[torch.dtype] = set()
        self.float32_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        if func._opname == "index_add_":
            self.types.add(args[0].dtype)
        out = func(*args, **(kwargs or {}))
        rows = [len(each) for each in tree_leaves(out) if is_matrix(each) and each.dtype == torch.float32]
        self.float32_rows = max([self.float32_rows, *rows])
        return out


def is_matrix(value) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 2


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=["Qwen3-MoE", "DeepSeek-V3"])
def test_pairs_are_sorted_once_and_never_all_in_float32(monkeypatch, kind):
    """A second sort, and float32 copies of all pairs forward and backward, were the larger part of an expert layer.

    ``kind``: of the routing weights; float32 ones made a product and two gradients of all pairs float32.
    """
    monkeypatch.setattr(dispatch, "SUMMED_ROWS", 32)
    config = Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=24, num_experts=8)
    experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    chosen = torch.rand(50, 8).argsort(1)[:, :4]
    hidden = torch.randn(50, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.rand(50, 4).to(kind).requires_grad_()
    with Operations() as operations:
        run_pairs(experts, Received(hidden, chosen, weights, 200, None)).sum().backward()
    assert sum(name in ("sort", "argsort", "topk") for name in operations.names) == 1
    assert "masked_fill" not in operations.names
    assert operations.float32_rows == 50  # the sums; 32 rows at a time are added


def test_parts_of_a_tokens_result_are_summed_in_float32_and_rounded_once():
    parts = torch.tensor([[1.0], *[[2.0**-9]] * 8, [3.0]], dtype=torch.bfloat16, requires_grad=True)
    with Operations() as sums:  # a CPU does so anyway
        found = sum_rows(parts, torch.tensor([0] * 9 + [1]), 2)
    assert sums.types == {torch.float32}
    assert found.dtype == torch.bfloat16 and found.tolist() == [[1 + 2.0**-6], [3.0]]
    (found * torch.tensor([[5.0], [7.0]])).sum().backward()
    assert parts.grad.flatten().tolist() == [5.0] * 9 + [7.0]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_in_blocks_of_queries_is_softmax_attention_within_each_sample(
    monkeypatch, window, has_sinks
):
    monkeypatch.setattr(ring, "BLOCK_BYTES", 4 * 2 * 4 * 12 * 5)  # five queries at a time
    torch.manual_seed(0)
    states = [
        torch.randn(2, heads, 12, width, requires_grad=True) for heads, width in ((4, 6), (2, 6), (2, 5))
    ]
    query, key, value = states
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 0, 0, 0, 0]])
    packing = Packing(Context(), positions)
    mask = packing.visible(packing.own, packing.own, window)[:, None]
    scores = (query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(~mask, -torch.inf)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    if sinks is not None:  # a column of scores without a value
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    found = ring.ring_attention(States(query, key, value[:, :, :12]), packing, 0.3, window, sinks)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    inputs = [*states, *([] if sinks is None else [sinks])]
    grads = torch.autograd.grad((expected * weights).sum(), inputs, retain_graph=True)
    for grad, want in zip(torch.autograd.grad((found * weights).sum(), inputs), grads, strict=True):
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6)


def test_a_dispatch_waits_once_and_sends_three_messages(one_rank, monkeypatch):
    """Counts, hidden states, and weights with experts; the counts are the only values that the host reads."""
    sizes = []
    send = dist.all_to_all_single

    def counted(out, rows, *sizes_and_more, **more):
        sizes.append(tuple(rows.shape))
        return send(out, rows, *sizes_and_more, **more)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    hidden, weights = torch.randn(6, 16, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    with HostWaits() as waits:
        received = TorchDispatcher(dist.group.WORLD, 4).dispatch(hidden, index, weights)
    assert waits.found == ["tolist at read_sizes"]
    assert sizes == [(1, 2), (6, 16), (6, 4)]
    assert torch.equal(received.index, index) and received.num_pairs == 12
    torch.testing.assert_close(received.weights, weights)
    (received.weights * 3).sum().backward()
    assert torch.equal(weights.grad, torch.full((6, 2), 3.0))
