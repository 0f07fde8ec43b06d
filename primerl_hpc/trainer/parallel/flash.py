"""Flash attention over samples of unequal length, with the log-sum-exp of each query.

    segments = packing.segments(window)
    out = flash_attention(query, key, value, sinks, segments, scale)            # [T, heads, D]

`flash_forward` and `flash_backward` call two operators of torch (FlashAttention-2, which needs no other package) or,
after `choose_kernels`, those of an installed FlashAttention-4 or FlashAttention-3. All support attention windows and
grouped key-value heads.

Attention sinks (GPT-OSS) are one more logit in each head's denominator. With o, L the output and log-sum-exp without
them, L' = log(e^L + e^sink) and o' = o · e^(L − L'). The backward kernel computes P = e^(S − L') and P · (P̄ − ⟨ō, o'⟩)
from what it is given, so it returns the gradients of q, k and v with sinks if it is given o' and L'. The gradient of a
sink is −Σ e^(sink − L') · ⟨ō, o'⟩.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primerl_hpc.common.errors import ConfigError

log = logging.getLogger("primerl_hpc.trainer")

MAX_HEAD_WIDTH = 256  # of FlashAttention-2
WIDTH_MULTIPLE = 8
FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn.flash_attn_interface",
    "flash_attention_3": "flash_attn_interface",
}
"""Module that each implementation of `Model.attention` outside torch imports its kernels from."""
FA3_MODULE = FLASH_PACKAGES["flash_attention_3"]
FA4_MODULE = "flash_attn.cute.interface"
HOPPER, BLACKWELL = 9, 10
"""Major compute capabilities."""
FA4_WIDTHS = {HOPPER: range(8, 257), BLACKWELL: range(8, 129)}
"""Widths of heads that FlashAttention-4 computes, by major compute capability."""


@dataclass(frozen=True)
class Segments:
    """Consecutive segments of T concatenated query tokens and T_k key tokens; a query sees keys of its own segment.

    ``is_causal``: the last query and the last key of a segment are the same token, and no query sees a later one.
    ``window``: a query sees the key at its own place, counted from the end of both segments, and ``window`` − 1 keys
    before it; None: all.
    """

    query_bounds: Tensor  # [S + 1] int32, from 0 to T
    key_bounds: Tensor  # [S + 1] int32, from 0 to T_k
    longest_query: int
    longest_key: int
    is_causal: bool = True
    window: int | None = None

    @property
    def visible_before(self) -> int:
        """Number of keys before a query's own place that it sees; −1: all."""
        return -1 if self.window is None else self.window - 1

    @property
    def visible_after(self) -> int:
        return 0 if self.is_causal else -1


class States(NamedTuple):
    """Queries [T, heads, D], keys and values [T_k, kv_heads, D]."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass
class Kernels:
    """Kernels outside torch's operators, chosen once per process; None: torch's."""

    fa4: Any = None  # module of FlashAttention-4
    widths: range = range(0)  # of heads that it computes

    def take(self, states: States) -> bool:
        return self.fa4 is not None and states.query.shape[-1] in self.widths


KERNELS = Kernels()


def fa4_arguments(segments: Segments, scale: float) -> dict[str, Any]:
    """Return what FlashAttention-4's forward and backward need besides tensors of states."""
    has_window = segments.window is not None
    before = segments.visible_before if has_window else None
    return {
        "cu_seqlens_q": segments.query_bounds,
        "cu_seqlens_k": segments.key_bounds,
        "max_seqlen_q": segments.longest_query,
        "max_seqlen_k": segments.longest_key,
        "softmax_scale": scale,
        "causal": segments.is_causal and not has_window,
        "window_size_left": before,
        "window_size_right": segments.visible_after if has_window and segments.is_causal else None,
    }


def flash_forward(states: States, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """Return output [T, heads, D] and log-sum-exps [heads, T] (float32)."""
    if KERNELS.take(states):
        results = KERNELS.fa4._flash_attn_fwd(*states, return_lse=True, **fa4_arguments(segments, scale))
        return results[0], results[1]
    out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        *states,
        segments.query_bounds,
        segments.key_bounds,
        segments.longest_query,
        segments.longest_key,
        0.0,  # dropout
        segments.is_causal and segments.window is None,
        False,  # debug mask
        scale=scale,
        window_size_left=segments.visible_before,
        window_size_right=segments.visible_after,
    )
    return out, log_sums


