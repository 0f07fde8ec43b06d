"""Blocks about rollouts: environments, sampling, batch sizes, staleness and concurrency."""

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
from primerl_hpc.recipe.hub import PACKAGE_FORM
from primerl_hpc.recipe.schema.algorithm import Algorithm
from primerl_hpc.recipe.schema.selection import Curriculum, Gate, RolloutFilter, Shuffled

MAX_ADAPTIVE = 1024
"""Limit on rollouts in flight with adaptive concurrency if the recipe sets none."""


class Sampling(Block):
    """How completions are sampled. The trainer computes log-probabilities under the temperature-scaled distribution
    over all tokens, so training rollouts must be sampled from that distribution."""

    temperature: NonNegativeFloat = 1.0
    """Logits are divided by this before the softmax. 0 selects the most likely token (greedy), for evaluations only."""
    max_tokens: PositiveInt | None = 512
    """Maximum length of the completion of one turn, in tokens. null: the rest of the context
    (``inference.max_model_len`` minus the turn's prompt)."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: sample among the most likely tokens whose probabilities add up to this. 1 samples among all
    tokens, which training rollouts require."""
    top_k: Annotated[int, Field(strict=True, ge=-1)] = -1
    """Sample among this many of the most likely tokens. -1 or 0 samples among all tokens, which training rollouts
    require."""
    min_p: Fraction = 0.0
    """Exclude tokens whose probability is below this share of the most likely token's. 0 excludes none, which training
    rollouts require."""
    extra: dict[str, Scalar] = Field(default_factory=dict)
    """Additional vLLM sampling parameters. Training rollouts may set neither parameters that remove, favor or force
    tokens (min_tokens, bad_words, penalties, …) nor seed and n."""

    @field_validator("extra")
    @classmethod
    def _extra_repeats_no_key(cls, value: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in value if name in cls.model_fields]:
            raise ValueError(f"{own[0]} has its own key; write sampling: {{{own[0]}: …}} instead")
        return value


class Environment(Block):
    id: str
    """Id of a verifiers environment: an installed package, or one that ships with primerl-hpc, such as
    ``reverse-text``."""
    package: Annotated[str, Field(pattern=rf"^{PACKAGE_FORM}$")] | None = None
    """Package of the Environments Hub that contains the environment: ``owner/name@version``, with an exact version.
    `prefetch` and `bundle --recipe` install it, `doctor --recipe` and `submit` check it. Default (null): the package is
    installed in another way, or shipped with primerl-hpc."""
    name: str | None = None
    """Name in metrics and logs. Default: the id. Required if an id is used twice."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's taskset, for example ``{split: test}``."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Fields of the verifiers environment config other than the taskset, for example ``{agent: {max_turns: 4}}``."""
    address: Annotated[str, Field(pattern=r"^(tcp|ipc)://.+")] | None = None
    """Address of a verifiers environment server that you run yourself, for example ``tcp://host:5000``. It needs the
    engines' API key in its environment variable PRIMERL_ENGINE_API_KEY. Default (null): the run starts its own
    servers."""
    servers: Auto | PositiveInt = "auto"
    """Number of server processes; each new episode goes to the one with the fewest. One process uses one core and
    serves about 400 short episodes per second. ``auto``: one for every 256 rollouts in flight, on at most a quarter of
    the node's cores, and more where the predicted rate needs them; none with ``address``."""
    max_concurrent: PositiveInt | None = None
    """Maximum number of episodes in flight in this environment. Default: no limit, or one per core of the node if
    episodes start their own processes."""
    tasks_per_minute: PositiveFloat | None = None
    """Maximum number of episodes started per minute, for environments that use a rate-limited service. Default: no
    limit."""
    timeout_s: PositiveFloat = 600.0
    """Seconds after which a rollout is cancelled and counted as an error."""

    @model_validator(mode="after")
    def _an_address_is_one_server(self) -> Self:
        if self.address is not None and self.servers not in ("auto", 1):
            raise ValueError(
                "servers counts processes that the run starts, but there is an address; remove servers"
            )
        return self

    @property
    def label(self) -> str:
        return self.name or self.id.rsplit("/", 1)[-1].split("@", 1)[0]


