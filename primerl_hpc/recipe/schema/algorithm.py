"""Algorithms: how the rewards of a group become advantages or training targets for tokens.

One block for each entry of ``orchestrator.algorithms.ALGORITHMS``. Rules about an algorithm are class variables of
its block.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from primerl_hpc.common.block import Block, Fraction, NonNegativeFloat, PositiveFloat, default_type


class LinearLengthPenalty(Block):
    """Linear penalty: r' = r - p (w_out out/max out + w_in in/max in + w_turn turns/max turns), where p is the group's
    mean reward, or 0 if that is negative."""

    type: Literal["linear"] = "linear"
    output_weight: NonNegativeFloat = 0.25
    """w_out: reward deducted from the rollout with the most sampled tokens, as a share of the group's mean reward."""
    input_weight: NonNegativeFloat = 0.1
    """w_in: like ``output_weight``, for tokens of prompts and of environment replies."""
    turn_weight: NonNegativeFloat = 0.1
    """w_turn: like ``output_weight``, for the number of turns."""


class CorrectLengthPenalty(Block):
    """Bonus for the cheapest of the group's best rollouts: r' = r (1 + clamp(1 - c / mean c of the best, 0, 1)), where
    c is a rollout's cost; all other rollouts keep r."""

    type: Literal["correct"] = "correct"
    cost: Literal["tokens", "turns"] = "tokens"
    """Unit of the cost.
    ``tokens``: the weighted number of tokens (see ``output_weight`` and ``input_weight``).
    ``turns``: the number of turns."""
    output_weight: NonNegativeFloat = 1.0
    """Weight of a sampled token in the cost."""
    input_weight: NonNegativeFloat = 1.0
    """Weight of a token of the prompt or of an environment reply in the cost."""


LengthPenalty = Annotated[
    Annotated[LinearLengthPenalty | CorrectLengthPenalty, Field(discriminator="type")],
    default_type("linear"),
]


class Method(Block):
    """Base of all algorithm blocks: the rules that other parts of the program need to know about an algorithm."""

    samples_from: ClassVar[Literal["policy", "teacher"]] = "policy"
    """Model that samples the replies that are trained on. A teacher's replies never become stale, and their
    log-probabilities under the policy are unknown."""
    takes_images: ClassVar[bool] = True
    """True if rollouts may contain images. Algorithms that score or re-render rollouts process their text only."""
    compares_group: ClassVar[bool] = False
    """True if rewards are compared within the group and nowhere else, so that a group of one has no advantage."""
    needs_teacher: ClassVar[bool] = False
    """True if the algorithm uses the recipe's ``teacher``."""
    is_scored: ClassVar[bool] = False
    """True if a reference model scores every sampled token."""


class LengthAware(Method):
    length_penalty: LengthPenalty | None = None
    """How the length of a rollout changes its reward before rewards are compared. Default (null): not at all."""


class GRPO(LengthAware):
    """A = r - mean(r) over the group, without division by the standard deviation."""

    compares_group: ClassVar[bool] = True
    type: Literal["grpo"] = "grpo"


class GRPOStd(LengthAware):
    """A = (r - mean(r)) / (std(r) + 1e-8) over the group."""

    compares_group: ClassVar[bool] = True
    type: Literal["grpo_std"] = "grpo_std"


class RLOO(LengthAware):
    """A = r - mean of the other rollouts' r in the group."""

    compares_group: ClassVar[bool] = True
    type: Literal["rloo"] = "rloo"


class OPO(LengthAware):
    """A = r - mean of r over the group, weighted by the number of sampled tokens."""

    compares_group: ClassVar[bool] = True
    type: Literal["opo"] = "opo"


class MaxRL(LengthAware):
    """A = (r - mean(r)) / mean(r) over the group; 0 if mean(r) ≤ 0."""

    compares_group: ClassVar[bool] = True
    type: Literal["max_rl"] = "max_rl"


class RAE(Method):
    """Self-play: A = r - b, with a moving baseline b for each agent: b ← decay b + (1 - decay) r after each trace.
    Needs no group, so ``rollouts.group_size`` may be 1."""

    type: Literal["rae"] = "rae"
    decay: Fraction = 0.95
    """Share of its old value that an agent's baseline keeps at each update."""


class HierarchicalGRPO(Method):
    """Environments with several agents: the agents in ``episode_agents`` are compared within one episode, all others
    with the same agent across the group."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    episode_agents: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of agents that play several times in an episode and are compared there, for example the solvers of a
    proposer-solver game."""


class ECHO(LengthAware):
    """grpo on the tokens that the policy sampled, plus a small cross-entropy loss on the environment's messages."""

    type: Literal["echo"] = "echo"
    alpha: dict[Literal["system", "user", "tool"], PositiveFloat] = Field(
        default_factory=lambda: {"tool": 0.1}
    )
    """Weight of the cross-entropy loss on message text, for each message role that has one."""


class OPD(Method):
    """On-policy distillation: the policy samples, the recipe's teacher scores every token, and the loss is the reverse
    KL divergence."""

    takes_images: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    is_scored: ClassVar[bool] = True
    type: Literal["opd"] = "opd"


class OPSD(Method):
    """On-policy self-distillation: like opd, but the current policy itself scores the tokens, with a demonstration of
    the task in its prompt."""

    takes_images: ClassVar[bool] = False
    is_scored: ClassVar[bool] = True
    type: Literal["opsd"] = "opsd"
    demo_key: str = "demonstration"
    """Field of a task's data that holds its demonstration, for example ``answer``."""
    template: Annotated[str, Field(pattern=r"\{demonstration\}")] = (
        "Here is how this task is done well:\n\n{demonstration}"
    )
    """Text inserted at the start of the system message when the policy scores, never when it samples. It must contain
    ``{demonstration}``."""


class SFTDistill(Method):
    """Hard distillation: the recipe's teacher samples, and the policy is trained on the teacher's replies by
    cross-entropy."""

    samples_from: ClassVar[Literal["policy", "teacher"]] = "teacher"
    takes_images: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = True
    type: Literal["sft_distill"] = "sft_distill"


class CustomAlgorithm(Method):
    """Advantages from your own function, which is called once per group."""

    type: Literal["custom"] = "custom"
    import_path: str
    """``package.module:function``. The function receives the group's rollouts
    (`orchestrator.rollouts.trajectories.Rollout`) and returns one finite number for each."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the function in addition."""


Algorithm = Annotated[
    Annotated[
        GRPO
        | GRPOStd
        | RLOO
        | OPO
        | MaxRL
        | RAE
        | HierarchicalGRPO
        | ECHO
        | OPD
        | OPSD
        | SFTDistill
        | CustomAlgorithm,
        Field(discriminator="type"),
    ],
    default_type("grpo"),
]

__all__ = [
    "ECHO",
    "GRPO",
    "OPD",
    "OPO",
    "OPSD",
    "RAE",
    "RLOO",
    "Algorithm",
    "CorrectLengthPenalty",
    "CustomAlgorithm",
    "GRPOStd",
    "HierarchicalGRPO",
    "LengthPenalty",
    "LinearLengthPenalty",
    "MaxRL",
    "SFTDistill",
]
