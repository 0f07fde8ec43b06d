"""``rollouts.async_level``: the version that samples each batch, its staleness metric, resuming; batches by tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.orchestrator.batches.batcher import BatchBuilder
from primerl_hpc.orchestrator.checkpoint.follower import SIDES
from primerl_hpc.orchestrator.rollout_data import Group, Rollout, TaskRef
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.orchestrator.train_loop import Orchestrator
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Rollouts
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.rl_loop import clean_up
from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver
from tests.support.helpers import MINIMAL_RL
from tests.support.train_loop import end_group, make_train_loop, synthetic_rollout
from tests.unit.transport.test_weights_delta import write_full

LEVELS = (0, 1, 2, 4)


def make_recipe(**rollouts: Any) -> Recipe:
    values = {
        **MINIMAL_RL,
        "max_steps": 20,
        "rollouts": {"group_size": 2, "batch_size": 4, "max_in_flight": 4, **rollouts},
        "environments": {"train": [{"id": "reverse-text"}]},
    }
    return Recipe.model_validate(values)


async def play(loop: Orchestrator, until: int) -> dict[int, list[int]]:
    """Run the loop to the end of batch ``until`` with engines that are much faster than the trainer.

    The trainer publishes a version only when the loop can do nothing else. Returns the versions that sampled the
    groups in the queue when each batch is built.
    """
    sampled: dict[int, list[int]] = {}
    while loop.dispatcher.step <= until:
        if not loop.dispatcher.may_ship:
            assert not loop.dispatcher.next_starts(loop.builder.num_queued), "the gate is closed"
            loop.dispatcher.policy_live(loop.dispatcher.version + 1)
        starts = loop.dispatcher.next_starts(loop.builder.num_queued)
        for _, members in groupby(starts, key=lambda start: start.group_id):
            group = list(members)
            half = [synthetic_rollout(reward) for reward in (1.0, 0.0)]
            loop._score(end_group(loop.dispatcher, group, half))
        assert loop.builder.is_ready(loop.dispatcher.min_fresh_version)
        step = loop.dispatcher.step
        sampled[step] = [version for group in loop.builder.queue for version in group.versions]
        loop._build_batch()
        assert loop._shipping is not None
        await loop._shipping
    return sampled


def age(step: int, level: int, first_version: int) -> int:
    return min(level, step - 1 - first_version)


def assert_ages(run: RunDir, sampled: dict[int, list[int]], level: int, first_version: int) -> None:
    rows = read_steps(run.metrics("orchestrator"))
    for step, versions in sampled.items():
        expected = age(step, level, first_version)
        assert versions == [step - 1 - expected] * 4
        assert (rows[step]["off_policy/max"], rows[step]["off_policy/mean"]) == (expected, expected)


@pytest.mark.parametrize("window", [4, 6])
@pytest.mark.parametrize("level", LEVELS)
def test_each_batch_is_sampled_by_the_version_of_its_level_also_after_a_resume(
    tmp_path: Path, level: int, window: int
) -> None:
    run, recipe = RunDir(tmp_path), make_recipe(async_level=level, max_off_policy_steps=window)
    first = make_train_loop(run, recipe)
    assert_ages(run, asyncio.run(play(first, 7 + level)), level, 0)
    # the trainer saves step 7 when the orchestrator is as far ahead as it may be
    assert first.dispatcher.step == 8 + level
    run.finish_checkpoint_side(7, "trainer", SIDES)
    assert first.follower.follow() == [7]

    second = make_train_loop(run, recipe)
    second.state.restore(run, second.resumed)
    assert (second.resumed, second.dispatcher.step, second.dispatcher.version) == (7, 8, 7)
    sampled = asyncio.run(play(second, 14))
    assert sorted(sampled) == list(range(8, 15))
    assert_ages(run, sampled, level, 7)


@pytest.mark.parametrize("level", LEVELS)
def test_no_trained_token_is_older_than_the_level_whatever_is_in_flight(tmp_path: Path, level: int) -> None:
    run, recipe = RunDir(tmp_path), make_recipe(async_level=level, max_in_flight=32)
    assert recipe.rollouts.max_off_policy_steps == 8
    asyncio.run(play(make_train_loop(run, recipe), 8 + level))
    ages = [row["off_policy/max"] for row in read_steps(run.metrics("orchestrator")).values()]
    assert len(ages) == 8 + level and max(ages) == level


@pytest.mark.parametrize("level", LEVELS)
def test_the_trainer_keeps_the_weights_of_one_version_more_than_the_level(tmp_path: Path, level: int) -> None:
    run, recipe = RunDir(tmp_path), make_recipe(async_level=level, max_off_policy_steps=4)
    for version in range(1, 10):
        write_full(run, version)
    clean_up(run, recipe, FilesystemReceiver(run), 9)
    assert run.stable_weights() == list(range(9 - max(level, 1), 10))


@pytest.mark.parametrize(("window", "level"), [(0, 0), (1, 1), (8, 1)])
def test_the_default_level_is_one_batch_or_none_without_staleness(window: int, level: int) -> None:
    assert Rollouts(max_off_policy_steps=window).max_lead == level
    limits = DispatchLimits(group_size=1, batch_size=1, max_in_flight=1, max_off_policy_steps=window)
    dispatcher = Dispatcher(next_task=lambda: TaskRef(0, 0), limits=limits, last_step=1)
    assert dispatcher.async_level == level


def test_a_level_above_the_staleness_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"async_level 3 exceeds max_off_policy_steps 2.*Raise max_off"):
        Rollouts(max_off_policy_steps=2, async_level=3)


def rollout_of(num_tokens: int, reward: float) -> Rollout:
    made = synthetic_rollout(reward)
    made.output_tokens = num_tokens - made.input_tokens
    return made


def make_builder(recipe: Recipe) -> BatchBuilder:
    return BatchBuilder(recipe.rollouts, Scorer(recipe), seq_len=64, num_ranks=1, env_names=["reverse-text"])


def finished(dispatcher: Dispatcher, builder: BatchBuilder, lengths: Iterator[int]) -> list[Group]:
    """Finish everything that may start."""
    dispatcher.batch_size = builder.batch_size
    starts = dispatcher.next_starts(builder.num_queued)
    assert starts, "nothing starts although the batch is not full"
    groups = []
    for start in starts:
        done = dispatcher.finished(start.rollout_id, rollout_of(next(lengths), start.rollout_id % 2))
        groups += [done] if done is not None else []
    return groups


@settings(max_examples=60, deadline=None)
@given(
    batch_tokens=st.integers(1, 4000),
    window=st.integers(0, 3),
    permits=st.integers(1, 40),
    seed_lengths=st.lists(st.integers(4, 400), min_size=1, max_size=20),
)
def test_batches_by_tokens_have_as_many_groups_as_reach_them_and_collection_never_stops(
    batch_tokens: int, window: int, permits: int, seed_lengths: list[int]
) -> None:
    recipe = make_recipe(batch_tokens=batch_tokens, max_off_policy_steps=window, zero_advantage="keep")
    builder = make_builder(recipe)
    limits = DispatchLimits(group_size=2, batch_size=4, max_in_flight=permits, max_off_policy_steps=window)
    dispatcher = Dispatcher(next_task=lambda: TaskRef(0, 0), limits=limits, last_step=6)

    def lengths() -> Iterator[int]:
        while True:
            yield from seed_lengths

    drawn = lengths()
    while dispatcher.step <= 6:
        if not dispatcher.may_ship:
            dispatcher.policy_live(dispatcher.version + 1)
        while not builder.is_ready(dispatcher.min_fresh_version):
            for group in finished(dispatcher, builder, drawn):
                builder.add(group)
        batch = builder.next_batch(dispatcher.step, dispatcher.min_fresh_version)
        assert batch is not None
        sizes = [group.num_tokens for group in batch.groups]
        assert sum(sizes) >= batch_tokens > sum(sizes[:-1])
        dispatcher.advance(dispatcher.step + 1)


def test_the_estimated_rollouts_of_a_batch_follow_the_measured_lengths() -> None:
    recipe = make_recipe(batch_tokens=1000, max_off_policy_steps=1)
    builder = make_builder(recipe)
    assert builder.batch_size == 4
    limits = DispatchLimits(group_size=2, batch_size=4, max_in_flight=4, max_off_policy_steps=1)
    dispatcher = Dispatcher(next_task=lambda: TaskRef(0, 0), limits=limits, last_step=6)
    for group in finished(dispatcher, builder, iter([100] * 4)):
        builder.add(group)
    assert builder.batch_size == 10 and not builder.is_ready(0)
