"""Finished rollouts in a checkpoint: restored exactly, counted once; a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_jsonl, write_json
from primerl_hpc.orchestrator.batches.batcher import Batch, BatchBuilder
from primerl_hpc.orchestrator.checkpoint.follower import (
    QUEUE,
    SIDES,
    CheckpointFollower,
    load_queue,
    load_state,
)
from primerl_hpc.orchestrator.checkpoint.queue_file import read_queue, write_queue
from primerl_hpc.orchestrator.checkpoint.state import LoopState
from primerl_hpc.orchestrator.evaluation import Evaluator
from primerl_hpc.orchestrator.rollout_data import AgentTrace, Group, Rollout, Sample, Split
from primerl_hpc.orchestrator.rollouts.traces import TraceWriter
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import MetricsWriter, read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.rollouts.micro_batch import Picture, PlacedPicture
from tests.support.helpers import MINIMAL_RL

BATCH, GROUP, TASKS = 12, 4, 7


def make_recipe(algorithm: str = "grpo", **rollouts: Any) -> Recipe:
    values = {
        **MINIMAL_RL,
        "max_steps": 20,
        "rollouts": {"batch_size": BATCH, "group_size": GROUP, "max_off_policy_steps": 4, **rollouts},
        "environments": {
            "train": [{"id": "reverse-text", "curriculum": {"type": "difficulty_pools"}}],
            "eval": [{"id": "reverse-text", "name": "held-out", "interval": 2}],
        },
        "algorithm": {"type": algorithm},
    }
    if algorithm in ("opd", "sft_distill"):
        values["teacher"] = {"model": {"name": "m"}}
    return Recipe.model_validate(values)


def make_sample(rng: np.random.Generator) -> Sample:
    length = int(rng.integers(2, 40))
    mask = rng.random(length) < 0.5
    mask[0] = False
    return Sample(
        rng.integers(0, 99, length).astype(np.int32),
        mask,
        np.where(mask, rng.normal(size=length), 0).astype(np.float32),
        temperature=0.7,
        trace=int(rng.integers(2)),
        ref_logprobs=rng.normal(size=length).astype(np.float32),
        roles=rng.integers(0, 4, length).astype(np.uint8) if rng.random() < 0.7 else None,
    )


def make_rollout(reward: float, rng: np.random.Generator, version: int = 0) -> Rollout:
    return Rollout(
        reward,
        [make_sample(rng) for _ in range(int(rng.integers(1, 4)))],
        output_tokens=int(rng.integers(1, 50)),
        input_tokens=7,
        num_turns=2,
        is_truncated=bool(rng.random() < 0.5),
        rewards={"lcs": reward},
        metrics={"words": float(rng.normal())},
        last_version=version,
        seconds=float(rng.random()),
        traces=[AgentTrace("one", reward), AgentTrace("two", -reward)],
    )


def assert_same(left: Any, right: Any) -> None:
    """Also of arrays, their types, and of what is inside dataclasses."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif is_dataclass(left):
        for each in fields(left):
            assert_same(getattr(left, each.name), getattr(right, each.name))
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    st.sampled_from(["grpo", "grpo_std", "rae", "echo", "opd", "sft_distill"]),
)
def test_groups_come_back_as_they_were(tmp_path_factory, seed, sizes, algorithm):
    rng = np.random.default_rng(seed)
    scorer = Scorer(make_recipe(algorithm))
    groups = []
    for group_id, size in enumerate(sizes):
        group = Group(group_id, Split.TRAIN, 0, int(rng.integers(99)), size, to_start=0, retries_left=0)
        group.results = [make_rollout(float(rng.random()), rng) for _ in range(size)]
        group.versions = rng.integers(0, 9, size).tolist()
        groups.append(scorer.score(group))
    pictures = [Picture(key, rng.random((16, 6), np.float32), (1, 4, 4)) for key in "ab"]
    for number, sample in enumerate(
        each for group in groups for one in group.rollouts for each in one.samples
    ):
        if seed % 2 and number % 3:
            routed = rng.integers(0, 9, (sample.num_tokens, 2, 2)).astype(np.uint16)
            sample.routed_experts = [routed]
            sample.images = (PlacedPicture(pictures[number % 2], number, 4),)
    path = tmp_path_factory.mktemp("queue") / QUEUE
    write_queue(path, groups)
    assert_same(read_queue(path), groups)
    assert [each.name for each in path.parent.iterdir()] == [QUEUE]