class TrainEnvironment(Environment):
    ratio: PositiveFloat = 1.0
    """Share of the groups that come from this environment, relative to the other environments' ratios."""
    algorithm: Algorithm | None = None
    """Algorithm for this environment. Default: the recipe's ``algorithm``."""
    curriculum: Curriculum = Shuffled()
    """Order in which tasks are drawn."""
    gates: tuple[Gate, ...] = ()
    """Rules that a finished group must pass to be trained on; it must pass all of them. Rejected groups are replaced by
    new ones."""


class EvalEnvironment(Environment):
    interval: PositiveInt = 100
    """Number of policy versions between evaluations. The first and the last version are always evaluated."""
    samples: PositiveInt = 1
    """Rollouts per task: the k of avg@k and pass@k."""
    num_tasks: PositiveInt | None = None
    """Evaluate only this many tasks, the first ones. Default: all tasks."""
    sampling: Sampling | None = None
    """Sampling for this environment. Default: ``rollouts.sampling``."""


def check_labels(split: Sequence[Environment]) -> None:
    """Check that environment names are unique and valid file names. Raises ValueError."""
    labels = [environment.label for environment in split]
    for label in labels:
        if not is_valid_name(label):
            raise ValueError(f"environment name {label!r} is not a valid log file name; set 'name'")
        if labels.count(label) > 1:
            raise ValueError(f"two environments are called {label!r}; give one of them another 'name'")


class Environments(Block):
    """The verifiers environments that provide tasks and rewards."""

    train: tuple[TrainEnvironment, ...] = ()
    """Environments to train on. kind rl needs at least one."""
    eval: tuple[EvalEnvironment, ...] = ()
    """Environments to evaluate on, during a run of kind rl or sft and in kind eval."""
    eval_on_start: Bool = True
    """Evaluate policy v0 before the first training step."""

    @model_validator(mode="after")
    def _labels_are_file_names_and_unique(self) -> Self:
        for split in (self.train, self.eval):
            check_labels(split)
        return self

    @property
    def by_server(self) -> list[tuple[str, Environment]]:
        """(split, environment) of each environment server, ordered by server index: train first, then eval.

        ``servers: auto`` counts as 1 until the planner has replaced it.
        """
        environments: list[tuple[str, Environment]] = [("train", environment) for environment in self.train]
        environments += [("eval", environment) for environment in self.eval]
        return [
            (split, environment)
            for split, environment in environments
            for _ in range(1 if environment.servers == "auto" else environment.servers)
        ]


class AdaptiveConcurrency(Block):
    """Adjust the number of rollouts in flight to the engines' KV cache usage, queue lengths and preemptions."""

    min: PositiveInt = 8
    """Lower limit on the number of rollouts in flight."""
    start: PositiveInt | None = None
    """Initial number of rollouts in flight. Default: ``rollouts.batch_size``."""


class ExpectedRollouts(Block):
    """Lengths and times of training rollouts that predictions use; they change nothing else in a run. ``plan --like
    RUN`` takes them from a run's metrics."""

    completion_tokens: PositiveInt | None = None
    """Mean number of tokens that a rollout generates, over all turns. Default (null): half of what
    ``sampling.max_tokens`` allows, marked as an assumption."""
    cv: NonNegativeFloat = 1.0
    """Standard deviation of that number, divided by its mean."""
    prompt_tokens: PositiveInt | None = None
    """Mean tokens of the first prompt. Default (null): an eighth of ``inference.max_model_len``, at most 1,024, marked
    as an assumption."""
    turns: PositiveInt = 1
    """Requests per rollout."""
    env_s: NonNegativeFloat = 0.0
    """Seconds that the environment takes after each turn, for tools and scoring."""


def default_async_level(max_off_policy_steps: int) -> int:
    """Return the ``async_level`` of ``auto``."""
    return min(1, max_off_policy_steps)


def start_lead(async_level: int | None, max_off_policy_steps: int) -> int:
    """Return the number of batches ahead of the live version with which rollouts still start; None is ``auto``."""
    return min(2, max_off_policy_steps) if async_level is None else async_level


