"""Batches for the trainer: size in rollouts, no stale group, zero advantages as configured, limits on errors."""

from __future__ import annotations

import json

import numpy as np
import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.orchestrator.batches.batcher import BatchBuilder, NoSignalError, TooManyErrorsError
from primerl_hpc.orchestrator.rollout_data import Group, Rollout, Sample, Split
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.recipe.schema.recipe import Recipe
from tests.support.helpers import MINIMAL_RL


def rollout(reward: float) -> Rollout:
    sample = Sample(
        token_ids=np.arange(6), loss_mask=np.arange(6) >= 3, logprobs=np.zeros(6, np.float32), temperature=1.0
    )
    return Rollout(reward, [sample], output_tokens=3, input_tokens=3, num_turns=1, is_truncated=False)


def group(rewards: list[float], *, version: int = 0, failed: int = 0, task: int = 0, env: int = 0) -> Group:
    size = len(rewards) + failed
    made = Group(task, Split.TRAIN, env, task, size, to_start=0, retries_left=0)
    made.results = [rollout(reward) for reward in rewards]
    made.versions = [version] * len(rewards)
    made.num_failed = failed
    return made


def builder(*, algorithm=None, gates=(), **changes) -> BatchBuilder:
    recipe = Recipe.model_validate(
        {
            **MINIMAL_RL,
            "rollouts": {"batch_size": 4, "group_size": 2, **changes},
            "environments": {
                "train": [{"id": "reverse-text", "algorithm": algorithm or {}, "gates": list(gates)}]
            },
            **({"teacher": {"model": {"name": "t"}}} if algorithm == {"type": "sft_distill"} else {}),
        }
    )
    return BatchBuilder(recipe.rollouts, Scorer(recipe), seq_len=32, num_ranks=2, env_names=["reverse-text"])


def batch_of(made: BatchBuilder, step: int = 1, min_fresh: int = -10):
    batch = made.next_batch(step, min_fresh)
    if batch is not None:
        made.pack(batch)
    return batch


def test_batch_is_ready_when_its_rollouts_are_there_and_keeps_the_rest():
    made = builder()
    made.add(group([0.0, 1.0]))
    assert not made.is_ready(0)
    made.add(group([1.0, 0.0]))
    made.add(group([0.0, 1.0]))
    batch = batch_of(made)
    assert batch.info.num_samples == 4
    assert made.num_queued == 2
    assert [len(rank) for rank in batch.packed.ranks] == [1, 1]


def test_rollouts_lost_to_errors_are_replaced_by_another_group():
    made = builder()
    made.add(group([0.0, 1.0]))
    made.add(group([1.0], failed=1))
    assert not made.is_ready(0)
    made.add(group([0.0, 1.0]))
    batch = batch_of(made)
    assert sum(len(each.rollouts) for each in batch.groups) == 5


def test_stale_groups_never_reach_a_batch():
    made = builder()
    for version in (0, 2, 3):
        made.add(group([0.0, 1.0], version=version))
    assert made.is_ready(min_fresh_version=2)
    batch = batch_of(made, step=4, min_fresh=2)
    assert [each.oldest_version for each in batch.groups] == [2, 3]
    assert batch.info.policy_version_min == 2
    assert (batch.tally.stale_groups, batch.tally.stale_rollouts) == (1, 2)


def test_drop_ships_only_samples_with_a_signal():
    made = builder(zero_advantage="drop")
    made.add(group([0.0, 1.0]))
    made.add(group([1.0, 1.0]))
    assert batch_of(made).info.num_samples == 2


def test_keep_ships_samples_without_a_signal_too():
    made = builder(zero_advantage="keep")
    made.add(group([0.0, 1.0]))
    made.add(group([1.0, 1.0]))
    assert batch_of(made).info.num_samples == 4


