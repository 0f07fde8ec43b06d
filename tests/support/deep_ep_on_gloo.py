"""DeepEP's `Buffer` on any backend of torch.distributed, with the documented interface and without its kernels.

Each rank gathers all tokens and keeps its own. Source: github.com/deepseek-ai/DeepEP, `deep_ep/buffer.py`, normal
kernels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes > 0
        self.group, self.rank, self.size = group, group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple:
        check(topk_idx, torch.int64)
        chosen = torch.zeros(len(topk_idx), num_experts, dtype=torch.bool).scatter_(1, topk_idx, True)
        is_in_rank = chosen.view(len(topk_idx), self.size, -1).any(-1)
        return is_in_rank.sum(0).int(), None, chosen.sum(0).int(), is_in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple:
        """Return rows in order of ranks, then tokens; experts of other ranks are -1 with weight 0."""
        check(x, torch.bfloat16)
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return self._rows_for_me(x, handle[0]), None, None, None, None, None
        check(topk_idx, torch.int64)
        check(topk_weights, torch.float32)
        assert len(num_tokens_per_rank) == self.size and num_tokens_per_rdma_rank is None
        everyones = self._gather(is_token_in_rank)
        num_local = len(num_tokens_per_expert) // self.size
        index = self._rows_for_me(topk_idx, everyones) - self.rank * num_local
        index = index.where((index >= 0) & (index < num_local), -1)
        weights = self._rows_for_me(topk_weights, everyones).where(index >= 0, 0)
        counts = [int((index == expert).sum()) for expert in range(num_local)]
        return self._rows_for_me(x, everyones), index, weights, counts, (everyones,), None

    def combine(self, x: Tensor, handle: tuple, topk_weights: Tensor | None = None) -> tuple:
        """Return the sums, in float32, of the returned rows of each of this rank's tokens."""
        check(x, torch.bfloat16)
        if topk_weights is None:
            return self._sum_of_mine(x, handle[0]), None, None
        check(topk_weights, torch.float32)
        return self._sum_of_mine(x, handle[0]), self._sum_of_mine(topk_weights, handle[0]), None

    def _gather(self, value: Tensor) -> list[Tensor]:
        everyones: list = [None] * self.size
        dist.all_gather_object(everyones, value.detach(), group=self.group)
        return everyones

    def _rows_for_me(self, rows: Tensor, is_in_rank: list[Tensor]) -> Tensor:
        pairs = zip(self._gather(rows), is_in_rank, strict=True)
        return torch.cat([theirs[is_in[:, self.rank]] for theirs, is_in in pairs])

    def _sum_of_mine(self, rows: Tensor, is_in_rank: list[Tensor]) -> Tensor:
        mine = is_in_rank[self.rank]
        total = torch.zeros(len(mine), rows.shape[1])
        for rank, theirs in enumerate(self._gather(rows)):
            start = sum(int(is_in[:, rank].sum()) for is_in in is_in_rank[: self.rank])
            total[mine[:, rank]] += theirs[start : start + int(mine[:, rank].sum())].float()
        return total.to(rows.dtype)


def check(value: Tensor | None, dtype: torch.dtype) -> None:
    """Assert what the kernels require of a tensor."""
    assert value is not None and value.ndim == 2 and value.is_contiguous() and value.dtype == dtype
