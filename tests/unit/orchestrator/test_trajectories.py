"""verifiers traces → samples: token ids of the engine, each sampled token trained once, failures reported."""

from __future__ import annotations

import numpy as np
import pytest
from verifiers.v1.episode import WireEpisode
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import Error, WireTrace
from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage

from primerl_hpc.orchestrator.rollout_data import AgentTrace, RolloutFailed
from primerl_hpc.orchestrator.rollouts.trajectories import role_tokens, rollout_of, samples_of

TASK = {"type": "Task", "data": {"idx": 0, "prompt": "say it"}, "key": "k", "hash": "h"}
AGENT = {"config": {"harness": {"id": "inproc-chat"}, "runtime": {"type": "subprocess"}}}


def prompt(ids: list[int], parent: int | None = None) -> MessageNode:
    return MessageNode(
        parent=parent, message=UserMessage(content="ask"), token_ids=ids, mask=[False] * len(ids)
    )


def reply(ids: list[int], parent: int, *, scaffold: int = 1) -> MessageNode:
    """The first ``scaffold`` tokens are template, the rest sampled with logprob -0.1 × id."""
    sampled = ids[scaffold:]
    return MessageNode(
        parent=parent,
        message=AssistantMessage(content="answer"),
        sampled=True,
        token_ids=ids,
        mask=[False] * scaffold + [True] * len(sampled),
        logprobs=[-0.1 * token for token in sampled],
    )


def trace(nodes: list[MessageNode], *, reward: float = 1.0, ok: bool = True, **fields) -> WireTrace:
    made = WireTrace.model_validate({"task": TASK, "agent": AGENT, "ok": ok} | fields)
    made.nodes = nodes
    made.record_reward("similarity", reward)
    return made


def episode(*traces: WireTrace, ok: bool = True, **fields) -> WireEpisode:
    made = WireEpisode.model_validate({"task": TASK, "ok": ok, **fields})
    made.traces = list(traces)
    return made


def test_one_turn_is_one_sample_of_prompt_and_completion():
    (sample,) = samples_of(trace([prompt([1, 2, 3]), reply([9, 4, 5], 0)]), 0.7)
    assert sample.token_ids.tolist() == [1, 2, 3, 9, 4, 5]
    assert sample.loss_mask.tolist() == [False] * 4 + [True] * 2
    np.testing.assert_allclose(sample.logprobs, [0, 0, 0, 0, -0.4, -0.5], rtol=1e-6)
    assert sample.temperature == 0.7


def test_turns_that_extend_the_tokens_as_an_exact_prefix_are_one_sample():
    nodes = [prompt([1, 2]), reply([9, 4], 0), prompt([5, 6], 1), reply([9, 7, 8], 2)]
    (sample,) = samples_of(trace(nodes), 1.0)
    assert sample.token_ids.tolist() == [1, 2, 9, 4, 5, 6, 9, 7, 8]
    assert sample.token_ids[sample.loss_mask].tolist() == [4, 7, 8]


def test_a_rewritten_history_starts_a_new_sample_and_a_shared_reply_is_trained_once():
    nodes = [
        prompt([1, 2]),
        reply([9, 4], 0),
        prompt([5], 1),
        reply([9, 7], 2),  # first path
        prompt([6], 1),
        reply([9, 8], 4),  # second path from the same first reply
    ]
    samples = samples_of(trace(nodes), 1.0)
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 9, 4, 5, 9, 7], [1, 2, 9, 4, 6, 9, 8]]
    trained = [sample.token_ids[sample.loss_mask].tolist() for sample in samples]
    assert trained == [[4, 7], [8]]
    assert samples[1].logprobs[3] == 0  # trained in the first sample, so no probability here


def test_selected_experts_are_views_of_the_response_and_zero_for_messages_without_any():
    nodes = [prompt([1, 2]), reply([9, 4], 0), prompt([5], 1), reply([9, 7], 2)]
    nodes[1].routed_experts = np.full((2, 3, 2), 7, np.uint8)
    nodes[3].routed_experts = np.full((2, 3, 2), 300, np.uint16)
    (sample,) = samples_of(trace(nodes), 1.0)
    assert [len(part) for part in sample.routed_experts] == [2, 2, 1, 2]
    assert sample.routed_experts[1] is nodes[1].routed_experts
    assert [int(part.max()) for part in sample.routed_experts] == [0, 7, 0, 300]
    (plain,) = samples_of(trace([prompt([1, 2]), reply([9, 4], 0)]), 1.0)
    assert plain.routed_experts is None


def test_text_of_environment_messages_is_marked_once_and_their_template_not():
    tool = MessageNode(
        parent=1,
        message=ToolMessage(tool_call_id="c", content="42"),
        token_ids=[9, 7, 9],
        mask=[False] * 3,
        is_content=[False, True, False],
    )
    nodes = [prompt([1, 2]), reply([9, 4], 0), tool, reply([9, 7], 2), prompt([6], 1), reply([9, 8], 4)]
    first, second = samples_of(trace(nodes), 1.0)
    assert role_tokens(first, "tool").tolist() == [False] * 5 + [True] + [False] * 3
    assert np.flatnonzero(role_tokens(first, "user")).tolist() == [0, 1]
    assert np.flatnonzero(role_tokens(second, "user")).tolist() == [4]  # the prompt is in the first sample