def test_a_queue_of_an_earlier_version_has_a_rollouts_mean_advantage(tmp_path):
    path, rng = tmp_path / QUEUE, np.random.default_rng(0)
    group = Group(0, Split.TRAIN, 0, 7, 2, to_start=0, retries_left=0)
    group.results, group.versions = [make_rollout(reward, rng) for reward in (0.0, 1.0)], [0, 0]
    scored = Scorer(make_recipe("grpo")).score(group)
    write_queue(path, [scored])
    with safe_open(path, framework="np") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no Mapping)
    (row,) = json.loads(header["groups"])
    del row["trace_advantages"]
    save_file(tensors, path, {**header, "groups": json.dumps([{**row, "advantages": [-0.5, 0.5]}])})
    (found,) = read_queue(path)
    assert found.advantages.tolist() == [-0.5, 0.5] == [each.item() for each in found.trace_advantages]


class Incarnation:
    """The loop's parts without engines and clock: the reward of a rollout is a function of its task and its place in
    the group."""

    def __init__(self, run: RunDir, recipe: Recipe, resumed: int = 0) -> None:
        self.run, self.recipe, self.resumed = run, recipe, resumed
        environments = recipe.environments.train
        self.sampler = TaskSampler([TASKS], [1.0], recipe.seed, [each.curriculum for each in environments])
        self.dispatcher = Dispatcher(
            next_task=self.sampler.next,
            limits=DispatchLimits(
                group_size=GROUP,
                batch_size=BATCH,
                max_in_flight=3 * BATCH,
                max_off_policy_steps=recipe.rollouts.max_off_policy_steps,
            ),
            last_step=recipe.steps,
            step=resumed + 1,
            version=resumed,
        )
        self.builder = BatchBuilder(
            recipe.rollouts, Scorer(recipe), seq_len=recipe.seq_len, num_ranks=2, env_names=["reverse-text"]
        )
        self.traces = TraceWriter(run.traces("train"))
        self.eval_traces = TraceWriter(run.traces("eval"))
        self.evaluator = Evaluator(
            recipe.environments, [1], recipe.steps, set(read_steps(run.metrics("eval")))
        )
        self.state = LoopState(
            self.sampler, self.dispatcher, self.builder, self.traces, self.eval_traces, self.evaluator
        )
        self.follower = CheckpointFollower(run, "trainer-0", resumed)
        self.in_flight: list = []
        self.batches: list[Batch] = []
        self.state.restore(run, resumed)

    def collect(self, steps: int, *, queue_at_least: int = 0) -> None:
        """Batches are cut until ``steps`` more are, each when so many rollouts would be left over; a version follows
        each."""
        until = len(self.batches) + steps
        while len(self.batches) < until:
            self.in_flight += self.dispatcher.next_starts(self.builder.num_queued)
            start = self.in_flight.pop(0)
            member = sum(each.group_id == start.group_id for each in self.in_flight)
            reward = float((start.task * 5 + member * 3) % 7)
            rng = np.random.default_rng([start.task, member])
            group = self.dispatcher.finished(start.rollout_id, make_rollout(reward, rng, start.version))
            if group is not None:
                self.score(group)
            if self.builder.num_queued >= BATCH + queue_at_least:
                self.build_batch()

    def score(self, group: Group) -> None:
        scored = self.builder.add(group)
        self.sampler.observe(scored.task, scored.mean_reward)
        for rollout, version in zip(scored.rollouts, scored.versions, strict=True):
            self.traces.add(rollout, env="e", task=str(group.task), version=version, group=group.group_id)
            self.state.totals["rollouts"] += 1
            self.state.totals["tokens"] += rollout.output_tokens

    def build_batch(self) -> None:
        step = self.dispatcher.step
        self.batches.append(self.builder.next_batch(step, self.dispatcher.min_fresh_version))
        self.follower.remember(step, self.state.snapshot(), self.builder.queue)
        self.dispatcher.advance(step + 1)
        self.dispatcher.policy_live(step)
        self.traces.flush()

    def save(self, step: int) -> None:
        self.run.finish_checkpoint_side(step, "trainer", SIDES)
        assert self.follower.follow() == [step]


