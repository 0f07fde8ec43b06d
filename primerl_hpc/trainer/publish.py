"""How the RL loop gives a policy version to the engines: ``weights.transport``, one object behind one protocol."""

from __future__ import annotations

from typing import Protocol

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.delta import DeltaPublisher
from primerl_hpc.trainer.export import publish_policy


class Publisher(Protocol):
    def publish(self, version: int, *, is_whole: bool) -> None:
        """Make the policy as it is now known as ``version``. Collective.

        ``is_whole``: it must lie in ``weights/`` as a model folder, for whoever reads there.
        """


class FilesystemPublisher:
    """Every version is whole; adapters alone where only they are trained."""

    def __init__(self, run: RunDir, core: Core) -> None:
        self.run, self.core = run, core

    def publish(self, version: int, *, is_whole: bool) -> None:
        publish_policy(self.run, self.core, version)


def make_publisher(run: RunDir, core: Core) -> Publisher:
    if core.recipe.weights.transport == "delta":
        return DeltaPublisher(run, core)
    return FilesystemPublisher(run, core)
