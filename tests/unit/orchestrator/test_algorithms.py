"""Algorithms against the plain formulas of their sources in float64, written out rollout by rollout."""

from __future__ import annotations

import asyncio
import statistics
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.validate import unfold
from primerl_hpc.orchestrator.algorithms import algorithms_of, make_algorithm
from primerl_hpc.orchestrator.algorithms.custom import CustomAlgorithmError
from primerl_hpc.orchestrator.rollout_data import AgentTrace, Rollout, Sample
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.orchestrator.setup import load_environments
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.algorithm import Algorithm
from primerl_hpc.recipe.schema.rollout import TrainEnvironment
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import MINIMAL_RL

REWARDS = [0.0, 1.0, 0.25, 0.5, 1.0]
LENGTHS = [10, 40, 5, 20, 80]
MEAN = sum(REWARDS) / 5


def algorithm(kind: str, **more):
    return make_algorithm(TypeAdapter(Algorithm).validate_python({"type": kind, **more}))


def rollout(reward: float, *, output: int = 4, turns: int = 1, inputs: int = 7) -> Rollout:
    return Rollout(reward, [], output_tokens=output, input_tokens=inputs, num_turns=turns, is_truncated=False)


def game(**rewards: float | list[float]) -> Rollout:
    """A rollout of several agents; a list is one agent that played several times."""
    traces = [
        AgentTrace(agent, each)
        for agent, given in rewards.items()
        for each in (given if isinstance(given, list) else [given])
    ]
    made = rollout(statistics.fmean(trace.reward for trace in traces))
    made.traces = traces
    return made


def advantages_of(kind: str, rewards=REWARDS, lengths=LENGTHS, **more):
    group = [rollout(reward, output=length) for reward, length in zip(rewards, lengths, strict=True)]
    return [float(each[0]) for each in algorithm(kind, **more).advantages(group)]


def _rloo(i: int) -> float:
    others = REWARDS[:i] + REWARDS[i + 1 :]
    return REWARDS[i] - sum(others) / len(others)


OPO_BASELINE = sum(r * n for r, n in zip(REWARDS, LENGTHS, strict=True)) / sum(LENGTHS)
PLAIN = {
    "grpo": lambda i: REWARDS[i] - MEAN,
    "echo": lambda i: REWARDS[i] - MEAN,
    "grpo_std": lambda i: (REWARDS[i] - MEAN) / statistics.stdev(REWARDS),
    "rloo": _rloo,
    "opo": lambda i: REWARDS[i] - OPO_BASELINE,
    "max_rl": lambda i: (REWARDS[i] - MEAN) / MEAN,
}


@pytest.mark.parametrize("kind", sorted(PLAIN))
def test_advantage_equals_the_plain_formula(kind):
    np.testing.assert_allclose(advantages_of(kind), [PLAIN[kind](i) for i in range(5)], rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(PLAIN))
@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2, 0.3, 0.3],
        [float(np.float32(0.1) + np.float32(0.2)), 0.3, 0.3],
        [float(np.float32(80.1)), 80.1, 80.1],
        [0.1 + 0.2 - 0.3, 0.0, 0.0],
        [0.0, 0.0],
        [1.0],
    ],
)
def test_equal_rewards_give_exact_zeros_whatever_the_rounding(kind, rewards):
    assert not any(advantages_of(kind, rewards, [3] * len(rewards)))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_small_rewards_and_small_differences_are_no_rounding(scale):
    advantages = advantages_of("grpo_std", [scale, 2 * scale, 3 * scale], [3] * 3)
    assert advantages == pytest.approx([-1, 0, 1], rel=1e-2)
    assert advantages_of("grpo_std", [1.0, 1.0, 1.0001], [3] * 3)[2] == pytest.approx(1.15, rel=1e-2)


def test_max_rl_is_zero_where_the_mean_reward_is_not_positive():
    assert not any(advantages_of("max_rl", [-1.0, 0.5, 0.5], [1, 2, 3]))


def test_every_block_of_the_recipe_has_its_file():
    more = {
        "hierarchical_grpo": {"episode_agents": ["solver"]},
        "custom": {"import_path": "statistics:fmean"},
    }
    blocks = [each for each in unfold(Algorithm) if isinstance(each, type)]
    assert len(blocks) >= 9
    for block in blocks:
        (kind,) = get_args(block.model_fields["type"].annotation)
        assert algorithm(kind, **more.get(kind, {})).config.type == kind


