"""local-search: questions about an invented encyclopedia; the tool ``search`` finds its articles. Requires no network.

    environments: {train: [{id: local-search, env_args: {agent: {max_turns: 6}}}]}

Half of the questions take two searches. Requires a model and a renderer with tool support. The reward is 1 if the last
line of the last reply is the answer; case, commas, emphasis and a final period do not matter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from primerl_hpc.envs.generated import count_tool_calls, draw_distinct
from primerl_hpc.envs.tool_servers.encyclopedia import ask, write_articles
from primerl_hpc.envs.tool_servers.search import SearchConfig, SearchTools

_TEST_SHARE = 8  # one of this many questions belongs to the test split
_DEFAULT_TASKS = {"train": 2048, "test": 128}
_MAX_DRAWS_PER_TASK = 1000
_PROMPT = "{} Use the tool search; end with a line that contains only the answer."


def ends_with_answer(reply: str, answer: str) -> bool:
    lines = reply.strip().splitlines() or [""]
    return re.sub(r"[,*]", "", lines[-1]).strip(" .").lower() == answer.lower()


class LocalSearchData(vf.TaskData):
    answer: str


class LocalSearchTask(vf.Task[LocalSearchData]):
    @property
    def key(self) -> str:
        return str(self.data.prompt)

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(ends_with_answer(trace.last_reply or "", self.data.answer))

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        return count_tool_calls(trace)


class LocalSearchConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: 2048 for train, 128 for test."""
    seed: int = 0
    tools: SearchConfig = SearchConfig()
    """Number of articles and seed of the encyclopedia."""


class LocalSearch(vf.Taskset[LocalSearchTask, LocalSearchConfig]):
    @classmethod
    def toolsets(cls, config: LocalSearchConfig) -> list[vf.Toolset]:
        return [SearchTools(config.tools)]

    def load(self) -> Iterator[LocalSearchTask]:
        """Yield distinct questions. The split of a question depends only on its text."""
        config = self.config
        towns = write_articles(config.tools.num_articles, config.tools.seed)
        rng = random.Random(config.seed)
        num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]
        questions = draw_distinct(
            lambda: ask(towns, rng),
            lambda question: question.text,
            split=config.split,
            test_share=_TEST_SHARE,
            num_tasks=num_tasks,
            max_draws=_MAX_DRAWS_PER_TASK * num_tasks,
            shortage=f"{config.tools.num_articles} articles have fewer than {num_tasks} questions of split "
            f"{config.split}; raise tools.num_articles or lower num_tasks",
        )
        for question in questions:
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            data = LocalSearchData(  # pyright: ignore[reportCallIssue]
                prompt=_PROMPT.format(question.text), answer=question.answer
            )
            yield LocalSearchTask(data, config.task)


__all__ = ["LocalSearch"]
