"""Advantages from a function that the recipe names.

def advantages(rollouts: list[Rollout], **kwargs) -> Sequence[float]        # one per rollout of the group
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.importing import import_object
from primerl_hpc.orchestrator.algorithms.base import Algorithm
from primerl_hpc.orchestrator.trajectories import Rollout


class CustomAlgorithmError(RoleError):
    """The user's function raised, or returned something else than an advantage for each rollout."""

    exit_code = ExitCode.NO_CONTINUE


class Custom(Algorithm):
    def __init__(self, config: Any) -> None:
        """Raises ConfigError when there is no such function."""
        super().__init__(config)
        self.function = import_object(config.import_path, place="algorithm.import_path")

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        """Raises CustomAlgorithmError."""
        try:
            found = np.asarray(self.function(list(group), **self.config.kwargs), dtype=np.float64)
        except Exception as error:  # whatever a user's function may raise
            raise self._fault(f"raised {type(error).__name__}: {error}") from error
        if found.shape != (len(group),) or not np.isfinite(found).all():
            raise self._fault(
                f"returned {found.tolist()} for {len(group)} rollouts, not a finite number each"
            )
        return [np.full(len(rollout.traces), each) for rollout, each in zip(group, found, strict=True)]

    def _fault(self, what: str) -> CustomAlgorithmError:
        return CustomAlgorithmError(f"{self.config.import_path} {what}", place="algorithm.import_path")


ALGORITHM = Custom
