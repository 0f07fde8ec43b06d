"""nim: self-play. Two agents take 1 to ``max_take`` stones in turn; who takes the last one wins.

    environments: {train: [{id: nim, algorithm: {type: rae}}]}

Both seats are the policy's, so each rollout has two traces, ``first`` and ``second``, of rewards +1 and -1. A reply that
is not a legal number of stones loses at once. Zero-sum: algorithm ``rae`` compares each seat with its own past.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

_SEATS = ("first", "second")


class NimData(vf.TaskData):
    stones: int
    max_take: int


class NimTask(vf.Task[NimData]):
    @property
    def key(self) -> str:
        return f"{self.data.stones} stones, at most {self.data.max_take}"


class NimConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    """Heaps of an odd number of stones in training, of an even one in the test."""
    min_stones: int = Field(3, ge=2)
    max_stones: int = Field(21, ge=2)
    max_take: int = Field(3, ge=1, le=9)


class Nim(vf.Taskset[NimTask, NimConfig]):
    def load(self) -> Iterator[NimTask]:
        config = self.config
        for stones in range(config.min_stones, config.max_stones + 1):
            if stones % 2 == (config.split == "train"):
                yield NimTask(
                    NimData(prompt=None, stones=stones, max_take=config.max_take),
                    config.task,
                )


def stones_taken(reply: str, stones: int, max_take: int) -> int | None:
    """The move in a reply; None when there is none or it is not allowed."""
    numbers = re.findall(r"\d+", reply)
    taken = int(numbers[-1]) if numbers and len(numbers[-1]) < 4 else 0
    return taken if 1 <= taken <= min(max_take, stones) else None


class NimEnvConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class NimEnv(vf.Env[NimEnvConfig]):
    async def run(self, task: NimTask, agents: vf.Agents) -> None:
        """Play to the end; the loser, as the board tells, is left to `finalize`."""
        stones, limit = task.data.stones, task.data.max_take
        said = ""
        async with agents.first.interaction(task) as first, agents.second.interaction(task) as second:
            for turn in range(task.data.stones):
                player = (first, second)[turn % 2]
                segment = await player.turn(f"{said}{stones} stones. Take 1 to {min(limit, stones)}.")
                taken = None if segment.terminated else stones_taken(segment.last_reply, stones, limit)
                if taken is None:
                    break
                stones -= taken
                said = f"I take {taken}. "
                if not stones:
                    break

    async def finalize(self, task: NimTask, episode: vf.Episode) -> None:
        """Replays the moves in the traces: +1 to the winner, -1 to the loser."""
        traces = {trace.agent.name: trace for trace in episode.traces}
        moves = {
            seat: [node.message.content or "" for node in traces[seat].nodes if node.sampled]
            for seat in _SEATS
        }
        winner = winner_of(task.data, moves)
        for seat, trace in traces.items():
            trace.record_reward("win", 1.0 if seat == winner else -1.0)
            trace.record_metric("moves", float(len(moves[seat])))


def winner_of(data: NimData, moves: dict[str, list[str]]) -> str:
    """Who took the last stone, or whose opponent made a move that is not allowed or none at all."""
    stones, turns = data.stones, 0
    while True:
        mover, other = _SEATS[turns % 2], _SEATS[(turns + 1) % 2]
        own = moves[mover]
        taken = stones_taken(own[turns // 2], stones, data.max_take) if turns // 2 < len(own) else None
        if taken is None:
            return other
        stones -= taken
        if not stones:
            return mover
        turns += 1


__all__ = ["Nim", "NimEnv"]
