"""The frozen model of opd and sft_distill: engines of the run, or a server at the recipe's address.

    teacher = TeacherClient(run, recipe.teacher)            # raises ConfigError if the key is missing
    await teacher.check({"opd"}, seq_len=2048, tokenizer=tokenizer)   # raises ConfigError for what would fail later
    await teacher.add_logprobs(rollout, seq_len=2048)       # opd: every sample gets ref_logprobs
    add_samples(rollout, episode, renderer)                 # sft_distill: the teacher's replies in the policy's tokens

opd needs vLLM with the policy's tokenizer; sft_distill works with any chat-completions server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import string
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import TransientIOErrors
from primerl_hpc.orchestrator.rollout_data import Rollout, RolloutFailed, Sample
from primerl_hpc.orchestrator.rollouts.prompt_logprobs import PromptLogprobs
from primerl_hpc.recipe.schema.evaluation import External
from primerl_hpc.recipe.schema.model import Teacher
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import EndpointWatch
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode

logger = logging.getLogger(__name__)

PROBE = string.printable + "Zażółć gęślą jaźń, 漢字 и العربية 🙂"


class TeacherClient:
    """Client of the teacher."""

    def __init__(self, run: RunDir, config: Teacher) -> None:
        """Raise ConfigError if the environment variable for the key is not set."""
        self.run, self.config = run, config
        self.urls = [config.base_url] if config.base_url else []
        self._endpoints = EndpointWatch(run, busy_s=0.0)
        self._turn, self._patience = itertools.count(), TransientIOErrors("the teacher's endpoints")
        keys = None if config.base_url else run_keys(run)
        self._scores = PromptLogprobs(
            config.model.name,
            keys.api_key if keys else config.key(),
            tls=keys.client_context() if keys else None,
            timeout_s=config.timeout_s,
            max_concurrent=config.max_concurrent,
        )

    def refresh(self) -> list[str]:
        """Read the endpoints of the run's own engines: a restarted engine may have another address."""
        if self.config.base_url is None:
            if not self.urls:
                self._endpoints.hurry()
            with self._patience:
                endpoints = self._endpoints.of_role(Role.TEACHER.value).values()
                self.urls = [f"{endpoint['url']}/v1" for endpoint in endpoints]
        return self.urls

    def next_url(self) -> str:
        """Return the engines in turn. Raises RolloutFailed while there is none."""
        if not self.urls:
            raise RolloutFailed("NoTeacher", "the teacher is down", is_engine_fault=True)
        return self.urls[next(self._turn) % len(self.urls)]

    def next_address(self) -> External:
        """Return `next_url` and the environment variable from which environment servers read the key."""
        variable = (
            env.ENGINE_API_KEY if self.config.base_url is None else self.config.key_variable or env.NO_KEY
        )
        return External(base_url=self.next_url(), key_variable=variable, token_limit=self.config.token_limit)

    async def add_logprobs(self, rollout: Rollout, *, seq_len: int) -> None:
        """Set ``ref_logprobs`` [N] of each sample; 0 beyond ``seq_len``, which is not trained.

        Raises RolloutFailed.
        """
        await asyncio.gather(*(self._score(sample, seq_len) for sample in rollout.samples))

    async def _score(self, sample: Sample, seq_len: int) -> None:
        tokens = sample.token_ids[: sample.tokens_within(seq_len)].tolist()
        logprobs = np.zeros(sample.num_tokens, np.float32)
        logprobs[: len(tokens)] = await self._scores.of(self.next_url(), tokens)
        sample.ref_logprobs = np.where(sample.loss_mask, logprobs, np.float32(0))

    async def close(self) -> None:
        await self._scores.close()

    # -- before the first rollout ------------------------------------------------------------------
    async def check(self, algorithms: Collection[str], *, seq_len: int, tokenizer: Any) -> None:
        """Send a few small requests, so that errors appear before the first rollout. ``tokenizer`` is the policy's.

        Raises ConfigError naming the problem: address, key, name, context length, tokenizer, no log-probabilities.
        """
        url = self.next_url()
        try:
            if "sft_distill" in algorithms:
                messages = [{"role": "user", "content": "hi"}]
                body = {"model": self.config.model.name, "messages": messages, self.config.token_limit: 1}
                await self._scores.post(f"{url}/chat/completions", body)
            if "opd" in algorithms:
                await self._check_context(url, seq_len)
                await self._check_tokenizer(url, tokenizer)
                await self._scores.of(url, tokenizer.encode(PROBE, add_special_tokens=False)[: seq_len // 2])
        except (RolloutFailed, httpx.HTTPError) as error:
            needs = "; opd needs vLLM there" if "opd" in algorithms else ""
            raise ConfigError(
                f"{url} cannot be used: {error}",
                location="teacher",
                hint=f"check teacher.base_url, model.name and key_variable{needs}",
            ) from error

    async def _check_context(self, url: str, seq_len: int) -> None:
        """Raise ConfigError unless the context holds a full sample and one more token.

        A server that does not report its context length is accepted.
        """
        try:
            answer = await self._scores.client.get(f"{url}/models")
            models = answer.json()["data"] if answer.status_code == 200 else []
        except (httpx.HTTPError, ValueError, KeyError):
            return  # the other checks show whether the server works
        for model in models:
            context = model.get("max_model_len")
            if model.get("id") == self.config.model.name and context is not None and context <= seq_len:
                raise ConfigError(
                    f"its context of {context} tokens is too small: it must score {seq_len} tokens and sample one more",
                    location="teacher",
                    hint="serve it with a longer context, or lower seq_len",
                )

    async def _check_tokenizer(self, url: str, tokenizer: Any) -> None:
        """Raise ConfigError unless both tokenizers encode a text with all added tokens to the same ids."""
        text = PROBE + "".join(tokenizer.get_added_vocab())
        body = {"model": self.config.model.name, "prompt": text, "add_special_tokens": False}
        answer = await self._scores.client.post(f"{url.removesuffix('/v1')}/tokenize", json=body)
        if answer.status_code in (404, 405):
            logger.warning("%s has no /tokenize: cannot compare its tokenizer with the policy's", url)
            return
        if answer.status_code != 200:
            raise RolloutFailed("TeacherError", f"HTTP {answer.status_code} {answer.text[:200]}")
        remote, local = answer.json()["tokens"], tokenizer.encode(text, add_special_tokens=False)
        if remote != local:
            index = next(
                (i for i, pair in enumerate(zip(remote, local, strict=False)) if pair[0] != pair[1]), -1
            )
            raise ConfigError(
                f"its tokenizer differs from the policy's: {tokenizer.decode(local[index : index + 1])!r} is token "
                f"{local[index]} for the policy and {remote[index]} for the teacher",
                location="teacher.model",
                hint="use a teacher of the policy's model family, or algorithm sft_distill, which accepts any teacher",
            )


def add_samples(rollout: Rollout, episode: Episode[Any, Any, Any], renderer: Any) -> None:
    """Add the episode's branches as samples in the policy's tokens; the loss mask marks the teacher's replies.

    A reply that several branches share is marked in the first of them only. For a reply that was truncated at its
    limit, the end that the template adds is not marked.
    """
    from renderers.base import build_training_sample
    from verifiers.v1.clients.train import tool_to_wire
    from verifiers.v1.dialects.chat import message_to_wire

    traces = [trace for trace in episode.traces if trace.agent.trainable]
    for index, trace in enumerate(traces):
        seen: set[int] = set()
        limited = [call.node for call in trace.calls if call.finish_reason == "length"]
        truncated = {id(trace.nodes[node]) for node in limited if node is not None}
        for branch in trace.branches:
            fresh = [node.sampled and id(node) not in seen for node in branch.nodes]
            seen |= {id(node) for node in branch.nodes}
            if not any(fresh):
                continue
            messages: list[Any] = [message_to_wire(node.message) for node in branch.nodes]
            tools: list[Any] | None = [tool_to_wire(tool) for tool in branch.tools] or None
            rendered = build_training_sample(
                renderer,
                messages,
                tools=tools,
                message_loss_mask=[int(is_fresh) for is_fresh in fresh],
                ensure_final_stop=True,
            )
            mask = np.asarray(rendered.loss_mask, dtype=np.bool_)
            mask[:1] = False  # nothing predicts the first token
            tokens = np.asarray(rendered.token_ids, dtype=np.int32)
            if indices := [index for index, node in enumerate(branch.nodes) if id(node) in truncated]:
                mask &= ~_after_text(renderer, renderer.render(messages, tools=tools), tokens, indices)
            rollout.samples.append(
                Sample(tokens, mask, np.zeros(len(tokens), np.float32), temperature=1.0, trace=index)
            )
    if not rollout.samples:
        raise RolloutFailed("EmptyTrajectory", "the teacher returned no reply")
    rollout.traces = [
        replace(trace, **_lengths([sample for sample in rollout.samples if sample.trace == index]))
        for index, trace in enumerate(rollout.traces)
    ]
    rollout.output_tokens = sum(trace.output_tokens for trace in rollout.traces)
    rollout.input_tokens = sum(trace.input_tokens for trace in rollout.traces)


def _after_text(
    renderer: Any, rendered: Any, tokens: NDArray[np.int32], indices: list[int]
) -> NDArray[np.bool_]:
    """Return a mask [N] of the tokens that follow the text in the messages at ``indices`` and belong to them.

    ``rendered`` may lack the stop token at the end of ``tokens``. If the renderer does not distinguish text from
    template, the mask covers the full messages.
    """
    owner = np.full(len(tokens), max(rendered.message_indices))
    owner[: len(rendered.message_indices)] = rendered.message_indices
    is_text = np.zeros(len(tokens), np.bool_)
    is_text[: len(rendered.is_content)] = rendered.is_content
    is_text &= ~np.isin(tokens, renderer.get_stop_token_ids())
    after_text = np.zeros(len(tokens), np.bool_)
    for index in indices:
        own = np.flatnonzero(owner == index)
        after_text[own] = own > max(own[is_text[own]], default=-1)
    return after_text


def _lengths(samples: list[Sample]) -> dict[str, int]:
    output = sum(int(sample.loss_mask.sum()) for sample in samples)
    return {"output_tokens": output, "input_tokens": sum(sample.num_tokens for sample in samples) - output}
