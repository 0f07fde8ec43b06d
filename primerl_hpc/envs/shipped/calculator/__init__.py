"""calculator: the prompt is a × b + c, too large for mental arithmetic; the tools are ``multiply`` and ``add``.

    environments: {train: [{id: calculator, args: {digits: 4}, env_args: {agent: {max_turns: 4}}}]}

Requires a model and a renderer with tool support. The reward is 1 if the last number in the last reply is the answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from primerl_hpc.envs.generated import count_tool_calls
from primerl_hpc.envs.tool_servers.calculator import CalculatorTools

_SEED_OF = {"train": 0, "test": 1}
_DEFAULT_TASKS = {"train": 4096, "test": 256}


class CalculatorData(vf.TaskData):
    answer: int


class CalculatorTask(vf.Task[CalculatorData]):
    @property
    def key(self) -> str:
        return str(self.data.prompt)

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        numbers = re.findall(r"-?\d+", (trace.last_reply or "").replace(",", ""))
        return float(bool(numbers) and int(numbers[-1]) == self.data.answer)

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return count_tool_calls(trace)


class CalculatorConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: 4096 for train, 256 for test."""
    seed: int = 0
    digits: int = Field(4, ge=2, le=9)
    """Digits of each number."""
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Calculator(vf.Taskset[CalculatorTask, CalculatorConfig]):
    @classmethod
    def toolsets(cls, config: CalculatorConfig) -> list[vf.Toolset]:
        return [CalculatorTools(config.tools)]

    def load(self) -> Iterator[CalculatorTask]:
        """Yield distinct tasks. ``a`` is odd in training and even in test, so the splits share no task."""
        config = self.config
        rng = random.Random(2 * config.seed + _SEED_OF[config.split])
        low, high = 10 ** (config.digits - 1), 10**config.digits - 1
        num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]
        seen: set[tuple[int, int, int]] = set()
        while len(seen) < num_tasks:
            a = rng.randint(low // 2, high // 2) * 2 + (config.split == "train")
            numbers = (a, rng.randint(low, high), rng.randint(low, high))
            if numbers in seen:
                continue
            seen.add(numbers)
            a, b, c = numbers
            prompt = f"What is {a} * {b} + {c}? Use the tools; end with the number."
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            data = CalculatorData(prompt=prompt, answer=a * b + c)  # pyright: ignore[reportCallIssue]
            yield CalculatorTask(data, config.task)


__all__ = ["Calculator"]
