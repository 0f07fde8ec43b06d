"""Snapshots of GPU memory that a rank writes when it runs out of it; `tests/gpu` does so with a real allocator."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from primerl_hpc.common.names import Role
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.main import rank_memory_snapshots
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.perf import MAX_SNAPSHOTS, memory_snapshots
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan


class Recorder:
    """The interface of `torch.cuda.memory`, for machines without a GPU."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error = error

    def _record_memory_history(self, **options: Any) -> None:
        self.calls.append(options)

    def _dump_snapshot(self, filename: str) -> None:
        Path(filename).write_text("blocks")
        if self.error is not None:
            raise self.error


def run_out(path: Path, history: int, recorder: Recorder) -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match="2 GiB"),
        memory_snapshots(path, history, recorder=recorder),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory: 2 GiB")


def test_a_rank_out_of_memory_writes_its_snapshot_with_a_bounded_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, recorder = RunDir(tmp_path).memory_snapshot(2, 7), Recorder()
    run_out(path, 100, recorder)
    assert recorder.calls[0]["max_entries"] == 100 and recorder.calls[-1] == {"enabled": None}
    assert path == tmp_path / "profiles" / "memory-2" / "rank_7.pickle" and path.read_text() == "blocks"
    assert str(path) in caplog.text


def test_without_history_nothing_is_recorded_and_the_blocks_are_still_written(tmp_path: Path) -> None:
    recorder = Recorder()
    run_out(tmp_path / "a" / "rank_0.pickle", 0, recorder)
    assert recorder.calls == [] and (tmp_path / "a" / "rank_0.pickle").exists()


def test_other_errors_and_success_write_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    with memory_snapshots(tmp_path / "a" / "rank_0.pickle", 5, recorder=recorder):
        pass
    with (
        pytest.raises(RuntimeError),
        memory_snapshots(tmp_path / "a" / "rank_0.pickle", 5, recorder=recorder),
    ):
        raise RuntimeError("not memory")
    assert not (tmp_path / "a").exists() and recorder.calls[-1] == {"enabled": None}


def test_only_some_ranks_of_an_attempt_write_theirs(tmp_path: Path) -> None:
    for rank in range(MAX_SNAPSHOTS + 3):
        run_out(RunDir(tmp_path).memory_snapshot(1, rank), 5, Recorder())
    run_out(RunDir(tmp_path).memory_snapshot(2, 0), 5, Recorder())
    assert len(list(tmp_path.rglob("rank_*.pickle"))) == MAX_SNAPSHOTS + 1


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("the device is lost")], ids=str
)
def test_a_snapshot_that_cannot_be_written_does_not_replace_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    caplog.set_level(logging.WARNING)
    run_out(tmp_path / "a" / "rank_0.pickle", 5, Recorder(error))
    assert str(error) in caplog.text
    assert not list(tmp_path.rglob("*.pickle"))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_rank_on_a_gpu_is_recorded_with_the_history_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    recorder = Recorder()
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(torch.cuda.memory, name, getattr(recorder, name))
    monkeypatch.setenv("PRIMERL_ATTEMPT", "3")
    values = {**TOY_RECIPE, "trainer": {"memory_history": 17}}
    phase = make_plan(tmp_path, values, processes=[process_plan(Role.TRAINER)]).phases[0]
    world = World(5, 8, 5, 8, torch.device(device), mesh=None)
    with pytest.raises(torch.OutOfMemoryError), rank_memory_snapshots(RunDir(tmp_path), phase, world):
        raise torch.OutOfMemoryError
    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("rank_*")]
    if device == "cpu":
        assert written == [] and recorder.calls == []
    else:
        assert written == ["profiles/memory-3/rank_5.pickle"] and recorder.calls[0]["max_entries"] == 17
