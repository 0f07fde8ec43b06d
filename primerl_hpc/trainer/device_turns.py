"""The trainer's turns on accelerators that it shares with engines (``layout.colocated`` in mode ``sleep``).

    turns = make_turns(recipe, run, world)
    with turns.take():                    # waits until the engines sleep
        trainer = build_trainer(…)
        turns.attach(trainer)
    with turns.take() as times: …         # one step; the trainer's tensors are on the device

In other layouts the trainer always has its accelerators, and `take` does nothing. A turn that raises is not reported as
over: the process ends, and its successor asks for a turn of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from primerl_hpc.common import env
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.waiting import Polling
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.host_copy import HostCopy
from primerl_hpc.trainer.setup import World, broadcast_from_rank0
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.transport.turns import TurnRequest, read_grant, write_request

ROUND_S = 5.0  # waiting ranks exchange a result this often, so that no collective times out
POLL_S = 0.05


class AlwaysOnDevice:
    """The trainer has accelerators of its own."""

    def attach(self, trainer: Trainer) -> None:
        """Nothing is moved."""

    @contextmanager
    def take(self) -> Iterator[dict[str, float]]:
        """Enter immediately; yields no metrics."""
        yield {}


class TrainerTurns(AlwaysOnDevice):
    """The trainer asks for each turn, and keeps its tensors in host memory between turns."""

    def __init__(self, run: RunDir, world: World) -> None:
        self.run, self.world = run, world
        self.process = process_name(Role.TRAINER, 0)
        self._number = 0
        self._copy: HostCopy | None = None

    def attach(self, trainer: Trainer) -> None:
        """Move this trainer's tensors from now on."""
        self._copy = HostCopy(trainer.policy, trainer.optimizer, self.world.device)

    @contextmanager
    def take(self) -> Iterator[dict[str, float]]:
        """Wait for a turn, move the tensors to the device, and back when the block ends. Collective.

        Yields the metrics of its start.
        """
        started = time.perf_counter()
        self._number += 1
        self._ask(is_released=False)
        while not broadcast_from_rank0(self._is_granted() if self.world.is_leader else None):
            pass
        granted = time.perf_counter()
        if self._copy is not None:
            self._copy.to_device()
        moved = time.perf_counter()
        yield {"time/wait_for_turn": granted - started, "time/move_to_device": moved - granted}
        if self._copy is not None:
            self._copy.to_host()
        dist.barrier()  # the turn is over when the last rank has freed its memory
        self._ask(is_released=True)

    def _ask(self, *, is_released: bool) -> None:
        if self.world.is_leader:
            request = TurnRequest(env.attempt(), env.incarnation(), self._number, is_released)
            write_request(self.run, self.process, request)

    def _is_granted(self) -> bool:
        """Wait for at most `ROUND_S`; True if the turn was granted."""
        request = TurnRequest(env.attempt(), env.incarnation(), self._number)
        for _ in Polling(ROUND_S, POLL_S):
            grant = read_grant(self.run)
            if grant is not None and grant.admits_trainer(request):
                return True
        return False


def make_turns(recipe: Recipe, run: RunDir, world: World) -> AlwaysOnDevice:
    """Return the turns of a recipe's layout."""
    return TrainerTurns(run, world) if recipe.layout.takes_turns else AlwaysOnDevice()
