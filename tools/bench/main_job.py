#!/usr/bin/env python3
"""The main job on several seeds: wall time, memory, held-out reward before and after RL, mismatch KL.

    tools/bench/main_job.py --seeds 0 1 2            # prints a table and one JSON line per seed

Each seed gets a model, demonstrations and a run of its own. Memory is the sum of proportional set sizes (PSS) of
every process of the run, sampled each second: shared pages count once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from primerl_hpc.common.metrics import read_steps  # noqa: E402
from primerl_hpc.common.rundir import RunDir  # noqa: E402


class MemoryWatch(threading.Thread):
    """Highest sum of PSS over all processes that belong to a run directory."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self.root, self.peak_bytes, self.ended = str(root), 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(1.0):
            total = 0
            for process in self.processes():
                try:
                    total += process.memory_full_info().pss
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            self.peak_bytes = max(self.peak_bytes, total)

    def processes(self) -> set[psutil.Process]:
        """Supervisor and guards, known by the run directory on their command line, and all below them."""
        found = set()
        for process in psutil.process_iter():
            try:
                if self.root in process.cmdline():
                    found |= {process, *process.children(recursive=True)}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def run_seed(seed: int, folder: Path, overrides: list[str]) -> dict[str, object]:
    tiny, root = folder / f"tiny-{seed}", folder / f"run-{seed}"
    subprocess.run(
        [sys.executable, str(ROOT / "tools/tiny-model"), str(tiny), "--seed", str(seed)], check=True
    )
    settings = [
        f"model.name={tiny}/model",
        f"warmup.sft.data.path={tiny}/sft.jsonl",
        f"seed={seed}",
        *overrides,
    ]
    words = [word for text in settings for word in ("--set", text)]
    recipe = ROOT / "recipes/reverse_text/tiny.yaml"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PRIMERL_HOME": str(folder / "state"),
    }
    watch = MemoryWatch(root)
    watch.start()
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "primerl_hpc",
            "submit",
            str(recipe),
            "-p",
            "local",
            "--run-dir",
            str(root),
            "--follow",
            *words,
        ],
        env=environment,
        stdout=sys.stderr,
        check=False,
    )
    wall_s = time.monotonic() - start
    watch.ended.set()
    watch.join()
    run = RunDir(root)
    evaluations = {
        version: row["eval/held-out/reward/mean"] for version, row in read_steps(run.metrics("eval")).items()
    }
    kl = [row["mismatch_kl/all/mean"] for row in read_steps(run.metrics("trainer")).values()][-3:]
    batches = read_steps(run.metrics("orchestrator")).values()
    return {
        "seed": seed,
        "exit_code": done.returncode,
        "wall_s": round(wall_s, 1),
        "memory_peak_gib": round(watch.peak_bytes / 2**30, 2),
        "held_out": {version: round(value, 3) for version, value in evaluations.items()},
        "mismatch_kl_last_3": sum(kl) / max(1, len(kl)),
        "age_max": max((row.get("off_policy/max", 0) for row in batches), default=None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, help="keep everything here [default: a temporary folder]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        rows = []
        for seed in options.seeds:
            rows.append(run_seed(seed, folder, options.overrides))
            print(json.dumps(rows[-1]), flush=True)
    print(f"\n{'seed':>4} {'wall s':>7} {'GiB':>5} {'before':>7} {'after':>7} {'KL':>9} {'age':>4}")
    for row in rows:
        held = list(row["held_out"].values()) or [float("nan")]
        print(
            f"{row['seed']:>4} {row['wall_s']:>7} {row['memory_peak_gib']:>5} {held[0]:>7.3f} {held[-1]:>7.3f}"
            f" {row['mismatch_kl_last_3']:>9.1e} {row['age_max']:>4}"
        )
    return 0 if all(row["exit_code"] == 0 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