def flash_backward(
    grad_out: Tensor, states: States, out: Tensor, log_sums: Tensor, segments: Segments, scale: float
) -> States:
    """Return the gradients. ``out`` and ``log_sums`` may cover more keys than ``states`` contain."""
    device = grad_out.device
    if KERNELS.take(states):
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        results = KERNELS.fa4._flash_attn_bwd(
            *states,
            out.contiguous(),
            grad_out.contiguous(),
            log_sums.contiguous(),
            deterministic=is_deterministic,
            **fa4_arguments(segments, scale),
        )
        return States(*results[:3])
    grads = torch.ops.aten._flash_attention_backward(
        grad_out.contiguous(),
        *states,
        out,
        log_sums,
        segments.query_bounds,
        segments.key_bounds,
        segments.longest_query,
        segments.longest_key,
        0.0,
        segments.is_causal and segments.window is None,
        torch.zeros(2, dtype=torch.uint64, device=device),  # state of the random generator: no dropout
        torch.empty(0, device=device),
        scale=scale,
        window_size_left=segments.visible_before,
        window_size_right=segments.visible_after,
    )
    return States(*grads)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments, scale: float
) -> Tensor:
    """Compute attention of [T, heads, D] over [T, kv_heads, D] and [T, kv_heads, D_v]. Returns [T, heads, D_v].

    ``sinks`` [heads] or None. bfloat16 or float16.
    """
    value_width = value.shape[-1]
    width = -(-max(query.shape[-1], value_width) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    query, key, value = (widen(states, width) for states in (query, key, value))
    return _FlashAttention.apply(query, key, value, sinks, segments, scale)[..., :value_width]


def widen(states: Tensor, width: int) -> Tensor:
    """Pad the last dimension with zeros, which change no score."""
    return F.pad(states, (0, width - states.shape[-1])) if states.shape[-1] < width else states


def add_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exps with sinks: [T, heads, D], [heads, T], [heads] → the same shapes."""
    totals = torch.logaddexp(log_sums, sinks.float()[:, None])
    return out * (log_sums - totals).exp().t()[..., None].to(out.dtype), totals


def sink_gradient(grad_out: Tensor, out: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of ``sinks`` from the output and log-sum-exps with sinks."""
    products = (grad_out.float() * out.float()).sum(-1).t()  # [heads, T]
    return -((sinks.float()[:, None] - log_sums).exp() * products).sum(1).to(sinks.dtype)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, segments, scale):
        out, log_sums = flash_forward(States(query, key, value), segments, scale)
        if sinks is not None:
            out, log_sums = add_sinks(out, log_sums, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, sinks, out, log_sums = ctx.saved_tensors
        states = States(query, key, value)
        grads = flash_backward(grad_out, states, out, log_sums, ctx.segments, ctx.scale)
        grad_sinks = None if sinks is None else sink_gradient(grad_out, out, log_sums, sinks)
        return *grads, grad_sinks, None, None


# -- inside compiled graphs ------------------------------------------------------------------------


@torch.library.custom_op("primerl::flash_attention", mutates_args=())
def flash_operator(
    states: list[Tensor], sinks: Tensor | None, samples: list[Tensor], scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """`flash_forward` with sinks as one operator of torch: output and log-sum-exps of query, key and value.

    ``samples``: their bounds, and the tokens of the longest one, on the host. ``window`` 0: none.
    """
    out, log_sums = flash_forward(States(*states), causal_segments(samples, window), scale)
    return (out, log_sums) if sinks is None else add_sinks(out, log_sums, sinks)


@flash_operator.register_fake
def _(states, sinks, samples, scale, window):
    query = states[0]
    return torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@torch.library.custom_op("primerl::flash_attention_backward", mutates_args=())
def flash_backward_operator(
    grad_out: Tensor,
    states: list[Tensor],
    results: list[Tensor],
    samples: list[Tensor],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_backward` as one operator of torch. ``results``: of `flash_operator`."""
    segments = causal_segments(samples, window)
    grads = flash_backward(grad_out, States(*states), results[0], results[1], segments, scale)
    return grads.query, grads.key, grads.value


@flash_backward_operator.register_fake
def _(grad_out, states, results, samples, scale, window):
    query, key, value = (torch.empty_like(part) for part in states)
    return query, key, value


def _keep_for_backward(ctx, inputs, output) -> None:
    states, sinks, samples, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*states, sinks, *output, *samples)


def _flash_gradients(ctx, grad_out, _):
    query, key, value, sinks, out, log_sums, *samples = ctx.saved_tensors
    states, results = [query, key, value], [out, log_sums]
    grads = flash_backward_operator(grad_out, states, results, samples, ctx.scale, ctx.window)
    grad_sinks = None if sinks is None else sink_gradient(grad_out, out, log_sums, sinks)
    return list(grads), grad_sinks, [None] * len(samples), None, None


flash_operator.register_autograd(_flash_gradients, setup_context=_keep_for_backward)


def causal_segments(samples: Sequence[Tensor], window: int) -> Segments:
    bounds, longest = samples[0], int(samples[1])
    return Segments(bounds, bounds, longest, longest, window=window or None)


def compiled_flash_attention(
    states: States, sinks: Tensor | None, samples: Sequence[Tensor], scale: float, window: int | None
) -> Tensor:
    """Return what `flash_attention` returns, without a graph break. ``samples``: see `flash_operator`."""
    value_width = states.value.shape[-1]
    width = -(-max(states.query.shape[-1], value_width) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    padded = [widen(part, width) for part in states]
    out, _ = flash_operator(padded, sinks, list(samples), scale, window or 0)
    return out[..., :value_width]


def choose_kernels(device: torch.device, heads: int, kv_heads: int, width: int) -> str:
    """Choose the fastest kernels that are installed and support the GPU and the model. Returns their name.

    FlashAttention-4 computes on Hopper and Blackwell GPUs and compiles its kernels when they are first used (seconds);
    FlashAttention-3 computes on Hopper.
    """
    KERNELS.fa4 = None
    name = "FlashAttention-2 of torch"
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    if major in FA4_WIDTHS and load_fa4(device, heads, kv_heads, width):
        name = f"FlashAttention-4 ({FA4_MODULE})"
    elif major == HOPPER and activate_fa3():
        name = f"FlashAttention-3 ({FA3_MODULE})"
    log.info("attention: %s", name)
    return name


def load_fa4(device: torch.device, heads: int, kv_heads: int, width: int) -> bool:
    """Use FlashAttention-4 if it is installed and computes a sample of the model's heads."""
    try:
        KERNELS.fa4 = import_module(FA4_MODULE)
    except (ImportError, RuntimeError, OSError) as error:
        log.info("no FlashAttention-4: %s", error)
        return False
    # CuTe DSL warns once per kernel about an argument of the package's own, which it leaves out
    warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)
    KERNELS.widths = FA4_WIDTHS[torch.cuda.get_device_capability(device)[0]]
    try:
        compute_sample(device, heads, kv_heads, -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    except Exception as error:  # noqa: BLE001 a compiler and private functions may raise anything
        log.warning("FlashAttention-4 is installed and not used: %s: %s", type(error).__name__, error)
        KERNELS.fa4 = None
    return KERNELS.fa4 is not None


def compute_sample(device: torch.device, heads: int, kv_heads: int, width: int) -> None:
    """Compute attention of one sample, forward and backward, which compiles the kernels of these heads."""
    query, *rest = (
        torch.zeros(128, each, width, device=device, dtype=torch.bfloat16)
        for each in (heads, kv_heads, kv_heads)
    )
    bounds = torch.tensor([0, len(query)], dtype=torch.int32, device=device)
    states, segments = States(query, *rest), Segments(bounds, bounds, len(query), len(query))
    out, log_sums = flash_forward(states, segments, 1.0)
    flash_backward(query, states, out, log_sums, segments, 1.0)


def activate_fa3() -> bool:
    """Let torch's operators use FlashAttention-3. Returns False if its package cannot be imported."""
    from torch.nn.attention import activate_flash_attention_impl

    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, OSError) as error:
        log.info("no FlashAttention-3: %s", error)
        return False
    return True


def check_flash_package(name: str) -> None:
    """Raise ConfigError if the package of a flash implementation cannot be imported."""
    module = FLASH_PACKAGES[name]
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.attention: {name} requires {module}, which cannot be imported ({error})",
            hint="set it to auto, which needs no other package",
        ) from error
