"""Difficulty pools: tasks are drawn by pool weights, unseen ones once; a restart changes nothing."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.orchestrator.scheduling.curriculum import Epochs, make_curriculum
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.recipe.schema.selection import DifficultyPools, Sequential, Shuffled

REWARDS = {"hard": 0.1, "normal": 0.5, "easy": 1.0}


def pools(size: int = 30, seed: int = 0, **weights: float):
    return make_curriculum(DifficultyPools(**weights), size, [seed, 0])


def see_all(curriculum) -> None:
    """Draw until every task was; a third of them goes to each pool, in turn."""
    while curriculum.metrics()["unseen"]:
        task = curriculum.next()
        curriculum.observe(task, list(REWARDS.values())[task % 3])


def test_unseen_tasks_are_drawn_once_each_before_any_is_drawn_again():
    curriculum = pools(30)
    assert sorted(curriculum.next() for _ in range(30)) == list(range(30))
    assert sorted(curriculum.next() for _ in range(30)) == list(range(30))


def test_seen_tasks_come_as_often_as_their_pools_weigh():
    curriculum = pools(30, hard_weight=0.5, normal_weight=2.0, easy_weight=0.5)
    see_all(curriculum)
    counts = Counter(curriculum.next() % 3 for _ in range(6000))
    assert counts[1] / 6000 == pytest.approx(2 / 3, abs=0.03)
    assert counts[0] / 6000 == pytest.approx(1 / 6, abs=0.03)


def test_a_pool_without_weight_is_never_drawn_from_while_others_have_tasks():
    curriculum = pools(30, hard_weight=0.0, easy_weight=0.0, unseen_weight=1.0)
    see_all(curriculum)
    assert {curriculum.next() % 3 for _ in range(300)} == {1}


def test_without_any_weight_tasks_come_epoch_after_epoch():
    curriculum = pools(7, hard_weight=0, normal_weight=0, easy_weight=0, unseen_weight=0)
    assert sorted(curriculum.next() for _ in range(7)) == list(range(7))


@pytest.mark.parametrize(
    ("reward", "pool"), [(0, "hard"), (0.25, "hard"), (0.26, "normal"), (0.75, "normal"), (0.8, "easy")]
)
def test_the_pool_is_that_of_the_mean_reward(reward, pool):
    assert pools().pool_of(reward) == pool


def test_a_task_is_in_the_pool_of_its_last_group_alone():
    curriculum = pools(3)
    for reward in (0.0, 1.0, 0.5, 0.5):
        curriculum.observe(1, reward)
    assert curriculum.metrics() == {"unseen": 3, "hard": 0, "normal": 1, "easy": 0}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=60),
    st.integers(0, 60),
    st.sampled_from([DifficultyPools(), Shuffled(), Sequential()]),
)
def test_a_restored_curriculum_continues_the_sequence(observations, restart_at, config):
    plain = make_curriculum(config, 10, [4, 2])
    other = make_curriculum(config, 10, [4, 2])
    for index, (task, reward) in enumerate(observations):
        if index == restart_at:
            state = json.loads(json.dumps(other.state()))
            other = make_curriculum(config, 10, [4, 2])
            other.restore(state)
        assert plain.next() == other.next()
        plain.observe(task, reward)
        other.observe(task, reward)
        assert plain.metrics() == other.metrics()
        if metrics := plain.metrics():
            assert metrics["hard"] + metrics["normal"] + metrics["easy"] == len(
                {each for each, _ in observations[: index + 1]}
            )


def test_a_task_whose_group_came_to_nothing_is_tried_again():
    curriculum = pools(10)
    missed = curriculum.next()
    curriculum.record_failure(missed)
    for _ in range(9):
        if (task := curriculum.next()) != missed:
            curriculum.observe(task, 0.5)
    while curriculum.metrics()["unseen"]:
        if (task := curriculum.next()) != missed:
            curriculum.observe(task, 0.5)
    assert curriculum.metrics() == {"unseen": 0, "hard": 1, "normal": 9, "easy": 0}
    assert missed in {curriculum.next() for _ in range(200)}
    curriculum.observe(missed, 1.0)
    curriculum.record_failure(missed)  # its pool is known
    assert curriculum.metrics() == {"unseen": 0, "hard": 0, "normal": 9, "easy": 1}


def test_a_missed_task_is_missed_after_a_restart_too():
    def make() -> TaskSampler:
        return TaskSampler([10], [1.0], seed=3, curricula=[DifficultyPools()])

    plain = make()
    drawn = [plain.next() for _ in range(4)]
    plain.record_failure(drawn[0])
    plain.observe(drawn[1], 0.5)
    restored = make()
    restored.restore(json.loads(json.dumps(plain.state(drawn[2:]))))
    assert restored.curricula[0].metrics() == {"unseen": 6, "hard": 1, "normal": 1, "easy": 0}
    plain.requeue(drawn[2:])
    assert [restored.next() for _ in range(30)] == [plain.next() for _ in range(30)]


def test_epochs_count_drawn_tasks_relative_to_all_tasks():
    for config in (DifficultyPools(), Shuffled(), Sequential()):
        curriculum = make_curriculum(config, 4, [0, 0])
        assert curriculum.epochs == 0
        for _ in range(6):
            curriculum.next()
        assert curriculum.epochs == 1.5


def test_each_epoch_is_shuffled_differently_and_the_same_for_the_same_seed():
    def epochs_of(seed: int) -> list[list[int]]:
        curriculum = Epochs(50, [seed, 0])
        return [[curriculum.next() for _ in range(50)] for _ in range(2)]

    first, second = epochs_of(1)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50)) != first
    assert epochs_of(1) == [first, second] and epochs_of(2)[0] != first
    curriculum = pools(50)
    assert [curriculum.next() for _ in range(50)] != list(range(50))


def test_sequential_keeps_the_environments_order():
    curriculum = make_curriculum(Sequential(), 4, [0, 0])
    assert [curriculum.next() for _ in range(6)] == [0, 1, 2, 3, 0, 1]


def test_each_environment_has_its_curriculum_and_its_observations():
    sampler = TaskSampler([4, 4], [1.0, 1.0], seed=0, curricula=[Sequential(), DifficultyPools()])
    drawn = [sampler.next() for _ in range(20)]
    for task in drawn:
        sampler.observe(task, 1.0)
    first = [task.index for task in drawn if task.env == 0]
    assert first == [index % 4 for index in range(len(first))]
    assert sampler.curricula[1].metrics()["easy"] == 4
    sampler.requeue(drawn[:2])
    assert [sampler.next(), sampler.next()] == drawn[:2]
