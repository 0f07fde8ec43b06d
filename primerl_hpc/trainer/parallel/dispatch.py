"""Sends tokens to the ranks of their experts and back, on any backend of torch.distributed.

A token is sent once to each rank that holds at least one of its experts, with the experts' local numbers and routing
weights; experts of other ranks have the number E_local and weight 0. The results are sent back and summed. DeepEP works
the same way, so both backends have one interface.

    received = dispatcher.dispatch(hidden, top_k_index, top_k_weights)
    output = dispatcher.combine(run_pairs(experts, received), received)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

SUMMED_ROWS = 16_384  # rows that are in float32 at a time


@dataclass
class Received:
    """M tokens for this rank's E experts; at least one row, even if no rank sent any."""

    hidden: Tensor  # [M, H]
    index: Tensor  # [M, k] int64 in [0, E]; E: on another rank
    weights: Tensor  # [M, k]; 0 for experts on other ranks
    num_pairs: int  # pairs of a token and an expert of this rank
    handle: Any  # the backend's data for the way back


def nothing() -> None: ...


class ExpertDispatcher(Protocol):
    num_local: int
    """Experts of this rank."""

    def dispatch(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], None] = nothing
    ) -> Received:
        """Send hidden [N, H], index [N, k] over all experts, weights [N, k]. Differentiable in hidden and weights.

        ``meanwhile`` is called before the hidden states have arrived, and may issue other work for the device.
        """
        ...

    def combine(self, output: Tensor, received: Received) -> Tensor:
        """Send output [M, H] back. Returns the sum over ranks for each of the N tokens, [N, H]. Differentiable."""
        ...


class AllToAll(torch.autograd.Function):
    """Send ``send[r]`` rows to rank r and receive ``receive[r]`` from it. Backward is the way back."""

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


class Message:
    """An `exchange` that is started now and finished later; work issued in between runs on the device at the same time.

        link = message.start(rows)
        ...
        rows = message.finish(link)

    Differentiable. Backward starts the way back where forward finished, and waits for it where forward started.
    Autograd runs backward in the reverse order of forward, so the work in between runs in between there as well.
    """

    def __init__(self, send: list[int], receive: list[int], group: dist.ProcessGroup) -> None:
        self.send, self.receive, self.group = send, receive, group
        self._sent: tuple[Any, Tensor, Tensor] | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Send rows. Returns an empty tensor, which connects both ends in autograd's graph."""
        return _Start.apply(rows, self)

    def finish(self, link: Tensor) -> Tensor:
        """Return the received rows."""
        return _Finish.apply(link, self)

    def begin(self, rows: Tensor, send: list[int], receive: list[int]) -> None:
        out, rows = rows.new_empty(sum(receive), *rows.shape[1:]), rows.contiguous()
        work = dist.all_to_all_single(out, rows, receive, send, group=self.group, async_op=True)
        self._sent = work, rows, out  # the rows must not be freed while they are sent

    def end(self) -> Tensor:
        """Make the current stream wait for the message; with gloo, the host. Returns what arrived."""
        assert self._sent is not None
        (work, _, out), self._sent = self._sent, None
        work.wait()
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, message):
        ctx.message = message
        message.begin(rows, message.send, message.receive)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx, grad):
        return ctx.message.end(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, link, message):
        ctx.message = message
        return message.end()

    @staticmethod
    def backward(ctx, grad):
        message = ctx.message
        message.begin(grad, message.receive, message.send)
        return grad.new_empty(0), None


def sum_rows(rows: Tensor, token: Tensor, num_tokens: int, weights: Tensor | None = None) -> Tensor:
    """Sum rows [S, H] by their token, each times its weight [S]: [num_tokens, H]; in float32, rounded once."""
    return _SumRows.apply(rows, token, num_tokens, weights)


