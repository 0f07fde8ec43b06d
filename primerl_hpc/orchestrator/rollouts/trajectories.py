"""Convert finished verifiers episodes to samples: token ids, which of them the policy sampled, and log-probabilities.

verifiers stores an episode as a graph of messages. Each node holds only the tokens that it adds, so a path from root to
leaf is exactly what the engine received. Turns of one path form one sample, because each prompt extended the previous
tokens as an exact prefix; where it did not, the graph forks and the other path is a separate sample. A node that
several paths share is trained in the first of them only.

    rollout = rollout_of(episode, temperature=1.0)      # raises RolloutFailed
    rollout.samples[0].token_ids, rollout.reward
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.envs.serving.context_limits import is_overflow
from primerl_hpc.orchestrator.rollout_data import AgentTrace, Rollout, RolloutFailed, Sample
from primerl_hpc.recipe.control_tokens import has_control_text

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import Branch, Trace

ENGINE_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
# errors of the OpenAI client in verifiers' message for a reward whose judge did not respond
JUDGE_AWAY = re.compile(r": (APIConnectionError|APITimeoutError|InternalServerError|RateLimitError): ")
# Roles of text written by an environment; `Sample.roles` holds indices into this list. 0: everything else.
ROLES = ("", "system", "user", "tool")


def rollout_of(episode: Episode[Any, Any, Any], *, temperature: float, need_tokens: bool = True) -> Rollout:
    """Combine the episode's trainable traces into one rollout; its reward is their mean.

    Without ``need_tokens`` the lengths are those that the model's server reported. Raises RolloutFailed if the episode
    or any of its traces failed, or if no token was sampled.
    """
    _raise_if_failed(episode)
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise RolloutFailed("EmptyEpisode", "the episode has no trainable trace")
    samples = [
        replace(sample, trace=index)
        for index, trace in enumerate(traces)
        for sample in samples_of(trace, temperature)
    ]
    if need_tokens and not samples:
        raise RolloutFailed("EmptyTrajectory", "the engine returned no sampled token")
    _raise_without_reward(traces)
    agent_traces = [_agent_trace(trace, need_tokens) for trace in traces]
    return Rollout(
        reward=float(np.mean([trace.reward for trace in traces])),
        samples=samples,
        output_tokens=sum(trace.output_tokens for trace in agent_traces),
        input_tokens=sum(trace.input_tokens for trace in agent_traces),
        num_turns=sum(trace.num_turns for trace in agent_traces),
        is_truncated=any(trace.is_truncated for trace in agent_traces),
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
        has_control_text=any(_has_control_text(trace) for trace in traces),
        traces=agent_traces,
    )


def _agent_trace(trace: Trace[Any, Any, Any], need_tokens: bool) -> AgentTrace:
    output, inputs = trace.num_output_tokens, trace.num_input_tokens
    if need_tokens:
        output = sum(sum(node.mask) for node in trace.nodes)
        inputs = sum(len(node.token_ids) for node in trace.nodes) - output
    return AgentTrace(trace.agent.name, trace.reward, output, inputs, trace.num_turns, trace.is_truncated)


def _means(named: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return each name's mean over the traces that have it."""
    values: dict[str, list[float]] = {}
    for name, value in named:
        values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


@dataclass(frozen=True)
class TrainedBranch:
    """A path with tokens that are trained in it. Lists have one value per token."""

    branch: Branch
    mask: list[bool]  # sampled, and in no earlier path
    roles: list[int]


def trained_branches(trace: Trace[Any, Any, Any]) -> Iterator[TrainedBranch]:
    """Yield the trace's paths that become samples, in order."""
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
    """Return the samples of a trace.

    Every sampled token is trained in exactly one sample, and so is every environment message.
    """
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
    """Return the experts of each message, without copying; None if no message has any."""
    experts = [node.routed_experts for node in nodes]
    shape = next((part.shape[1:] for part in experts if part is not None), None)
    if shape is None:
        return None
    unknown = np.zeros((1, *shape), np.uint8)
    return [
        np.broadcast_to(unknown, (len(node.token_ids), *shape)) if part is None else part
        for node, part in zip(nodes, experts, strict=True)
    ]


def role_tokens(sample: Sample, role: str) -> NDArray[np.bool_]:
    """Return a mask [N] of the tokens that are text of environment messages with this role."""
    if sample.roles is None:
        return np.zeros(sample.num_tokens, np.bool_)
    return sample.roles == ROLES.index(role)


def _role_codes(node: MessageNode) -> list[int]:
    """Return a code for each of the node's tokens.

    The role's code for text of the environment, 0 for template tokens and the policy's replies.
    """
    role = node.message.role
    if node.sampled or role not in ROLES:
        return [0] * len(node.token_ids)
    code = ROLES.index(role)
    if len(node.is_content) != len(node.token_ids):  # the renderer does not distinguish text from template
        return [code] * len(node.token_ids)
    return [code if is_content else 0 for is_content in node.is_content]


def _raise_if_failed(episode: Episode[Any, Any, Any]) -> None:
    """Raise RolloutFailed if any trace failed, or if no agent had a turn."""
    for trace in episode.traces:
        if not trace.ok:
            raise _failure(trace.errors, "TraceFailed", trace.stop_condition or "no reason given")
    if not episode.ok:
        raise _failure(episode.errors, "EpisodeFailed", "no reason given")
    if episode.traces and not any(trace.num_turns for trace in episode.traces):
        raise RolloutFailed(
            "EmptyTrajectory", f"the episode has no turn ({episode.traces[0].stop_condition})"
        )


def _raise_without_reward(traces: list[Trace[Any, Any, Any]]) -> None:
    """Raise RolloutFailed for a missing or NaN reward, which must not count as 0."""
    for trace in traces:
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            raise RolloutFailed(
                "NoReward",
                f"the environment gave agent {trace.agent.name} no {', '.join(missing) or 'reward'}",
            )
        if not np.isfinite(trace.reward):
            raise RolloutFailed(
                "NoReward", f"the environment gave agent {trace.agent.name} the reward {trace.reward}"
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
    is_limit = last.type == "ProviderError" and is_overflow(last.message, last.status_code)
    return RolloutFailed(last.type, last.message, is_engine_fault=is_engine, is_limit=is_limit)


def _has_control_text(trace: Trace[Any, Any, Any]) -> bool:
    sampled = (node.message for node in trace.nodes if node.sampled)
    return any(
        has_control_text(_plain(message)["content"] + (getattr(message, "reasoning_content", None) or ""))
        for message in sampled
    )


def _plain(message: Any) -> dict[str, Any]:
    """Return role and content as text.

    Reasoning, and the names and arguments of tool calls, are added where the message has them.
    """
    content = message.content
    if isinstance(content, list):
        content = " ".join(getattr(part, "text", f"<{part.type}>") for part in content)
    plain: dict[str, Any] = {"role": message.role, "content": content or ""}
    if reasoning := getattr(message, "reasoning_content", None):
        plain["reasoning"] = reasoning
    if calls := getattr(message, "tool_calls", None):
        plain["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return plain
