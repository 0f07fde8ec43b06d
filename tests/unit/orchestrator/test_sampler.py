"""Order of tasks: epochs cover every task, environments are drawn by ratio, a resumed run loses none."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from primerl_hpc.envs.tasks import EnvironmentTask, fingerprint_of
from primerl_hpc.orchestrator.rollout_data import TaskRef
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.recipe.schema.selection import DifficultyPools, Sequential, Shuffled


def draw(sampler: TaskSampler, count: int) -> list[TaskRef]:
    return [sampler.next() for _ in range(count)]


def test_every_epoch_covers_every_task_once_in_another_order():
    sampler = TaskSampler([50], [1.0], seed=3)
    first, second = draw(sampler, 50), draw(sampler, 50)
    assert sorted(task.index for task in first) == sorted(task.index for task in second) == list(range(50))
    assert first != second


def test_environments_are_drawn_by_their_ratio():
    counts = Counter(task.env for task in draw(TaskSampler([10, 10], [1.0, 3.0], seed=0), 4000))
    assert counts[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_same_seed_gives_the_same_tasks_and_another_seed_others():
    assert draw(TaskSampler([99], [1.0], 1), 30) == draw(TaskSampler([99], [1.0], 1), 30)
    assert draw(TaskSampler([99], [1.0], 1), 30) != draw(TaskSampler([99], [1.0], 2), 30)


def test_resumed_sampler_returns_unfinished_tasks_first_and_then_continues():
    sampler = TaskSampler([7, 5], [2.0, 1.0], seed=5)
    drawn = draw(sampler, 20)
    state = json.loads(json.dumps(sampler.state(unfinished=drawn[15:])))
    coming = draw(sampler, 20)
    resumed = TaskSampler([7, 5], [2.0, 1.0], seed=5)
    resumed.restore(state)
    assert draw(resumed, 25) == drawn[15:] + coming


def test_state_of_another_task_set_is_refused():
    state = TaskSampler([7], [1.0], 0).state([])
    with pytest.raises(ValueError, match="7"):
        TaskSampler([8], [1.0], 0).restore(state)
    with pytest.raises(ValueError, match="there were 1 training environments at the checkpoint, now 2"):
        TaskSampler([7, 7], [1.0, 1.0], 0, accepts_changes=True).restore(state)


@pytest.mark.parametrize(("size", "keys"), [(9, "abcdefghi"), (7, "gfedcba")])
def test_other_tasks_are_refused_or_start_their_own_curriculum_over(size, keys, caplog):
    def fingerprints(keys: str) -> list[str]:
        return [fingerprint_of([EnvironmentTask(key, {}) for key in names]) for names in ("xyzuv", keys)]

    before = TaskSampler([5, 7], [1.0, 1.0], 0, None, fingerprints("abcdefg"))
    draw(before, 9)
    state = json.loads(json.dumps(before.state([TaskRef(0, 3), TaskRef(1, 6)])))
    TaskSampler([5, 7], [1.0, 1.0], 0, None, fingerprints("abcdefg")).restore(state)
    with pytest.raises(ValueError, match=r"training environment 1 ha[sd] 7 tasks"):
        TaskSampler([5, size], [1.0, 1.0], 0, None, fingerprints(keys)).restore(state)
    after = TaskSampler([5, size], [1.0, 1.0], 0, None, fingerprints(keys), accepts_changes=True)
    assert after.restore(state) == {1}
    assert after.epochs() == [before.epochs()[0], 0.0]
    assert after.next() == TaskRef(0, 3) and "starting its curriculum over" in caplog.text
    earlier = {name: value for name, value in state.items() if name != "fingerprints"}
    TaskSampler([5, 7], [1.0, 1.0], 0, None, fingerprints("gfedcba")).restore(earlier)


@pytest.mark.parametrize("is_of_an_earlier_version", [False, True])
@pytest.mark.parametrize(("was", "now"), [(Shuffled(), DifficultyPools()), (DifficultyPools(), Shuffled())])
def test_a_curriculum_of_another_type_starts_over(was, now, is_of_an_earlier_version, caplog):
    before, after = (TaskSampler([5, 5], [1.0, 1.0], 0, [Sequential(), config]) for config in (was, now))
    for _ in range(7):
        before.next()
    state = json.loads(json.dumps(before.state([TaskRef(1, 3)])))
    if is_of_an_earlier_version:
        del state["curriculum_types"]
    after.restore(state)
    assert after.epochs() == [before.epochs()[0], 0.0] and before.epochs()[1] > 0
    assert after.next() == TaskRef(1, 3)
    assert f"to {now.type}: starting it over" in caplog.text