class _SumRows(torch.autograd.Function):
    """Only `SUMMED_ROWS` rows are float32 at a time: some families have float32 weights, which would turn all rows and
    their gradients into float32."""

    @staticmethod
    def forward(ctx, rows, token, num_tokens, weights):
        ctx.save_for_backward(token, *(() if weights is None else (rows, weights)))
        sums = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
        for part in _parts(len(rows)):
            values = rows[part].float()
            if weights is not None:
                values = values * weights[part, None]
            sums.index_add_(0, token[part], values)
        return sums.to(rows.dtype)

    @staticmethod
    def backward(ctx, grad):
        token, *weighted = ctx.saved_tensors
        if not weighted:
            return grad[token], None, None, None
        rows, weights = weighted
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        for part in _parts(len(rows)):
            values = grad[token[part]].float()
            grad_weights[part] = (values * rows[part]).sum(-1)
            grad_rows[part] = values.mul_(weights[part, None])
        return grad_rows, None, None, grad_weights


def _parts(num_rows: int) -> list[slice]:
    return [slice(start, start + SUMMED_ROWS) for start in range(0, num_rows, SUMMED_ROWS)]


@dataclass
class WayBack:
    token: Tensor  # [S] the token, of N, of each sent row
    num_tokens: int
    send: list[int]
    receive: list[int]


def read_sizes(counts: Tensor, arriving: Tensor) -> tuple[list[int], list[int], int]:
    """Return the rows to send to and to receive from each rank, and the received pairs of a token and an expert.

    The only wait for the device in a layer. ``counts``, ``arriving`` [R, 2]: rows and pairs for and from each rank.
    """
    (send, _), (receive, num_pairs) = torch.stack([counts, arriving]).mT.tolist()
    return send, receive, sum(num_pairs)


class TorchDispatcher:
    """All-to-all of torch.distributed: gloo, NCCL."""

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int) -> None:
        self.group, self.num_local = group, num_local_experts
        self.num_ranks = dist.get_world_size(group)

    def dispatch(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], None] = nothing
    ) -> Received:
        owner = index // self.num_local  # [N, k] rank of each expert
        is_sent = torch.zeros(self.num_ranks, len(hidden), dtype=torch.bool, device=hidden.device)
        is_sent.t().scatter_(1, owner, True)
        pairs = torch.zeros(self.num_ranks, dtype=torch.int64, device=hidden.device)
        pairs.scatter_add_(0, owner.flatten(), torch.ones_like(owner).flatten())
        counts = torch.stack([is_sent.sum(1), pairs], 1)
        arriving = torch.empty_like(counts)
        sizes: Any = dist.all_to_all_single(arriving, counts, group=self.group, async_op=True)
        # the places of the true values in order of ranks, then tokens; their number is known, `nonzero` would wait
        places = is_sent.flatten().to(torch.uint8).argsort(descending=True, stable=True)
        sizes.wait()
        send, receive, num_pairs = read_sizes(counts, arriving)
        rank, token = (found[: sum(send)] for found in (places // len(hidden), places % len(hidden)))
        states, choices = (Message(send, receive, self.group) for _ in range(2))
        way = WayBack(token, len(hidden), send, receive)
        sent_states = states.start(hidden[token])
        local = index[token] - (rank * self.num_local)[:, None]
        is_local = (local >= 0) & (local < self.num_local)
        local = local.masked_fill(~is_local, self.num_local)
        routed = weights[token].masked_fill(~is_local, 0.0)
        # weights and local numbers of experts in one message; float32 holds both exactly
        sent_choices = choices.start(torch.cat([routed.float(), local.float()], 1))
        meanwhile()  # the device computes while the messages are sent
        hidden, both = states.finish(sent_states), choices.finish(sent_choices)
        num_chosen = index.shape[1]
        routed, local = both[:, :num_chosen].to(weights.dtype), both.detach()[:, num_chosen:].long()
        if not len(hidden):
            # a row that belongs to no expert, so that the experts' weights have a gradient on every rank
            hidden, routed = (
                torch.cat([rows, rows.new_zeros(1, rows.shape[1])]) for rows in (hidden, routed)
            )
            local = local.new_full((1, local.shape[1]), self.num_local)
        return Received(hidden, local, routed, num_pairs, way)

    def combine(self, output: Tensor, received: Received) -> Tensor:
        way: WayBack = received.handle
        back = AllToAll.apply(output[: sum(way.receive)], way.receive, way.send, self.group)
        return sum_rows(back, way.token, way.num_tokens)
