"""The split advisor: from metrics to a faster split, and the cases in which it advises nothing."""

from __future__ import annotations

from typing import Any

import pytest

from primerl_hpc.plan.simulation.advisor import MeasuredSides, UnitSplit, advise, engine_curve, measure_sides
from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.plan.simulation.sides import EngineSide, SimulatedRun, TrainerSide, Workload
from primerl_hpc.plan.simulation.simulate import simulate

LENGTHS = Lengths.lognormal(mean=800, cv=0.8, longest=4096)
WORKLOAD = Workload(256, 8, 512, 2, LENGTHS)
SIZES = {"batch_size": 256, "group_size": 8, "max_in_flight": 512, "max_off_policy_steps": 2}
CURVE = ((1.0, 0.0102), (1024.0, 0.01 + 0.0002 * 1024))


def cluster(split: UnitSplit) -> tuple[EngineSide, TrainerSide, SimulatedRun]:
    """A cluster with two engines per node, whose trainer needs 60 s on one node."""
    engines = EngineSide(2 * split.engines, CURVE, 1024, pause_s=1.0, detect_s=0.5)
    trainer = TrainerSide(2.0, 60.0 / (256 * LENGTHS.mean) / split.trainer, publish_s=1.0)
    return engines, trainer, simulate(WORKLOAD, engines, trainer, steps=16, seed=7)


def rows(split: UnitSplit, **changes: Any) -> tuple[list[dict], list[dict]]:
    """The metrics that a run with this split writes."""
    engines, trainer, run = cluster(split)
    running = run.in_flight
    orchestrator = {
        "completion_tokens/mean": LENGTHS.mean,
        "completion_tokens/p10": LENGTHS.values[409],
        "completion_tokens/p90": LENGTHS.values[3686],
        "completion_tokens/max": 4096,
        "inference/engines": engines.num_engines,
        "inference/running": running,
        "inference/waiting": 0,
        "inference/tokens_per_s": running / engines.token_s(running / engines.num_engines),
        "turns/mean": 1.0,
        "time/engines_paused": 1.0,
        "time/weight_update": 1.5,
    }
    compute_s = trainer.token_s * 256 * LENGTHS.mean
    of_trainer = {
        "time/step": run.step_s,
        "time/forward_backward": compute_s,
        "time/optimizer": 2.0,
        "time/broadcast_weights": 1.0,
    }
    return [of_trainer | changes] * 6, [orchestrator | changes] * 6


def measured(split: UnitSplit, **changes: Any) -> MeasuredSides:
    found = measure_sides(*rows(split, **changes), **SIZES)
    assert found is not None
    return found


def test_a_bad_split_becomes_at_least_one_and_a_half_times_as_fast_in_three_links() -> None:
    """Each link follows the advice of the previous one; the cluster itself is simulated."""
    split = UnitSplit(7, 1)
    step_s = [cluster(split)[2].step_s]
    for _ in range(3):
        advice = advise(measured(split), split)
        if not advice.is_advised:
            break
        split = advice.best
        step_s.append(cluster(split)[2].step_s)
    assert step_s == sorted(step_s, reverse=True) and step_s[0] / step_s[-1] >= 1.5


def test_a_good_split_is_kept_and_the_reason_given() -> None:
    advice = advise(measured(UnitSplit(4, 4)), UnitSplit(4, 4))
    assert not advice.is_advised and advice.best == UnitSplit(4, 4) and advice.gain == 1.0
    assert advice.sentence.startswith("keep nodes 4 for engines, 4 for the trainer: no other split")


def test_too_few_engines_are_recognized_too() -> None:
    advice = advise(measured(UnitSplit(1, 7)), UnitSplit(1, 7))
    assert advice.is_advised and advice.best.engines > 1
    assert f"{advice.gain:.2f}× as fast" in advice.sentence
    assert advice.as_json()["best"] == {"engines": advice.best.engines, "trainer": advice.best.trainer}


