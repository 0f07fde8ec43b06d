"""A finished verifiers episode → what is trained: token ids, which of them the policy sampled, and how likely.

verifiers keeps an episode as a graph of messages; each node holds only the tokens it adds, so a path from root to
leaf is exactly what the engine saw. Turns of one path are one sample, because each prompt extended the previous
tokens as an exact prefix; where a prompt did not, the graph has forked and the other path is a sample of its own.
A node that several paths share is trained in the first of them only.

    rollout = rollout_of(episode, temperature=1.0)      # raises RolloutFailed
    rollout.samples[0].token_ids, rollout.reward
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.transport.rollouts import PlacedPicture

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch, Trace

ENGINE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
# a reward whose judge did not answer, as verifiers words it: errors of the OpenAI client
JUDGE_AWAY = re.compile(r": (APIConnectionError|APITimeoutError|InternalServerError|RateLimitError): ")
# Roles whose text an environment wrote; their codes in `Sample.roles` are their places here. 0: everything else.
ROLES = ("", "system", "user", "tool")


class RolloutFailed(Exception):
    """An episode that cannot be trained or scored.

    ``is_engine_fault``: the engine, router or judge did not answer; says nothing about the task, so a new try may succeed.
    """

    def __init__(self, kind: str, message: str, *, is_engine_fault: bool = False) -> None:
        self.kind, self.is_engine_fault = kind, is_engine_fault
        super().__init__(f"{kind}: {message}")


@dataclass
class Sample:
    """One token sequence of length N. Streams have shape [N] and belong to the token they stand beside."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]  # sampled by the policy, and trained in this sample
    logprobs: NDArray[np.float32]  # log μ, temperature-scaled; 0 where not trained
    temperature: float
    trace: int = 0  # which of the rollout's traces it is of
    ref_logprobs: NDArray[np.float32] | None = None  # log-probability under a teacher; 0 where not trained
    roles: NDArray[np.uint8] | None = None  # text of environment messages not in an earlier sample; see ROLES
    # experts the engine chose, in parts [n, layers, k] whose n sum up to N; zeros alone: not known
    routed_experts: list[NDArray] | None = None
    images: tuple[PlacedPicture, ...] = ()  # in the order of their tokens; see `images`

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def without_tokens(self) -> Sample:
        """A sample of length 0 in its place."""
        ids, mask, logprobs = self.token_ids[:0].copy(), self.loss_mask[:0].copy(), self.logprobs[:0].copy()
        return Sample(ids, mask, logprobs, self.temperature, self.trace)

    def tokens_within(self, seq_len: int) -> int:
        """How many of them a row of ``seq_len`` tokens takes: an image is there as a whole or not at all."""
        if self.num_tokens <= seq_len:
            return self.num_tokens
        return min([seq_len, *(each.start for each in self.images if each.start + each.length > seq_len)])


@dataclass(frozen=True)
class AgentTrace:
    """What one agent did and got in a rollout."""

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
    input_tokens: int  # prompt and replies of the environment, each counted once
    num_turns: int
    is_truncated: bool
    # by the environment's own names, weighted; like metrics the mean over the traces that have the name
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    text: list[dict[str, str]] = field(default_factory=list)  # messages of the last path, for people
    last_version: int = 0  # policy version that was live when it finished
    seconds: float = 0.0
    traces: list[AgentTrace] = field(default_factory=list)  # default: one, of an agent called ``agent``

    def __post_init__(self) -> None:
        self.traces = self.traces or [AgentTrace("agent", self.reward)]


def rollout_of(episode: Episode[Any, Any, Any], *, temperature: float, need_tokens: bool = True) -> Rollout:
    """The episode's trainable traces as one rollout; several are averaged in reward and share the advantage.

    Without ``need_tokens`` the lengths are those that the model's server counted.

    Raises RolloutFailed when the episode or any of its traces failed, or no token was sampled.
    """
    _raise_if_failed(episode)
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise RolloutFailed("EmptyEpisode", "no trainable trace")
    samples = [
        replace(sample, trace=index)
        for index, trace in enumerate(traces)
        for sample in samples_of(trace, temperature)
    ]
    if need_tokens and not samples:
        raise RolloutFailed("EmptyTrajectory", "no sampled token came back")
    _raise_without_reward(traces)
    played = [_played(trace, need_tokens) for trace in traces]
    return Rollout(
        reward=float(np.mean([trace.reward for trace in traces])),
        samples=samples,
        output_tokens=sum(each.output_tokens for each in played),
        input_tokens=sum(each.input_tokens for each in played),
        num_turns=sum(each.num_turns for each in played),
        is_truncated=any(each.is_truncated for each in played),
        rewards=_means(
            (name, reward.value)
            for trace in traces
            for name, reward in trace.rewards.items()
            if reward is not None
        ),
        metrics=_means(
            (name, value) for trace in traces for name, value in trace.metrics.items() if value is not None
        ),
        text=[_plain(message) for message in traces[-1].messages],
        traces=played,
    )


