"""How the RL loop gives a policy version to the engines: ``weights.transport``, one object behind one protocol."""

from __future__ import annotations

from typing import Protocol

from primerl_hpc.common.listen import listen_host
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import load_plan
from primerl_hpc.trainer.broadcast import BroadcastPublisher
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.delta import DeltaPublisher
from primerl_hpc.trainer.export import publish_policy


class Publisher(Protocol):
    def publish(self, version: int, *, is_whole: bool) -> None:
        """Make the policy as it is now known as ``version``. Collective.

        ``is_whole``: it must lie in ``weights/`` as a model folder, for whoever reads there.
        """

    def write_whole(self, version: int) -> None:
        """The policy as it is now, which is ``version``, as a model folder in ``weights/``. Collective."""


class FilesystemPublisher:
    """Every version is whole; adapters alone where only they are trained."""

    def __init__(self, run: RunDir, core: Core) -> None:
        self.run, self.core = run, core

    def publish(self, version: int, *, is_whole: bool) -> None:
        self.write_whole(version)

    def write_whole(self, version: int) -> None:
        publish_policy(self.run, self.core, version)


def make_publisher(run: RunDir, core: Core) -> Publisher:
    match core.recipe.weights.transport:
        case "delta":
            return DeltaPublisher(run, core)
        case "broadcast":
            return BroadcastPublisher(run, core, listen_host(load_plan(run).num_hosts))
        case "filesystem":
            return FilesystemPublisher(run, core)
