"""The frozen model of opd and sft_distill: engines of the run's own, or a server at the recipe's address.

    teacher = TeacherClient(run, recipe.teacher)            # raises ConfigError: no key
    await teacher.check({"opd"}, seq_len=2048, tokenizer=tokenizer)   # raises ConfigError: whatever would fail later
    await teacher.add_logprobs(rollout, seq_len=2048)       # opd: every sample gets ref_logprobs
    add_samples(rollout, episode, renderer)                 # sft_distill: the teacher's words as the student's tokens

For opd it is vLLM with the policy's tokenizer; for sft_distill any chat-completions server will do.
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
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.rundir import RunDir, ensure_api_key, read_endpoints
from primerl_hpc.orchestrator.prompt_logprobs import PromptLogprobs
from primerl_hpc.orchestrator.trajectories import Rollout, RolloutFailed, Sample
from primerl_hpc.recipe.evaluation_schema import External
from primerl_hpc.recipe.model_schema import Teacher

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode

logger = logging.getLogger(__name__)

PROBE = string.printable + "Zażółć gęślą jaźń, 漢字 и العربية 🙂"


class TeacherClient:
    def __init__(self, run: RunDir, config: Teacher) -> None:
        """Raises ConfigError when the variable that should hold the key is not set."""
        self.run, self.config = run, config
        self.urls = [config.base_url] if config.base_url else []
        self._turn, self._patience = itertools.count(), Patience("where the teacher is")
        key = config.key() if config.base_url else ensure_api_key(run)
        self._scores = PromptLogprobs(
            config.model.name, key, timeout_s=config.timeout_s, max_concurrent=config.max_concurrent
        )

    def refresh(self) -> list[str]:
        """Look for the run's own engines; a restarted one may have another address."""
        if self.config.base_url is None:
            with self._patience:
                endpoints = read_endpoints(self.run, Role.TEACHER.value).values()
                self.urls = [f"{endpoint['url']}/v1" for endpoint in endpoints]
        return self.urls

    def next_url(self) -> str:
        """The engines in turn. Raises RolloutFailed while there is none."""
        if not self.urls:
            raise RolloutFailed("NoTeacher", "the teacher is down", is_engine_fault=True)
        return self.urls[next(self._turn) % len(self.urls)]

    def next_address(self) -> External:
        """`next_url`, and where an environment server finds the key."""
        variable = (
            env.ENGINE_API_KEY if self.config.base_url is None else self.config.key_variable or env.NO_KEY
        )
        return External(base_url=self.next_url(), key_variable=variable)

    async def add_logprobs(self, rollout: Rollout, *, seq_len: int) -> None:
        """Give each sample ``ref_logprobs`` [N]; what lies beyond ``seq_len`` is not trained, and 0. Raises RolloutFailed."""
        await asyncio.gather(*(self._score(sample, seq_len) for sample in rollout.samples))

    async def _score(self, sample: Sample, seq_len: int) -> None:
        tokens = sample.token_ids[: sample.tokens_within(seq_len)].tolist()
        logprobs = np.zeros(sample.num_tokens, np.float32)
        logprobs[: len(tokens)] = await self._scores.of(self.next_url(), tokens)
        sample.ref_logprobs = np.where(sample.loss_mask, logprobs, np.float32(0))

    async def close(self) -> None:
        await self._scores.close()

    # -- before the first rollout -------------------------------------------------------------------------------------
    async def check(self, algorithms: Collection[str], *, seq_len: int, tokenizer: Any) -> None:
        """A few small requests now are better than a run that fails later. ``tokenizer`` is the policy's.

        Raises ConfigError saying what is wrong: address, key, name, context, tokenizer, no log-probabilities.
        """
        url = self.next_url()
        try:
            if "sft_distill" in algorithms:
                messages = [{"role": "user", "content": "hi"}]
                body = {"model": self.config.model.name, "messages": messages, "max_tokens": 1}
                await self._scores.post(f"{url}/chat/completions", body)
            if "opd" in algorithms:
                await self._check_context(url, seq_len)
                await self._check_tokenizer(url, tokenizer)
                await self._scores.of(url, tokenizer.encode(PROBE, add_special_tokens=False)[: seq_len // 2])
        except (RolloutFailed, httpx.HTTPError) as error:
            needs = "; opd needs vLLM there" if "opd" in algorithms else ""
            raise ConfigError(
                f"{url} cannot be used: {error}",
                place="teacher",
                mend=f"look at teacher.base_url, model.name and key_variable{needs}",
            ) from error

    async def _check_context(self, url: str, seq_len: int) -> None:
        """It must take a whole sample and one token more. A server that does not tell its context is believed."""
        try:
            answer = await self._scores.client.get(f"{url}/models")
            models = answer.json()["data"] if answer.status_code == 200 else []
        except (httpx.HTTPError, ValueError, KeyError):
            return  # whether it works is asked by the requests that matter
        for model in models:
            context = model.get("max_model_len")
            if model.get("id") == self.config.model.name and context is not None and context <= seq_len:
                raise ConfigError(
                    f"its context is {context} tokens, and it is to score {seq_len} and sample one more",
                    place="teacher",
                    mend="serve it with a longer one, or lower seq_len",
                )

    async def _check_tokenizer(self, url: str, tokenizer: Any) -> None:
        """The same text must be the same ids on both sides, added tokens included."""
        text = PROBE + "".join(tokenizer.get_added_vocab())
        body = {"model": self.config.model.name, "prompt": text, "add_special_tokens": False}
        answer = await self._scores.client.post(f"{url.removesuffix('/v1')}/tokenize", json=body)
        if answer.status_code in (404, 405):
            logger.warning("%s has no /tokenize: its tokenizer is not compared with the policy's", url)
            return
        if answer.status_code != 200:
            raise RolloutFailed("TeacherError", f"HTTP {answer.status_code} {answer.text[:200]}")
        theirs, ours = answer.json()["tokens"], tokenizer.encode(text, add_special_tokens=False)
        if theirs != ours:
            place = next(
                (i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), -1
            )
            raise ConfigError(
                f"its tokenizer is not the policy's: {tokenizer.decode(ours[place : place + 1])!r} is token "
                f"{ours[place]} here and {theirs[place]} there",
                place="teacher.model",
                mend="opd needs a teacher of the policy's family; sft_distill takes any",
            )


def add_samples(rollout: Rollout, episode: Episode[Any, Any, Any], renderer: Any) -> None:
    """The episode's paths as samples in the student's tokens; the loss mask marks what the teacher said.

    A reply that several paths share is marked in the first of them only. Of one that was cut off at its limit, the end that
    the template gives it is not marked.
    """
    from renderers.base import build_training_sample
    from verifiers.v1.clients.train import tool_to_wire
    from verifiers.v1.dialects.chat import message_to_wire

    traces = [trace for trace in episode.traces if trace.agent.trainable]
    for index, trace in enumerate(traces):
        seen: set[int] = set()
        limited = [call.node for call in trace.calls if call.finish_reason == "length"]
        cut = {id(trace.nodes[node]) for node in limited if node is not None}
        for branch in trace.branches:
            fresh = [node.sampled and id(node) not in seen for node in branch.nodes]
            seen |= {id(node) for node in branch.nodes}
            if not any(fresh):
                continue
            messages = [message_to_wire(node.message) for node in branch.nodes]
            tools = [tool_to_wire(tool) for tool in branch.tools] or None
            rendered = build_training_sample(
                renderer,
                messages,
                tools=tools,
                message_loss_mask=[int(each) for each in fresh],
                ensure_final_stop=True,
            )
            mask = np.asarray(rendered.loss_mask, dtype=np.bool_)
            mask[:1] = False  # nothing predicts the first token
            tokens = np.asarray(rendered.token_ids, dtype=np.int32)
            if places := [place for place, node in enumerate(branch.nodes) if id(node) in cut]:
                mask &= ~_unsaid(renderer, renderer.render(messages, tools=tools), tokens, places)
            rollout.samples.append(
                Sample(tokens, mask, np.zeros(len(tokens), np.float32), temperature=1.0, trace=index)
            )
    if not rollout.samples:
        raise RolloutFailed("EmptyTrajectory", "the teacher said nothing")
    rollout.traces = [
        replace(trace, **_lengths([sample for sample in rollout.samples if sample.trace == index]))
        for index, trace in enumerate(rollout.traces)
    ]
    rollout.output_tokens = sum(trace.output_tokens for trace in rollout.traces)
    rollout.input_tokens = sum(trace.input_tokens for trace in rollout.traces)


def _unsaid(renderer: Any, rendered: Any, tokens: NDArray[np.int32], places: list[int]) -> NDArray[np.bool_]:
    """What comes after the text of the messages at ``places``, and is theirs. [N], as ``tokens``.

    ``rendered`` may lack the stop token at the end of ``tokens``. Of a renderer that does not tell text from template, the
    whole message.
    """
    owner = np.full(len(tokens), max(rendered.message_indices))
    owner[: len(rendered.message_indices)] = rendered.message_indices
    is_text = np.zeros(len(tokens), np.bool_)
    is_text[: len(rendered.is_content)] = rendered.is_content
    is_text &= ~np.isin(tokens, renderer.get_stop_token_ids())
    unsaid = np.zeros(len(tokens), np.bool_)
    for place in places:
        own = np.flatnonzero(owner == place)
        unsaid[own] = own > max(own[is_text[own]], default=-1)
    return unsaid


def _lengths(samples: list[Sample]) -> dict[str, int]:
    output = sum(int(sample.loss_mask.sum()) for sample in samples)
    return {"output_tokens": output, "input_tokens": sum(sample.num_tokens for sample in samples) - output}
