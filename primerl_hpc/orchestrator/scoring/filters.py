"""Rollout filters: detect bad sampling from the sampled tokens and their log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.orchestrator.rollout_data import Rollout
from primerl_hpc.recipe.schema import selection as selection_schema

Detector = Callable[[Rollout], bool]


def make_filter(config: selection_schema.RolloutFilter, vocab_size: int) -> Detector:
    """Return a function that is true for rollouts that the filter detects."""
    if isinstance(config, selection_schema.Gibberish):
        return lambda rollout: _is_gibberish(rollout, config, vocab_size)
    if isinstance(config, selection_schema.Repetition):
        return lambda rollout: _repeats(rollout, config)
    return lambda rollout: _has_wrong_length(rollout, config)


def _is_gibberish(rollout: Rollout, config: selection_schema.Gibberish, vocab_size: int) -> bool:
    """True if any sampled token has an id > ``token_id_above`` and log μ < -log V - ``logprob_offset``."""
    limit = -log(vocab_size) - config.logprob_offset
    return any(
        bool(
            np.any(sample.loss_mask & (sample.token_ids > config.token_id_above) & (sample.logprobs < limit))
        )
        for sample in rollout.samples
    )


def _repeats(rollout: Rollout, config: selection_schema.Repetition) -> bool:
    """True if ``window`` consecutive sampled tokens each have μ > ``probability_above``."""
    limit = log(config.probability_above) if config.probability_above else -np.inf
    return any(
        longest_run(sample.logprobs[sample.loss_mask] > limit) >= config.window for sample in rollout.samples
    )


def _has_wrong_length(rollout: Rollout, config: selection_schema.Length) -> bool:
    is_long = config.max_tokens is not None and rollout.output_tokens > config.max_tokens
    is_refused_as_truncated = config.truncated and rollout.is_truncated
    return rollout.output_tokens < config.min_tokens or is_long or is_refused_as_truncated


def longest_run(flags: NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
