"""DeepEP (github.com/deepseek-ai/DeepEP, `Buffer`) as a dispatcher: its kernels move tokens over NVLink and RDMA.

``tools/install-deepep`` installs it, and it is imported only here. Hidden states must be bfloat16; routing weights are
sent as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.parallel.dispatch import Received, nothing


def import_deep_ep() -> Any:
    """Return the module. Raises ConfigError if DeepEP is not installed or cannot be imported, or there is no GPU."""
    if find_spec("deep_ep") is None:
        raise ConfigError(
            "layout.trainer.expert_backend is deepep, but DeepEP is not installed here",
            hint="install it with tools/install-deepep, or set it to torch",
        )
    try:
        deep_ep = import_module("deep_ep")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"layout.trainer.expert_backend is deepep, but the installed DeepEP cannot be imported ({error})",
            hint="add the folder lib of NVSHMEM to LD_LIBRARY_PATH, build it again with tools/install-deepep for this "
            "torch, or set it to torch",
        ) from error
    if not hasattr(deep_ep, "Buffer"):
        raise ConfigError(
            "layout.trainer.expert_backend is deepep, but the installed deep_ep has no class Buffer: PyPI's package of "
            "this name, and later versions of DeepEP, have another interface",
            hint="install the pinned version with tools/install-deepep, or set it to torch",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "layout.trainer.expert_backend is deepep, but there is no GPU", hint="set it to torch"
        )
    return deep_ep


class DeepEPDispatcher:
    """One dispatcher for all layers, with one communication buffer, allocated for the width of the first tokens.

    Raises ConfigError for a number of ranks for which DeepEP has no settings.
    """

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int) -> None:
        self.deep_ep = import_deep_ep()
        self.group, self.num_local = group, num_local_experts
        size, buffer_class = dist.get_world_size(group), self.deep_ep.Buffer
        try:
            self.configs = [buffer_class.get_dispatch_config(size), buffer_class.get_combine_config(size)]
        except AssertionError as error:
            raise ConfigError(
                f"layout.trainer.expert_backend is deepep, which cannot distribute experts over {size} ranks ({error})",
                hint="set layout.trainer.expert_parallel to 2, 4, 8, 16 or 32, or expert_backend to torch",
            ) from error
        self.num_experts = num_local_experts * dist.get_world_size(group)
        self.buffer: Any = None

    def dispatch(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], None] = nothing
    ) -> Received:
        if self.buffer is None:
            self.buffer = self._make_buffer(hidden.shape[1] * hidden.element_size())
        meanwhile()
        hidden, local, routed, num_pairs, handle = _Dispatch.apply(
            hidden, index, weights.float(), self.buffer, self.num_experts
        )
        is_elsewhere = local < 0
        local = local.masked_fill(is_elsewhere, self.num_local)
        routed = routed.masked_fill(is_elsewhere, 0.0)  # so that it has no gradient either
        if not len(hidden):
            # as in TorchDispatcher: a row that belongs to no expert
            hidden, routed = (
                torch.cat([rows, rows.new_zeros(1, rows.shape[1])]) for rows in (hidden, routed)
            )
            local = local.new_full((1, local.shape[1]), self.num_local)
            return Received(hidden, local, routed, 0, (handle, 0))
        return Received(hidden, local, routed, num_pairs, (handle, len(hidden)))

    def combine(self, output: Tensor, received: Received) -> Tensor:
        handle, num_rows = received.handle
        return _Combine.apply(output[:num_rows], self.buffer, handle)

    def _make_buffer(self, row_bytes: int) -> Any:
        size = dist.get_world_size(self.group)
        nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, size) for config in self.configs)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, size) for config in self.configs)
        return self.deep_ep.Buffer(self.group, nvlink, rdma)


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