def content(batches: list[Batch]) -> list:
    """Return the rollouts and tasks of each batch, and the trained tokens."""
    return [
        [
            (group.task, [rollout.reward for rollout in group.rollouts], group.advantages.tolist())
            for group in batch.groups
        ]
        for batch in batches
    ]


def test_a_resumed_run_makes_the_batches_of_one_that_did_not_stop(tmp_path):
    recipe = make_recipe("rae")
    whole = Incarnation(RunDir(tmp_path / "whole"), recipe)
    whole.collect(3, queue_at_least=BATCH)
    whole.save(3)
    assert whole.builder.num_queued >= BATCH
    run = RunDir(tmp_path / "stopped")
    first = Incarnation(run, recipe)
    first.collect(3, queue_at_least=BATCH)
    first.save(3)
    first.collect(2, queue_at_least=BATCH)  # all of this is lost

    second = Incarnation(run, recipe, resumed=3)
    assert second.builder.num_queued >= BATCH
    whole.collect(4)
    second.collect(4)
    assert content(second.batches) == content(whole.batches[3:])
    assert second.state.totals == whole.state.totals
    assert second.builder.scorer.state() == whole.builder.scorer.state()
    assert second.sampler.state([]) == whole.sampler.state([])
    assert second.builder.state() == whole.builder.state()


def test_after_a_resume_every_rollout_is_traced_and_counted_once(tmp_path):
    run, recipe = RunDir(tmp_path), make_recipe()
    first = Incarnation(run, recipe)
    first.collect(3, queue_at_least=BATCH)
    first.save(3)
    first.collect(2)
    lost = {row["group"] for row in read_jsonl(run.traces("train"))}
    with run.traces("train").open("a") as file:
        file.write('{"env": "e", "ta')  # killed while it wrote

    second = Incarnation(run, recipe, resumed=3)
    queued = second.builder.num_queued
    kept = [row["group"] for row in read_jsonl(run.traces("train"))]
    assert len(kept) == 3 * BATCH + queued < len(lost) * GROUP
    second.collect(4)
    rows = list(read_jsonl(run.traces("train")))
    assert len(rows) == second.state.totals["rollouts"]
    assert all(sum(row["group"] == each for row in rows) == GROUP for each in {row["group"] for row in rows})
    in_batches = {group.group_id for batch in first.batches[:3] + second.batches for group in batch.groups}
    waiting = {group.group_id for group in second.builder.queue}
    assert not in_batches & waiting and in_batches | waiting == {row["group"] for row in rows}


def test_without_a_checkpoint_the_earlier_incarnation_is_not_counted(tmp_path):
    run, recipe = RunDir(tmp_path), make_recipe()
    Incarnation(run, recipe).collect(2)
    assert list(read_jsonl(run.traces("train")))
    again = Incarnation(run, recipe)
    assert not list(read_jsonl(run.traces("train"))) and again.builder.num_queued == 0


