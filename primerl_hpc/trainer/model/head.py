"""Log-probabilities and entropy of chosen tokens without holding tokens × vocabulary.

log π(y|h) = z_y − logsumexp(z) with z = W h / T, entropy H = −Σ π log π. Forward and backward process chunks of tokens;
backward recomputes a chunk's π from the values that forward saved (h, W and the log-sum-exp), except the last chunk's,
which it starts with: ∂ log π / ∂z = onehot(y) − softmax(z). Entropy has no gradient.

With tensor parallelism each rank has the logits of a part of the vocabulary. With m = max z, s = Σ exp(z − m) and
u = Σ exp(z − m)(z − m) over all ranks, in float32:

    log π(y) = (z_y − m) − log s        H = log s − u / s

Each rank's gradient of h is that of these logits: a part of a sum over the ranks.

`token_stats` and `logit_gradients` are the same formulas without vocabulary ranks, to be compiled (`FusedHead`): each
reads a chunk's product once or twice and writes only its result. Operation by operation, a chunk is read and written
about 20 times, half of the head's time on a GPU (docs/gpu-path.md).

Some families change logits before the temperature (`LogitForm`): z = c tanh(s (W h + b) / c) / T, whose derivative is
that of plain logits times s (1 − (z T / c)²).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup

CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1536 << 20}
"""Bound of one chunk's float32 logits by type of device. Each chunk reads and writes the gradient of the weight once,
so large chunks cost a GPU less."""
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 64, 8192


@dataclass(frozen=True)
class LogitForm:
    """How logits are made of the head's product: cap · tanh(scale · (W h + b) / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed ``logits``, which are overwritten."""
        if self.scale != 1:
            logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, capped: Tensor) -> Tensor | None:
        """Return the cap's derivative where it returned ``capped``; None without a cap."""
        return None if self.cap is None else (capped / self.cap).square_().neg_().add_(1)


PLAIN = LogitForm()


def auto_chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose float32 logits fill `CHUNK_BYTES`."""
    return min(max(CHUNK_BYTES[device.type] // (4 * vocab_size), MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)


def keeps_float32(tensor: Tensor) -> bool:
    """True if torch multiplies matrices of this type on this device into float32: half types on CUDA."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` in float32. On a GPU it is never rounded to the type of the factors."""
    if keeps_float32(left):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).float()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, float32, in place."""
    if keeps_float32(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def formed_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, form: LogitForm) -> Tensor:
    """Return the logits of ``hidden`` [T, H] before the temperature, [T, V], float32.

    With bfloat16 factors the product stays float32 on a GPU: rounding logits of 20 to bfloat16 changes them by up to
    0.06.
    """
    logits = float32_product(hidden, weight.t())
    return form.apply(logits if bias is None else logits.add_(bias))


def at_temperature(logits: Tensor, temperatures: Tensor | None, part: slice) -> Tensor:
    """Return z = ``logits`` / T of ``part``; ``logits`` are overwritten.

    Dividing h instead would be less work, but rounds differently: entropies then differ by 3e-5.
    """
    return logits if temperatures is None else logits.div_(temperatures[part, None])


def divided_softmax(
    logits: Tensor, targets: Tensor, is_own: Tensor, ranks: TensorGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log π, entropy and log Σ exp z over all ranks, [T], and this rank's probabilities, [T, part].

    ``logits`` [T, part] of this rank, overwritten; ``targets`` [T] index its logits where ``is_own``. Collective.
    """
    maxima = logits.amax(-1)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=ranks.group)
    logits.sub_(maxima[:, None])
    chosen = logits.gather(-1, targets[:, None])[:, 0] * is_own
    probs = logits.exp()
    sums = torch.stack([probs.sum(-1), logits.mul_(probs).sum(-1), chosen])
    dist.all_reduce(sums, group=ranks.group)
    total, product, chosen = sums
    logs = total.log()
    return chosen - logs, logs - product / total, maxima + logs, probs.div_(total[:, None])