def test_an_environment_may_have_its_own_algorithm():
    environments = {"train": [{"id": "a"}, {"id": "b", "algorithm": {"type": "rae", "decay": 0.5}}]}
    recipe = parse_recipe({**MINIMAL_RL, "environments": environments, "algorithm": {"type": "rloo"}})
    assert [each.config.type for each in algorithms_of(recipe)] == ["rloo", "rae"]
    assert TrainEnvironment.model_validate({"id": "a", "algorithm": {}}).algorithm.type == "grpo"


# -- length penalties ------------------------------------------------------------------------------


def test_linear_penalty_takes_a_share_of_the_mean_reward_from_the_longest():
    penalty = {"output_weight": 0.25, "input_weight": 0.1, "turn_weight": 0.1}
    group = [rollout(1.0, output=50, inputs=10), rollout(1.0, output=100, inputs=10, turns=2)]
    found = algorithm("grpo", length_penalty=penalty).advantages(group)
    penalised = [1 - (0.25 * 0.5 + 0.1 + 0.1 * 0.5), 1 - (0.25 + 0.1 + 0.1)]
    np.testing.assert_allclose(np.ravel(found), np.array(penalised) - np.mean(penalised))


@pytest.mark.parametrize("kind", ["linear", "correct"])
def test_length_penalty_leaves_a_group_without_reward_alone(kind):
    assert not any(advantages_of("grpo", [0.0, 0.0], [5, 50], length_penalty={"type": kind}))


@pytest.mark.parametrize("rewards", [[-1.0, -1.0], [-2.0, 1.0]])
def test_linear_penalty_never_rewards_length_however_negative_the_rewards(rewards):
    penalised = advantages_of("grpo", rewards, [10, 30], length_penalty={"type": "linear"})
    np.testing.assert_allclose(penalised, advantages_of("grpo", rewards, [10, 30]))


@pytest.mark.parametrize("second", [1.0, 0.9999999])  # equal, and equal but for rounding
def test_correct_penalty_favors_short_rollouts_among_the_best_only(second):
    penalty = {"type": "correct", "output_weight": 1.0, "input_weight": 0.0}
    found = advantages_of("grpo", [1.0, second, 0.5], [10, 30, 1], length_penalty=penalty)
    # mean cost of the two best is 20: the first gets 1 + (1 - 10/20), the second is above the mean
    expected = np.array([1.5, 1.0, 0.5])
    np.testing.assert_allclose(found, expected - expected.mean(), atol=2 * (1.0 - second))


def test_correct_penalty_may_count_turns():
    group = [rollout(1.0, turns=1), rollout(1.0, turns=3)]
    found = algorithm("grpo", length_penalty={"type": "correct", "cost": "turns"}).advantages(group)
    np.testing.assert_allclose(np.ravel(found), [0.25, -0.25])


# -- several agents --------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("xy"), st.floats(-1, 1)), min_size=1, max_size=4), max_size=12
    ),
    st.floats(0, 1),
    st.integers(0, 12),
)
def test_rae_baselines_are_moving_means_per_agent_and_survive_a_restart(games, decay, restart_at):
    group = [game(**{f"{agent}{i}": r for i, (agent, r) in enumerate(each)}) for each in games]
    for each in group:
        each.traces = [AgentTrace(trace.agent[0], trace.reward) for trace in each.traces]
    made, baselines = algorithm("rae", decay=decay), {"x": 0.0, "y": 0.0}
    for index, each in enumerate(group):
        if index == restart_at:
            state = made.state()
            made = algorithm("rae", decay=decay)
            made.restore(state)
        (found,) = made.advantages([each])
        expected = []
        for trace in each.traces:
            expected.append(trace.reward - baselines[trace.agent])
            baselines[trace.agent] = decay * baselines[trace.agent] + (1 - decay) * trace.reward
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_rae_takes_each_trace_against_the_baseline_just_before_it():
    """As SPIRAL's reference code, whose ``prepare_trajectories`` reads the baseline and then updates it, by
    trajectory."""
    made = algorithm("rae", decay=0.5)
    made.restore({"a": 0.5})  # a checkpoint's form
    first, second = made.advantages([game(a=1.0, b=-1.0), game(a=1.0, b=-1.0)])
    assert first.tolist() == [0.5, -1.0]
    assert second.tolist() == [0.25, -0.5]
    assert made.state() == {"a": 0.875, "b": -0.75}


def test_rae_is_the_same_whichever_rollout_of_a_group_ends_first():
    def advantages(order: list[int]) -> list[list[float]]:
        tasks = TaskSampler([4], [1.0], seed=0)
        dispatcher = Dispatcher(
            next_task=tasks.next,
            limits=DispatchLimits(group_size=3, batch_size=3, max_in_flight=3, max_off_policy_steps=0),
            last_step=1,
        )
        starts = dispatcher.next_starts(queued=0)
        played = [game(a=reward) for reward in (1.0, -1.0, 0.5)]
        groups = [dispatcher.finished(starts[index].rollout_id, played[index]) for index in order]
        return [each.tolist() for each in algorithm("rae", decay=0.5).advantages(groups[-1].results)]

    assert advantages([2, 0, 1]) == advantages([0, 1, 2]) == [[1.0], [-1.5], [0.5 - -0.25]]


