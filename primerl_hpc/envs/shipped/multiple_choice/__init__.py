r"""multiple-choice: questions with one right answer among several, from a file or a dataset (GPQA, MMLU-Pro, ARC, …).

    environments: {eval: [{id: multiple-choice, args: {file: /data/questions.jsonl}}]}
    environments:
      eval:
        - id: multiple-choice
          args: {dataset: Idavidrein/gpqa, subset: gpqa_diamond, question_field: Question, answer_field: Correct Answer,
                 wrong_fields: [Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3]}

A row has a question, its right answer, and wrong answers in fields of their own or in one list. The order of the
choices is drawn with ``seed`` and the question, so that it is the same in every run. The reward is 1 if the last
letter in ``\boxed{}`` or after "answer" is that of the right choice.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, model_validator

from primerl_hpc.common.files import read_user_rows

_PROMPT = "{}\n\n{}\n\nThink step by step, then give the letter of the right choice in \\boxed{{}}."
_LETTER = re.compile(
    r"\\boxed\{\s*(?:\\text\{)?\(?([A-Za-z])\)?\}?\s*\}|\b(?i:answer)(?:\s+is)?\s*:?\s*\**\(?([A-Z])\b"
)


class ChoiceData(vf.TaskData):
    answer: str
    """Letter of the right choice."""


class ChoiceTask(vf.Task[ChoiceData]):
    @property
    def key(self) -> str:
        return str(self.data.prompt)

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(letter_of(trace.last_reply or "") == self.data.answer)

    @vf.metric
    async def has_letter(self, trace: vf.Trace) -> float:
        return float(letter_of(trace.last_reply or "") is not None)


class ChoiceConfig(vf.TasksetConfig):
    file: str | None = None
    """JSON Lines with a question in each line."""
    dataset: str | None = None
    """Dataset of the Hugging Face hub, or a folder that `datasets.load_dataset` reads."""
    subset: str | None = None
    dataset_split: str = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: all rows."""
    seed: int = 0
    question_field: str = "question"
    answer_field: str = "answer"
    """Field with the text of the right answer."""
    wrong_fields: list[str] = Field(default_factory=lambda: ["wrong"], min_length=1)
    """Fields with wrong answers, each a text or a list of texts."""

    @model_validator(mode="after")
    def _has_one_source(self) -> ChoiceConfig:
        if (self.file is None) == (self.dataset is None):
            raise ValueError("set either file or dataset")
        return self


class MultipleChoice(vf.Taskset[ChoiceTask, ChoiceConfig]):
    def load(self) -> Iterator[ChoiceTask]:
        for number, row in enumerate(self._rows()):
            if number == self.config.num_tasks:
                return
            prompt, answer = self._prompt_of(number + 1, row)
            data = ChoiceData.model_validate({"prompt": prompt, "answer": answer})
            yield ChoiceTask(data, self.config.task)

    def _rows(self) -> Iterator[Any]:
        if self.config.file is not None:
            return read_user_rows(Path(self.config.file))
        from datasets import load_dataset

        assert self.config.dataset is not None  # validated with the config
        return iter(load_dataset(self.config.dataset, self.config.subset, split=self.config.dataset_split))

    def _prompt_of(self, number: int, row: Any) -> tuple[str, str]:
        """Return prompt and right letter. Raises ValueError for a row without question, answer or wrong answers.

        A wrong answer that is null is none: Arrow fills the fields that a row does not have with null.
        """
        config, source = self.config, self.config.file or self.config.dataset
        for name in (config.question_field, config.answer_field, *config.wrong_fields):
            if not isinstance(row, dict) or name not in row:
                raise ValueError(f"{source}: row {number} has no field {name}")
            if row[name] is None and name not in config.wrong_fields:
                raise ValueError(f"{source}: row {number} has null in field {name}")
        question, right = (str(row[name]).strip() for name in (config.question_field, config.answer_field))
        values = (row[name] for name in config.wrong_fields)
        wrong = [
            str(text).strip()
            for value in values
            for text in (value if isinstance(value, list) else [value])
            if text is not None
        ]
        choices = [right, *wrong]
        if not 2 <= len(choices) <= len(string.ascii_uppercase) or right in wrong:
            raise ValueError(
                f"{source}: row {number} needs 1 to 25 wrong answers that differ from the right one"
            )
        random.Random(f"{config.seed} {question}").shuffle(choices)
        letters = dict(zip(string.ascii_uppercase, choices, strict=False))
        lines = "\n".join(f"{letter}) {choice}" for letter, choice in letters.items())
        return _PROMPT.format(question, lines), next(
            key for key, choice in letters.items() if choice == right
        )


def letter_of(reply: str) -> str | None:
    """Return the last letter that the reply gives as its answer; None without one."""
    found = _LETTER.findall(reply)
    return (found[-1][0] or found[-1][1]).upper() if found else None


__all__ = ["MultipleChoice"]
