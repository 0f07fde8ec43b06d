"""What reaches the trainer: batch size in rollouts, no stale group, zero advantages as asked, faults bounded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.orchestrator.batches import BatchCutter, NoSignalError, TooManyErrorsError
from primerl_hpc.orchestrator.dispatcher import Group, Split
from primerl_hpc.orchestrator.scoring import Scorer
from primerl_hpc.orchestrator.trajectories import Rollout, Sample
from primerl_hpc.recipe.schema import Recipe


def rollout(reward: float) -> Rollout:
    sample = Sample(
        token_ids=np.arange(6),
        loss_mask=np.arange(6) >= 3,
        logprobs=np.zeros(6, np.float32),
        temperature=1.0,
    )
    return Rollout(reward, [sample], output_tokens=3, input_tokens=3, num_turns=1, is_truncated=False)


def group(rewards: list[float], *, version: int = 0, failed: int = 0, task: int = 0, env: int = 0) -> Group:
    size = len(rewards) + failed
    made = Group(task, Split.TRAIN, env, task, size, to_start=0, retries_left=0)
    made.results = [rollout(reward) for reward in rewards]
    made.versions = [version] * len(rewards)
    made.num_failed = failed
    return made


def cutter(*, algorithm=None, gates=(), **changes) -> BatchCutter:
    recipe = Recipe.model_validate(
        {
            "kind": "rl",
            "name": "r",
            "model": {"name": "m"},
            "max_steps": 1,
            "rollouts": {"batch_size": 4, "group_size": 2, **changes},
            "environments": {
                "train": [{"id": "reverse-text", "algorithm": algorithm or {}, "gates": list(gates)}]
            },
            **({"teacher": {"model": {"name": "t"}}} if algorithm == {"type": "sft_distill"} else {}),
        }
    )
    return BatchCutter(recipe.rollouts, Scorer(recipe), seq_len=32, num_ranks=2, env_names=["reverse-text"])


def cut_of(made: BatchCutter, step: int = 1, min_fresh: int = -10):
    cut = made.take(step, min_fresh)
    if cut is not None:
        made.pack(cut)
    return cut


def test_batch_is_ready_when_its_rollouts_are_there_and_keeps_the_rest():
    made = cutter()
    made.add(group([0.0, 1.0]))
    assert not made.is_ready(0)
    made.add(group([1.0, 0.0]))
    made.add(group([0.0, 1.0]))
    cut = cut_of(made)
    assert cut.info.num_samples == 4
    assert made.num_queued == 2
    assert [len(rank) for rank in cut.packed.ranks] == [1, 1]


def test_rollouts_lost_to_errors_are_made_up_for_by_another_group():
    made = cutter()
    made.add(group([0.0, 1.0]))
    made.add(group([1.0], failed=1))
    assert not made.is_ready(0)
    made.add(group([0.0, 1.0]))
    cut = cut_of(made)
    assert sum(len(each.rollouts) for each in cut.groups) == 5


def test_stale_groups_never_reach_a_batch():
    made = cutter()
    for version in (0, 2, 3):
        made.add(group([0.0, 1.0], version=version))
    assert made.is_ready(min_fresh_version=2)
    cut = cut_of(made, step=4, min_fresh=2)
    assert [each.oldest_version for each in cut.groups] == [2, 3]
    assert cut.info.policy_version_min == 2
    assert (cut.tally.stale_groups, cut.tally.stale_rollouts) == (1, 2)


def test_drop_ships_only_samples_with_a_signal():
    made = cutter(zero_advantage="drop")
    made.add(group([0.0, 1.0]))
    made.add(group([1.0, 1.0]))
    assert cut_of(made).info.num_samples == 2


def test_keep_ships_samples_without_a_signal_too():
    made = cutter(zero_advantage="keep")
    made.add(group([0.0, 1.0]))
    made.add(group([1.0, 1.0]))
    assert cut_of(made).info.num_samples == 4


def test_what_only_another_loss_learns_from_is_shipped_without_weight_in_rl():
    made = cutter(algorithm={"type": "echo", "alpha": {"user": 0.5}})
    given = group([1.0, 1.0])
    for each in given.results:
        each.samples[0].roles = np.array([0, 2, 0, 0, 0, 0], np.uint8)
    made.add(given)
    made.add(group([0.0, 1.0]))
    cut = cut_of(made)
    assert [sample.rl_weight for sample in cut.samples] == [0.0, 0.0, 1.0, 1.0]
    rows = [row for rank in cut.packed.ranks for row in rank]
    assert sum(np.count_nonzero(row.weights("rl")) for row in rows) == 6
    assert sorted(weight for row in rows for weight in row.weights("ce") if weight) == [0.5, 0.5]


def test_refill_does_not_count_groups_without_a_signal():
    made = cutter(zero_advantage="refill")
    made.add(group([0.0, 1.0]))
    made.add(group([1.0, 1.0]))
    assert not made.is_ready(0)
    made.add(group([1.0, 0.0]))
    cut = cut_of(made)
    assert cut.info.num_samples == 4
    assert cut.tally.refilled_groups == 1


def test_a_group_that_a_gate_turns_away_takes_no_room():
    made = cutter(gates=[{"type": "reward_range"}])
    made.add(group([0.0, 1.0]))
    assert made.add(group([1.0, 1.0])).mean_reward == 1.0  # scored, so that curricula learn of it
    made.add(group([0.0, 0.0]))
    assert not made.is_ready(0)
    made.add(group([1.0, 0.0]))
    cut = cut_of(made)
    assert (cut.info.num_samples, cut.tally.rejected_groups) == (4, 2)
    assert made.scorer.take_metrics() == {"gates/reverse-text/reward_range/rejected": 2}


def test_gates_that_turn_everything_away_end_the_run():
    made = cutter(gates=[{"type": "reward_range", "above": 2.0, "below": 3.0}], max_empty_batches=1)
    made.add(group([0.0, 1.0]))
    with pytest.raises(NoSignalError, match="gates"):
        made.add(group([0.0, 1.0]))


@pytest.mark.parametrize(("action", "shipped"), [("enforce", 3), ("observe", 4)])
def test_a_filtered_rollout_is_not_trained_but_counts_among_its_siblings(action, shipped):
    made = cutter(filters=[{"type": "length", "truncated": True, "action": action}])
    given = group([0.0, 1.0])
    given.results[0].is_truncated = True
    made.add(given)
    made.add(group([0.0, 1.0]))
    cut = cut_of(made)
    assert cut.info.num_samples == shipped
    assert cut.groups[0].advantages.tolist() == [-0.5, 0.5]
    assert made.scorer.take_metrics() == {"filters/length/detected": 0.25}


@pytest.mark.parametrize(("algorithm", "shipped"), [("grpo", 0), ("sft_distill", 4)])
def test_what_a_teacher_said_is_no_repetition_of_the_policys(algorithm, shipped):
    made = cutter(algorithm={"type": algorithm}, filters=[{"type": "repetition", "window": 3}])
    scored = [made.add(group([0.0, 1.0])) for _ in range(2)]  # log-probabilities of 0
    assert sum(len(each) for one in scored for each in one.samples) == shipped
    assert made.scorer.take_metrics() == {"filters/repetition/detected": 0.0 if shipped else 1.0}


def test_the_length_of_what_a_teacher_said_is_filtered():
    made = cutter(algorithm={"type": "sft_distill"}, filters=[{"type": "length", "max_tokens": 2}])
    assert made.add(group([0.0, 1.0])).samples == [[], []]


def test_batch_without_any_signal_is_collected_anew_and_too_many_of_them_end_the_run():
    made = cutter(max_empty_batches=2)
    for _ in range(2):
        made.add(group([1.0, 1.0]))
    assert cut_of(made) is None
    assert made.num_queued == 0
    for _ in range(2):
        made.add(group([1.0, 1.0]))
    with pytest.raises(NoSignalError) as caught:
        cut_of(made)
    assert caught.value.exit_code == ExitCode.NO_CONTINUE


def test_a_batch_with_signal_forgives_earlier_empty_ones():
    made = cutter(max_empty_batches=2)
    for rewards in ([1.0, 1.0], [0.0, 1.0], [1.0, 1.0]):
        for _ in range(2):
            made.add(group(rewards))
        cut_of(made)


def test_refilling_without_end_is_given_up():
    made = cutter(zero_advantage="refill", max_empty_batches=1)
    made.add(group([1.0, 1.0]))
    with pytest.raises(NoSignalError):
        made.add(group([0.0, 0.0]))


def test_refilling_is_not_given_up_while_some_groups_have_a_signal():
    made = cutter(zero_advantage="refill", max_empty_batches=1)
    for _ in range(2):
        made.add(group([1.0, 1.0]))
        made.add(group([0.0, 1.0]))
    assert cut_of(made).tally.refilled_groups == 2


def test_too_many_failed_rollouts_end_the_run():
    made = cutter(max_error_fraction=0.5)
    for _ in range(9):
        assert made.add(group([], failed=2)) is None
    with pytest.raises(TooManyErrorsError) as caught:
        made.add(group([], failed=2))
    assert caught.value.exit_code == ExitCode.NO_CONTINUE


def test_rollouts_that_others_deaths_took_do_not_end_the_run():
    made = cutter(max_error_fraction=0.5)
    for _ in range(20):
        lost = group([], failed=2)
        lost.num_faulted = 2
        assert made.add(lost) is None


def test_failed_rollouts_below_the_limit_are_borne():
    made = cutter(max_error_fraction=0.5)
    for _ in range(200):
        made.add(group([1.0], failed=1))


def three_environments() -> BatchCutter:
    names = ["good", "also-good", "broken"]
    recipe = Recipe.model_validate(
        {
            "kind": "rl",
            "name": "r",
            "model": {"name": "m"},
            "max_steps": 1,
            "rollouts": {"batch_size": 4, "group_size": 2},
            "environments": {"train": [{"id": "reverse-text", "name": name} for name in names]},
        }
    )
    return BatchCutter(recipe.rollouts, Scorer(recipe), seq_len=32, num_ranks=1, env_names=names)


def add_round(made: BatchCutter) -> None:
    for env in range(2):
        made.add(group([0.0, 1.0], env=env))
    made.add(group([], failed=2, env=2))


def test_one_of_several_environments_that_always_fails_ends_the_run_by_its_name():
    made = three_environments()
    for _ in range(9):
        add_round(made)
    with pytest.raises(TooManyErrorsError, match="environment broken: 20 of its last 20 rollouts failed"):
        add_round(made)


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
