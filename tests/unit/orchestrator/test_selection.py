"""Gates and filters: what each must detect and what it must not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.orchestrator.rollout_data import Rollout, Sample, ScoredGroup, TaskRef
from primerl_hpc.orchestrator.scoring.filters import longest_run, make_filter
from primerl_hpc.orchestrator.scoring.gates import CustomGateError, make_gate
from primerl_hpc.recipe.schema.selection import Gate, RolloutFilter

VOCAB = 150_000
CHANCE = -np.log(VOCAB)


def rollout(ids=(5, 6), logprobs=(-1.0, -1.0), *, prompt=(1, 2), truncated=False, reward=1.0) -> Rollout:
    tokens = np.array([*prompt, *ids])
    mask = np.arange(len(tokens)) >= len(prompt)
    values = np.zeros(len(tokens), np.float32)
    values[mask] = logprobs
    sample = Sample(tokens, mask, values, temperature=1.0)
    return Rollout(reward, [sample], len(ids), len(prompt), 1, truncated)


def detects(each: Rollout, **config) -> bool:
    return make_filter(TypeAdapter(RolloutFilter).validate_python(config), VOCAB)(each)


def admits(rewards: list[float], advantages: list[float] | list[list[float]], **config) -> bool:
    rollouts = [rollout(reward=reward) for reward in rewards]
    traces = [np.atleast_1d(np.asarray(each, np.float64)) for each in advantages]
    group = ScoredGroup(0, TaskRef(0, 0), rollouts, [0] * len(rewards), traces, [], 0)
    return make_gate(TypeAdapter(Gate).validate_python(config))(group)


# -- filters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "logprob", "found"),
    [
        (120_000, CHANCE - 2.1, True),
        (120_000, CHANCE - 1.9, False),  # unlikely, but not less than chance by so much
        (100_000, CHANCE - 9.0, False),  # a frequent token
    ],
)
def test_gibberish_is_a_rare_token_that_was_less_likely_than_chance(token, logprob, found):
    assert detects(rollout((5, token), (-1.0, logprob)), type="gibberish") is found


def test_gibberish_in_the_prompt_is_not_the_policys():
    assert not detects(rollout(prompt=(120_000, 2)), type="gibberish")


def test_repetition_is_a_long_run_of_certain_tokens():
    certain, unsure = np.log(0.995), np.log(0.9)
    config = {"type": "repetition", "window": 4}
    assert detects(rollout(range(6), [unsure, certain, certain, certain, certain, unsure]), **config)
    assert not detects(rollout(range(6), [certain, certain, certain, unsure, certain, certain]), **config)


def test_a_token_at_the_threshold_is_no_repetition_and_a_threshold_of_0_counts_all_tokens():
    for above, found in ((0.5, False), (0.49, True), (0.0, True)):
        config = {"type": "repetition", "window": 4, "probability_above": above}
        each = rollout(range(4), np.zeros(4))
        each.samples[0].logprobs = np.where(each.samples[0].loss_mask, np.log(0.5), 0.0)
        assert detects(each, **config) is found
    assert not detects(rollout(range(4), np.zeros(4)), type="repetition", window=5, probability_above=0.0)


def test_repetition_in_any_sample_of_a_rollout_counts():
    several = rollout(range(4), np.log([0.9, 0.9, 0.9, 0.9]))
    several.samples += rollout(range(4), np.log([0.999] * 4)).samples
    assert detects(several, type="repetition", window=4)
    several.samples.reverse()
    assert detects(several, type="repetition", window=4)


@pytest.mark.parametrize(("offset", "found"), [(2.0, False), (1.99, True)])
def test_gibberish_is_measured_from_the_chance_of_a_uniform_draw(offset, found):
    each = rollout((5, 120_000), (-1.0, -1.0))
    each.samples[0].logprobs = np.array([0.0, 0.0, -1.0, CHANCE - 2.0])
    assert detects(each, type="gibberish", logprob_offset=offset) is found


def test_the_first_rare_token_is_one_above_the_limit():
    for token, found in ((7, False), (8, True)):
        each = rollout((5, token), (-1.0, CHANCE - 9.0))
        assert detects(each, type="gibberish", token_id_above=7) is found


@given(st.lists(st.booleans(), max_size=40))
def test_longest_run_is_the_longest_run(flags):
    longest = max((len(run) for run in "".join("x" if flag else " " for flag in flags).split()), default=0)
    assert longest_run(np.array(flags, bool)) == longest


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"min_tokens": 3}, True),
        ({"min_tokens": 2}, False),
        ({"max_tokens": 1}, True),
        ({"max_tokens": 2}, False),
        ({}, False),
    ],
)
def test_length_bounds_the_sampled_tokens(config, found):
    assert detects(rollout(), type="length", **config) is found


def test_length_may_look_for_truncation():
    assert detects(rollout(truncated=True), type="length", truncated=True)
    assert not detects(rollout(truncated=True), type="length")


# -- gates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "found"), [([0.0, 0.0], False), ([1.0, 1.0], False), ([0.0, 1.0], True), ([0.5, 0.5], True)]
)
def test_reward_range_is_online_difficulty_filtering(rewards, found):
    assert admits(rewards, [0.0, 0.0], type="reward_range") is found


@pytest.mark.parametrize(
    ("advantages", "config", "found"),
    [
        ([[0.5, -0.5], [0.0, 0.0]], {}, True),  # a game with two trained players
        ([[0.0, 0.0], [0.0, 0.0]], {}, False),
        ([0.0, 0.0], {}, False),
        ([0.0, 0.1], {}, True),
        ([-0.1, 0.1], {"reject_min": -0.2, "reject_max": 0.2}, False),
        ([-0.3, 0.1], {"reject_min": -0.2, "reject_max": 0.2}, True),
    ],
)
def test_advantage_range_turns_away_groups_that_lie_in_it_altogether(advantages, config, found):
    assert admits([0.0, 1.0], advantages, type="advantage_range", **config) is found


def has_reward_above(group: ScoredGroup, limit: float) -> bool:
    return group.mean_reward > limit


def test_a_custom_gate_decides():
    config = {"type": "custom", "import_path": f"{__name__}:has_reward_above", "kwargs": {"limit": 0.6}}
    assert admits([1.0, 0.5], [0, 0], **config)
    assert not admits([0.5, 0.5], [0, 0], **config)


def test_a_custom_gate_that_raises_or_is_not_there_is_named():
    with pytest.raises(CustomGateError, match="has_reward_above raised TypeError") as caught:
        admits([1.0], [0], type="custom", import_path=f"{__name__}:has_reward_above")
    assert caught.value.exit_code == ExitCode.NO_CONTINUE
    with pytest.raises(ConfigError, match="nowhere"):
        admits([1.0], [0], type="custom", import_path=f"{__name__}:nowhere")
