"""DeepEP behind the dispatcher's interface: its kernels move tokens over NVLink and RDMA (github.com/deepseek-ai/DeepEP, `Buffer`).

Installed by hand, imported here alone. Hidden states must be bfloat16, routing weights travel as float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.parallel.dispatch import Received


def import_deep_ep() -> Any:
    """Raises ConfigError where DeepEP cannot work."""
    try:
        import deep_ep
    except ImportError as error:
        raise ConfigError(
            f"layout.trainer.expert_backend is deepep, but DeepEP is not installed here ({error})",
            mend="install DeepEP for this torch and CUDA, or set it to torch",
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            "layout.trainer.expert_backend is deepep, but there is no GPU", mend="set it to torch"
        )
    return deep_ep


class DeepEPDispatcher:
    """One for all layers, with one communication buffer, made when the first tokens tell their width."""

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int) -> None:
        self.deep_ep = import_deep_ep()
        self.group, self.num_local = group, num_local_experts
        self.num_experts = num_local_experts * dist.get_world_size(group)
        self.buffer: Any = None

    def dispatch(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Received:
        if self.buffer is None:
            self.buffer = self._make_buffer(hidden.shape[1] * hidden.element_size())
        hidden, local, routed, num_pairs, handle = _Dispatch.apply(
            hidden, index, weights.float(), self.buffer, self.num_experts
        )
        is_elsewhere = local < 0
        local = local.masked_fill(is_elsewhere, self.num_local)
        routed = routed.masked_fill(is_elsewhere, 0.0)  # nor does a gradient come back from there
        if not len(hidden):
            # as in TorchDispatcher: a row for nobody
            hidden, routed = (
                torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in (hidden, routed)
            )
            local = local.new_full((1, local.shape[1]), self.num_local)
            return Received(hidden, local, routed, 0, (handle, 0))
        return Received(hidden, local, routed, num_pairs, (handle, len(hidden)))

    def combine(self, output: Tensor, received: Received) -> Tensor:
        handle, num_rows = received.handle
        return _Combine.apply(output[:num_rows], self.buffer, handle)

    def _make_buffer(self, row_bytes: int) -> Any:
        size, kind = dist.get_world_size(self.group), self.deep_ep.Buffer
        configs = [kind.get_dispatch_config(size), kind.get_combine_config(size)]
        nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in configs)
        return kind(self.group, nvlink, rdma)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, index, weights, buffer, num_experts):
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(index, num_experts)
        hidden, index, weights, num_of_expert, handle, _ = buffer.dispatch(
            hidden,
            topk_idx=index,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(index)
        return hidden, index, weights, sum(num_of_expert), handle

    @staticmethod
    def backward(ctx, grad_hidden, _, grad_weights, *__):
        grad_hidden, grad_weights, _ = ctx.buffer.combine(
            grad_hidden.contiguous(), ctx.handle, topk_weights=grad_weights.float()
        )
        return grad_hidden, None, grad_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, _ = buffer.combine(output.contiguous(), handle)
        return combined

    @staticmethod
    def backward(ctx, grad):
        grad, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)
        return grad, None, None
