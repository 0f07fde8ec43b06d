"""reverse-text: the prompt is a word, the answer is the word reversed. Needs no data, no network, no tools.

    environments: {train: [{id: reverse-text}], eval: [{id: reverse-text, args: {split: test, num_tasks: 64}}]}

Words are drawn from ``seed``; which split a word belongs to depends on the word alone, so train and test never share
one, whatever the seeds and sizes. The reward is the similarity of reply and answer in [0, 1].
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator

_TEST_SHARE = 16  # one word in so many belongs to the test split
_DEFAULT_TASKS = {"train": 8192, "test": 512}
_MAX_DRAWS_PER_TASK = 1000


class ReverseTextData(vf.TaskData):
    answer: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    @property
    def key(self) -> str:
        """The word itself: the default would also hash its position."""
        return str(self.data.prompt)

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        """2 M / (letters of both), M the letters in matching blocks (difflib's ratio)."""
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
    """Shortest word, in letters."""
    max_len: int = Field(8, ge=1)

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> ReverseTextConfig:
        if self.min_len > self.max_len:
            raise ValueError(f"min_len {self.min_len} is above max_len {self.max_len}")
        return self


class ReverseText(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    def load(self) -> Iterator[ReverseTextTask]:
        for word in draw_words(self.config):
            yield ReverseTextTask(ReverseTextData(prompt=word, answer=word[::-1]), self.config.task)


def split_of(word: str) -> str:
    return "test" if zlib.crc32(word.encode()) % _TEST_SHARE == 0 else "train"


def draw_words(config: ReverseTextConfig) -> list[str]:
    """Distinct words of the split. Raises ValueError when there are not so many of these lengths."""
    rng = random.Random(config.seed)
    num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]
    words: dict[str, None] = {}
    for _ in range(_MAX_DRAWS_PER_TASK * num_tasks):
        length = rng.randint(config.min_len, config.max_len)
        word = "".join(rng.choice(string.ascii_lowercase) for _ in range(length))
        if split_of(word) == config.split:
            words[word] = None
            if len(words) == num_tasks:
                return list(words)
    raise ValueError(
        f"no {num_tasks} different {config.split} words of {config.min_len} to {config.max_len} letters"
    )


__all__ = ["ReverseText"]
