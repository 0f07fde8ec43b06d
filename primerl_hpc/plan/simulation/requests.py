"""State of groups, rollouts and engines in a simulation."""

from __future__ import annotations

import random
from collections import deque

from primerl_hpc.plan.simulation.sides import PrefillSide


class SimulatedGroup:
    __slots__ = (
        "ended",
        "engine",
        "is_open",
        "is_prefilled",
        "oldest",
        "prompts",
        "to_start",
        "tokens",
        "versions",
    )

    def __init__(self, size: int) -> None:
        self.to_start, self.ended, self.versions, self.tokens = size, 0, 0, 0.0
        self.oldest: int | None = None
        self.engine: SimulatedEngine | None = None
        self.is_prefilled, self.is_open = False, True
        self.prompts: set[int] = set()
        """Prefill engines that have processed its prompt."""

    @property
    def first_version(self) -> int:
        """Policy version of its oldest rollout; for groups that have started."""
        assert self.oldest is not None
        return self.oldest


class SimulatedRollout:
    __slots__ = ("engine", "group", "prefill", "tokens", "turns")

    def __init__(self, group: SimulatedGroup, tokens: float, turns: int) -> None:
        self.group, self.tokens, self.turns = group, tokens, turns
        self.engine: SimulatedEngine | None = None
        self.prefill: int | None = None
        """Number of the prefill engine that has its earlier turns; None before the first."""


class SimulatedEngine:
    """Sequences that share an engine. ``work``: tokens that each sequence has generated since the start."""

    __slots__ = ("clock", "is_due", "load", "pulling", "running", "stamp", "waiting", "work")

    def __init__(self) -> None:
        self.clock = self.work = 0.0
        """``clock``: the time up to which ``work`` counts; in the future while it reads a prompt or is paused."""
        self.running: list[tuple[float, int, SimulatedRollout]] = []
        self.waiting: deque[SimulatedRollout] = deque()
        self.pulling: set[SimulatedRollout] = set()
        """Requests whose prompts a prefill engine processes."""
        self.load = self.stamp = 0
        self.is_due = False


class PrefillQueues:
    """Prefill engines, each of which processes prompts in the order of their requests.

    As in `inference.prefill`, all turns of a rollout use one engine, by a hash, so that the rollouts of a group are
    spread over the engines, and each of these processes the group's prompt once.
    """

    def __init__(self, side: PrefillSide, random: random.Random) -> None:
        self.side, self.random = side, random
        self.free_at = [0.0] * side.num_engines
        """When an engine has processed all prompts that were requested."""
        self.busy_s = self.paused_s = 0.0
        """Time of all engines with a prompt to process; time for which they were paused for weight updates."""

    def ready_at(self, now: float, rollout: SimulatedRollout) -> float:
        """Request the prompt of the rollout's next turn; return when a decoding engine has its KV blocks."""
        side, prompts = self.side, rollout.group.prompts
        if rollout.prefill is None:
            rollout.prefill = number = int(self.random.random() * side.num_engines)
            work_s = 0.0 if number in prompts else side.prompt_s
            prompts.add(number)
        else:
            number, work_s = rollout.prefill, side.turn_s
        self.busy_s += work_s
        self.free_at[number] = free_at = max(self.free_at[number], now) + work_s
        return max(free_at, now + side.alone_s) + side.transfer_s

    def pause(self, now: float, seconds: float) -> None:
        self.paused_s += seconds
        self.free_at = [max(free_at, now) + seconds for free_at in self.free_at]

    def idle(self, window_s: float) -> float:
        """Return the mean share of the time in which an engine has no prompt to process."""
        return max(0.0, 1 - self.busy_s / window_s / len(self.free_at))
