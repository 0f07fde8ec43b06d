#!/usr/bin/env python3
"""Measure how long `status` takes with many recorded runs, and how often it queries SLURM.

    tools/bench/status_scale.py                     # 1,000 and 10,000 runs
    tools/bench/status_scale.py --runs 100 --json

Creates the registry and run directories of a heavy user: ten runs in SLURM's queue, the others finished. squeue and
sacct are programs that count their calls and print output in SLURM's format. `cold` is the first call, which reads
every run; `warm` the following ones (median of several). Both are wall times of complete processes. Required: warm at
most 1 s, one query.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

sys.path.insert(0, str(ROOT))
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.command_lines import SEPARATOR

QUEUED = 10
LIMIT_S = 1.0
_COUNTING = """#!/bin/sh
echo "$(basename "$0")" >> {folder}/asked
cat {folder}/"$(basename "$0")".txt
"""


def make_runs(folder: Path, count: int) -> None:
    """Create registry and run directories, without fsync to be fast."""
    registry, now, queue = folder / "state" / "runs", time.time(), []
    registry.mkdir(parents=True)
    recipe = {"kind": "rl", "max_steps": 200}
    plan = {
        "version": 1,
        "kind": "rl",
        "nodes": [{"index": 0}],
        "phases": [{"name": "main", "recipe": recipe, "processes": []}],
    }
    for number in range(count):
        run = RunDir(folder / "runs" / f"math-{number:05d}")
        is_queued, age_s = number < QUEUED, 3600.0 * (number + 1)
        job = str(100_000 + count - number)
        run.control.mkdir(parents=True)
        run.metrics("trainer").parent.mkdir()
        _write(run.plan, plan)
        _write(
            run.job, {"scheduler": "slurm", "job_id": job, "attempt": 1, "submitted": round(now - age_s, 3)}
        )
        if not is_queued or number % 2:
            state = "running" if is_queued else ("done", "failed", "stopped")[number % 3]
            _write(
                run.state,
                {
                    "attempt": 1,
                    "state": state,
                    "phase": "main",
                    "started": now - age_s,
                    "updated": now - age_s,
                },
            )
            run.events.write_text("")
            rows = ({"step": step, "time": now - age_s + step, "attempt": 1} for step in range(1, 201))
            run.metrics("trainer").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if is_queued:
            _write(run.supervisor_lock, {"host": "n1", "pid": 1, "started": "1", "job": job, "restart": "0"})
            words = (
                ("RUNNING", "None", "2026-01-01T00:00:00", "n1")
                if number % 2
                else ("PENDING", "Priority", "N/A", "")
            )
            queue.append(SEPARATOR.join((job, job, *words, "2026-01-01T00:00:00", "math")))
        _write(
            registry / f"{number:016x}.json",
            {"path": str(run.root), "name": run.root.name, "submitted": now - age_s},
        )
    (folder / "squeue.txt").write_text("\n".join(queue) + "\n")
    (folder / "sacct.txt").write_text("")


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def make_commands(folder: Path) -> None:
    for name in ("squeue", "sacct"):
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(_COUNTING.format(folder=folder))
        path.chmod(0o755)


def look(folder: Path) -> tuple[float, str]:
    """Return (wall seconds, output) of one `primerl-hpc status`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PRIMERL_HOME": str(folder / "state"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", "status"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - start, done.stdout


def measure(count: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_runs(folder, count)
        make_commands(folder)
        cold, _ = look(folder)
        (folder / "asked").unlink(missing_ok=True)
        looks = [look(folder) for _ in range(repeats)]
        times, text = [seconds for seconds, _ in looks], looks[-1][1]
        asked = (folder / "asked").read_text().split()
        assert f"{count - 20:,} more" in text and text.count("running") + text.count("pending") >= QUEUED, (
            text
        )
        return {
            "runs": count,
            "cold s": cold,
            "warm s": statistics.median(times),
            "min": min(times),
            "max": max(times),
            "queries a look": len(asked) / repeats,
            "fits": statistics.median(times) <= LIMIT_S and len(asked) == repeats,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    rows = [measure(count, options.repeats) for count in options.runs]
    show(
        "primerl-hpc status over recorded runs, ten of them in the queue; at most 1 s and one query",
        rows,
        as_json=options.as_json,
    )
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
