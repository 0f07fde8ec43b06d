"""Publishers: how the RL loop publishes a policy version, by ``weights.transport``."""

from __future__ import annotations

from typing import Protocol

from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.ports import listen_host
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.trainer.weights.broadcast import BroadcastPublisher
from primerl_hpc.trainer.weights.delta import DeltaPublisher
from primerl_hpc.trainer.weights.filesystem import publish_policy


class Publisher(Protocol):
    def publish(self, version: int, *, is_full: bool) -> None:
        """Publish the current policy as ``version``. Collective.

        ``is_full``: it must also be written to ``weights/`` as a model folder, for other readers.
        """

    def write_full(self, version: int) -> None:
        """Write the current policy, which is ``version``, to ``weights/`` as a model folder. Collective."""


class FilesystemPublisher:
    """Writes every version in full; only the adapters if only they are trained."""

    def __init__(self, run: RunDir, trainer: Trainer) -> None:
        self.run, self.trainer = run, trainer

    def publish(self, version: int, *, is_full: bool) -> None:
        self.write_full(version)

    def write_full(self, version: int) -> None:
        publish_policy(self.run, self.trainer, version)


def make_publisher(run: RunDir, trainer: Trainer) -> Publisher:
    match trainer.recipe.weights.transport:
        case "delta":
            return DeltaPublisher(run, trainer)
        case "broadcast":
            plan = load_plan(run)
            return BroadcastPublisher(run, trainer, listen_host(plan.num_hosts), plan.max_ranks)
        case "filesystem":
            return FilesystemPublisher(run, trainer)