def test_restored_rollouts_become_stale_like_any_others(tmp_path):
    run = RunDir(tmp_path)
    first = Incarnation(run, make_recipe(max_off_policy_steps=1))
    first.collect(1, queue_at_least=BATCH)
    first.save(1)
    second = Incarnation(run, make_recipe(max_off_policy_steps=1), resumed=1)
    queued = second.builder.num_queued
    assert queued >= BATCH and {v for group in second.builder.queue for v in group.versions} == {0}
    second.dispatcher.advance(3)
    assert not second.builder.is_ready(second.dispatcher.min_fresh_version)
    second.collect(1)
    (batch,) = second.batches
    assert batch.tally.stale_rollouts == queued and batch.info.policy_version_min >= 1


def test_a_fork_starts_queued_tasks_again(tmp_path):
    run, recipe = RunDir(tmp_path), make_recipe()
    first = Incarnation(run, recipe)
    first.collect(2, queue_at_least=BATCH)
    queued = [group.task for group in first.builder.queue]
    first.save(2)
    write_json(run.fork_note(2), {"run": "other", "step": 2, "skip": []})
    second = Incarnation(run, recipe, resumed=2)
    assert second.builder.num_queued == 0
    assert [second.sampler.next() for _ in queued] == queued
    assert list(read_jsonl(run.traces("train"))) == []  # the size that was saved is of the other run's file


@pytest.mark.parametrize("resumed", [0, 2])
def test_rollouts_of_an_evaluation_that_is_done_again_are_traced_once(tmp_path, resumed):
    run, recipe = RunDir(tmp_path), make_recipe()
    first = Incarnation(run, recipe)
    first.collect(2)
    first.save(2)
    rng = np.random.default_rng(0)
    for version in (0, 2):
        rollout = make_rollout(1.0, rng, version)
        first.eval_traces.add(rollout, env="e", task="1", version=version, eval_version=version)
        first.eval_traces.add_failure(env="e", task="1", version=version, error="x")
    first.eval_traces.flush()
    with run.traces("eval").open("a") as file:
        file.write('{"env": "e", "ta')  # killed while it wrote
    MetricsWriter(run.metrics("eval")).write(0, {})
    Incarnation(run, recipe, resumed=resumed)
    assert [row["version"] for row in read_jsonl(run.traces("eval"))] == [0, 0]
    assert [path.name for path in run.traces("eval").parent.glob("eval*")] == ["eval.jsonl"]


def test_evaluations_that_were_open_at_a_checkpoint_are_known_to_the_next_incarnation(tmp_path):
    run, recipe = RunDir(tmp_path), make_recipe()
    first = Incarnation(run, recipe)
    first.evaluator.open(0, first.dispatcher)
    first.collect(2)
    for version in (1, 2):
        first.evaluator.open(version, first.dispatcher)
    first.evaluator.open_versions.remove(0)  # done
    first.collect(3)
    first.save(5)
    assert first.evaluator.unfinished == Incarnation(run, recipe, resumed=5).evaluator.unfinished == [2]
    write_json(run.fork_note(5), {"run": "other", "step": 5, "skip": []})
    assert Incarnation(run, recipe, resumed=5).evaluator.interrupted == []  # of another run


def test_evaluations_that_began_after_the_cut_are_missed_and_those_with_a_row_are_not():
    recipe = make_recipe()
    evaluator = Evaluator(recipe.environments, [1], recipe.steps, evaluated={2})
    evaluator.restore({"open": [2, 4], "live": 5}, 8)
    assert evaluator.interrupted == [4, 6]  # v8 is evaluated when it is live


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped"])
def test_a_damaged_queue_is_refused_with_its_path(tmp_path: Path, harm):
    run = RunDir(tmp_path)
    life = Incarnation(run, make_recipe())
    life.collect(1, queue_at_least=BATCH)
    life.save(1)
    path = run.checkpoint_side(1, "orchestrator") / QUEUE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    changed = {"missing": None, "cut": data[:-9], "flipped": data}[harm]
    path.unlink() if changed is None else path.write_bytes(changed)
    with pytest.raises(DataError, match="queue of finished rollouts") as caught:
        load_queue(run, 1, load_state(run, 1))
    assert caught.value.location == str(path)
