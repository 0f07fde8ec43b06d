"""Log-probabilities and entropy of chosen tokens without ever holding tokens × vocabulary.

log π(y|h) = z_y − logsumexp(z) with z = W h / T, entropy H = −Σ π log π. Forward and backward go
over chunks of tokens; backward recomputes a chunk's π from what forward kept (h, W and the log-sum-exp), all but that of the
last chunk, which it begins with: ∂ log π / ∂z = onehot(y) − softmax(z). Entropy carries no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 256 << 20  # bound of one chunk's float32 logits
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 64, 8192


def auto_chunk_tokens(vocab_size: int) -> int:
    """Tokens whose float32 logits fill `CHUNK_BYTES`."""
    return min(max(CHUNK_BYTES // (4 * vocab_size), MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)


def scaled_logits(hidden: Tensor, weight: Tensor, temperatures: Tensor | None, part: slice) -> Tensor:
    """z = W h / T of ``part`` [T, V], float32. Dividing h is less work, but rounds otherwise: entropies then differ by 3e-5."""
    logits = F.linear(hidden[part], weight).float()
    return logits if temperatures is None else logits.div_(temperatures[part, None])


class ChunkedLogprob(torch.autograd.Function):
    """hidden [T, H], weight [V, H], targets [T], temperatures [T] → log-probabilities [T], entropies [T] (float32).

    Temperatures may be None, where all are 1.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, chunk_tokens):
        logprobs, entropies, log_sums = (
            torch.empty(len(hidden), device=hidden.device, dtype=torch.float32) for _ in range(3)
        )
        ctx.last_probs = None
        for start in range(0, len(hidden), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = scaled_logits(hidden, weight, temperatures, part)
            chosen = logits.gather(-1, targets[part, None])[:, 0]
            logs = torch.log_softmax(logits, -1)  # one kernel; torch.logsumexp is four, with copies
            logprobs[part] = logs.gather(-1, targets[part, None])[:, 0]
            log_sums[part] = chosen - logprobs[part]
            probs = torch.exp(logs, out=logits)  # in memory that is there already
            entropies[part] = -logs.mul_(probs).sum(-1)
            if part.stop >= len(hidden):
                ctx.last_probs = probs
            del logits, logs, probs  # what is no more needed would live beside the next chunk's
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_sums)
        ctx.chunk_tokens = chunk_tokens
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, temperatures, log_sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # not with adapters alone
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        probs, ctx.last_probs = ctx.last_probs, None
        scaled = grad.float() if temperatures is None else grad.float() / temperatures
        for start in reversed(range(0, len(hidden), ctx.chunk_tokens)):
            part = slice(start, start + ctx.chunk_tokens)
            if probs is None:
                logits = scaled_logits(hidden, weight, temperatures, part)
                probs = logits.sub_(log_sums[part, None]).exp_()
            grad_logits, probs = probs.mul_(-scaled[part, None]), None
            grad_logits.scatter_add_(-1, targets[part, None], scaled[part, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is None:
                continue
            if hidden.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.t(), hidden[part])
            else:
                grad_weight += grad_logits.t() @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
