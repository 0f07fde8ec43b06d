"""Ring attention: keys and values are passed around the ranks while queries stay (arXiv 2310.01889).

Each rank adds the contribution of one block of keys to its running result. With o_b, L_b the output and log-sum-exp
over block b,

    L = log(e^L + e^L_b)        o = o · e^(L_old − L) + o_b · e^(L_b − L)

Backward passes the blocks around once more, with their gradients; after as many hops as ranks they are back at their
owner. Blocks are plain matrices (`MatrixBlocks`, any device) or torch's flash kernels (`ring_flash.FlashBlocks`). One
rank is a ring of one: with plain matrices this is the "eager" attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.trainer.parallel.context import Context, Packing
from primerl_hpc.trainer.parallel.flash import States
from primerl_hpc.trainer.parallel.ring_flash import FlashBlocks

BLOCK_BYTES = 128 << 20  # bound of one block's float32 scores


def ring_attention(
    states: States,
    packing: Packing,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute attention of queries [B, heads, n, D] over keys and values [B, kv_heads, n, D | D_v].

    ``sinks`` [heads]: a logit of each head's denominator that has no value. ``cap``: scores are
    cap · tanh(scale · q k / cap), for which flash kernels are not used. Returns [B, heads, n, D_v].
    """
    return _Ring.apply(*states, sinks, make_blocks(packing, scale, window, cap))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, blocks):
        packing, context = blocks.packing, blocks.packing.context
        out: Tensor | None = None
        log_sums: Tensor | None = None
        keys, values = key.contiguous(), value.contiguous()
        for hop in range(context.size):
            source = (context.rank - hop) % context.size
            arriving = Hop(context, [keys, values]) if hop < context.size - 1 else None
            if hop == 0 or packing.sees(source, blocks.window):
                for part, part_sums in blocks.forward(States(query, keys, values), source):
                    # in the rank's own block every query sees itself, so log-sums are finite from here on
                    if out is None or log_sums is None:
                        out, log_sums = part, part_sums
                    else:
                        out, log_sums = merged(out, log_sums, part, part_sums)
            if arriving is not None:
                keys, values = arriving.wait()
        assert out is not None and log_sums is not None  # hop 0 is the rank's own block
        if sinks is not None:
            totals = torch.logaddexp(log_sums, sinks.float()[:, None])
            out, log_sums = out * (log_sums - totals).exp()[..., None], totals
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, sinks, out, log_sums = ctx.saved_tensors
        blocks, context = ctx.blocks, ctx.blocks.packing.context
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        moving = [key.contiguous(), value.contiguous()]
        moving += [torch.zeros_like(block, dtype=torch.float32) for block in moving]
        for hop in range(context.size):
            source = (context.rank - hop) % context.size
            keys, values, grad_keys, grad_values = moving
            arriving = Hop(context, [keys, values]) if hop < context.size - 1 else None
            if hop == 0 or blocks.packing.sees(source, blocks.window):
                parts = blocks.backward(States(query, keys, values), source, out, log_sums, grad_out)
                grad_query += parts[0]
                grad_keys += parts[1]
                grad_values += parts[2]
            gradients = Hop(context, [grad_keys, grad_values]).wait()
            moving = [*(arriving.wait() if arriving else (keys, values)), *gradients]
        grad_sinks = None
        if sinks is not None:  # −Σ e^(sink − L) · ⟨ō, o⟩
            products = (grad_out.float() * out.float()).sum(-1)
            shares = (sinks.float()[:, None] - log_sums).exp()
            grad_sinks = -(shares * products).sum((0, 2)).to(sinks.dtype)
        grad_key, grad_value = moving[2:]
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
            None,
        )