def own_targets(targets: Tensor, size: int, ranks: TensorGroup, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the targets [T] as indices of this rank's ``size`` logits, and which of them it has."""
    local = targets - ranks.part_of(vocab_size).start
    return local.clamp(0, size - 1), (local >= 0) & (local < size)


class Tokens(NamedTuple):
    """Targets [T] and temperatures [T] of tokens, or None where all are 1."""

    targets: Tensor
    temperatures: Tensor | None


def changed_logits(
    product: Tensor, temperatures: Tensor | None, bias: Tensor | None, form: LogitForm
) -> tuple[Tensor, Tensor | None]:
    """Return the logits [T, V] of the head's ``product``, which stays as it is, and the slope of their cap or None."""
    logits, slope = product if bias is None else product + bias, None
    logits = logits if form.scale == 1 else logits * form.scale
    if form.cap is not None:
        capped = torch.tanh(logits / form.cap)
        logits, slope = capped * form.cap, 1 - capped.square()
    return logits if temperatures is None else logits / temperatures[:, None], slope


def token_stats(
    product: Tensor, tokens: Tokens, bias: Tensor | None, form: LogitForm
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log π, entropy and log Σ exp z of tokens, [T], from the head's ``product`` [T, V]."""
    logits, _ = changed_logits(product, tokens.temperatures, bias, form)
    maxima = logits.amax(-1, keepdim=True)
    shifted = logits - maxima
    weights = shifted.exp()
    total = weights.sum(-1)
    logs = total.log()
    chosen = shifted.gather(-1, tokens.targets[:, None])[:, 0]
    return chosen - logs, logs - (weights * shifted).sum(-1) / total, maxima[:, 0] + logs


def logit_gradients(
    product: Tensor,
    tokens: Tokens,
    bias: Tensor | None,
    form: LogitForm,
    log_sums: Tensor,
    grad: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the head's ``product`` [T, V] in ``dtype``. ``grad`` [T]: of log π."""
    logits, slope = changed_logits(product, tokens.temperatures, bias, form)
    is_target = torch.arange(logits.shape[1], device=logits.device) == tokens.targets[:, None]
    scaled = grad if tokens.temperatures is None else grad / tokens.temperatures
    grads = scaled[:, None] * (is_target.to(logits.dtype) - (logits - log_sums[:, None]).exp())
    grads = grads if slope is None else grads * slope
    return (grads if form.scale == 1 else grads * form.scale).to(dtype)


class FusedHead(NamedTuple):
    """`token_stats` and `logit_gradients`, compiled."""

    stats: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gradients: Callable[..., Tensor]


def choose_head(recipe: Recipe, device: torch.device) -> FusedHead | None:
    """Return the compiled operations on logits, or None for those in place.

    ``trainer.compile: auto`` compiles on GPUs, for all models; what torch cannot compile then runs as it is.
    """
    wanted = recipe.trainer.compile
    is_compiled = device.type == "cuda" if wanted == "auto" else wanted
    return compile_head(may_fail=wanted == "auto") if is_compiled else None


def compile_head(*, may_fail: bool = False, backend: Any = "inductor") -> FusedHead:
    """Return compiled functions. ``may_fail``: what torch cannot compile runs as it is, with a warning."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = may_fail
    return FusedHead(
        torch.compile(token_stats, backend=backend), torch.compile(logit_gradients, backend=backend)
    )


def any_length(values: Tensor) -> Tensor:
    """Return ``values``, with which functions are compiled for all lengths of the first dim at once."""
    torch._dynamo.maybe_mark_dynamic(values, 0)
    return values


def tokens_of(part: slice, targets: Tensor, temperatures: Tensor | None) -> Tokens:
    """Return copies of a part of the tokens: functions are compiled for the place of a view."""
    own = None if temperatures is None else any_length(temperatures[part].clone())
    return Tokens(any_length(targets[part].clone()), own)


class ChunkedLogprob(torch.autograd.Function):
    """hidden [T, H], weight [V, H], targets [T], temperatures [T] → log-probabilities [T], entropies [T] (float32).

    Temperatures may be None, where all are 1. ``vocabulary``: the ranks that divide it and its size; None: this
    rank has all. All of them pass the same tokens. ``bias`` [V] or None. ``fused``: compiled operations on
    logits; None, or where ranks divide the vocabulary: operations in place.
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        targets,
        temperatures,
        chunk_tokens,
        vocabulary=None,
        bias=None,
        form=PLAIN,
        fused=None,
    ):
        is_own = None
        if vocabulary is not None:
            targets, is_own = own_targets(targets, len(weight), *vocabulary)
        logprobs, entropies, log_sums = (
            torch.empty(len(hidden), device=hidden.device, dtype=torch.float32) for _ in range(3)
        )
        ctx.last_probs = ctx.last_product = None
        ctx.fused = fused if vocabulary is None else None
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            if ctx.fused is not None:
                product = any_length(float32_product(hidden[part], weight.t()))
                logprobs[part], entropies[part], log_sums[part] = ctx.fused.stats(
                    product, tokens_of(part, targets, temperatures), bias, form
                )
                ctx.last_product = product if part.stop >= len(hidden) else None
                del product
                continue
            logits = at_temperature(formed_logits(hidden[part], weight, bias, form), temperatures, part)
            if vocabulary is not None and is_own is not None:
                logprobs[part], entropies[part], log_sums[part], probs = divided_softmax(
                    logits, targets[part], is_own[part], vocabulary[0]
                )
                if part.stop >= len(hidden) and form.cap is None:
                    ctx.last_probs = probs
                del logits, probs
                continue
            chosen = logits.gather(-1, targets[part, None])[:, 0]
            logs = torch.log_softmax(logits, -1)  # one kernel; torch.logsumexp is four, with copies
            logprobs[part] = logs.gather(-1, targets[part, None])[:, 0]
            log_sums[part] = chosen - logprobs[part]
            probs = torch.exp(logs, out=logits)  # reuses memory
            entropies[part] = -logs.mul_(probs).sum(-1)
            if part.stop >= len(hidden) and form.cap is None:
                ctx.last_probs = probs
            del logits, logs, probs  # otherwise they would coexist with the next chunk's
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_sums, is_own, bias)
        ctx.chunk_tokens, ctx.form = chunk_tokens, form
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, *_, bias = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # not with adapters alone
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for start in reversed(range(0, len(hidden), ctx.chunk_tokens)):
            part = slice(start, start + ctx.chunk_tokens)
            chunk = gradients_in_place if ctx.fused is None else fused_gradients
            grad_logits = chunk(ctx, grad, part)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[part])
            del grad_logits  # otherwise it would coexist with the next chunk's
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if bias is not None and grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, None, None, None, None, grad_bias, None, None