def test_samples_for_another_loss_only_are_shipped_without_rl_weight():
    made = builder(algorithm={"type": "echo", "alpha": {"user": 0.5}})
    given = group([1.0, 1.0])
    for each in given.results:
        each.samples[0].roles = np.array([0, 2, 0, 0, 0, 0], np.uint8)
    made.add(given)
    made.add(group([0.0, 1.0]))
    batch = batch_of(made)
    assert [sample.rl_weight for sample in batch.samples] == [0.0, 0.0, 1.0, 1.0]
    rows = [row for rank in batch.packed.ranks for row in rank]
    assert sum(np.count_nonzero(row.weights("rl")) for row in rows) == 6
    assert sorted(weight for row in rows for weight in row.weights("ce") if weight) == [0.5, 0.5]


def test_refill_does_not_count_groups_without_a_signal():
    made = builder(zero_advantage="refill")
    made.add(group([0.0, 1.0]))
    made.add(group([1.0, 1.0]))
    assert not made.is_ready(0)
    made.add(group([1.0, 0.0]))
    batch = batch_of(made)
    assert batch.info.num_samples == 4
    assert batch.tally.refilled_groups == 1


def test_a_group_that_a_gate_turns_away_takes_no_room():
    made = builder(gates=[{"type": "reward_range"}])
    made.add(group([0.0, 1.0]))
    assert made.add(group([1.0, 1.0])).mean_reward == 1.0  # scored, so that curricula learn of it
    made.add(group([0.0, 0.0]))
    assert not made.is_ready(0)
    made.add(group([1.0, 0.0]))
    batch = batch_of(made)
    assert (batch.info.num_samples, batch.tally.rejected_groups) == (4, 2)
    assert made.scorer.take_metrics() == {"gates/reverse-text/reward_range/rejected": 2}


def test_gates_that_turn_everything_away_end_the_run():
    made = builder(gates=[{"type": "reward_range", "above": 2.0, "below": 3.0}], max_empty_batches=1)
    made.add(group([0.0, 1.0]))
    with pytest.raises(NoSignalError, match="gates"):
        made.add(group([0.0, 1.0]))


@pytest.mark.parametrize(("action", "shipped"), [("enforce", 3), ("observe", 4)])
def test_a_filtered_rollout_is_not_trained_but_counts_among_its_siblings(action, shipped):
    made = builder(filters=[{"type": "length", "truncated": True, "action": action}])
    given = group([0.0, 1.0])
    given.results[0].is_truncated = True
    made.add(given)
    made.add(group([0.0, 1.0]))
    batch = batch_of(made)
    assert batch.info.num_samples == shipped
    assert batch.groups[0].advantages.tolist() == [-0.5, 0.5]
    assert made.scorer.take_metrics() == {"filters/length/detected": 0.25}


@pytest.mark.parametrize(("algorithm", "shipped"), [("grpo", 0), ("sft_distill", 4)])
def test_a_teachers_tokens_are_no_repetition_of_the_policy(algorithm, shipped):
    made = builder(algorithm={"type": algorithm}, filters=[{"type": "repetition", "window": 3}])
    scored = [made.add(group([0.0, 1.0])) for _ in range(2)]  # log-probabilities of 0
    assert sum(len(each) for one in scored for each in one.samples) == shipped
    assert made.scorer.take_metrics() == {"filters/repetition/detected": 0.0 if shipped else 1.0}


def test_the_length_of_a_teachers_reply_is_filtered():
    made = builder(algorithm={"type": "sft_distill"}, filters=[{"type": "length", "max_tokens": 2}])
    assert made.add(group([0.0, 1.0])).samples == [[], []]


def test_batch_without_any_signal_is_collected_again_and_too_many_end_the_run():
    made = builder(max_empty_batches=2)
    for _ in range(2):
        made.add(group([1.0, 1.0]))
    assert batch_of(made) is None
    assert made.num_queued == 0
    for _ in range(2):
        made.add(group([1.0, 1.0]))
    with pytest.raises(NoSignalError) as caught:
        batch_of(made)
    assert caught.value.exit_code == ExitCode.NO_CONTINUE


