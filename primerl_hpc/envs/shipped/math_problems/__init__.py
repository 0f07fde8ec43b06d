r"""math-problems: school mathematics with exact answers in ``\boxed{}``, checked by math-verify. Requires no network.

    environments: {train: [{id: math-problems, args: {kinds: [linear, fractions]}}]}
    environments: {train: [{id: math-problems, args: {file: /data/problems.jsonl}}]}
    environments: {train: [{id: math-problems, args: {dataset: PrimeIntellect/Hendrycks-Math, dataset_split: train}}]}

Problems are generated from ``seed``, or read from a file or a dataset with a problem and an answer in each row. The
split of a generated problem depends only on its text. The reward is 1 if the answer equals the expected one as a
mathematical expression: ``0.5`` and ``\frac{1}{2}`` are equal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator
from verifiers.v1.utils.score import verify_boxed_math_answer

from primerl_hpc.common.files import read_user_rows
from primerl_hpc.envs.generated import draw_distinct

_TEST_SHARE = 8  # one of this many problems belongs to the test split
_DEFAULT_TASKS = {"train": 8192, "test": 512}
_MAX_DRAWS_PER_TASK = 100
Kind = Literal["linear", "quadratic", "fractions", "power", "derivative", "system", "distance", "choose"]
_PROMPT = "{}\nPut the final answer in \\boxed{{}}."


class MathData(vf.TaskData):
    answer: str


class MathTask(vf.Task[MathData]):
    @property
    def key(self) -> str:
        return str(self.data.prompt)

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return verify_boxed_math_answer(trace.last_reply, self.data.answer)

    @vf.metric
    async def has_box(self, trace: vf.Trace) -> float:
        return float("\\boxed{" in (trace.last_reply or ""))


class MathConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: 8192 for train, 512 for test; all rows of a file or dataset."""
    seed: int = 0
    kinds: list[Kind] = Field(default_factory=lambda: list(KINDS), min_length=1)
    """Kinds of generated problems."""
    file: str | None = None
    """JSON Lines with a problem and an answer in each line."""
    dataset: str | None = None
    """Dataset of the Hugging Face hub, or a folder that `datasets.load_dataset` reads."""
    dataset_split: str = "train"
    problem_field: str = "problem"
    answer_field: str = "answer"

    @model_validator(mode="after")
    def _has_one_source(self) -> MathConfig:
        if self.file is not None and self.dataset is not None:
            raise ValueError("file and dataset exclude each other")
        return self


class MathProblems(vf.Taskset[MathTask, MathConfig]):
    def load(self) -> Iterator[MathTask]:
        config = self.config
        for number, (problem, answer) in enumerate(self._problems()):
            if number == config.num_tasks:
                return
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            data = MathData(  # pyright: ignore[reportCallIssue]
                prompt=prompt_of(problem), answer=answer
            )
            yield MathTask(data, config.task)

    def _problems(self) -> Iterator[tuple[str, str]]:
        if self.config.file is not None:
            return self._rows(read_user_rows(Path(self.config.file)))
        if self.config.dataset is not None:
            from datasets import load_dataset

            return self._rows(iter(load_dataset(self.config.dataset, split=self.config.dataset_split)))
        return generate(self.config)

    def _rows(self, rows: Iterator[Any]) -> Iterator[tuple[str, str]]:
        """Yield problem and answer of each row. Raises ValueError for a row without them."""
        source = self.config.file or self.config.dataset
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"{source}: row {number} is not a JSON object with a problem and an answer")
            fields = (self.config.problem_field, self.config.answer_field)
            missing = [name for name in fields if row.get(name) is None]
            if missing:
                raise ValueError(
                    f"{source}: row {number} has no field {missing[0]}; set problem_field and answer_field"
                )
            problem, answer = (str(row[name]) for name in fields)
            yield problem, answer


def prompt_of(problem: str) -> str:
    return _PROMPT.format(problem)


def generate(config: MathConfig) -> Iterator[tuple[str, str]]:
    """Yield distinct problems of the split. Raises ValueError if there are not enough."""
    rng = random.Random(config.seed)
    num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]
    return draw_distinct(
        lambda: KINDS[rng.choice(config.kinds)](rng),
        lambda drawn: drawn[0],
        split=config.split,
        test_share=_TEST_SHARE,
        num_tasks=num_tasks,
        max_draws=_MAX_DRAWS_PER_TASK * num_tasks,
        shortage=f"there are fewer than {num_tasks} {config.split} problems of these kinds",
    )


# -- kinds of problems: a generator of random numbers → problem and answer -------------------------


def _linear(rng: random.Random) -> tuple[str, str]:
    a, c = rng.sample(range(2, 30), 2)
    b, d = rng.randint(-60, 60), rng.randint(-60, 60)
    return f"Solve {a}x {_signed(b)} = {c}x {_signed(d)} for x.", str(Fraction(d - b, a - c))


def _quadratic(rng: random.Random) -> tuple[str, str]:
    small, large = sorted(rng.sample(range(-25, 26), 2))
    b, c = -(small + large), small * large
    return f"What is the larger root of x^2 {_signed(b)}x {_signed(c)} = 0?", str(large)


def _fractions(rng: random.Random) -> tuple[str, str]:
    one, two, three = (Fraction(rng.randint(1, 20), rng.randint(2, 12)) for _ in range(3))
    return f"Compute {one} + {two} * {three} as a fraction.", str(one + two * three)


def _power(rng: random.Random) -> tuple[str, str]:
    base, exponent, modulus = rng.randint(2, 40), rng.randint(10, 200), rng.randint(7, 97)
    return f"What is the remainder of {base}^{exponent} divided by {modulus}?", str(
        pow(base, exponent, modulus)
    )


def _derivative(rng: random.Random) -> tuple[str, str]:
    a, b, c, x = (rng.randint(1, 12) for _ in range(4))
    problem = f"Let f(x) = {a}x^3 - {b}x^2 + {c}x. What is f'({x})?"
    return problem, str(3 * a * x * x - 2 * b * x + c)


def _system(rng: random.Random) -> tuple[str, str]:
    x, y = rng.randint(-15, 15), rng.randint(-15, 15)
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    problem = f"Find xy if {a}x + y = {a * x + y} and x - {b}y = {x - b * y}."
    return problem, str(x * y)


def _distance(rng: random.Random) -> tuple[str, str]:
    x1, y1, x2, y2 = (rng.randint(-20, 20) for _ in range(4))
    squared = (x1 - x2) ** 2 + (y1 - y2) ** 2
    root = math.isqrt(squared)
    answer = str(root) if root * root == squared else f"\\sqrt{{{squared}}}"
    return f"What is the distance between ({x1}, {y1}) and ({x2}, {y2})?", answer


def _choose(rng: random.Random) -> tuple[str, str]:
    red, blue, drawn = rng.randint(3, 12), rng.randint(3, 12), rng.randint(2, 3)
    probability = Fraction(math.comb(red, drawn), math.comb(red + blue, drawn))
    problem = (
        f"A bag contains {red} red and {blue} blue balls. {drawn} balls are drawn without replacement. What is the "
        "probability that all of them are red?"
    )
    return problem, str(probability)


def _signed(number: int) -> str:
    return f"- {-number}" if number < 0 else f"+ {number}"


KINDS: dict[Kind, Callable[[random.Random], tuple[str, str]]] = {
    "linear": _linear,
    "quadratic": _quadratic,
    "fractions": _fractions,
    "power": _power,
    "derivative": _derivative,
    "system": _system,
    "distance": _distance,
    "choose": _choose,
}

__all__ = ["MathProblems"]
