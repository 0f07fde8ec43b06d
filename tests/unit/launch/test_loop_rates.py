"""Figures of a measured loop, from rows of its metrics."""

from __future__ import annotations

import pytest

from primerl_hpc.launch.bench.loop_rates import loop_rates


def batch(step_s: float, wait_s: float = 0.0) -> dict[str, float]:
    return {
        "time/step": step_s,
        "time/wait_for_policy": wait_s,
        "batch/rollouts": 8,
        "batch/tokens": 400,
        "completion_tokens/mean": 10.0,
        "off_policy/mean": 1.0,
    }


def train(step_s: float, wait_s: float) -> dict[str, float]:
    return {"time/step": step_s, "time/wait_for_batch": wait_s, "perf/throughput": 1000.0}


def test_only_the_steps_after_the_warm_up_count() -> None:
    orchestrator = {1: batch(100.0), 2: batch(1.0, 0.5), 3: batch(3.0, 0.5), 4: batch(100.0)}
    trainer = {1: train(100.0, 99.0), 2: train(2.0, 0.5), 3: train(2.0, 0.5)}
    found = loop_rates(orchestrator, trainer, warmup=1, last=3)
    assert found["steps"] == 2
    assert found["rates"] == {
        "rollouts_per_s": 4.0,
        "sampled_tokens_per_s": 40.0,
        "packed_tokens_per_s": 200.0,
        "trainer_tokens_per_s": 1000.0,
    }
    assert found["shares"] == {"orchestrator_waits": 0.25, "trainer_waits": 0.25}
    assert found["means"] == {"staleness": 1.0}
    assert found["seconds"]["orchestrator"]["step"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert found["seconds"]["trainer"]["wait_for_batch"]["median"] == 0.5


def test_without_a_trainer_there_are_neither_its_figures_nor_a_staleness() -> None:
    found = loop_rates({1: batch(1.0), 2: batch(1.0)}, {}, warmup=0, last=2)
    assert "trainer" not in found["seconds"] and "trainer_waits" not in found["shares"]
    assert "staleness" not in found["means"]
    assert found["rates"]["rollouts_per_s"] == pytest.approx(8.0)