def merged(out: Tensor, log_sums: Tensor, part: Tensor, part_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sums over two sets of keys."""
    total = torch.logaddexp(log_sums, part_sums)
    return out * (log_sums - total).exp()[..., None] + part * (part_sums - total).exp()[..., None], total


class Blocks(Protocol):
    """Attention of this rank's queries over the keys of one rank."""

    packing: Packing
    window: int | None

    def forward(self, states: States, source: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield outputs [B, heads, n, D_v] and log-sums [B, heads, n], float32, over disjoint sets of keys.

        They are 0 and −∞ for queries that see no key.
        """
        ...

    def backward(
        self, states: States, source: int, out: Tensor, log_sums: Tensor, grad_out: Tensor
    ) -> States:
        """Return the gradients, float32. ``out`` and ``log_sums``: over all keys."""
        ...


def make_blocks(packing: Packing, scale: float, window: int | None, cap: float | None = None) -> Blocks:
    """Return flash kernels if the attention of full rows uses torch's; plain matrices otherwise."""
    if packing.inner == "varlen" and cap is None:
        return FlashBlocks(packing, scale, window)
    return MatrixBlocks(packing, scale, window, cap)


@dataclass(frozen=True)
class Scoring:
    """Scores of queries and keys: scale · q k, or cap · tanh(scale · q k / cap)."""

    scale: float
    cap: float | None = None

    def __call__(self, query: Tensor, keys: Tensor) -> Tensor:
        """[B, kv_heads, g, c, D], [B, kv_heads, m, D] → [B, kv_heads, g, c, m]."""
        products = (query @ keys.float().unsqueeze(2).transpose(-1, -2)).mul_(self.scale)
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def to_products(self, grads: Tensor, scores: Tensor) -> Tensor:
        """Return the gradients of q k for those of ``scores``, which are overwritten."""
        if self.cap is not None:
            grads.mul_(1 - (scores / self.cap).square_())
        return grads.mul_(self.scale)


class MatrixBlocks:
    """Plain matrices in float32, a bounded number of queries at a time, on any device."""

    def __init__(self, packing: Packing, scale: float, window: int | None, cap: float | None = None) -> None:
        self.packing, self.scoring, self.window = packing, Scoring(scale, cap), window

    def forward(self, states: States, source: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield block_forward(states, visible_to(self.packing, source, self.window), self.scoring)

    def backward(
        self, states: States, source: int, out: Tensor, log_sums: Tensor, grad_out: Tensor
    ) -> States:
        visible = visible_to(self.packing, source, self.window)
        # ∂ loss / ∂ score = p · (p̄ − rows), rows = Σ_d ō o
        rows = (grad_out.float() * out.float()).sum(-1)
        return block_backward(states, visible, self.scoring, log_sums, rows, grad_out.float())


class Hop:
    """Tensors in transfer to the next rank of the ring, while those of the previous rank arrive."""

    def __init__(self, context: Context, tensors: list[Tensor]) -> None:
        self.tensors, self.works = tensors, []
        if context.size == 1:
            return
        assert context.group is not None
        following, previous = (
            dist.get_global_rank(context.group, (context.rank + step) % context.size) for step in (1, -1)
        )
        self.tensors = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, following, context.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, previous, context.group) for tensor in self.tensors]
        self.works = dist.batch_isend_irecv(operations)
        self.sent = tensors  # must not be freed before they are sent

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


def visible_to(packing: Packing, source: int, window: int | None) -> Callable[[slice], Tensor]:
    """Return a function from a slice of this rank's queries to the keys of rank ``source`` that they see, [B, c, m].

    The mask of all queries is never built at once.
    """
    return lambda part: packing.visible(packing.own[part], packing.tokens[source], window)


def query_chunks(query: Tensor, num_keys: int) -> list[slice]:
    batch, heads, length, _ = query.shape
    size = max(1, BLOCK_BYTES // (4 * batch * heads * num_keys))
    return [slice(start, start + size) for start in range(0, length, size)]


def grouped(states: Tensor, kv_heads: int) -> Tensor:
    """Reshape [B, heads, …] → [B, kv_heads, heads / kv_heads, …], float32."""
    return states.float().unflatten(1, (kv_heads, -1))


def hide(scores: Tensor, visible: Tensor) -> Tensor:
    """Return ``scores`` [B, kv_heads, g, c, m] with −∞ where bool ``visible`` [B, c, m] is False. In place."""
    return scores.masked_fill_(~visible[:, None, None], -torch.inf)


def block_forward(
    states: States, visible: Callable[[slice], Tensor], scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return output [B, heads, n, D_v] and log-sums [B, heads, n] over one block of keys, float32.

    They are 0 and −∞ for queries that see no key of the block.
    """
    query, keys, values = states
    kv_heads = keys.shape[1]
    outs, sums = [], []
    for part in query_chunks(query, keys.shape[2]):
        block_scores = hide(scoring(grouped(query[:, :, part], kv_heads), keys), visible(part))
        log_sum = torch.logsumexp(block_scores, -1)
        weights = (block_scores - log_sum.masked_fill(log_sum == -torch.inf, 0.0)[..., None]).exp_()
        outs.append((weights @ values.float().unsqueeze(2)).flatten(1, 2))
        sums.append(log_sum.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def block_backward(
    states: States,
    visible: Callable[[slice], Tensor],
    scoring: Scoring,
    log_sums: Tensor,
    rows: Tensor,
    grad_out: Tensor,
) -> States:
    """Return the gradients from one block, float32. ``log_sums`` and ``rows`` are over all blocks."""
    query, keys, values = states
    kv_heads = keys.shape[1]
    grad_keys, grad_values = (
        torch.zeros_like(states, dtype=torch.float32).unsqueeze(2) for states in (keys, values)
    )
    grad_query = []
    for part in query_chunks(query, keys.shape[2]):
        queries = grouped(query[:, :, part], kv_heads)
        grads = grouped(grad_out[:, :, part], kv_heads)
        scores = scoring(queries, keys)
        weights = hide(scores if scoring.cap is None else scores.clone(), visible(part))
        weights.sub_(grouped(log_sums[:, :, part], kv_heads)[..., None]).exp_()
        grad_values += (weights.transpose(-1, -2) @ grads).sum(2, keepdim=True)
        inner = grads @ values.float().unsqueeze(2).transpose(-1, -2)
        inner.sub_(grouped(rows[:, :, part], kv_heads)[..., None]).mul_(weights)
        inner = scoring.to_products(inner, scores)
        grad_query.append((inner @ keys.float().unsqueeze(2)).flatten(1, 2))
        grad_keys += (inner.transpose(-1, -2) @ queries).sum(2, keepdim=True)
    return States(torch.cat(grad_query, 2), grad_keys.squeeze(2), grad_values.squeeze(2))
