"""The tracker with real wandb, offline: rows arrive once, later attempts go on where the earlier one ended."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_json, read_json_or_none
from primerl_hpc.common.metrics import MetricsWriter
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import OnExit
from tests.support import make_plan, process_plan, start_role

RECIPE = {
    "kind": "rl",
    "name": "tracked",
    "model": {"name": "some/model"},
    "max_steps": 3,
    "environments": {"train": [{"id": "reverse-text"}]},
    "tracking": {"wandb": {"offline": True}},
}


def wait_until_sent(run: RunDir, tracker: subprocess.Popen, timeout_s: float = 60.0) -> None:
    size = run.metrics("trainer").stat().st_size
    deadline = time.monotonic() + timeout_s
    while (read_json_or_none(run.tracker_offsets) or {}).get("trainer") != size:
        assert tracker.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def test_metrics_reach_wandb_and_a_second_attempt_sends_only_new_rows(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = RunDir(tmp_path / "run")
    make_plan(
        run.root, RECIPE, processes=[process_plan(Role.TRACKER, on_exit=OnExit.OPTIONAL, accelerators=0)]
    )
    writer = MetricsWriter(run.metrics("trainer"))
    sent = []
    for step in (1, 2):
        writer.write(step, {"loss/mean": 0.5 / step})
        tracker = start_role(run, "main", "tracker-0")
        try:
            wait_until_sent(run, tracker)
        finally:
            tracker.send_signal(signal.SIGTERM)
            assert tracker.wait(timeout=30) == 0
        sent.append(read_json(run.tracker_offsets)["trainer"])
    assert sent[0] < sent[1]
    recorded = [path.read_bytes() for path in sorted((run.root / "wandb").glob("offline-run-*/*.wandb"))]
    assert len(recorded) == 2 and all(b"trainer/loss/mean" in data for data in recorded)
