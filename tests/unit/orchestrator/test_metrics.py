"""Metrics of a step: overall, per environment and per agent; every rollout has a line in the traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import Role
from primerl_hpc.orchestrator.batches.batcher import BatchBuilder
from primerl_hpc.orchestrator.metrics import (
    ErrorRateWatch,
    LoopLag,
    batch_metrics,
    disk_metrics,
    effective_metrics,
    group_metrics,
)
from primerl_hpc.orchestrator.rollout_data import (
    AgentTrace,
    Group,
    Rollout,
    Sample,
    ScoredGroup,
    Split,
    TaskRef,
)
from primerl_hpc.orchestrator.rollouts.traces import TraceWriter
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import MINIMAL_RL, make_plan, process_plan

RECIPE = Recipe.model_validate(
    {
        **MINIMAL_RL,
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


def test_rollouts_without_a_completion_token_are_counted() -> None:
    rollouts = [rollout(reward) for reward in (1.0, 0.0, 1.0, 0.0)]
    rollouts[1].output_tokens = 0
    scored = ScoredGroup(0, TaskRef(0, 0), rollouts, [1] * 4, [], [], num_failed=0)
    for suffix, label in (("", "all"), ("/words", "words")):
        assert group_metrics([scored], suffix)[f"empty_rollouts/{label}"] == 0.25


def test_an_environment_whose_rollouts_fail_for_ten_batches_is_reported_once_with_its_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [process_plan(Role.ENV_SERVER, index) for index in range(2)]
    plan, run = make_plan(tmp_path / "run", RECIPE, processes=servers), RunDir(tmp_path / "run")
    watch, writer = ErrorRateWatch(run, plan.phases[0]), MetricsWriter(run.metrics("orchestrator"))
    for step in range(1, 21):  # every second batch has no rollouts of nim
        row = {"errored_rollouts/all": 0.1, "errored_rollouts/words": 0.04 if step == 11 else 0.2}
        row |= {"errored_rollouts/nim": 0.3} if step % 2 else {}
        row |= {"failures/words/ToolError": step, "failures/words/KeyError": 3 * step, "failures/nim/A": 5}
        row |= {"failures/words/OSError": 2, "failures/words/\x1b[2JError": 2 * step}
        writer.write(step, row)
        found = watch.observe(row)
        names = [rate.environment for rate in found]
        assert names == (["words"] if step == 10 else ["nim"] if step >= 19 else []), step
        if step == 10:
            (rate,) = found
            assert rate.kinds == {"KeyError": 30, "\\x1b[2JError": 20, "ToolError": 10}
            assert rate.log == str(run.latest_logs / "env_server-0.log") and rate.share == pytest.approx(0.2)
    (first, second) = [record.message for record in caplog.records]
    assert "20% of the rollouts of environment words failed in its last 10 batches: KeyError ×30" in first
    assert "environment nim failed" in second and second.endswith("env_server-1.log")
    (resumed,) = ErrorRateWatch(run, plan.phases[0]).found
    assert resumed.environment == "nim", "batches before a restart count"


def idle_dispatcher() -> Dispatcher:
    return Dispatcher(
        next_task=lambda: TaskRef(0, 0),
        limits=DispatchLimits(group_size=2, batch_size=4, max_in_flight=2, max_off_policy_steps=4),
        last_step=9,
        step=4,
        version=3,
    )


@pytest.fixture
def metrics() -> dict[str, float]:
    dispatcher = idle_dispatcher()
    dispatcher.next_starts(0)
    dispatcher.policy_live(5)
    builder = BatchBuilder(
        RECIPE.rollouts, Scorer(RECIPE), seq_len=16, num_ranks=1, env_names=["words", "nim"]
    )
    builder.add(group(0, [rollout(1.0), rollout(0.0)], version=2, failed=1))
    builder.add(group(1, [game(1.0), game(-1.0)], version=3))
    builder.add(group(1, [], version=3, failed=2))
    builder.add(group(0, [rollout(1.0)], version=4))
    batch = builder.next_batch(4, 0)
    builder.pack(batch)
    return batch_metrics(batch, dispatcher)


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
        ("errored_rollouts/words", 1 / 3),
        ("errored_rollouts/nim", 1 / 2),  # a complete group was lost
        ("errored_rollouts/all", 3 / 7),
        ("empty_rollouts/all", 0.0),
        ("empty_rollouts/words", 0.0),
        ("seq_len/all/mean", 5.0),
        ("seq_len/all/max", 6.0),
        ("seq_len/words/mean", 4.0),
        ("seq_len/nim/max", 6.0),
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
    builder = BatchBuilder(
        recipe.rollouts, Scorer(recipe), seq_len=16, num_ranks=1, env_names=["words", "nim"]
    )
    builder.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
    builder.add(group(1, [rollout(1.0), rollout(0.0)], version=7))
    builder.add(group(0, [rollout(1.0)], version=0))
    batch = builder.next_batch(9, 0)
    builder.pack(batch)
    row = json.loads(json.dumps(batch_metrics(batch, idle_dispatcher())))
    assert (row["batch/trained_tokens"], row["batch/rollouts"]) == (8, 4)
    assert (row["off_policy/max"], batch.info.policy_version_min, batch.queued_versions) == (1, 7, [])


def test_distributions_have_mean_bounds_and_tails(metrics):
    for name in ("reward", "completion_tokens", "prompt_tokens", "turns", "branches", "rollout_s"):
        for suffix in ("", "/words", "/nim"):
            assert {f"{name}{suffix}/{part}" for part in ("mean", "min", "max", "p10", "p90")} <= set(metrics)


def test_rollouts_of_equal_reward_are_described_but_not_as_effective():
    builder = BatchBuilder(
        RECIPE.rollouts, Scorer(RECIPE), seq_len=16, num_ranks=1, env_names=["words", "nim"]
    )
    builder.add(group(0, [rollout(1.0), rollout(1.0)], version=0))
    builder.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
    groups = builder.next_batch(1, 0).groups
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
    builder = BatchBuilder(
        recipe.rollouts, Scorer(recipe), seq_len=16, num_ranks=1, env_names=["words", "nim"]
    )
    for env, rewards in ((0, (1.0, 1.0)), (1, (0.0, 0.0)), (0, (1.0, 1.0)), (0, (1.0, 0.0)), (0, (1.0, 0.0))):
        builder.add(group(env, [rollout(reward, samples=2) for reward in rewards], version=0))
    batch = builder.next_batch(1, 0)
    row = batch_metrics(batch, idle_dispatcher())
    assert (row["solve_all"], row["solve_none"], row["solve_some"]) == (0.4, 0.2, 0.4)
    assert (row["reward/mean"], row["reward/nim/mean"], row["effective/reward/mean"]) == (0.6, 0.0, 0.5)
    assert (row["batch/rollouts"], row["batch/rollouts_passed_over"], row["branches/mean"]) == (4, 6, 2)
    assert (row["batch/words/ratio"], row["batch/nim/ratio"]) == (1.0, 0.0)
    assert not any(
        sample.num_tokens
        for each in batch.tally.passed_over
        for one in each.rollouts
        for sample in one.samples
    )
    for _ in range(2):
        builder.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
    batch = builder.next_batch(2, 0)
    assert batch_metrics(batch, idle_dispatcher())["solve_all"] == 0.0  # counted once


def test_an_environment_that_lost_every_group_shows_its_errors():
    builder = BatchBuilder(
        RECIPE.rollouts, Scorer(RECIPE), seq_len=16, num_ranks=1, env_names=["words", "nim"]
    )
    for _ in range(2):
        builder.add(group(0, [rollout(1.0), rollout(0.0)], version=0))
        builder.add(group(1, [], version=0, failed=2))
    row = batch_metrics(builder.next_batch(1, 0), idle_dispatcher())
    assert row["errored_rollouts/nim"] == 1.0 and row["errored_rollouts/words"] == 0.0


def test_the_event_loops_lag_has_a_tail():
    lag = LoopLag()
    lag._lags = [0.0] * 99 + [1.0]
    row = lag.take()
    assert row["event_loop_lag/mean"] < row["event_loop_lag/p99"] < row["event_loop_lag/max"] == 1.0


def test_a_full_disk_is_reported(tmp_path):
    row = disk_metrics(tmp_path)
    assert row["system/ckpt_disk_free_gib"] > 0 and 0 <= row["system/ckpt_disk_used_share"] <= 1


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
