"""Algorithms: what the rewards of a group make of its tokens. One block per file of ``orchestrator/algorithms``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from primerl_hpc.common.block import Block, Fraction, NonNegativeFloat, PositiveFloat, default_type


class LinearLengthPenalty(Block):
    """Linear penalty on the group's mean reward p: r' = r - p (w_out out/max out + w_in in/max in + w_turn turns/max turns)."""

    type: Literal["linear"] = "linear"
    output_weight: NonNegativeFloat = 0.25
    """w_out: what the group's longest output costs, as a share of its mean reward."""
    input_weight: NonNegativeFloat = 0.1
    """w_in: the same of tokens of prompts and of environments' replies."""
    turn_weight: NonNegativeFloat = 0.1
    """w_turn: the same of turns."""


class CorrectLengthPenalty(Block):
    """Bonus for the cheap among the group's best: r' = r (1 + clamp(1 - c / mean c of the best, 0, 1)); the others keep r."""

    type: Literal["correct"] = "correct"
    cost: Literal["tokens", "turns"] = "tokens"
    """What is cheap: weighted tokens, or turns."""
    output_weight: NonNegativeFloat = 1.0
    """Weight of a sampled token in the cost."""
    input_weight: NonNegativeFloat = 1.0
    """Weight of a token of the prompt or of an environment's reply."""


LengthPenalty = Annotated[
    Annotated[LinearLengthPenalty | CorrectLengthPenalty, Field(discriminator="type")],
    default_type("linear"),
]


class Method(Block):
    """What the block of any algorithm says of it beside its settings."""

    samples_from: ClassVar[Literal["policy", "teacher"]] = "policy"
    """Whose replies are trained on. A teacher's never become stale, and how likely the policy finds them is not known."""
    takes_images: ClassVar[bool] = True
    """Whether rollouts may show images. Where a rollout is scored or rendered anew, only its text is."""


class LengthAware(Method):
    length_penalty: LengthPenalty | None = None
    """What a rollout's length changes of its reward before it is compared; null: nothing."""


class GRPO(LengthAware):
    """A = r - mean(r) over the group, without division by the standard deviation."""

    type: Literal["grpo"] = "grpo"


class GRPOStd(LengthAware):
    """A = (r - mean(r)) / (std(r) + 1e-8) over the group."""

    type: Literal["grpo_std"] = "grpo_std"


class RLOO(LengthAware):
    """A = r - mean of the others' r."""

    type: Literal["rloo"] = "rloo"


class OPO(LengthAware):
    """A = r - mean of r weighted by the number of sampled tokens."""

    type: Literal["opo"] = "opo"


class MaxRL(LengthAware):
    """A = (r - mean(r)) / mean(r); nothing where mean(r) ≤ 0."""

    type: Literal["max_rl"] = "max_rl"


class RAE(Method):
    """Self-play: A = r - b with a moving baseline b for each agent, b ← decay b + (1 - decay) r; needs no group."""

    type: Literal["rae"] = "rae"
    decay: Fraction = 0.95
    """Share of its old value that the baseline keeps at each reward."""


class HierarchicalGRPO(Method):
    """Several agents: some are compared inside one episode, the others with the same agent across the group."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: Annotated[tuple[str, ...], Field(min_length=1)]
    """Agents that play several times in an episode and are compared there (the solvers of a proposer-solver game)."""


class Echo(LengthAware):
    """grpo on what the policy sampled, and a small cross-entropy on what the environment said to it."""

    type: Literal["echo"] = "echo"
    alpha: dict[Literal["system", "user", "tool"], PositiveFloat] = Field(
        default_factory=lambda: {"tool": 0.1}
    )
    """Weight of the cross-entropy on the message text of each of these roles."""


class OPD(Method):
    """On-policy distillation: the policy samples, the recipe's teacher scores every token, the loss is the reverse KL."""

    takes_images: ClassVar[bool] = False
    type: Literal["opd"] = "opd"


class OPSD(Method):
    """On-policy self-distillation: as opd, but who scores is the live policy itself, shown a demonstration of the task."""

    takes_images: ClassVar[bool] = False
    type: Literal["opsd"] = "opsd"
    demo_key: str = "demonstration"
    """Field of a task's data that holds its demonstration, e.g. ``answer``."""
    template: Annotated[str, Field(pattern=r"\{demonstration\}")] = (
        "Here is how this task is done well:\n\n{demonstration}"
    )
    """What is put at the beginning of the system message, only where the policy scores."""


class SFTDistill(Method):
    """Hard distillation: the recipe's teacher samples, the policy is trained on its replies by cross-entropy."""

    samples_from: ClassVar[Literal["policy", "teacher"]] = "teacher"
    takes_images: ClassVar[bool] = False
    type: Literal["sft_distill"] = "sft_distill"


class Custom(Method):
    """Advantages from a function of yours, called once per group."""

    type: Literal["custom"] = "custom"
    import_path: str
    """``package.module:function``: gets the group's rollouts (`orchestrator.trajectories.Rollout`), returns one finite number for each."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of the function."""


NEED_TEACHER = ("opd", "sft_distill")
"""Types that need the recipe's teacher."""
SCORED = ("opd", "opsd")
"""Types whose sampled tokens a reference model scores."""

Algorithm = Annotated[
    Annotated[
        GRPO
        | GRPOStd
        | RLOO
        | OPO
        | MaxRL
        | RAE
        | HierarchicalGRPO
        | Echo
        | OPD
        | OPSD
        | SFTDistill
        | Custom,
        Field(discriminator="type"),
    ],
    default_type("grpo"),
]

__all__ = [
    "GRPO",
    "NEED_TEACHER",
    "OPD",
    "OPO",
    "OPSD",
    "RAE",
    "RLOO",
    "SCORED",
    "Algorithm",
    "CorrectLengthPenalty",
    "Custom",
    "Echo",
    "GRPOStd",
    "HierarchicalGRPO",
    "LengthPenalty",
    "LinearLengthPenalty",
    "MaxRL",
    "SFTDistill",
]
