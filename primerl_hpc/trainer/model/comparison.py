"""Compare the trainer with transformers on the run's own weights: a family that no test compares is trained after it.

    compare(policy, recipe)      # ConfigError with both figures if they differ. Collective

Samples of random tokens share a row in the trainer; transformers computes each alone, with its own attention, masks and
head, in the same sharded modules. Compared are log-probabilities and the gradient of their sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.batch import ForwardInputs
from primerl_hpc.trainer.model.policy import Policy
from primerl_hpc.trainer.parallel.mesh import to_local

LENGTHS = (43, 2, 18)
"""Tokens of the samples."""
LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.2), "float16": (0.02, 0.1)}
"""By `trainer.param_dtype`: mean difference of log-probabilities, difference of gradients relative to their norm."""
log = logging.getLogger("primerl_hpc.trainer")


def compare(policy: Policy, recipe: Recipe) -> None:
    """Raise ConfigError if the trainer computes something else than transformers, or this cannot be compared."""
    family, hint = policy.hf.config.model_type, "model.accept_uncompared: true trains it all the same"
    if policy.context.size * policy.context.tensor.size > 1:
        raise ConfigError(
            f"no test compares family {family} with transformers, and the start compares it only if ranks share "
            "neither rows nor matrices",
            hint="set layout.trainer.context_parallel and tensor_parallel to 1; " + hint,
        )
    device = next(policy.parameters()).device
    generator = torch.Generator().manual_seed(recipe.seed)
    vocabulary = policy.hf.config.get_text_config().vocab_size
    samples = [torch.randint(vocabulary, (size,), generator=generator).to(device) for size in LENGTHS]
    try:
        own, own_gradients = gradients_of(policy, packed_logprobs, [samples])
        with plain_attention(policy.hf.config.get_text_config()):
            plain, gradients = gradients_of(policy, plain_logprobs, samples)
    except Exception as error:
        raise ConfigError(
            f"family {family} cannot be compared with transformers: {type(error).__name__}: {error}",
            hint=hint,
        ) from error
    policy.routing.reset()
    difference = (own - plain).abs().mean().item()
    parts = [(a - b).square().sum() for a, b in zip(own_gradients, gradients, strict=True)]
    totals = torch.stack([torch.stack(parts).sum(), torch.stack([g.square().sum() for g in gradients]).sum()])
    dist.all_reduce(totals)
    relative = (totals[0] / totals[1]).sqrt().item()
    figures = (
        f"log-probabilities differ by {difference:.2g} on average, gradients by {relative:.2g} of their norm"
    )
    limits = LIMITS[recipe.trainer.param_dtype]
    if not (difference <= limits[0] and relative <= limits[1]):
        raise ConfigError(
            f"the trainer computes something else than transformers for family {family}: {figures}; "
            f"at most {limits[0]:g} and {limits[1]:g} are expected",
            hint=hint,
        )
    log.info("family %s, which no test compares, equals transformers: %s", family, figures)


def gradients_of(
    policy: Policy, forward: Callable[[Policy, Any], Tensor], inputs: Iterable[Any]
) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities of ``forward`` for each input, and this rank's part of their sum's gradients.

    The policy's gradients are cleared.
    """
    logprobs = []
    for each in inputs:
        logprobs.append(forward(policy, each))
        logprobs[-1].sum().backward()
    found = [to_local(each.grad).float() for each in policy.parameters() if each.grad is not None]
    policy.zero_grad()
    return torch.cat(logprobs).detach(), found


def packed_logprobs(policy: Policy, samples: list[Tensor]) -> Tensor:
    """Return the trainer's log-probabilities of all tokens but the first of each sample, in one row."""
    ids = torch.cat(samples)
    positions = torch.cat([torch.arange(len(sample), device=ids.device) for sample in samples])
    targets = (positions > 0).nonzero()[:, 0]
    inputs = ForwardInputs(
        input_ids=ids[None], position_ids=positions[None], predictors=targets - 1, targets=ids[targets]
    )
    return policy(inputs)[0]


def plain_logprobs(policy: Policy, ids: Tensor) -> Tensor:
    """Return transformers' log-probabilities of the tokens ``ids`` [N] but the first."""
    logits: Tensor = policy(ids[None])
    return logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@contextmanager
def plain_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Let the model use transformers' attention and masks. ``config``: the text configuration."""
    own = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = own
