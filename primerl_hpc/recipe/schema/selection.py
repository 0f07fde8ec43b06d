"""Curricula (which tasks are drawn), gates (which groups are trained on) and filters (which rollouts are removed)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from primerl_hpc.common.block import (
    Block,
    Bool,
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    default_type,
)


class Shuffled(Block):
    """Every epoch draws every task once, in a new random order."""

    type: Literal["shuffled"] = "shuffled"


class Sequential(Block):
    """Draw tasks in the environment's order in every epoch, for tasks that are sorted by difficulty."""

    type: Literal["sequential"] = "sequential"


class DifficultyPools(Block):
    """Assign tasks to pools by the mean reward of their last group. The weight of a pool is the relative frequency at
    which each of its tasks is drawn."""

    type: Literal["difficulty_pools"] = "difficulty_pools"
    hard_max: Fraction = 0.25
    """Tasks with a mean reward up to this are in the hard pool."""
    normal_max: Fraction = 0.75
    """Tasks with a mean reward above ``hard_max`` and up to this are in the normal pool; tasks above it are in the easy
    pool."""
    hard_weight: NonNegativeFloat = 0.2
    """Weight of hard tasks."""
    normal_weight: NonNegativeFloat = 1.0
    """Weight of normal tasks."""
    easy_weight: NonNegativeFloat = 0.2
    """Weight of easy tasks."""
    unseen_weight: NonNegativeFloat = 1.0
    """Weight of tasks that have never been drawn."""

    @model_validator(mode="after")
    def _pools_are_ordered(self) -> Self:
        if self.hard_max >= self.normal_max:
            raise ValueError(f"hard_max {self.hard_max} must be less than normal_max {self.normal_max}")
        return self


Curriculum = Annotated[
    Annotated[Shuffled | Sequential | DifficultyPools, Field(discriminator="type")],
    default_type("shuffled"),
]


class RewardRange(Block):
    """Online difficulty filtering: train only on groups whose mean reward is strictly between the bounds."""

    type: Literal["reward_range"] = "reward_range"
    above: Float = 0.0
    """Reject groups with a mean reward of this or less."""
    below: Float = 1.0
    """Reject groups with a mean reward of this or more."""


class AdvantageRange(Block):
    """Reject groups whose advantages, of every agent in every rollout, are all within the range. The default range, 0
    to 0, rejects groups without a training signal."""

    type: Literal["advantage_range"] = "advantage_range"
    reject_min: Float = 0.0
    """Lower bound of the range, inclusive."""
    reject_max: Float = 0.0
    """Upper bound of the range, inclusive."""


class CustomGate(Block):
    """Your own function, which is called for every group."""

    type: Literal["custom"] = "custom"
    import_path: str
    """``package.module:function``. The function receives an `orchestrator.scoring.scoring.ScoredGroup` and returns True
    to train on it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the function in addition."""


Gate = Annotated[RewardRange | AdvantageRange | CustomGate, Field(discriminator="type")]


class Filter(Block):
    reads_logprobs: ClassVar[bool] = False
    """True if the filter uses the policy's log-probabilities. It then ignores rollouts that the policy did not
    sample."""
    action: Literal["enforce", "observe"] = "enforce"
    """Treatment of a rollout that the filter detects.
    ``enforce``: it is not trained on, but its reward still counts in the comparison with its group.
    ``observe``: it is counted in the metrics and trained on as usual."""


class Gibberish(Filter):
    """Detect a rare token that the policy itself considered less likely than chance, a sign that sampling has
    derailed."""

    reads_logprobs: ClassVar[bool] = True
    type: Literal["gibberish"] = "gibberish"
    token_id_above: NonNegativeInt = 100_000
    """Token ids above this count as rare: tokenizers number tokens by frequency."""
    logprob_offset: NonNegativeFloat = 2.0
    """A token is less likely than chance if its log-probability is below -log(vocabulary size) minus this."""


class Repetition(Filter):
    """Detect a long sequence of nearly certain tokens, a sign that the policy repeats itself."""

    reads_logprobs: ClassVar[bool] = True
    type: Literal["repetition"] = "repetition"
    window: PositiveInt = 3000
    """Length of the sequence, in sampled tokens."""
    probability_above: Fraction = 0.99
    """A token is nearly certain if it was sampled with more than this probability."""


class Length(Filter):
    """Detect rollouts that are too short, too long, or truncated."""

    type: Literal["length"] = "length"
    min_tokens: NonNegativeInt = 0
    """Minimum number of sampled tokens."""
    max_tokens: PositiveInt | None = None
    """Maximum number of sampled tokens. Default (null): no limit."""
    truncated: Bool = False
    """Also detect rollouts that were cut off by a limit on tokens or turns."""


RolloutFilter = Annotated[Gibberish | Repetition | Length, Field(discriminator="type")]

__all__ = [
    "AdvantageRange",
    "Curriculum",
    "CustomGate",
    "DifficultyPools",
    "Filter",
    "Gate",
    "Gibberish",
    "Length",
    "Repetition",
    "RewardRange",
    "RolloutFilter",
    "Sequential",
    "Shuffled",
]
