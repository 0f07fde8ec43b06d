"""Admission gates select the finished groups to train on: a group needs every gate of its environment to admit it.

Every gate is evaluated on every finished group, also on those that another gate rejected. A rejected group takes no
room in the batch, so other groups are generated instead.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.importing import import_object
from primerl_hpc.orchestrator.rollout_data import ScoredGroup
from primerl_hpc.recipe.schema import selection as selection_schema

Gate = Callable[[ScoredGroup], bool]


class CustomGateError(RoleError):
    """The user's gate function raised."""

    exit_code = ExitCode.NO_CONTINUE


def make_gate(config: selection_schema.Gate) -> Gate:
    """Return the gate of a recipe's block. Raises ConfigError if it names a function that cannot be imported."""
    if isinstance(config, selection_schema.RewardRange):
        return lambda group: config.above < group.mean_reward < config.below
    if isinstance(config, selection_schema.AdvantageRange):
        return lambda group: _is_outside(group, config)
    return _custom(config)


def _is_outside(group: ScoredGroup, config: selection_schema.AdvantageRange) -> bool:
    # per trace: the mean over the players of a zero-sum game is always 0
    advantages = np.concatenate(group.trace_advantages)
    inside = (advantages >= config.reject_min) & (advantages <= config.reject_max)
    return not bool(np.all(inside))


def _custom(config: selection_schema.CustomGate) -> Gate:
    function = import_object(config.import_path, location="environments.train.gates.import_path")

    def admits(group: ScoredGroup) -> bool:
        try:
            return bool(function(group, **config.kwargs))
        except Exception as error:  # a user's function may raise anything
            raise CustomGateError(
                f"{config.import_path} raised {type(error).__name__}: {error}", location="gate"
            ) from error

    return admits