def test_a_batch_with_signal_resets_the_count_of_empty_ones():
    made = builder(max_empty_batches=2)
    for rewards in ([1.0, 1.0], [0.0, 1.0], [1.0, 1.0]):
        for _ in range(2):
            made.add(group(rewards))
        batch_of(made)


def test_refilling_without_end_is_given_up():
    made = builder(zero_advantage="refill", max_empty_batches=1)
    made.add(group([1.0, 1.0]))
    with pytest.raises(NoSignalError):
        made.add(group([0.0, 0.0]))


def test_refilling_is_not_given_up_while_some_groups_have_a_signal():
    made = builder(zero_advantage="refill", max_empty_batches=1)
    for _ in range(2):
        made.add(group([1.0, 1.0]))
        made.add(group([0.0, 1.0]))
    assert batch_of(made).tally.refilled_groups == 2


def test_too_many_failed_rollouts_end_the_run():
    made = builder(max_error_fraction=0.5)
    for _ in range(9):
        assert made.add(group([], failed=2)) is None
    with pytest.raises(TooManyErrorsError) as caught:
        made.add(group([], failed=2))
    assert caught.value.exit_code == ExitCode.NO_CONTINUE


def test_rollouts_that_others_deaths_took_do_not_end_the_run():
    made = builder(max_error_fraction=0.5)
    for _ in range(20):
        lost = group([], failed=2)
        lost.num_faulted = 2
        assert made.add(lost) is None


def test_failed_rollouts_below_the_limit_are_borne():
    made = builder(max_error_fraction=0.5)
    for _ in range(200):
        made.add(group([1.0], failed=1))


def three_environments() -> BatchBuilder:
    names = ["good", "also-good", "broken"]
    recipe = Recipe.model_validate(
        {
            **MINIMAL_RL,
            "rollouts": {"batch_size": 4, "group_size": 2},
            "environments": {"train": [{"id": "reverse-text", "name": name} for name in names]},
        }
    )
    return BatchBuilder(recipe.rollouts, Scorer(recipe), seq_len=32, num_ranks=1, env_names=names)


def add_round(made: BatchBuilder) -> None:
    for env in range(2):
        made.add(group([0.0, 1.0], env=env))
    made.add(group([], failed=2, env=2))


def test_one_of_several_environments_that_always_fails_ends_the_run_by_its_name():
    made = three_environments()
    for _ in range(9):
        add_round(made)
    with pytest.raises(TooManyErrorsError, match="environment broken: 20 of its last 20 rollouts failed"):
        add_round(made)


def test_the_sentence_about_failed_rollouts_quotes_the_last_error_and_how_often_its_kind_came():
    made = three_environments()
    errors = [
        "TimeoutError: too long",
        "HarnessError: run 1",
        "HarnessError: no\x1b[31m tools\n" + "x" * 2000,
    ]
    with pytest.raises(TooManyErrorsError) as caught:
        for number in range(10):
            lost = group([], failed=2, env=2)
            lost.errors = [errors[0], errors[1 + number % 2]]
            made.add(lost)
    message = str(caught.value)
    assert "20 of its last 20 rollouts failed" in message
    assert "last error (10 of this kind): HarnessError: no\\x1b[31m tools xxx" in message
    assert "\n" not in message and "\x1b" not in message and len(message) < 700


def test_a_batch_without_a_signal_is_counted():
    made = builder()
    for _ in range(2):
        made.add(group([1.0, 1.0]))
    assert batch_of(made) is None and made.num_empty_batches == 1


def test_errors_of_an_environment_are_counted_on_across_a_resume():
    first = three_environments()
    for _ in range(9):
        add_round(first)
    second = three_environments()
    second.restore(json.loads(json.dumps(first.state())), [])
    with pytest.raises(TooManyErrorsError, match="environment broken"):
        add_round(second)
    third = three_environments()
    third.restore([[2, 2]] * 100, [])  # as earlier versions wrote it
    add_round(third)
