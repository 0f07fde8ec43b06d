"""Traces on request: whatever goes wrong with one, the trainer continues, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.common.files import write_json
from primerl_hpc.run.rundir import RunDir

torch = pytest.importorskip("torch")
from primerl_hpc.trainer.perf import StepProfiler  # noqa: E402 - needs torch

REQUEST = {"id": "20260101-000000", "steps": 1, "ranks": [0]}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    write_json(run.profile_request, REQUEST)
    return run


def profile_one_step(run: RunDir) -> None:
    profiler = StepProfiler(run, 0)
    profiler.accept(profiler.find_request())
    with profiler.step():
        torch.ones(2).sum()


def test_a_trace_during_which_the_trainer_died_is_not_repeated_by_the_next_attempt(run: RunDir) -> None:
    profiler = StepProfiler(run, 0)
    profiler.accept(profiler.find_request())
    with pytest.raises(MemoryError), profiler.step():
        raise MemoryError
    assert profiler._profile is not None
    profiler._profile.stop()  # as the end of the process does
    request = StepProfiler(run, 0).find_request()
    assert request is not None and request["ranks"] == []


def test_a_trace_that_cannot_be_written_does_not_end_the_trainer(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run.profile_trace("x", 0).parent.parent.write_text("a file in place of the folder")
    profile_one_step(run)
    assert "cannot trace its steps" in caplog.text


def test_a_requested_trace_is_written_once(run: RunDir) -> None:
    profile_one_step(run)
    assert run.profile_trace(REQUEST["id"], 0).is_file()
    assert StepProfiler(run, 0).find_request() == {**REQUEST, "ranks": []}
