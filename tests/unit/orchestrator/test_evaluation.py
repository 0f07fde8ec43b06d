"""Evaluation: which versions are due, the meaning of pass@k, and when the row of a version is written."""

from __future__ import annotations

from itertools import combinations

import pytest

from primerl_hpc.orchestrator.evaluation import Evaluator, pass_at_k, pass_hat_k
from primerl_hpc.orchestrator.rollout_data import Rollout
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.recipe.schema.rollout import Environments, EvalEnvironment


def rollout(reward: float, last_version: int = 0) -> Rollout:
    made = Rollout(reward, [], output_tokens=3, input_tokens=3, num_turns=1, is_truncated=False)
    made.last_version = last_version
    return made


def evaluator(*, interval=10, samples=2, on_start=True, last=25, evaluated=(), tasks=2) -> Evaluator:
    environments = Environments(
        eval=(EvalEnvironment(id="reverse-text", name="held-out", interval=interval, samples=samples),),
        eval_on_start=on_start,
    )
    return Evaluator(environments, [tasks], last, set(evaluated))


def dispatcher() -> Dispatcher:
    return Dispatcher(
        next_task=lambda: pytest.fail("no training task is wanted"),
        limits=DispatchLimits(group_size=1, batch_size=1, max_in_flight=100, max_off_policy_steps=0),
        last_step=0,
    )


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 2), (4, 3, 2), (8, 5, 4), (3, 3, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_solved_rollout(n, c, k):
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(draw) for draw in draws) / len(draws))


def test_first_last_and_every_interval_th_version_are_due():
    made = evaluator()
    assert [version for version in range(26) if made.due(version)] == [0, 10, 20, 25]
    assert [version for version in range(26) if evaluator(on_start=False).due(version)] == [10, 20, 25]


def test_versions_with_a_row_are_not_evaluated_again():
    assert not evaluator(evaluated={10}).due(10)


def test_a_due_version_between_live_and_newest_is_not_skipped():
    made = evaluator(evaluated={0})
    assert made.next_due(live=8, newest=11) == made.next_due(live=9, newest=11) == 10
    assert made.next_due(live=10, newest=12) == 12


def test_the_row_is_written_with_the_last_task_and_counts_failures_separately():
    made, engine = evaluator(samples=2, evaluated=()), dispatcher()
    assert made.open(10, engine)
    starts = engine.next_starts(0)
    assert len(starts) == 4
    rewards = {0: 1.0, 1: 0.5, 2: 0.0}
    rows = []
    for start in starts[:3]:
        group = engine.finished(start.rollout_id, rollout(rewards[start.rollout_id], last_version=11))
        rows += [made.add(group)] if group else []
    assert rows == [None]
    group = None
    rollout_id = starts[3].rollout_id
    while group is None:
        group = engine.failed(rollout_id)
        rollout_id += 1
        engine.next_starts(0)
    version, metrics = made.add(group)
    assert version == 10
    assert metrics["eval/held-out/avg@2"] == pytest.approx((0.75 + 0.0) / 2)
    assert metrics["eval/held-out/reward/mean"] == pytest.approx(0.5)
    assert metrics["eval/held-out/pass@1"] == pytest.approx(0.25)
    assert metrics["eval/held-out/pass@2"] == 1.0  # of the one task with two rollouts
    assert metrics["eval/held-out/pass^2"] == 0.0
    assert metrics["eval/held-out/errors"] == 1
    assert metrics["eval/held-out/errors/mean"] == 0.25
    assert metrics["eval/held-out/turns/p90"] == metrics["eval/held-out/turns/max"] == 1
    assert metrics["eval/held-out/completion_tokens/min"] == 3
    assert "eval/held-out/branches/mean" not in metrics  # no tokens came back
    assert "eval/all/rollouts" not in metrics
    assert metrics["eval/policy_version/max"] == 11
    assert made.num_open == 0


def test_failures_of_the_policy_count_as_unsolved_and_are_not_tried_again() -> None:
    """4 of 8 tasks are solved, 3 rollouts reach a limit, and one environment server breaks."""
    made, engine = evaluator(samples=1, tasks=8, evaluated=()), dispatcher()
    engine.max_retries = 0
    made.open(10, engine)
    row = None
    for index, start in enumerate(engine.next_starts(0)):
        if index < 4:
            group = engine.finished(start.rollout_id, rollout(1.0))
        else:
            group = engine.failed(start.rollout_id, is_limit=index < 7)
        assert group is not None, "the group is closed without another try"
        row = made.add(group)
    assert row is not None
    metrics = row[1]
    assert metrics["eval/held-out/avg@1"] == metrics["eval/held-out/pass@1"] == pytest.approx(4 / 7)
    assert metrics["eval/held-out/avg_finished@1"] == 1.0
    assert (metrics["eval/held-out/limited"], metrics["eval/held-out/errors"]) == (3, 4)


def test_an_evaluation_does_not_repeat_a_rollout_that_reached_a_limit() -> None:
    made, engine = evaluator(samples=1, tasks=1, evaluated=()), dispatcher()
    assert engine.max_retries > 0
    made.open(10, engine)
    (start,) = engine.next_starts(0)
    group = engine.failed(start.rollout_id, is_limit=True)
    assert group is not None and group.num_limited == 1 and not engine.next_starts(0)


def test_all_rollouts_of_an_evaluation_failing_still_gives_a_row():
    made, engine = evaluator(samples=1, tasks=1), dispatcher()
    engine.max_retries = 0
    made.open(0, engine)
    (start,) = engine.next_starts(0)
    version, metrics = made.add(engine.failed(start.rollout_id))
    assert (version, metrics["eval/held-out/errors"]) == (0, 1)
    assert "eval/held-out/avg@1" not in metrics


@pytest.mark.parametrize(
    ("samples", "says"),
    [((2, 2), {"eval/all/pass@2", "eval/all/avg@2", "eval/all/avg_finished@2"}), ((2, 1), set())],
)
def test_several_environments_have_a_row_together_and_pass_at_k_where_k_is_one(samples, says):
    environments = Environments(
        eval=tuple(
            EvalEnvironment(id="reverse-text", name=name, samples=each)
            for name, each in zip("ab", samples, strict=True)
        )
    )
    made, engine = Evaluator(environments, [1, 1], 10, set()), dispatcher()
    made.open(10, engine)
    done = None
    for start in engine.next_starts(0):
        given = rollout(float(start.env))
        given.samples = [None] * (1 + start.env)  # type: ignore[list-item]
        if (group := engine.finished(start.rollout_id, given)) is not None:
            done = made.add(group)
    _, metrics = done
    share = samples[1] / sum(samples)
    assert metrics["eval/all/reward/mean"] == pytest.approx(share)
    assert metrics["eval/all/branches/mean"] == pytest.approx(1 + share)
    assert metrics["eval/all/rollouts"] == sum(samples) and metrics["eval/all/tasks"] == 2
    assert {name for name in metrics if name.startswith(("eval/all/pass@2", "eval/all/avg"))} == says


def test_an_environment_that_was_evaluated_alone_is_not_all_of_them():
    environments = Environments(
        eval=(EvalEnvironment(id="a", interval=10), EvalEnvironment(id="b", interval=7)), eval_on_start=False
    )
    made, engine = Evaluator(environments, [1, 1], 99, set()), dispatcher()
    made.open(10, engine)
    done = [engine.finished(start.rollout_id, rollout(1.0)) for start in engine.next_starts(0)]
    _, metrics = made.add(next(group for group in done if group))
    assert "eval/a/reward/mean" in metrics and not any(name.startswith("eval/all/") for name in metrics)