def test_samples_and_rewards_of_several_agents_are_separate():
    seats = [{**AGENT, "name": name} for name in ("proposer", "solver")]
    traces = [
        trace([prompt([1]), reply([9, 4], 0)], reward=reward, agent=seat)
        for reward, seat in zip((0.5, 1.0), seats, strict=True)
    ]
    found = rollout_of(episode(*traces), temperature=1.0)
    assert [(each.agent, each.reward) for each in found.traces] == [("proposer", 0.5), ("solver", 1.0)]
    assert [sample.trace for sample in found.samples] == [0, 1]
    assert found.reward == 0.75


def test_metrics_of_agents_with_one_name_are_averaged_and_lengths_are_their_own():
    seats = [{**AGENT, "name": name} for name in ("first", "second")]
    long = [prompt([1, 2]), reply([9, 4], 0), prompt([5, 6], 1), reply([9, 7, 8], 2)]
    short = [prompt([1]), reply([9, 4], 0)]
    won = trace(long, reward=1.0, agent=seats[0], metrics={"stones": 4.0, "lead": 1.0})
    lost = trace(short, reward=-1.0, agent=seats[1], metrics={"stones": 1.0})
    found = rollout_of(episode(won, lost), temperature=1.0)
    assert found.rewards == {"similarity": 0.0}
    assert found.metrics == {"stones": 2.5, "lead": 1.0}
    assert found.traces == [
        AgentTrace("first", 1.0, output_tokens=3, input_tokens=6, num_turns=2),
        AgentTrace("second", -1.0, output_tokens=1, input_tokens=2, num_turns=1),
    ]
    assert (found.output_tokens, found.input_tokens, found.num_turns) == (4, 8, 3)


def test_first_token_is_never_trained():
    (sample,) = samples_of(trace([reply([4, 5], None, scaffold=0)]), 1.0)
    assert sample.loss_mask.tolist() == [False, True]


def test_rollout_counts_tokens_turns_and_reward():
    nodes = [prompt([1, 2]), reply([9, 4], 0), prompt([5, 6], 1), reply([9, 7, 8], 2)]
    found = rollout_of(episode(trace(nodes, reward=0.25)), temperature=1.0)
    assert (found.reward, found.output_tokens, found.input_tokens, found.num_turns) == (0.25, 3, 6, 2)
    assert found.rewards == {"similarity": 0.25}
    assert [message["role"] for message in found.text] == ["user", "assistant", "user", "assistant"]


def test_trace_without_a_turn_is_a_failure():
    with pytest.raises(RolloutFailed, match="EmptyTrajectory"):
        rollout_of(episode(trace([prompt([1])], stop_condition="agent_timeout")), temperature=1.0)


def test_sampled_turns_without_tokens_are_a_failure():
    node = MessageNode(parent=0, message=AssistantMessage(content="x"), sampled=True)
    with pytest.raises(RolloutFailed, match="EmptyTrajectory"):
        rollout_of(episode(trace([prompt([1]), node])), temperature=1.0)


def test_one_failed_trace_fails_its_siblings():
    good = trace([prompt([1]), reply([9, 4], 0)])
    bad = trace([prompt([1]), reply([9, 4], 0)], ok=False, stop_condition="error")
    with pytest.raises(RolloutFailed, match="TraceFailed"):
        rollout_of(episode(good, bad), temperature=1.0)


def test_a_seat_that_never_had_a_turn_does_not_fail_a_game():
    played = trace([prompt([1]), reply([9, 4], 0)], reward=-1.0)
    idle = trace([], reward=1.0)
    found = rollout_of(episode(played, idle), temperature=1.0)
    assert (len(found.samples), len(found.traces), found.reward) == (1, 2, 0.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_missing_or_not_a_number_is_a_failure(reward):
    made = trace([prompt([1]), reply([9, 4], 0)])
    if reward is None:
        made.rewards = {"similarity": None}
    else:
        made.record_reward("similarity", reward)
    with pytest.raises(RolloutFailed, match="NoReward"):
        rollout_of(episode(made), temperature=1.0)


@pytest.mark.parametrize(
    ("status", "is_engine_fault"), [(503, True), (504, True), (None, True), (400, False)]
)
def test_an_engine_that_did_not_respond_is_distinguished_from_a_bad_request(status, is_engine_fault):
    error = Error(type="ProviderError", message="no", status_code=status)
    with pytest.raises(RolloutFailed) as caught:
        rollout_of(episode(trace([prompt([1])], ok=False, errors=[error])), temperature=1.0)
    assert caught.value.is_engine_fault is is_engine_fault


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("APIConnectionError: Connection error.", "NoJudge"),
        ("RateLimitError: 429", "NoJudge"),
        ("BadRequestError: 400", "TaskError"),
        ("ValueError: judge returned no YES/NO verdict: 'hm'", "TaskError"),
    ],
)
def test_an_unreachable_judge_is_distinguished_from_an_invalid_reply(cause, kind):
    error = Error(type="TaskError", message=f"task Maths scoring: {cause}")
    with pytest.raises(RolloutFailed, match=f"^{kind}: ") as caught:
        rollout_of(episode(trace([prompt([1])], ok=False, errors=[error])), temperature=1.0)
    assert caught.value.is_engine_fault is (kind == "NoJudge")


def test_failed_episode_without_a_trace_is_a_failure():
    with pytest.raises(RolloutFailed, match="TimeoutError"):
        rollout_of(episode(ok=False, errors=[Error(type="TimeoutError", message="late")]), temperature=1.0)
