"""The rollout half of a recipe: environments, sampling, batches, staleness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.common.block import (
    Auto,
    Block,
    Bool,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Scalar,
)
from primerl_hpc.common.names import is_valid_name
from primerl_hpc.recipe.algorithm_schema import Algorithm
from primerl_hpc.recipe.selection_schema import Curriculum, Gate, RolloutFilter, Shuffled

MAX_ADAPTIVE = 1024  # rollouts in flight, where the recipe sets no bound


class Sampling(Block):
    """How completions are sampled. Log-probabilities on both sides are of the temperature-scaled distribution."""

    temperature: NonNegativeFloat = 1.0
    """Logits are divided by this before the softmax; 0: always the likeliest token, for evaluations alone."""
    max_tokens: PositiveInt = 512
    """Longest completion of one turn, in tokens."""
    top_p: PositiveFraction = 1.0
    """Sample among the likeliest tokens whose probabilities add up to this; 1: among all."""
    top_k: Annotated[int, Field(strict=True, ge=-1)] = -1
    """Sample among so many of the likeliest tokens; -1 or 0: among all."""
    min_p: Fraction = 0.0
    """Leave out tokens less likely than this share of the likeliest one's probability; 0: none."""
    extra: dict[str, Scalar] = Field(default_factory=dict)
    """More vLLM sampling parameters; of the training rollouts none that the trainer does not know of: seed, n, penalties, logit_bias."""

    @field_validator("extra")
    @classmethod
    def _extra_has_no_key_of_its_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in value if name in cls.model_fields]:
            raise ValueError(f"{own[0]} has a key of its own: write sampling: {{{own[0]}: …}}")
        return value


class Environment(Block):
    id: str
    """A verifiers environment: an installed package, or one that ships with primerl-hpc (reverse-text)."""
    name: str | None = None
    """Name in metrics and logs; default: the id. Needed where one id is used twice."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's taskset, e.g. ``{split: test}``."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of the verifiers environment config beyond the taskset, e.g. ``{agent: {max_turns: 4}}``."""
    address: Annotated[str, Field(pattern=r"^(tcp|ipc)://.+")] | None = None
    """A verifiers environment server that you run yourself, e.g. ``tcp://host:5000``; default: the run starts its own. It must have the engines' key in its variable PRIMERL_ENGINE_API_KEY."""
    servers: Auto | PositiveInt = "auto"
    """Processes that serve it; episodes go to the one with the fewest. One is a core's worth: about a hundred short episodes a second. ``auto``: one for every 256 rollouts in flight, on up to a quarter of their node's cores; none where the recipe gives an address."""
    max_concurrent: PositiveInt | None = None
    """Most episodes in flight in this environment."""
    tasks_per_minute: PositiveFloat | None = None
    """Most episodes begun per minute, for environments behind a service that counts."""
    timeout_s: PositiveFloat = 600.0
    """One rollout longer than this is cancelled and counted as an error."""

    @model_validator(mode="after")
    def _an_address_is_one_server(self) -> Self:
        if self.address is not None and self.servers not in ("auto", 1):
            raise ValueError("servers are those that the run starts, and there is an address")
        return self

    @property
    def label(self) -> str:
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]


class TrainEnvironment(Environment):
    ratio: PositiveFloat = 1.0
    """Share of groups drawn from this environment, relative to the others'."""
    algorithm: Algorithm | None = None
    """Default: the recipe's algorithm."""
    curriculum: Curriculum = Shuffled()
    """Which of its tasks comes next."""
    gates: tuple[Gate, ...] = ()
    """Which of its finished groups are trained on: those that all gates admit; others are generated in the place of the rest."""


class EvalEnvironment(Environment):
    interval: PositiveInt = 100
    """Evaluate every so many policy versions; the first and the last version are always evaluated."""
    samples: PositiveInt = 1
    """Rollouts per task: avg@k and pass@k are over these."""
    num_tasks: PositiveInt | None = None
    """The first so many tasks; default: all."""
    sampling: Sampling | None = None
    """Default: the training sampling."""


def check_labels(split: Sequence[Environment]) -> None:
    """Raises ValueError for environments that cannot be told apart, or name no file."""
    labels = [environment.label for environment in split]
    for label in labels:
        if not is_valid_name(label):
            raise ValueError(f"environment name {label!r} cannot name a log file; set 'name'")
        if labels.count(label) > 1:
            raise ValueError(f"two environments are called {label!r}; give one of them a 'name'")


class Environments(Block):
    """Where tasks and rewards come from (verifiers environments)."""

    train: tuple[TrainEnvironment, ...] = ()
    """Whose tasks are trained on; required by kind rl."""
    eval: tuple[EvalEnvironment, ...] = ()
    """What the policy is evaluated on, during a run of kind rl and in kind eval."""
    eval_on_start: Bool = True
    """Evaluate policy v0 before the first step."""

    @model_validator(mode="after")
    def _labels_are_file_names_and_unique(self) -> Self:
        for split in (self.train, self.eval):
            check_labels(split)
        return self

    @property
    def by_server(self) -> list[tuple[str, Environment]]:
        """(split, environment) of each environment server, in the order of their indices: train first, then eval.

        Where ``servers`` is not settled yet, it counts as 1.
        """
        every = [*(("train", each) for each in self.train), *(("eval", each) for each in self.eval)]
        return [
            (split, each)
            for split, each in every
            for _ in range(1 if each.servers == "auto" else each.servers)
        ]


class AdaptiveConcurrency(Block):
    """The number of rollouts in flight follows the engines' KV cache use, queues and preemptions."""

    min: PositiveInt = 8
    """Never fewer may be in flight."""
    start: PositiveInt | None = None
    """At first; default: rollouts.batch_size."""


class Rollouts(Block):
    """How many rollouts are made, how they are sampled, and which are trained on."""

    batch_size: PositiveInt = 128
    """Rollouts that one trainer step consumes."""
    group_size: PositiveInt = 8
    """Rollouts of one task that are compared with each other."""
    max_off_policy_steps: NonNegativeInt = 8
    """Bound on the age of a rollout's oldest token, in policy versions, when the batch is cut; 0: synchronous, on-policy."""
    max_in_flight: PositiveInt | None = None
    """Most rollouts in flight; default: twice the batch size, with adaptive_concurrency at least 1024."""
    adaptive_concurrency: AdaptiveConcurrency | None = None
    """Let the engines' own metrics decide how many rollouts are in flight, up to max_in_flight; null: always that many."""
    zero_advantage: Literal["drop", "keep", "refill"] = "drop"
    """Samples without a training signal: not shipped (drop), shipped (keep), or replaced by more groups (refill)."""
    filters: tuple[RolloutFilter, ...] = ()
    """Which rollouts are left out of the batch, or only counted."""
    max_empty_batches: PositiveInt = 10
    """Stop after so many batches in a row without any signal, or so many batches' rollouts turned away in a row."""
    max_error_fraction: Fraction = 0.5
    """Stop when more than this share of the rollouts of an environment's last 100 groups failed."""
    sampling: Sampling = Sampling()
    """Of training rollouts, and of evaluations without their own."""

    @property
    def in_flight_ceiling(self) -> int:
        """max_in_flight, or its default."""
        if self.max_in_flight is not None:
            return self.max_in_flight
        return max(2 * self.batch_size, MAX_ADAPTIVE if self.adaptive_concurrency else 0)


__all__ = [
    "Environment",
    "Environments",
    "EvalEnvironment",
    "Rollouts",
    "Sampling",
    "TrainEnvironment",
    "check_labels",
]