def test_a_run_that_the_simulation_does_not_reproduce_gets_no_advice() -> None:
    advice = advise(measured(UnitSplit(7, 1), **{"time/step": 500.0}), UnitSplit(7, 1))
    assert not advice.is_advised and "does not reproduce this run" in advice.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"completion_tokens/mean": None},
        {"time/forward_backward": None},
        {"inference/tokens_per_s": 0.0},
        {"inference/engines": None},
        {"time/step": float("nan")},
    ],
)
def test_missing_metrics_give_no_measurement(changes: dict[str, Any]) -> None:
    assert measure_sides(*rows(UnitSplit(7, 1), **changes), **SIZES) is None


def test_a_short_attempt_gives_no_measurement() -> None:
    trainer, orchestrator = rows(UnitSplit(7, 1))
    assert measure_sides(trainer[:3], orchestrator, **SIZES) is None
    assert measure_sides([], [], **SIZES) is None


def test_engines_over_several_nodes_move_with_all_their_nodes() -> None:
    advice = advise(measured(UnitSplit(6, 1)), UnitSplit(6, 1), span=3)
    assert advice.best.engines % 3 == 0 and advice.best.total == 7


def test_engines_that_wait_for_environments_get_no_more_units() -> None:
    """Rollouts of 6 s of which the engines need milliseconds: the metrics of tools/demo on two cores."""
    slow = {"rollout_s/mean": 6.0, "dispatcher/in_flight": 256, "completion_tokens/mean": 7.0}
    slow |= {"completion_tokens/p10": 5.0, "completion_tokens/p90": 9.0, "completion_tokens/max": 9.0}
    slow |= {"inference/engines": 1, "time/engines_paused": 0.07, "time/weight_update": 0.08}
    loads = [(0.0, 350.0), (1.0, 290.0), (0.0, 440.0), (1.0, 1500.0), (3.0, 430.0), (0.0, 240.0)]
    orchestrator = [
        slow | {"inference/running": running, "inference/tokens_per_s": rate, "inference/waiting": 0.0}
        for running, rate in loads
    ]
    trainer = {"time/step": 2.8, "time/forward_backward": 0.25, "time/broadcast_weights": 0.15}
    found = measure_sides([trainer] * 6, orchestrator, **(SIZES | {"batch_size": 128, "max_in_flight": 256}))
    assert found is not None and found.workload.env_s == pytest.approx(6.0, rel=0.01)
    advice = advise(found, UnitSplit(1, 2), unit="accelerator")
    assert not advice.is_advised and advice.best == UnitSplit(1, 2)


def test_engines_that_are_mostly_idle_get_no_more_units() -> None:
    """The rates of such engines are noise, from which the simulation may conclude that they are the bottleneck."""
    assert advise(measured(UnitSplit(1, 3)), UnitSplit(1, 3)).is_advised
    assert not advise(measured(UnitSplit(1, 3), **{"inference/idle": 0.6}), UnitSplit(1, 3)).is_advised


def test_with_two_units_there_is_no_other_split() -> None:
    assert not advise(measured(UnitSplit(1, 1)), UnitSplit(1, 1)).is_advised


def test_the_curve_of_the_engines_follows_measured_loads_and_else_an_assumed_slope() -> None:
    def row(running: float, seconds: float) -> dict[str, float]:
        return {
            "inference/engines": 2,
            "inference/running": 2 * running,
            "inference/tokens_per_s": 2 * running / seconds,
        }

    spread = engine_curve([row(load, 0.01 + 0.001 * load) for load in (10, 20, 30, 40)])
    assert spread is not None
    assert EngineSide(1, spread, 64).token_s(50) == pytest.approx(0.06)
    single = engine_curve([row(20, 0.04)] * 4)
    assert single is not None
    side = EngineSide(1, single, 64)
    assert side.token_s(20) == pytest.approx(0.04)
    assert side.token_s(64) == pytest.approx(2 * side.token_s(0.5), rel=0.05)
    assert engine_curve([{"inference/engines": 0}]) is None
