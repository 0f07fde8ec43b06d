"""The orchestrator's nouns: the data that its parts exchange. Pure data; imports no other part.

In the order of a rollout: `TaskRef` → `Start` (or `Cancel`) → `Outcome` with a `Rollout` of `Sample`s, or
`RolloutFailed` → `Group` → `ScoredGroup` with its `TrainSample`s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.transport.rollouts.micro_batch import PlacedPicture


class Split(Enum):
    """The recipe's list that an environment belongs to."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class TaskRef:
    """Task ``index`` of training environment ``env``."""

    env: int
    index: int


@dataclass(frozen=True)
class Start:
    """Action: start one rollout."""

    rollout_id: int
    group_id: int
    split: Split
    env: int  # index into environments.train or environments.eval
    task: int  # index into that environment's tasks
    version: int  # live at the start: the version of its oldest token


@dataclass(frozen=True)
class Cancel:
    """Action: cancel one group."""

    group_id: int
    rollout_ids: tuple[int, ...]  # that were in flight
    reason: str
    task: TaskRef


@dataclass
class Sample:
    """One token sequence of length N. Token streams have shape [N]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]  # sampled by the policy and trained in this sample
    logprobs: NDArray[np.float32]  # log μ, temperature-scaled; 0 where not trained
    temperature: float
    trace: int = 0  # index into the rollout's traces
    ref_logprobs: NDArray[np.float32] | None = None  # log-probability under a teacher; 0 where not trained
    roles: NDArray[np.uint8] | None = (
        None  # roles of environment text that is in no earlier sample; see trajectories.ROLES
    )
    # experts selected by the engine, in parts [n, layers, k] whose n sum up to N; only zeros: unknown
    routed_experts: list[NDArray] | None = None
    images: tuple[PlacedPicture, ...] = ()  # in the order of their tokens; see rollouts.images

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def without_tokens(self) -> Sample:
        """Return a sample of length 0 with the same temperature and trace."""
        ids, mask, logprobs = self.token_ids[:0].copy(), self.loss_mask[:0].copy(), self.logprobs[:0].copy()
        return Sample(ids, mask, logprobs, self.temperature, self.trace)

    def tokens_within(self, seq_len: int) -> int:
        """Return how many leading tokens fit into a row of ``seq_len`` tokens.

        An image is included in full or not at all.
        """
        if self.num_tokens <= seq_len:
            return self.num_tokens
        return min([seq_len, *(image.start for image in self.images if image.start + image.length > seq_len)])


@dataclass(frozen=True)
class AgentTrace:
    """Reward and lengths of one agent's part in a rollout."""

    agent: str
    reward: float
    output_tokens: int = 0
    input_tokens: int = 0
    num_turns: int = 0
    is_truncated: bool = False


@dataclass
class Rollout:
    """One scored episode."""

    reward: float  # mean over its traces
    samples: list[Sample]
    output_tokens: int  # sampled
    input_tokens: int  # prompt and environment replies, each counted once
    num_turns: int
    is_truncated: bool
    # weighted, by the environment's own names; like metrics, the mean over the traces that have the name
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    text: list[dict[str, Any]] = field(default_factory=list)  # messages of the last branch, for reports
    has_control_text: bool = False  # a completion contains the text of a control token
    last_version: int = 0  # policy version that was live at its end
    seconds: float = 0.0
    traces: list[AgentTrace] = field(default_factory=list)  # default: one trace of an agent named ``agent``

    def __post_init__(self) -> None:
        self.traces = self.traces or [AgentTrace("agent", self.reward)]


class RolloutFailed(Exception):
    """An episode that cannot be trained on or scored.

    ``is_engine_fault``: the engine, router or judge did not respond. This is independent of the task, so a retry may
    succeed. ``is_limit``: the policy reached a limit (context, time), which an evaluation counts as unsolved.
    """

    def __init__(
        self, kind: str, message: str, *, is_engine_fault: bool = False, is_limit: bool = False
    ) -> None:
        self.kind, self.is_engine_fault, self.is_limit = kind, is_engine_fault, is_limit
        super().__init__(f"{kind}: {message}")


