#!/usr/bin/env python3
"""Measure how soon a run produces rollouts after its only engine was killed, compared with the startup time of the
engine.

    tools/bench/recovery.py                         # three kills in one run of the tiny recipe
    tools/bench/recovery.py --kills 1 --json

The run is complete and real (vLLM on CPU, router, verifiers, torchrun); the engine receives SIGKILL. `dead to rollout`
is the time from the kill to the first rollout finished afterwards, `engine start` the time from the start of the new
process until it is ready, as measured by the supervisor. Required: the first exceeds the second by at most 5 s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.common.files import read_json_or_none, read_jsonl
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.rundir import RunDir

ENGINE = "inference-0"
LIMIT_S = 5.0
SETTLE_S = 1.5
"""Delay after a kill until rollouts finished before it have been recorded."""


def command(folder: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRIMERL_HOME": str(folder / "state")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words], env=environment, check=True, stdout=sys.stderr
    )


def wait_for(what: str, run: RunDir, condition: Callable[[], bool], timeout_s: float = 600.0) -> float:
    """Return the time at which ``condition`` became true, to about 20 ms."""
    deadline = time.time() + timeout_s
    while not condition():
        if time.time() > deadline or take_snapshot(run).state.is_final:
            raise SystemExit(f"timed out waiting for {what}; see {run.latest_logs}")
        time.sleep(0.02)
    return time.time()


def kill_engine(run: RunDir) -> dict[str, Any]:
    before = read_endpoint(run, ENGINE)
    assert before is not None
    incarnation = int(before["incarnation"])
    killed = time.time()
    os.kill(int(before["pid"]), 9)
    time.sleep(SETTLE_S)
    size = run.traces("train").stat().st_size
    ready = lambda: (read_endpoint(run, ENGINE) or {}).get("incarnation", 0) > incarnation  # noqa: E731
    is_ready = wait_for("the new engine", run, ready)
    rollout = wait_for("a rollout", run, lambda: run.traces("train").stat().st_size > size)
    wait_for("its event", run, lambda: _ready_events(run)[-1]["time"] > killed)
    start_s = float(_ready_events(run)[-1]["after_s"])
    return {
        "kill": incarnation + 1,
        "dead to ready s": is_ready - killed,
        "dead to rollout s": rollout - killed,
        "engine start s": start_s,
        "beyond it s": rollout - killed - start_s,
        "fits": rollout - killed - start_s <= LIMIT_S,
    }


def _ready_events(run: RunDir) -> list[dict[str, Any]]:
    return [
        row for row in read_jsonl(run.events) if row["event"] == "role_ready" and row["process"] == ENGINE
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as temporary:
        folder = Path(temporary)
        tiny, run = folder / "tiny", RunDir(folder / "run")
        subprocess.run(
            [sys.executable, str(ROOT / "tools" / "tiny-model"), str(tiny)], check=True, stdout=sys.stderr
        )
        settings = (f"model.name={tiny}/model", "warmup=null", "max_steps=1000", "environments.eval=[]")
        words = [word for text in settings for word in ("--set", text)]
        recipe = str(ROOT / "recipes" / "reverse_text" / "tiny.yaml")
        command(folder, "submit", recipe, "-p", "local", "--run-dir", str(run.root), *words)
        rows = []
        try:
            for _ in range(options.kills):
                steps = (take_snapshot(run).step or 0) + 2
                wait_for("a step", run, lambda steps=steps: take_snapshot(run).step >= steps)
                rows.append(kill_engine(run))
        finally:
            if read_json_or_none(run.state) is not None:
                command(folder, "cancel", str(run.root), "--now", "--wait")
    show(
        "from a killed engine to the next rollout; at most 5 s beyond the engine's own start",
        rows,
        as_json=options.as_json,
    )
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
