"""The teacher of opsd: the live policy, given a demonstration of the task that it scores.

    teacher = SelfTeacher(run, recipe, renderer)
    await teacher.add_logprobs(rollout, episode, "The answer is 4.", url="http://n0:8000/v1", version=3)

Only the prompt is rendered again, with the demonstration in its system message. The tokens from the first sampled one
on are the sample's own, so the scores belong to exactly the token ids that are trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.envs.tasks import EnvironmentTask
from primerl_hpc.orchestrator.rollout_data import Rollout, RolloutFailed, Sample
from primerl_hpc.orchestrator.rollouts.prompt_logprobs import PromptLogprobs
from primerl_hpc.orchestrator.rollouts.trajectories import trained_branches
from primerl_hpc.recipe.schema.algorithm import OPSD
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode
    from verifiers.v1.trace import Branch


class SelfTeacher:
    """Scores samples with the live policy."""

    def __init__(self, run: RunDir, recipe: Recipe, renderer: Any) -> None:
        self.renderer, self.seq_len = renderer, recipe.seq_len
        self.max_tokens = recipe.max_model_len - 1  # vLLM samples one more token
        keys = run_keys(run)
        self._scores = PromptLogprobs(recipe.policy_name, keys.api_key, tls=keys.client_context())

    async def add_logprobs(
        self,
        rollout: Rollout,
        episode: Episode[Any, Any, Any],
        text: str,
        *,
        url: str,
        version: int,
    ) -> None:
        """Set ``ref_logprobs`` [N] of each sample, scored by the live ``version`` with ``text`` in its system message.

        Raises RolloutFailed.
        """
        salt = f"{env.instance_id()}.{version}"
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        branches = [path.branch for trace in traces for path in trained_branches(trace)]
        pairs = zip(rollout.samples, branches, strict=True)
        await asyncio.gather(*(self._score(sample, branch, text, url, salt) for sample, branch in pairs))

    async def _score(self, sample: Sample, branch: Branch, text: str, url: str, salt: str) -> None:
        first = branch.sampled_mask.index(True)
        prompt = demonstrated_prompt(self.renderer, branch, text)
        end = sample.tokens_within(self.seq_len)  # later tokens are not trained
        tokens = prompt + sample.token_ids[first:end].tolist()
        if len(tokens) > self.max_tokens:
            raise RolloutFailed(
                "TooLong",
                f"with its demonstration the sample has {len(tokens)} tokens, "
                f"but engines score at most {self.max_tokens}; raise inference.max_model_len",
            )
        scores = await self._scores.of(url, tokens, cache_salt=salt)
        logprobs = np.zeros(sample.num_tokens, np.float32)
        logprobs[first:end] = scores[len(prompt) :]
        sample.ref_logprobs = np.where(sample.loss_mask, logprobs, np.float32(0))

    async def close(self) -> None:
        await self._scores.close()


def demonstrated_prompt(renderer: Any, branch: Branch, text: str) -> list[int]:
    """Return the tokens before the first sampled one, with ``text`` at the beginning of the system message."""
    from verifiers.v1.clients.train import tool_to_wire
    from verifiers.v1.dialects.chat import message_to_wire

    before = takewhile(lambda node: not any(node.mask), branch.nodes)
    messages = [message_to_wire(node.message) for node in before]
    if messages and messages[0]["role"] == "system":
        text = f"{text}\n\n{messages.pop(0)['content']}"
    tools = [tool_to_wire(tool) for tool in branch.tools] or None
    system = {"role": "system", "content": text}
    return list(renderer.render_ids([system, *messages], tools=tools, add_generation_prompt=True))


def check_demonstrations(config: OPSD, environment: str, tasks: Iterable[EnvironmentTask]) -> None:
    """Raise DataError naming the first task without a demonstration."""
    for task in tasks:
        if task.data.get(config.demo_key) is None:
            known = ", ".join(sorted(task.data))
            raise DataError(
                f"task '{task.key}' has no '{config.demo_key}', the demonstration that opsd needs",
                location=f"environment {environment}",
                hint=f"set demo_key of the algorithm to one of: {known}",
            )
