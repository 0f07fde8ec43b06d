"""reverse-text: the prompt is a word, the answer is the word reversed. Requires no data, network or tools.

    environments: {train: [{id: reverse-text}], eval: [{id: reverse-text, args: {split: test, num_tasks: 64}}]}

Words are drawn with ``seed``. The split of a word depends only on the word, so train and test never share a word,
whatever the seeds and sizes. The reward is the similarity of reply and answer in [0, 1].
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

from primerl_hpc.envs.generated import draw_distinct

_TEST_SHARE = 16  # one of this many words belongs to the test split
_DEFAULT_TASKS = {"train": 8192, "test": 512}
_MAX_DRAWS_PER_TASK = 1000


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @property
    def key(self) -> str:
        """The word itself. The default key would also depend on the position."""
        return str(self.data.prompt)

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        """Return difflib's ratio: 2 M / T, with M letters in matching blocks and T letters in both strings."""
        return SequenceMatcher(None, (trace.last_reply or "").strip(), self.data.answer).ratio()

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: 8192 for train, 512 for test."""
    seed: int = 0
    min_len: int = Field(4, ge=1)
    """Minimum word length in letters."""
    max_len: int = Field(8, ge=1)
    """Maximum word length in letters."""

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> ReverseTextConfig:
        if self.min_len > self.max_len:
            raise ValueError(f"min_len {self.min_len} exceeds max_len {self.max_len}")
        return self


class ReverseText(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> Iterator[ReverseTextTask]:
        for word in draw_words(self.config):
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            data = ReverseTextData(prompt=word, answer=word[::-1])  # pyright: ignore[reportCallIssue]
            yield ReverseTextTask(data, self.config.task)


def draw_words(config: ReverseTextConfig) -> Iterator[str]:
    """Yield distinct words of the split. Raises ValueError if there are not enough words of these lengths."""
    rng = random.Random(config.seed)
    num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]

    def draw() -> str:
        length = rng.randint(config.min_len, config.max_len)
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(length))

    return draw_distinct(
        draw,
        str,
        split=config.split,
        test_share=_TEST_SHARE,
        num_tasks=num_tasks,
        max_draws=_MAX_DRAWS_PER_TASK * num_tasks,
        shortage=f"there are fewer than {num_tasks} distinct {config.split} words with {config.min_len} to "
        f"{config.max_len} letters",
    )


__all__ = ["ReverseText"]
