"""Tokens to the ranks of their experts and back, on any backend of torch.distributed.

A token goes once to each rank that holds at least one of its experts, with the experts' local numbers and their routing
weights; experts that live elsewhere have the number E_local and weight 0. The results come back and are summed. This is DeepEP's
way too, so both backends are one interface.

    received = dispatcher.dispatch(hidden, top_k_index, top_k_weights)
    output = dispatcher.combine(run_pairs(experts, received), received)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Received:
    """M tokens for this rank's E experts; at least one row, though nobody may have sent any."""

    hidden: Tensor  # [M, H]
    index: Tensor  # [M, k] int64 in [0, E]; E: not here
    weights: Tensor  # [M, k]; 0 where not here
    num_pairs: int  # of a token and an expert that is here
    handle: Any  # the backend's memory of the way back


class Dispatcher(Protocol):
    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Received:
        """hidden [N, H], index [N, k] over all experts, weights [N, k]. Differentiable in hidden and weights."""

    def combine(self, output: Tensor, received: Received) -> Tensor:
        """output [M, H] → the sum over ranks for each of the N tokens, [N, H]. Differentiable."""


class AllToAll(torch.autograd.Function):
    """Rows to ranks: ``send[r]`` rows go to rank r, ``receive[r]`` come from it. Backward is the way back."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def exchange(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


def sum_rows(rows: Tensor, token: Tensor, num_tokens: int) -> Tensor:
    """rows [S, H] and which token each is of → each token's sum, [num_tokens, H]; summed in float32, rounded once."""
    sums = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    return sums.index_add(0, token, rows.float()).to(rows.dtype)


@dataclass
class WayBack:
    token: Tensor  # [S] which of the N tokens each sent row was
    num_tokens: int
    send: list[int]
    receive: list[int]


class TorchDispatcher:
    """All-to-all of torch.distributed: gloo, NCCL."""

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int) -> None:
        self.group, self.num_local = group, num_local_experts
        self.num_ranks = dist.get_world_size(group)

    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Received:
        is_sent = torch.zeros(self.num_ranks, len(hidden), dtype=torch.bool, device=hidden.device)
        is_sent.t().scatter_(1, index // self.num_local, True)
        rank, token = is_sent.nonzero(as_tuple=True)  # in order of ranks, then tokens
        local = index[token] - (rank * self.num_local)[:, None]
        is_there = (local >= 0) & (local < self.num_local)
        rows = is_sent.sum(1)
        counts = torch.stack([rows, torch.zeros_like(rows).index_add(0, rank, is_there.sum(1))], 1)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        # one wait for the device instead of two
        (send, _), (receive, num_pairs) = torch.stack([counts, arriving]).mT.tolist()
        local = local.masked_fill(~is_there, self.num_local)
        routed = weights[token].masked_fill(~is_there, 0.0)
        way = WayBack(token, len(hidden), send, receive)
        hidden = AllToAll.apply(hidden[token], send, receive, self.group)
        routed = AllToAll.apply(routed, send, receive, self.group)
        local = exchange(local, send, receive, self.group)
        if not len(hidden):
            # a row for nobody, so that the experts' weights take part in backward on every rank
            hidden, routed = (
                torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in (hidden, routed)
            )
            local = local.new_full((1, local.shape[1]), self.num_local)
        return Received(hidden, local, routed, sum(num_pairs), way)

    def combine(self, output: Tensor, received: Received) -> Tensor:
        way: WayBack = received.handle
        back = AllToAll.apply(output[: sum(way.receive)], way.receive, way.send, self.group)
        return sum_rows(back, way.token, way.num_tokens)
