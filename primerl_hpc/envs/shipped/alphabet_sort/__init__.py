"""alphabet-sort: several turns. The user gives a few names each turn; the answer is all names so far, sorted.

    environments: {train: [{id: alphabet-sort, args: {turns: 3, names_per_turn: 2}}]}

Names are drawn from `NAMES` without repetition within a task. The reward is the similarity of reply and answer in [0,
1], averaged over all turns of the task; turns that the rollout did not reach count as 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field, model_validator
from verifiers.v1.types import content_text

NAMES = (
    "ada alan alma amos anna arlo asta axel bea ben bo cara carl celia cleo cyrus dana dora edda edwin ella emil "
    "enid erik esme ezra faye finn flora gina gwen hal hana hugo ida igor inga iris ivan jada jan jonas juno kai "
    "kira klara lars lena leo lila luca mara max mia milo mona nell nico nina noel nora odin olga oona otto owen "
    "pam paul petra pia quinn ravi rhea rolf rosa ruth sami sara sven tara theo tilda tom uma una uri vera vito "
    "wanda wim xena yann yara zack zelda zoe"
).split()
_SEED_OF = {"train": 0, "test": 1}
_DEFAULT_TASKS = {"train": 4096, "test": 256}


class AlphabetSortData(vf.TaskData):
    given: list[list[str]]
    """Names that each turn adds."""

    def answer(self, turn: int) -> str:
        return " ".join(sorted(name for names in self.given[: turn + 1] for name in names))


class AlphabetSortTask(vf.Task[AlphabetSortData]):
    @property
    def key(self) -> str:
        return "/".join(" ".join(names) for names in self.data.given)

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        """Return difflib's ratio of reply and answer, averaged over all turns of the task."""
        replies = replies_of(trace)
        scores = [
            SequenceMatcher(None, " ".join(reply.split()), self.data.answer(turn)).ratio()
            for turn, reply in enumerate(replies)
        ]
        return sum(scores) / len(self.data.given)

    @vf.metric
    async def exact_turns(self, trace: vf.Trace) -> float:
        """Return the share of turns whose reply equals the answer."""
        replies = replies_of(trace)
        exact = [" ".join(reply.split()) == self.data.answer(turn) for turn, reply in enumerate(replies)]
        return sum(exact) / len(self.data.given)


def replies_of(trace: vf.Trace) -> list[str]:
    return [content_text(node.message.content) for node in trace.nodes if node.sampled]


class AlphabetSortConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: 4096 for train, 256 for test."""
    seed: int = 0
    turns: int = Field(3, ge=1)
    names_per_turn: int = Field(2, ge=1)

    @model_validator(mode="after")
    def _check_number_of_names(self) -> AlphabetSortConfig:
        if self.turns * self.names_per_turn > len(NAMES):
            raise ValueError(f"turns × names_per_turn must be at most {len(NAMES)}")
        return self


class AlphabetSort(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    def load(self) -> Iterator[AlphabetSortTask]:
        """Yield distinct tasks. Raises ValueError if there are not enough names for ``num_tasks``."""
        config = self.config
        rng = random.Random(2 * config.seed + _SEED_OF[config.split])
        num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]
        seen: set[tuple[str, ...]] = set()
        for _ in range(1000 * num_tasks):
            names = tuple(rng.sample(NAMES, config.turns * config.names_per_turn))
            # the split of a task must not depend on the seed
            is_test = sum(map(ord, "".join(sorted(names)))) % 16 == 0
            if names in seen or is_test != (config.split == "test"):
                continue
            seen.add(names)
            size = config.names_per_turn
            given = [list(names[start : start + size]) for start in range(0, len(names), size)]
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            data = AlphabetSortData(  # pyright: ignore[reportCallIssue]
                prompt=f"sort: {' '.join(given[0])}", given=given
            )
            yield AlphabetSortTask(data, config.task)
            if len(seen) == num_tasks:
                return
        raise ValueError(f"cannot generate {num_tasks} distinct {config.split} tasks from the names")


class AlphabetSortEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    async def run(self, task: AlphabetSortTask, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            for names in task.data.given[1:]:
                if segment.terminated:
                    break
                segment = await chat.turn(f"and: {' '.join(names)}")


__all__ = ["AlphabetSort", "AlphabetSortEnv"]
