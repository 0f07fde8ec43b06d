#!/usr/bin/env python3
"""Measure what ``layout.auto_split`` gains on a virtual SLURM cluster: a chain whose first job has a bad split.

    tools/bench/auto_split.py --json docs/measurements/auto_split.json

SLURM, supervisor, chain, plans and scripts are real. The roles sleep as long as the simulation returns for the split of
their plan (`tests/support/rated_split.py`), so the result shows that the advice is found, applied and followed by the
next job, and not how fast vLLM or the trainer are. Exits with 1 unless the run becomes 1.5 times as fast within three
jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from machine import describe_machine  # noqa: E402

CASE = "tests/slurm/test_auto_split.py"
REQUIRED = 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="Write the result to this file.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "measured.json"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CASE, "-k", "bad_split"],
            cwd=ROOT,
            env=os.environ | {"AUTO_SPLIT_JSON": str(measured)},
            check=False,
        )
        if done.returncode:
            return 1
        result = json.loads(measured.read_text())
    first, best = result["step_s"][0], min(result["step_s"][1:])
    result = {
        "bench": "auto_split",
        "machine": describe_machine(),
        "required": REQUIRED,
        "gain": round(first / best, 3),
        **result,
    }
    arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for split, seconds in zip(result["splits"], result["step_s"], strict=True):
        print(f"{seconds:6.2f} s per step  {split}")
    print(f"{result['gain']:.2f} times as fast")
    return 0 if result["gain"] >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