def test_hierarchical_compares_solvers_inside_the_episode_and_proposers_across_the_group():
    made = algorithm("hierarchical_grpo", episode_agents=["solver"])
    group = [game(proposer=0.2, solver=[1.0, 0.0]), game(proposer=0.8, solver=[1.0, 1.0])]
    first, second = made.advantages(group)
    np.testing.assert_allclose(first, [-0.3, 0.5, -0.5])
    np.testing.assert_allclose(second, [0.3, 0.0, 0.0])


def test_hierarchical_refuses_agents_that_the_environment_has_not(tmp_path):
    def load(*agents: str):
        recipe = parse_recipe(
            {
                **MINIMAL_RL,
                "environments": {"train": [{"id": "reverse-text"}]},
                "algorithm": {"type": "hierarchical_grpo", "episode_agents": agents},
            }
        )
        return asyncio.run(load_environments(RunDir(tmp_path), recipe))

    with pytest.raises(ConfigError, match=r"reverse-text: .*\['solver'\].*\['agent'\]"):
        load("solver")
    assert load("agent", "elsewhere")


def test_hierarchical_continues_where_no_solver_played():
    group = [game(proposer=0.2), game(proposer=0.8)]
    first, second = algorithm("hierarchical_grpo", episode_agents=["solver"]).advantages(group)
    np.testing.assert_allclose([first, second], [[-0.3], [0.3]])


def test_traces_of_one_rollout_share_a_group_baselines_advantage():
    first, second = algorithm("grpo").advantages([game(a=1.0, b=0.0), game(a=1.0, b=1.0)])
    assert first.tolist() == [-0.25, -0.25]
    assert second.tolist() == [0.25, 0.25]


# -- echo ------------------------------------------------------------------------------------------


def test_echo_weighs_the_text_of_the_chosen_roles():
    sample = Sample(
        token_ids=np.arange(7),
        loss_mask=np.array([0, 0, 0, 1, 0, 0, 1], bool),
        logprobs=np.zeros(7, np.float32),
        temperature=1.0,
        roles=np.array([1, 2, 0, 0, 3, 3, 0], np.uint8),
    )
    made = algorithm("echo", alpha={"tool": 0.1, "system": 0.5}).train_sample(sample, -0.5, 2)
    # the first is never predicted
    assert made.ce_weights.tolist() == pytest.approx([0, 0, 0, 0, 0.1, 0.1, 0])
    assert (made.rl_weight, made.advantage, made.env_id) == (1.0, -0.5, 2)
    assert algorithm("echo", alpha={"user": 0.1}).train_sample(sample, 0.0, 0).has_signal
    only_sampled = Sample(sample.token_ids, sample.loss_mask, sample.logprobs, 1.0)
    assert not algorithm("echo").train_sample(only_sampled, 0.0, 0).has_signal


# -- custom ----------------------------------------------------------------------------------------


def half(rollouts, scale=0.5):
    return [scale * each.reward for each in rollouts]


def wrong(rollouts, kind):
    if kind == "raises":
        raise ZeroDivisionError("no")
    return {"short": [1.0], "nan": [float("nan"), 0.0], "text": ["a", "b"]}[kind]


def test_custom_calls_the_users_function_once_per_group():
    made = algorithm("custom", import_path=f"{__name__}:half", kwargs={"scale": 2})
    assert np.ravel(made.advantages([rollout(1.0), rollout(0.25)])).tolist() == [2.0, 0.5]


@pytest.mark.parametrize("path", ["nothing", "no.such.module:f", f"{__name__}:no_such_name"])
def test_a_custom_function_that_is_not_there_is_refused(path):
    with pytest.raises(ConfigError, match=r"algorithm\.import_path"):
        algorithm("custom", import_path=path)


@pytest.mark.parametrize("kind", ["raises", "short", "nan", "text"])
def test_a_custom_function_that_gives_no_advantages_ends_the_run_with_its_name(kind):
    made = algorithm("custom", import_path=f"{__name__}:wrong", kwargs={"kind": kind})
    with pytest.raises(CustomAlgorithmError, match="test_algorithms:wrong") as caught:
        made.advantages([rollout(1.0), rollout(0.0)])
    assert caught.value.exit_code == ExitCode.NO_CONTINUE
