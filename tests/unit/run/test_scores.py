"""Series of a metric over steps, and the policy versions with its best values."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.checks.recipe.metric_keys import check_metric_keys
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import MetricSeries, write_score
from primerl_hpc.trainer.rl_loop import clean_up, make_best
from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver
from primerl_hpc.transport.weights.best import BestVersions
from tests.support.helpers import MINIMAL_RL
from tests.unit.transport.test_weights_delta import write_full

REWARDS = {1: 0.1, 2: 0.9, 3: float("nan"), 4: 0.4, 5: 0.8}


def write_rows(run: RunDir, file: str, values: dict[int, float], name: str = "reward/mean") -> None:
    writer = MetricsWriter(run.metrics(file))
    for step, value in values.items():
        writer.write(step, {name: value, "other": 1.0})


def test_a_series_drops_steps_that_a_recovery_repeats(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    series = MetricSeries(run, "reward/mean")
    series.refresh()
    assert series.last(3) == []
    write_rows(run, "orchestrator", {1: 0.1, 2: 0.2, 3: 0.3})
    series.refresh()
    assert series.last(2) == [0.2, 0.3]
    write_rows(run, "orchestrator", {2: 0.7})
    for known in (series, MetricSeries(run, "reward/mean")):
        known.refresh()
        assert known.values == {1: 0.1, 2: 0.7}


@pytest.mark.parametrize(
    ("file", "lowest", "expected"),
    [
        # the orchestrator's row n is of version n - 1; version 5 has no value yet
        ("orchestrator", False, {1, 4, 5}),
        ("trainer", False, {2, 5}),
        ("trainer", True, {1, 4}),
    ],
)
def test_the_best_versions_stay_and_those_without_a_value(
    tmp_path: Path, file: str, lowest: bool, expected: set[int]
) -> None:
    run = RunDir(tmp_path)
    write_rows(run, file, REWARDS)
    best = BestVersions(run, "reward/mean", 2, lambda _: True, lowest)
    assert best.keep(range(1, 6)) == expected


def test_the_trainer_keeps_the_versions_that_evaluate_best(tmp_path: Path) -> None:
    """Versions 4 and 8 are due; 8 is not evaluated yet, and 2 and 6 were best until 4 and 10 were not due."""
    run = RunDir(tmp_path)
    metric = "eval/held-out/reward/mean"
    recipe = parse_recipe(
        {
            **MINIMAL_RL,
            "max_steps": 20,
            "environments": {
                "train": [{"id": "a"}],
                "eval": [{"id": "b", "name": "held-out", "interval": 2}],
            },
            "weights": {"keep_best": {"metric": metric, "n": 2}},
        }
    )
    best = make_best(run, recipe)
    for version in range(1, 12):
        write_full(run, version)
        for evaluated, reward in {2: 0.5, 4: 0.9, 6: 0.7}.items():
            if version == evaluated + 3:  # an evaluation takes longer than a version stays by itself
                MetricsWriter(run.metrics("eval")).write(evaluated, {metric: reward})
        clean_up(run, recipe, FilesystemReceiver(run), version, best)
    # 4 and 6 are the best; 8 and 10 are due; 10 and 11 are the newest
    assert run.stable_weights() == [4, 6, 8, 10, 11]


def test_scores_of_an_evaluated_sft_run_are_a_series_of_versions(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for version, value in ((10, 0.3), (20, 0.6)):
        write_score(run, version, "held-out", {"eval/held-out/avg@2": value})
    series = MetricSeries(run, "eval/held-out/avg@2")
    series.refresh()
    assert series.values == {10: 0.3, 20: 0.6}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("reward/mean", ""),
        ("eval/held-out/pass@4", ""),
        ("reward/meen", "a run of kind rl has no metric 'reward/meen'"),
        ("val/loss", "a run of kind rl has no metric 'val/loss'"),
        ("eval/other/reward/mean", "environment 'other', which this run does not evaluate"),
    ],
)
@pytest.mark.parametrize("key", ["stop_when", "weights.keep_best"])
def test_a_metric_that_does_not_exist_is_refused(key: str, metric: str, message: str) -> None:
    values = {
        **MINIMAL_RL,
        "max_steps": 2,
        "environments": {"train": [{"id": "a"}], "eval": [{"id": "b", "name": "held-out"}]},
    }
    block = {"metric": metric}
    values |= (
        {"stop_when": block | {"at_least": 1.0}} if key == "stop_when" else {"weights": {"keep_best": block}}
    )
    recipe = parse_recipe(values)
    if not message:
        return check_metric_keys(recipe)
    with pytest.raises(ConfigError, match=message) as caught:
        check_metric_keys(recipe)
    assert key in caught.value.location
