"""synthetic-rollouts: prompts of random words and random rewards, for ``primerl-hpc bench loop``.

    environments: {train: [{id: synthetic-rollouts, args: {prompt_words: 100}}]}

Sampling decides the length of replies (``max_tokens`` with ``extra: {ignore_eos: true}``). A reward is uniform in
[0, 1], so that almost every group has a training signal.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field


class SyntheticTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def chance(self, trace: vf.Trace) -> float:
        """Return a random number in [0, 1]."""
        return random.random()


class SyntheticConfig(vf.TasksetConfig):
    num_tasks: int = Field(1024, ge=1)
    seed: int = 0
    prompt_words: int = Field(64, ge=1)
    """Words of a prompt, each a letter; most tokenizers need one or two tokens for a word and its space."""


class SyntheticRollouts(vf.Taskset[SyntheticTask, SyntheticConfig]):
    def load(self) -> Iterator[SyntheticTask]:
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_tasks):
            prompt = " ".join(rng.choice(string.ascii_lowercase) for _ in range(self.config.prompt_words))
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            yield SyntheticTask(vf.TaskData(prompt=prompt), self.config.task)  # pyright: ignore[reportCallIssue]


__all__ = ["SyntheticRollouts"]
