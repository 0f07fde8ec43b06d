"""The snapshot of a GPU whose memory is exhausted has the blocks and stacks of its allocations."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.trainer.perf import memory_snapshots  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]


def test_a_real_out_of_memory_error_is_recorded_with_the_line_that_allocated(tmp_path: Path) -> None:
    path, history = tmp_path / "profiles" / "rank_0.pickle", 50
    kept = []
    with pytest.raises(torch.OutOfMemoryError), memory_snapshots(path, history):
        for _ in range(2 * history):
            kept.append(torch.empty(2**20, device="cuda"))
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    snapshot = pickle.loads(path.read_bytes())
    (events,) = (trace for trace in snapshot["device_traces"] if trace)
    assert len(events) <= history and events[-1]["action"] == "oom"
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    allocated = [block for block in blocks if block["state"] == "active_allocated" and block["size"] == 2**22]
    assert len(allocated) >= len(kept)
    assert any(Path(__file__).name in frame["filename"] for frame in allocated[-1]["frames"])