@dataclass(frozen=True)
class Outcome:
    """How one rollout ended; ``env`` and ``task`` are labels for reports."""

    rollout_id: int
    split: Split
    env: str
    task: str
    version: int  # live at the start
    rollout: Rollout | None
    error: str = ""
    is_engine_fault: bool = False  # an engine or server was down: a retry may succeed
    fatal: PrimerlError | None = None  # every rollout of this recipe would fail like this
    is_limit: bool = False  # the policy reached a limit (context, time)


@dataclass
class Group:
    """All rollouts of one task that are compared with each other (train) or averaged (eval)."""

    group_id: int
    split: Split
    env: int
    task: int
    size: int
    to_start: int
    retries_left: int  # for rollouts that failed by themselves
    fault_retries_left: int = 0  # for rollouts whose engine or environment server died
    in_flight: dict[int, int] = field(default_factory=dict)  # rollout → version at its start
    results: list[Any] = field(default_factory=list)  # in the order in which the rollouts started
    versions: list[int] = field(default_factory=list)  # of `results`, at their start
    result_ids: list[int] = field(default_factory=list)  # rollout ids of `results`
    num_failed: int = 0  # rollouts that failed after all retries
    num_faulted: int = 0  # of them, because an engine or environment server died
    num_limited: int = 0  # of them, because the policy reached a limit (context, time)
    errors: list[str] = field(default_factory=list)  # of the rollouts that failed by themselves
    tag: Any = None  # the evaluation that the group belongs to

    @property
    def is_done(self) -> bool:
        return not self.to_start and not self.in_flight

    @property
    def oldest_version(self) -> int | None:
        return min([*self.versions, *self.in_flight.values()], default=None)


@dataclass
class TrainSample:
    """A sample with its training targets: which losses train which of its tokens.

    ``rl_weight`` and ``ref_kl_weight`` apply to the sampled tokens. [N] streams that are None are zeros.
    """

    sample: Sample
    advantage: float
    env_id: int
    rl_weight: float = 1.0
    ref_kl_weight: float = 0.0
    ce_weights: NDArray[np.float32] | None = None
    ref_logprobs: NDArray[np.float32] | None = None

    @property
    def has_signal(self) -> bool:
        """True if any loss has a gradient from it; the RL loss has none where the advantage is zero."""
        return bool(self.advantage * self.rl_weight or self.ref_kl_weight or self.ce_weights is not None)

    def is_trained(self, seq_len: int) -> bool:
        """True if any token in the first ``seq_len`` (see `Sample.tokens_within`) has a weight."""
        length = self.sample.tokens_within(seq_len)
        has_ce = self.ce_weights is not None and self.ce_weights[:length].any()
        return bool(has_ce or self.sample.loss_mask[:length].any())


@dataclass
class ScoredGroup:
    """A finished group with advantages and training samples."""

    group_id: int
    task: TaskRef
    rollouts: list[Rollout]
    versions: list[int]  # at the start of each rollout
    trace_advantages: list[NDArray[np.float64]]  # for each rollout, [its traces]
    samples: list[list[TrainSample]]  # for each rollout, the samples that are trained
    num_failed: int
    is_frozen: bool = False  # sampled by a frozen model: never stale

    @property
    def advantages(self) -> NDArray[np.float64]:
        """Advantage of each rollout, the mean over its traces [G]; 0 for the players of a zero-sum game together."""
        return np.asarray([advantages.mean() for advantages in self.trace_advantages])

    @property
    def num_tokens(self) -> int:
        """Tokens of its rollouts: prompts, replies of the environment and completions, each counted once."""
        return sum(rollout.input_tokens + rollout.output_tokens for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Version at which the oldest rollout started."""
        return min(self.versions)

    def is_stale(self, min_fresh_version: int) -> bool:
        """True if the group is older than ``min_fresh_version``; never for rollouts of a frozen model."""
        return not self.is_frozen and self.oldest_version < min_fresh_version

    @property
    def has_signal(self) -> bool:
        return any(sample.has_signal for samples in self.samples for sample in samples)

    @property
    def mean_reward(self) -> float:
        return float(np.mean([rollout.reward for rollout in self.rollouts]))
