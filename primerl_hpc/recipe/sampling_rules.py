"""Sampling parameters that training rollouts may not use.

Engines return log-probabilities of the distribution that they sample from (``--logprobs-mode processed_logprobs``). The
trainer recomputes them from the logits and the temperature only. A parameter that removes, favors or forces tokens
therefore biases the ratio of the two for every token: on-policy with ``top_p: 0.8`` its mean is 0.8, not 1.

    refused_parameter({"top_p": 0.8})  → ("top_p", "it removes tokens, …")
    refused_parameter({"top_p": 1.0})  → None

`REFUSED` and `HARMLESS` cover every field of vLLM's ``SamplingParams``; a unit test compares them with the pinned
version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Refused:
    """Why a sampling parameter is refused, and the values of it that are accepted."""

    reason: str
    without_effect: tuple[Any, ...] = ()
    """Values that have no effect and are accepted; null and empty containers always are."""


_REMOVES = "it removes tokens, so engines would sample from another distribution than the trainer computes"
_SHIFTS = "it changes logits, so engines would sample from another distribution than the trainer computes"
_FORCES = "it forces tokens, so engines would sample from another distribution than the trainer computes"

REFUSED: dict[str, Refused] = {
    "seed": Refused("all rollouts of a group would be alike"),
    "n": Refused("a rollout needs exactly one reply"),
    "top_p": Refused(_REMOVES, (1,)),
    "top_k": Refused(_REMOVES, (0, -1)),
    "min_p": Refused(_REMOVES, (0,)),
    "min_tokens": Refused(_REMOVES, (0,)),  # removes stop tokens until the minimum is reached
    "allowed_token_ids": Refused(_REMOVES),
    "bad_words": Refused(_REMOVES),
    "_bad_words_token_ids": Refused(_REMOVES),
    "structured_outputs": Refused(_REMOVES),
    "repetition_penalty": Refused(_SHIFTS, (1,)),
    "frequency_penalty": Refused(_SHIFTS, (0,)),
    "presence_penalty": Refused(_SHIFTS, (0,)),
    "logit_bias": Refused(_SHIFTS),
    "extra_args": Refused(_SHIFTS),  # only custom logits processors read it
    "thinking_token_budget": Refused(_FORCES),
    "trace_decode_token_ids": Refused(_FORCES),
}

HARMLESS = frozenset(
    {
        "temperature",  # the trainer divides by it as well
        "watermarking",  # acts only with the engine option watermark-config, see REFUSED_ENGINE_OPTIONS
        # These decide when a reply ends, not how its tokens are sampled.
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "repetition_detection",
        # These decide what the response contains.
        "logprobs",
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "output_text_buffer_length",
        "routed_experts_prompt_start",
        # These are internal state.
        "skip_clone",
        "skip_reading_prefix_cache",
        "_eos_token_id",
        "_all_stop_token_ids",
    }
)

REFUSED_ENGINE_OPTIONS = ("logits-processors", "watermark-config")
"""Options of ``vllm serve`` that change logits or sampling of every request."""


def refused_parameter(parameters: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first parameter that training rollouts may not have and the reason, or None if all are allowed."""
    for name, value in parameters.items():
        rule = REFUSED.get(name)
        if rule is not None and value not in (None, [], (), {}, *rule.without_effect):
            return name, rule.reason
    return None


def flat_parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``sampling`` mapping of a verifiers agent with ``extra_body`` merged in, as verifiers does."""
    body = sampling.get("extra_body")
    flat = dict(body) if isinstance(body, Mapping) else {}
    return flat | {name: value for name, value in sampling.items() if name != "extra_body"}
