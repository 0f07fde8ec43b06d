"""Which tasks are drawn (curricula), which groups are trained on (gates), which rollouts are left out (filters)."""

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
    """Every epoch covers every task once, in an order of its own."""

    type: Literal["shuffled"] = "shuffled"


class Sequential(Block):
    """The environment's own order, epoch after epoch: for tasks that are sorted by difficulty."""

    type: Literal["sequential"] = "sequential"


class DifficultyPools(Block):
    """Tasks are in pools by the mean reward of their last group; a pool's weight is how often each of its tasks is drawn."""

    type: Literal["difficulty_pools"] = "difficulty_pools"
    hard_max: Fraction = 0.25
    """Hard: mean reward up to this."""
    normal_max: Fraction = 0.75
    """Normal: mean reward up to this; easy: above."""
    hard_weight: NonNegativeFloat = 0.2
    """Of hard tasks."""
    normal_weight: NonNegativeFloat = 1.0
    """Of normal tasks."""
    easy_weight: NonNegativeFloat = 0.2
    """Of easy tasks."""
    unseen_weight: NonNegativeFloat = 1.0
    """Of tasks that were never drawn."""

    @model_validator(mode="after")
    def _pools_are_ordered(self) -> Self:
        if self.hard_max >= self.normal_max:
            raise ValueError(f"hard_max {self.hard_max} must be below normal_max {self.normal_max}")
        return self


Curriculum = Annotated[
    Annotated[Shuffled | Sequential | DifficultyPools, Field(discriminator="type")],
    default_type("shuffled"),
]


class RewardRange(Block):
    """Online difficulty filtering: trains on groups whose mean reward is strictly between the bounds."""

    type: Literal["reward_range"] = "reward_range"
    above: Float = 0.0
    """Turn groups away whose mean reward is this or less."""
    below: Float = 1.0
    """Turn groups away whose mean reward is this or more."""


class AdvantageRange(Block):
    """Turns away groups all of whose advantages, of every agent in every rollout, are in the range; the default turns away those without a signal."""

    type: Literal["advantage_range"] = "advantage_range"
    reject_min: Float = 0.0
    """Lower end of the range, which belongs to it."""
    reject_max: Float = 0.0
    """Upper end of the range, which belongs to it."""


class CustomGate(Block):
    """A function of yours that is asked about every group."""

    type: Literal["custom"] = "custom"
    import_path: str
    """``package.module:function``: gets a `orchestrator.scoring.ScoredGroup`, returns whether to train on it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of the function."""


Gate = Annotated[RewardRange | AdvantageRange | CustomGate, Field(discriminator="type")]


class Filter(Block):
    reads_logprobs: ClassVar[bool] = False
    """Whether it judges by the policy's log-probabilities; then it passes over what the policy did not sample."""
    action: Literal["enforce", "observe"] = "enforce"
    """enforce: its rollouts are not trained on, though their rewards count among their siblings; observe: only counted."""


class Gibberish(Filter):
    """A rare token that the policy itself found less likely than chance: sampling has derailed."""

    reads_logprobs: ClassVar[bool] = True
    type: Literal["gibberish"] = "gibberish"
    token_id_above: NonNegativeInt = 100_000
    """Tokens with larger ids are rare ones, as tokenizers number by frequency."""
    logprob_offset: NonNegativeFloat = 2.0
    """Less likely than chance: log-probability below -log(vocabulary) minus this."""


class Repetition(Filter):
    """A long run of tokens of which each was all but certain: the policy is in a loop."""

    reads_logprobs: ClassVar[bool] = True
    type: Literal["repetition"] = "repetition"
    window: PositiveInt = 3000
    """So many sampled tokens in a row."""
    probability_above: Fraction = 0.99
    """Each of them was sampled with more than this probability."""


class Length(Filter):
    """Too short, too long, or cut off."""

    type: Literal["length"] = "length"
    min_tokens: NonNegativeInt = 0
    """Fewest sampled tokens."""
    max_tokens: PositiveInt | None = None
    """Most sampled tokens."""
    truncated: Bool = False
    """Also those that ran into a limit of tokens or turns."""


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
