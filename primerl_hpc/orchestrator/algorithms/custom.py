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
from primerl_hpc.orchestrator.rollout_data import Rollout


class CustomAlgorithmError(RoleError):
    """The user's function raised, or did not return one finite advantage per rollout."""

    exit_code = ExitCode.NO_CONTINUE


class Custom(Algorithm):
    """Call the user's function once per group; the traces of a rollout share its advantage."""

    def __init__(self, config: Any) -> None:
        """Raise ConfigError if the function cannot be imported."""
        super().__init__(config)
        self.function = import_object(config.import_path, location="algorithm.import_path")

    def advantages(self, group: Sequence[Rollout]) -> list[NDArray[np.float64]]:
        """Raise CustomAlgorithmError."""
        try:
            advantages = np.asarray(self.function(list(group), **self.config.kwargs), dtype=np.float64)
        except Exception as error:  # a user's function may raise anything
            raise self._error(f"raised {type(error).__name__}: {error}") from error
        if advantages.shape != (len(group),) or not np.isfinite(advantages).all():
            raise self._error(
                f"returned {advantages.tolist()} for {len(group)} rollouts; expected one finite number for each"
            )
        return [np.full(len(rollout.traces), value) for rollout, value in zip(group, advantages, strict=True)]

    def _error(self, problem: str) -> CustomAlgorithmError:
        return CustomAlgorithmError(f"{self.config.import_path} {problem}", location="algorithm.import_path")