def fused_gradients(ctx, grad: Tensor, part: slice) -> Tensor:
    """Return the gradient of a chunk's product, [t, V], in the type of h."""
    hidden, weight, targets, temperatures, log_sums, _, bias = ctx.saved_tensors
    product, ctx.last_product = ctx.last_product, None
    if product is None:
        product = any_length(float32_product(hidden[part], weight.t()))
    tokens = tokens_of(part, targets, temperatures)
    own = (any_length(values[part].clone()) for values in (log_sums, grad.float()))
    return ctx.fused.gradients(product, tokens, bias, ctx.form, *own, hidden.dtype)


def gradients_in_place(ctx, grad: Tensor, part: slice) -> Tensor:
    """Return the gradient of a chunk's product, [t, V], float32, in the memory of its logits."""
    hidden, weight, targets, temperatures, log_sums, is_own, bias = ctx.saved_tensors
    form, slope = ctx.form, None
    probs, ctx.last_probs = ctx.last_probs, None
    if probs is None:
        probs = formed_logits(hidden[part], weight, bias, form)
        slope = form.slope(probs)
        probs = at_temperature(probs, temperatures, part).sub_(log_sums[part, None]).exp_()
    scaled = grad[part].float() if temperatures is None else grad[part].float() / temperatures[part]
    chosen = scaled if is_own is None else scaled * is_own[part]
    grads = probs.mul_(-scaled[:, None])
    grads.scatter_add_(-1, targets[part, None], chosen[:, None])
    if slope is not None:
        grads.mul_(slope)
    return grads if form.scale == 1 else grads.mul_(form.scale)
