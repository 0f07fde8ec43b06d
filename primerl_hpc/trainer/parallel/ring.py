"""Ring attention: keys and values go round the ranks while queries stay (arXiv 2310.01889).

Each rank adds what one block of keys gives to its running result. With o_b, L_b the output and log-sum-exp over block b,

    L = log(e^L + e^L_b)        o = o · e^(L_old − L) + o_b · e^(L_b − L)

Backward sends the blocks round once more, with their gradients beside them; after as many hops as ranks they are home.
Blocks are plain matrices in float32, a bounded number of queries at a time, so that they run anywhere. One rank is a
ring of one: the same code is our "eager" attention.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.trainer.parallel.context import Context, Packing

BLOCK_BYTES = 128 << 20  # bound of one block's float32 scores


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """[B, heads, n, D], keys and values [B, kv_heads, n, D | D_v] → output [B, heads, n, D_v], log-sums [B, heads, n] float32."""
    return _Ring.apply(query, key, value, packing, scale, window)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, packing, scale, window):
        context = packing.context
        out = log_sums = None
        keys, values = key.contiguous(), value.contiguous()
        for hop in range(context.size):
            source = (context.rank - hop) % context.size
            coming = Hop(context, [keys, values]) if hop < context.size - 1 else None
            if hop == 0 or packing.sees(source, window):
                visible = visible_to(packing, source, window)
                part, part_sums = block_forward(query, keys, values, visible, scale)
                if (
                    out is None
                ):  # its own block: every query sees at least itself, so log-sums are finite from here on
                    out, log_sums = part, part_sums
                else:
                    total = torch.logaddexp(log_sums, part_sums)
                    out = (
                        out * (log_sums - total).exp()[..., None]
                        + part * (part_sums - total).exp()[..., None]
                    )
                    log_sums = total
            if coming is not None:
                keys, values = coming.wait()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.packing, ctx.scale, ctx.window = packing, scale, window
        return out, log_sums

    @staticmethod
    def backward(ctx, grad_out, grad_sums):
        query, key, value, out, log_sums = ctx.saved_tensors
        packing, context = ctx.packing, ctx.packing.context
        # ∂ loss / ∂ score = p · (p̄ − rows), rows = Σ_d ō o − L̄
        rows = (grad_out.float() * out.float()).sum(-1) - grad_sums
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        moving = [key.contiguous(), value.contiguous()]
        moving += [torch.zeros_like(each, dtype=torch.float32) for each in moving]
        for hop in range(context.size):
            source = (context.rank - hop) % context.size
            keys, values, grad_keys, grad_values = moving
            coming = Hop(context, [keys, values]) if hop < context.size - 1 else None
            if hop == 0 or packing.sees(source, ctx.window):
                visible = visible_to(packing, source, ctx.window)
                parts = block_backward(
                    query, keys, values, visible, ctx.scale, log_sums, rows, grad_out.float()
                )
                grad_query += parts[0]
                grad_keys += parts[1]
                grad_values += parts[2]
            gradients = Hop(context, [grad_keys, grad_values]).wait()
            moving = [*(coming.wait() if coming else (keys, values)), *gradients]
        grad_key, grad_value = moving[2:]
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            None,
            None,
            None,
        )


class Hop:
    """Tensors on their way to the next rank of the ring, while those of the previous come."""

    def __init__(self, context: Context, tensors: list[Tensor]) -> None:
        self.tensors, self.works = tensors, []
        if context.size == 1:
            return
        assert context.group is not None
        following, previous = (
            dist.get_global_rank(context.group, (context.rank + step) % context.size) for step in (1, -1)
        )
        self.tensors = [torch.empty_like(each) for each in tensors]
        operations = [dist.P2POp(dist.isend, each, following, context.group) for each in tensors]
        operations += [dist.P2POp(dist.irecv, each, previous, context.group) for each in self.tensors]
        self.works = dist.batch_isend_irecv(operations)
        self.sent = tensors  # alive until they have left

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


def visible_to(packing: Packing, source: int, window: int | None) -> Callable[[slice], Tensor]:
    """A slice of this rank's queries → which keys of rank ``source`` they see, [B, c, m]: never made of all at once."""
    return lambda part: packing.visible(packing.own[part], packing.tokens[source], window)


def query_chunks(query: Tensor, num_keys: int) -> list[slice]:
    batch, heads, length, _ = query.shape
    size = max(1, BLOCK_BYTES // (4 * batch * heads * num_keys))
    return [slice(start, start + size) for start in range(0, length, size)]


def grouped(each: Tensor, kv_heads: int) -> Tensor:
    """[B, heads, …] → [B, kv_heads, heads / kv_heads, …], float32."""
    return each.float().unflatten(1, (kv_heads, -1))


def scores(query: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    """[B, kv_heads, g, c, D], [B, kv_heads, m, D], bool [B, c, m] → [B, kv_heads, g, c, m]"""
    products = query @ keys.float().unsqueeze(2).transpose(-1, -2)
    return products.mul_(scale).masked_fill_(~visible[:, None, None], -torch.inf)


def block_forward(
    query: Tensor, keys: Tensor, values: Tensor, visible: Callable[[slice], Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, heads, n, D_v] and log-sums [B, heads, n] over one block of keys, float32; 0 and −∞ where it shows none."""
    kv_heads = keys.shape[1]
    outs, sums = [], []
    for part in query_chunks(query, keys.shape[2]):
        each = scores(grouped(query[:, :, part], kv_heads), keys, visible(part), scale)
        log_sum = torch.logsumexp(each, -1)
        weights = (each - log_sum.masked_fill(log_sum == -torch.inf, 0.0)[..., None]).exp_()
        outs.append((weights @ values.float().unsqueeze(2)).flatten(1, 2))
        sums.append(log_sum.flatten(1, 2))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def block_backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Callable[[slice], Tensor],
    scale: float,
    log_sums: Tensor,
    rows: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values from one block, float32; ``log_sums`` and ``rows`` are over all blocks."""
    kv_heads = keys.shape[1]
    grad_keys, grad_values = (
        torch.zeros_like(each, dtype=torch.float32).unsqueeze(2) for each in (keys, values)
    )
    grad_query = []
    for part in query_chunks(query, keys.shape[2]):
        queries = grouped(query[:, :, part], kv_heads)
        grads = grouped(grad_out[:, :, part], kv_heads)
        weights = scores(queries, keys, visible(part), scale)
        weights.sub_(grouped(log_sums[:, :, part], kv_heads)[..., None]).exp_()
        grad_values += (weights.transpose(-1, -2) @ grads).sum(2, keepdim=True)
        inner = grads @ values.float().unsqueeze(2).transpose(-1, -2)
        inner.sub_(grouped(rows[:, :, part], kv_heads)[..., None]).mul_(weights).mul_(scale)
        grad_query.append((inner @ keys.float().unsqueeze(2)).flatten(1, 2))
        grad_keys += (inner.transpose(-1, -2) @ queries).sum(2, keepdim=True)
    return torch.cat(grad_query, 2), grad_keys.squeeze(2), grad_values.squeeze(2)