class Rollouts(Block):
    """How many rollouts are generated, how they are sampled, and which are trained on."""

    batch_size: PositiveInt = 128
    """Rollouts that one trainer step consumes. Must be a multiple of ``group_size``."""
    batch_tokens: PositiveInt | None = None
    """End a batch when its rollouts have this many tokens, counting the prompt, the environment's replies and the
    completions once. ``batch_size`` is then only the first estimate of a batch's number of rollouts; it is replaced by
    the lengths that the run measures. Default (null): a batch ends at ``batch_size`` rollouts."""
    group_size: PositiveInt = 8
    """Number of rollouts of the same task whose rewards are compared with each other."""
    max_off_policy_steps: NonNegativeInt = 8
    """Maximum age of a rollout's oldest token when its batch is built, in policy versions. 0: synchronous, on-policy
    training. An explicit ``async_level`` is the maximum age instead."""
    async_level: Auto | NonNegativeInt = "auto"
    """Number of batches that the orchestrator may be ahead of the weights in the engines: batch n ships, and rollouts
    start, once policy version n - 1 - async_level is live. It also bounds the age of every trained token: a rollout in
    flight that would become older is cancelled. 0 is synchronous, on-policy training. At most
    ``max_off_policy_steps``. The weights of the last async_level + 1 versions stay on disk. ``auto``: 1, or 0 with
    ``max_off_policy_steps: 0``, and tokens may be as old as ``max_off_policy_steps``; rollouts then also start for the
    batch that is collected while the trainer has one ahead, if ``max_off_policy_steps`` is at least 2."""
    max_in_flight: Auto | PositiveInt | None = None
    """Maximum number of rollouts in flight. Default: twice the batch size, and at least 1024 with
    ``adaptive_concurrency``. ``auto``: the predicted best number that the engines' KV caches hold."""
    adaptive_concurrency: AdaptiveConcurrency | None = None
    """Adjust the number of rollouts in flight to the engines' load, up to ``max_in_flight``. Default (null): always
    ``max_in_flight``."""
    zero_advantage: Literal["drop", "keep", "refill"] = "drop"
    """Treatment of samples without a training signal, such as those with advantage 0.
    ``drop``: they are not sent to the trainer, so the batch is smaller.
    ``keep``: they are sent to the trainer.
    ``refill``: they are replaced by samples of additional groups."""
    filters: tuple[RolloutFilter, ...] = ()
    """Filters that remove rollouts from the batch, or only count them."""
    max_empty_batches: PositiveInt = 10
    """Stop the run after this many consecutive batches without any training signal, or after rejecting this many
    batches worth of rollouts in a row."""
    max_error_fraction: Fraction = 0.5
    """Stop the run if more than this share of the rollouts of an environment's last 100 groups failed."""
    expected: ExpectedRollouts = ExpectedRollouts()
    sampling: Sampling = Sampling()
    """Sampling of training rollouts, and of evaluations without their own ``sampling``."""

    @model_validator(mode="after")
    def _the_lead_is_within_the_staleness(self) -> Self:
        if self.max_lead > self.max_off_policy_steps:
            raise ValueError(
                f"async_level {self.async_level} exceeds max_off_policy_steps {self.max_off_policy_steps}: batches so "
                "far ahead would be too stale to train on. Raise max_off_policy_steps or lower async_level"
            )
        return self

    @property
    def max_lead(self) -> int:
        """``async_level``, or its default."""
        return (
            default_async_level(self.max_off_policy_steps) if self.async_level == "auto" else self.async_level
        )

    @property
    def explicit_level(self) -> int | None:
        """``async_level``; None for ``auto``."""
        return None if self.async_level == "auto" else self.async_level

    @property
    def max_age(self) -> int:
        """Maximum age of a trained token in policy versions: the explicit ``async_level``, or the limit of ``auto``."""
        return self.max_off_policy_steps if self.async_level == "auto" else self.async_level

    @property
    def in_flight_ceiling(self) -> int:
        """``max_in_flight``, or its default."""
        if self.max_in_flight is not None and self.max_in_flight != "auto":
            return self.max_in_flight
        return max(2 * self.batch_size, MAX_ADAPTIVE if self.adaptive_concurrency else 0)


__all__ = [
    "Environment",
    "Environments",
    "EvalEnvironment",
    "ExpectedRollouts",
    "Rollouts",
    "Sampling",
    "TrainEnvironment",
    "check_labels",
    "default_async_level",
    "start_lead",
]
