"""What a step says about its rollouts: overall, per environment and per agent, and every rollout on a line of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.orchestrator.batches import BatchCutter
from primerl_hpc.orchestrator.dispatcher import Dispatcher, Group, Split
from primerl_hpc.orchestrator.metrics import (
    LoopLag,
    batch_metrics,
    disk_metrics,
    effective_metrics,
    group_metrics,
)
from primerl_hpc.orchestrator.sampler import TaskRef
from primerl_hpc.orchestrator.scoring import Scorer
from primerl_hpc.orchestrator.traces import TraceWriter
from primerl_hpc.orchestrator.trajectories import AgentTrace, Rollout, Sample
from primerl_hpc.recipe.schema import Recipe

RECIPE = Recipe.model_validate(
    {
        "kind": "rl",
        "name": "r",
        "model": {"name": "m"},
        "max_steps": 9,
        "rollouts": {"batch_size": 4, "group_size": 2},
        "environments": {"train": [{"id": "words"}, {"id": "nim", "algorithm": {"type": "rae"}}]},
    }
)


def rollout(reward: float, *, turns: int = 1, samples: int = 1) -> Rollout:
    made = [
        Sample(np.arange(4), np.arange(4) >= 2, np.zeros(4, np.float32), temperature=1.0)
        for _ in range(samples)
    ]
    return Rollout(reward, made, 2 * samples, 2, turns, is_truncated=turns > 1)


def game(first: float) -> Rollout:
    made = rollout(0.0, turns=3, samples=2)
    made.traces = [
        AgentTrace("first", first, output_tokens=3, input_tokens=1, num_turns=2, is_truncated=True),
        AgentTrace("second", -first, output_tokens=1, input_tokens=1, num_turns=1),
    ]
    made.samples[1].trace = 1
    return made


def group(env: int, rollouts: list[Rollout], *, version: int, failed: int = 0) -> Group:
    made = Group(env, Split.TRAIN, env, 0, 2, to_start=0, retries_left=0)
    made.results, made.versions, made.num_failed = rollouts, [version] * len(rollouts), failed
    return made


def idle_dispatcher() -> Dispatcher:
    return Dispatcher(
        next_task=lambda: TaskRef(0, 0),
        group_size=2,
        batch_size=4,
        max_in_flight=2,
        max_off_policy_steps=4,
        last_step=9,
        step=4,
        version=3,
    )


@pytest.fixture
def metrics() -> dict[str, float]:
    dispatcher = idle_dispatcher()
    dispatcher.next_starts(0)
    dispatcher.policy_live(5)
    cutter = BatchCutter(RECIPE.rollouts, Scorer(RECIPE), seq_len=16, num_ranks=1, env_names=["words", "nim"])
    cutter.add(group(0, [rollout(1.0), rollout(0.0)], version=2, failed=1))
    cutter.add(group(1, [game(1.0), game(-1.0)], version=3))
    cutter.add(group(1, [], version=3, failed=2))
    cutter.add(group(0, [rollout(1.0)], version=4))
    cut = cutter.take(4, 0)
    cutter.pack(cut)
    return batch_metrics(cut, dispatcher)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward/mean", 0.25),
        ("reward/words/mean", 0.5),
        ("reward/words/max", 1.0),
        ("reward/nim/first/max", 1.0),
        ("reward/nim/second/mean", 0.0),
        ("turns/mean", 2.0),
        ("turns/nim/max", 3.0),
        ("branches/nim/mean", 2.0),
        ("truncated/nim/mean", 1.0),
        ("completion_tokens/nim/first/mean", 3.0),
        ("prompt_tokens/nim/second/max", 1.0),
        ("turns/nim/first/p90", 2.0),
        ("branches/nim/second/mean", 1.0),
        ("truncated/nim/first/mean", 1.0),
        ("truncated/nim/second/mean", 0.0),
        ("errors/words/mean", 1 / 3),
        ("errors/nim/mean", 1 / 2),  # a whole group was lost
        ("errors/mean", 3 / 7),
        ("effective/branches/nim/mean", 2.0),
        ("effective/truncated/words/mean", 0.0),
        ("solve_some/words", 1.0),
        ("solve_none/nim", 1.0),
        ("batch/nim/ratio", 0.5),
        ("off_policy/max", 1.0),
        ("off_policy/mean", 0.5),
        ("off_policy/in_flight/max", 2.0),
        ("off_policy/in_queue/mean", 1.0),
        ("batch/samples", 6),
        ("effective/reward/words/mean", 0.5),
        ("effective/reward/nim/max", 0.0),
        ("effective/turns/mean", 2.0),
        ("batch/trainable", 1.0),
    ],
)
def test_metrics_of_a_batch(metrics, name, value):
    assert metrics[name] == pytest.approx(value)


def test_a_batch_that_a_frozen_model_sampled_has_trained_tokens_and_no_age():
    recipe = Recipe.model_validate(
        {
            **RECIPE.model_dump(exclude_unset=True),
            "algorithm": {"type": "sft_distill"},
            "teacher": {"model": {"name": "t"}},
            "environments": {"train": [{"id": "words"}, {"id": "nim", "algorithm": {"type": "grpo"}}]},
        }
    )
    cutter = BatchCutter(recipe.rollouts, Scorer(recipe), seq_len=16, num_ranks=1, env_names=["words", "nim"])
    cutter.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
    cutter.add(group(1, [rollout(1.0), rollout(0.0)], version=7))
    cutter.add(group(0, [rollout(1.0)], version=0))
    cut = cutter.take(9, 0)
    cutter.pack(cut)
    told = json.loads(json.dumps(batch_metrics(cut, idle_dispatcher())))
    assert (told["batch/trained_tokens"], told["batch/rollouts"]) == (8, 4)
    assert (told["off_policy/max"], cut.info.policy_version_min, cut.queued_versions) == (1, 7, [])


def test_distributions_have_mean_bounds_and_tails(metrics):
    for name in ("reward", "completion_tokens", "prompt_tokens", "turns", "branches", "rollout_s"):
        for suffix in ("", "/words", "/nim"):
            assert {f"{name}{suffix}/{part}" for part in ("mean", "min", "max", "p10", "p90")} <= set(metrics)


def test_rollouts_of_equal_reward_are_described_but_not_as_effective():
    cutter = BatchCutter(RECIPE.rollouts, Scorer(RECIPE), seq_len=16, num_ranks=1, env_names=["words", "nim"])
    cutter.add(group(0, [rollout(1.0), rollout(1.0)], version=0))
    cutter.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
    groups = cutter.take(1, 0).groups
    assert group_metrics(groups)["reward/mean"] == 0.75
    assert effective_metrics(groups)["effective/reward/mean"] == 0.5


@pytest.mark.parametrize("how", ["refilled", "turned away"])
def test_groups_that_were_passed_over_count_among_all_and_not_as_effective(how):
    rollouts = {"zero_advantage": "refill"} if how == "refilled" else {}
    gates = [] if how == "refilled" else [{"type": "advantage_range"}]
    recipe = Recipe.model_validate(
        {
            **RECIPE.model_dump(exclude_unset=True),
            "rollouts": {"batch_size": 4, "group_size": 2, **rollouts},
            "environments": {"train": [{"id": "words", "gates": gates}, {"id": "nim", "gates": gates}]},
        }
    )
    cutter = BatchCutter(recipe.rollouts, Scorer(recipe), seq_len=16, num_ranks=1, env_names=["words", "nim"])
    for env, rewards in ((0, (1.0, 1.0)), (1, (0.0, 0.0)), (0, (1.0, 1.0)), (0, (1.0, 0.0)), (0, (1.0, 0.0))):
        cutter.add(group(env, [rollout(reward, samples=2) for reward in rewards], version=0))
    cut = cutter.take(1, 0)
    told = batch_metrics(cut, idle_dispatcher())
    assert (told["solve_all"], told["solve_none"], told["solve_some"]) == (0.4, 0.2, 0.4)
    assert (told["reward/mean"], told["reward/nim/mean"], told["effective/reward/mean"]) == (0.6, 0.0, 0.5)
    assert (told["batch/rollouts"], told["batch/rollouts_passed_over"], told["branches/mean"]) == (4, 6, 2)
    assert (told["batch/words/ratio"], told["batch/nim/ratio"]) == (1.0, 0.0)
    assert not any(
        sample.num_tokens for each in cut.tally.passed_over for one in each.rollouts for sample in one.samples
    )
    for _ in range(2):
        cutter.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
    cut = cutter.take(2, 0)
    assert batch_metrics(cut, idle_dispatcher())["solve_all"] == 0.0  # told once


def test_an_environment_that_lost_every_group_shows_its_errors():
    cutter = BatchCutter(RECIPE.rollouts, Scorer(RECIPE), seq_len=16, num_ranks=1, env_names=["words", "nim"])
    for _ in range(2):
        cutter.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
        cutter.add(group(1, [], version=0, failed=2))
    told = batch_metrics(cutter.take(1, 0), idle_dispatcher())
    assert told["errors/nim/mean"] == 1.0 and told["errors/words/mean"] == 0.0


def test_the_event_loops_lag_has_a_tail():
    lag = LoopLag()
    lag._lags = [0.0] * 99 + [1.0]
    told = lag.take()
    assert told["event_loop_lag/mean"] < told["event_loop_lag/p99"] < told["event_loop_lag/max"] == 1.0


def test_the_disk_that_fills_is_told(tmp_path):
    told = disk_metrics(tmp_path)
    assert told["system/ckpt_disk_free_gib"] > 0 and 0 <= told["system/ckpt_disk_used_share"] <= 1


def test_every_rollout_is_a_line_and_so_is_every_failure(tmp_path):
    writer = TraceWriter(tmp_path / "train.jsonl")
    played = game(1.0)
    played.text = [{"role": "user", "content": "5 stones"}, {"role": "assistant", "content": "1"}]
    writer.add(played, env="nim", task="5 stones", version=3, advantages=[0.12345, 0.0], group=7)
    writer.add_failure(env="nim", task="7 stones", version=3, error="NoReward: none")
    writer.flush()
    row, failure = read_jsonl(tmp_path / "train.jsonl")
    assert row["agents"] == [["first", 1.0, 0.1235], ["second", -1.0, 0.0]]
    assert (row["prompt"], row["completion"], row["advantage"]) == ("5 stones", "1", 0.0617)
    assert (row["turns"], row["branches"], row["output_tokens"], row["group"]) == (3, 2, 4, 7)
    assert failure == json.loads(
        '{"env": "nim", "task": "7 stones", "version": 3, "error": "NoReward: none"}'
    )
