"""Admission gates: which finished groups are trained on. A group is, when every gate of its environment admits it.

Gates see every finished group, also those that another gate turned away. A group that is turned away takes no room in
the batch, so others are generated in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.importing import import_object
from primerl_hpc.recipe import selection_schema

if TYPE_CHECKING:
    from primerl_hpc.orchestrator.scoring import ScoredGroup

Gate = Callable[["ScoredGroup"], bool]


class CustomGateError(RoleError):
    """The user's function raised."""

    exit_code = ExitCode.NO_CONTINUE


def make_gate(config: selection_schema.Gate) -> Gate:
    """The gate of a recipe's block. Raises ConfigError when it names a function that cannot be imported."""
    if isinstance(config, selection_schema.RewardRange):
        return lambda group: config.above < group.mean_reward < config.below
    if isinstance(config, selection_schema.AdvantageRange):
        return lambda group: _is_outside(group, config)
    return _custom(config)


def _is_outside(group: ScoredGroup, config: selection_schema.AdvantageRange) -> bool:
    advantages = np.concatenate(group.trace_advantages)  # a mean over players of a zero-sum game says nothing
    inside = (advantages >= config.reject_min) & (advantages <= config.reject_max)
    return not bool(np.all(inside))


def _custom(config: selection_schema.CustomGate) -> Gate:
    function = import_object(config.import_path, place="environments.train.gates.import_path")

    def admits(group: ScoredGroup) -> bool:
        try:
            return bool(function(group, **config.kwargs))
        except Exception as error:  # whatever a user's function may raise
            raise CustomGateError(
                f"{config.import_path} raised {type(error).__name__}: {error}", place="gate"
            ) from error

    return admits
