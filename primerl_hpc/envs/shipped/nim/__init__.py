"""nim: self-play. Two agents take 1 to ``max_take`` stones in turn; the agent that takes the last stone wins.

    environments: {train: [{id: nim, algorithm: {type: rae}}]}

The policy plays both agents, so each rollout has two traces, ``first`` and ``second``, with rewards +1 and -1. An agent
whose reply is not a legal number of stones loses immediately. The game is zero-sum: algorithm ``rae`` uses a separate
running baseline for each agent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.types import content_text

_AGENTS = ("first", "second")


class NimData(vf.TaskData):
    stones: int
    max_take: int


class NimTask(vf.Task[NimData]):
    @property
    def key(self) -> str:
        return f"{self.data.stones} stones, at most {self.data.max_take}"


class NimConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    """Training uses heaps with an odd number of stones, test with an even number."""
    min_stones: int = Field(3, ge=2)
    max_stones: int = Field(21, ge=2)
    max_take: int = Field(3, ge=1, le=9)


class Nim(vf.Taskset[NimTask, NimConfig]):
    def load(self) -> Iterator[NimTask]:
        config = self.config
        for stones in range(config.min_stones, config.max_stones + 1):
            if stones % 2 == (config.split == "train"):
                # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
                data = NimData(  # pyright: ignore[reportCallIssue]
                    prompt=None, stones=stones, max_take=config.max_take
                )
                yield NimTask(data, config.task)


def stones_taken(reply: str, stones: int, max_take: int) -> int | None:
    """Return the number of stones in a reply; None if there is none or the move is illegal."""
    numbers = re.findall(r"\d+", reply)
    taken = int(numbers[-1]) if numbers and len(numbers[-1]) < 4 else 0
    return taken if 1 <= taken <= min(max_take, stones) else None


class NimEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class NimEnv(vf.Env[NimEnvConfig]):
    async def run(self, task: NimTask, agents: vf.Agents) -> None:
        """Play the game. `finalize` determines the winner."""
        stones, limit = task.data.stones, task.data.max_take
        opponent_move = ""
        async with agents.first.interaction(task) as first, agents.second.interaction(task) as second:
            for turn in range(task.data.stones):
                player = (first, second)[turn % 2]
                prompt = f"{opponent_move}{stones} stones. Take 1 to {min(limit, stones)}."
                segment = await player.turn(prompt)
                taken = None if segment.terminated else stones_taken(segment.last_reply, stones, limit)
                if taken is None:
                    break
                stones -= taken
                opponent_move = f"I take {taken}. "
                if not stones:
                    break

    async def finalize(self, task: NimTask, episode: vf.Episode) -> None:
        """Replay the moves in the traces and record +1 for the winner and -1 for the loser."""
        traces = {trace.agent.name: trace for trace in episode.traces}
        moves = {
            agent: [content_text(node.message.content) for node in traces[agent].nodes if node.sampled]
            for agent in _AGENTS
        }
        winner = winner_of(task.data, moves)
        for agent, trace in traces.items():
            trace.record_reward("win", 1.0 if agent == winner else -1.0)
            trace.record_metric("moves", float(len(moves[agent])))


def winner_of(data: NimData, moves: dict[str, list[str]]) -> str:
    """Return the agent that took the last stone, or whose opponent made an illegal move or none."""
    stones, turns = data.stones, 0
    while True:
        mover, other = _AGENTS[turns % 2], _AGENTS[(turns + 1) % 2]
        own = moves[mover]
        taken = stones_taken(own[turns // 2], stones, data.max_take) if turns // 2 < len(own) else None
        if taken is None:
            return other
        stones -= taken
        if not stones:
            return mover
        turns += 1


__all__ = ["Nim", "NimEnv"]