def _played(trace: Trace[Any, Any, Any], need_tokens: bool) -> AgentTrace:
    output, inputs = trace.num_output_tokens, trace.num_input_tokens
    if need_tokens:
        output = sum(sum(node.mask) for node in trace.nodes)
        inputs = sum(len(node.token_ids) for node in trace.nodes) - output
    return AgentTrace(trace.agent.name, trace.reward, output, inputs, trace.num_turns, trace.is_truncated)


def _means(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Each name's mean over the traces that have it: one agent's must not hide another's."""
    values: dict[str, list[float]] = {}
    for name, value in named:
        values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(each)) for name, each in values.items()}


@dataclass(frozen=True)
class TrainedBranch:
    """A path with tokens that are trained in it. Lists have a value per token."""

    branch: Branch
    mask: list[bool]  # sampled, and in no earlier path
    roles: list[int]


def trained_branches(trace: Trace[Any, Any, Any]) -> Iterator[TrainedBranch]:
    """The trace's paths that become samples, in their order."""
    seen: set[int] = set()
    for branch in trace.branches:
        if not branch.trainable:
            continue
        mask: list[bool] = []
        roles: list[int] = []
        for node in branch.nodes:
            is_fresh = id(node) not in seen
            mask += node.mask if node.sampled and is_fresh else [False] * len(node.mask)
            roles += _role_codes(node) if is_fresh else [0] * len(node.token_ids)
            seen.add(id(node))
        if any(mask):
            yield TrainedBranch(branch, mask, roles)


def samples_of(trace: Trace[Any, Any, Any], temperature: float) -> list[Sample]:
    """Every sampled token of the trace in exactly one sample, and so every message of the environment."""
    samples: list[Sample] = []
    for path in trained_branches(trace):
        loss_mask = np.asarray(path.mask, dtype=np.bool_)
        loss_mask[0] = False  # nothing predicts the first token
        logprobs = np.asarray(path.branch.logprobs, dtype=np.float32)
        samples.append(
            Sample(
                token_ids=np.asarray(path.branch.token_ids, dtype=np.int32),
                loss_mask=loss_mask,
                logprobs=np.where(loss_mask, logprobs, np.float32(0)),
                temperature=temperature,
                roles=np.asarray(path.roles, dtype=np.uint8),
                routed_experts=_routed_experts(path.branch.nodes),
            )
        )
    return samples


def _routed_experts(nodes: list[MessageNode]) -> list[NDArray] | None:
    """What each message has of them, not copied. None when no message has any."""
    found = [node.routed_experts for node in nodes]
    shape = next((each.shape[1:] for each in found if each is not None), None)
    if shape is None:
        return None
    unknown = np.zeros((1, *shape), np.uint8)
    return [
        np.broadcast_to(unknown, (len(node.token_ids), *shape)) if each is None else each
        for node, each in zip(nodes, found, strict=True)
    ]


def role_tokens(sample: Sample, role: str) -> NDArray[np.bool_]:
    """Which tokens are text of the environment's messages of that role. [N]"""
    if sample.roles is None:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.roles == ROLES.index(role)


def _role_codes(node: MessageNode) -> list[int]:
    """Code of each of the node's tokens: of its role where the environment's text is, 0 in template and replies."""
    role = node.message.role
    if node.sampled or role not in ROLES:
        return [0] * len(node.token_ids)
    code = ROLES.index(role)
    if len(node.is_content) != len(node.token_ids):  # a renderer that does not tell text from template
        return [code] * len(node.token_ids)
    return [code if is_content else 0 for is_content in node.is_content]


def _raise_if_failed(episode: Episode[Any, Any, Any]) -> None:
    """One failed trace fails its siblings, and so does an episode in which nobody had a turn."""
    for trace in episode.traces:
        if not trace.ok:
            raise _failure(trace.errors, "TraceFailed", trace.stop_condition or "no reason given")
    if not episode.ok:
        raise _failure(episode.errors, "EpisodeFailed", "no reason given")
    if episode.traces and not any(trace.num_turns for trace in episode.traces):
        raise RolloutFailed("EmptyTrajectory", f"no turn ({episode.traces[0].stop_condition})")


def _raise_without_reward(traces: list[Trace[Any, Any, Any]]) -> None:
    """A reward that is missing or NaN says nothing about the policy; it must not count as 0."""
    for trace in traces:
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise RolloutFailed(
                "NoReward", f"its environment gave {trace.agent.name} no {', '.join(missing) or 'reward'}"
            )
        if not np.isfinite(trace.reward):
            raise RolloutFailed(
                "NoReward", f"its environment gave {trace.agent.name} the reward {trace.reward}"
            )


def _failure(errors: list[Any], kind: str, message: str) -> RolloutFailed:
    if not errors:
        return RolloutFailed(kind, message)
    last = errors[-1]
    if last.type == "TaskError" and JUDGE_AWAY.search(last.message):
        return RolloutFailed("NoJudge", last.message, is_engine_fault=True)
    is_engine = last.type == "ProviderError" and (
        last.status_code is None or last.status_code in ENGINE_STATUSES
    )
    return RolloutFailed(last.type, last.message, is_engine_fault=is_engine)


def _plain(message: Any) -> dict[str, str]:
    content = message.content
    if isinstance(content, list):
        content = " ".join(getattr(part, "text", f"<{part.type}>") for part in content)
    return {"role": message.role, "content": content or ""}
