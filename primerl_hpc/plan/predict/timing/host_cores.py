"""CPU cores that rollouts keep busy: environment servers, API servers, router, orchestrator.

    figures = host_cores(rate, turns=10)              # cores.environments, cores.api_servers, …
    servers_for(figures["cores.environments"])        # processes, each of which is busy for at most `FULL` of its time

Measured with a model so small that the rest of the time is visible: rollouts of 1 turn with 7 and with 256 tokens, and
of 10 turns with 7 tokens each. The work of the environment itself (tools, sandboxes, scoring with a judge) is not in
these figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from primerl_hpc.plan.predict.figure import Figure, estimate

SOURCE = "docs/measurements/loop.json, a core of the development machine"
FACTOR = 1.6
"""Interval of a cost: other CPUs, longer messages, engines that run few sequences a step."""
FULL = 0.7
"""A process whose core is busier than this delays the requests of others."""
ENVIRONMENTS, API_SERVERS, ROUTER, ORCHESTRATOR = (
    "cores.environments", "cores.api_servers", "cores.router", "cores.orchestrator",
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a role."""

    rollout: float = 0.0
    turn: float = 0.0
    token: float = 0.0
    """Per sampled token."""

    def cores(self, rollouts: float, turns: float, tokens: float) -> float:
        """Return busy cores. ``rollouts``, ``tokens``: per second; ``turns``: of a rollout."""
        return rollouts * (self.rollout + self.turn * turns) + self.token * tokens


COSTS = {
    ENVIRONMENTS: Cost(rollout=0.9e-3, turn=1.4e-3),
    API_SERVERS: Cost(turn=1.0e-3, token=15e-6),
    ROUTER: Cost(turn=0.4e-3),
    ORCHESTRATOR: Cost(rollout=0.7e-3, turn=0.3e-3),
}


def host_cores(rollouts: float, turns: int, tokens: float) -> dict[str, Figure]:
    """Return the busy cores of each role, of all its processes together.

    ``rollouts``, ``tokens``: per second, of all engines; ``turns``: of a rollout.
    """
    return {
        name: estimate(
            name,
            cost.cores(rollouts, turns, tokens),
            FACTOR,
            "cores",
            "rollouts/s × (s per rollout + s per turn × turns) + s per token × tokens/s",
            {
                "rollouts/s": rollouts,
                "turns": float(turns),
                "tokens/s": tokens,
                "s per rollout": cost.rollout,
                "s per turn": cost.turn,
                "s per token": cost.token,
            },
            source=SOURCE,
        )
        for name, cost in COSTS.items()
    }


def servers_for(cores: Figure) -> int:
    """Return the number of processes that are needed so that each is busy for at most `FULL` of its time."""
    return max(1, math.ceil(cores.value / FULL))


def full_processes(figures: dict[str, Figure], *, servers: int, engines: int) -> Iterator[str]:
    """Yield a sentence for each role whose processes are too busy. ``servers``: environment servers for training."""
    if ENVIRONMENTS not in figures:
        return
    cores = figures[ENVIRONMENTS]
    if cores.value > FULL * servers:
        yield (
            f"the environment servers need {cores.value:.1f} cores, but use at most {servers}: engines wait for them; "
            f"set environments.train.servers to {servers_for(cores)}"
        )
    each = figures[API_SERVERS].value / max(1, engines)
    if each > FULL:
        yield (
            f"the API server of each engine needs {each:.1f} cores, but uses at most 1: use more, smaller engines "
            "(layout.inference.tensor_parallel, data_parallel)"
        )
    for name, role in ((ROUTER, "router"), (ORCHESTRATOR, "orchestrator")):
        if figures[name].value > FULL:
            yield (
                f"the {role} needs {figures[name].value:.1f} cores, but uses at most 1: rollouts wait for it; "
                "divide the work into several runs, or use longer rollouts"
            )
