#!/usr/bin/env python3
"""Count the conversations that reach the context limit, and how many of them are trained.

    tools/bench/long_conversations.py                       # alphabet-sort, two turns, 56 tokens: two minutes
    tools/bench/long_conversations.py --seq-len 64          # another limit
    tools/bench/long_conversations.py --code ../earlier     # the package of another checkout, for a comparison

A tiny model with random weights rarely ends its replies, so most conversations of two turns reach the limit. A run of
four steps is submitted as a user would; its recorded rollouts are counted. Exits with 1 if no conversation was long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, conclude

STEPS = 4


def submit(code: Path, folder: Path, seq_len: int) -> int:
    """Run the recipe with the package in ``code``; return the exit status of ``submit --follow``."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(code),
        "PRIMERL_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
    }
    tiny = [
        sys.executable,
        str(code / "tools" / "tiny-model"),
        str(folder / "tiny"),
        "--task",
        "alphabet-sort",
    ]
    subprocess.run(tiny, check=True, env=environ, stdout=subprocess.DEVNULL)
    changes = [
        f"model.name={folder / 'tiny' / 'model'}", "warmup=null", f"seq_len={seq_len}", f"max_steps={STEPS}",
        "environments.eval=[]", "rollouts.sampling.max_tokens=16",
    ]  # fmt: skip
    command = [
        *(sys.executable, "-m", "primerl_hpc", "submit"),
        *(
            str(code / "recipes" / "alphabet_sort" / "tiny.yaml"),
            "-p",
            "local",
            "--run-dir",
            str(folder / "run"),
        ),
        *(word for change in changes for word in ("--set", change)),
        "--follow",
    ]
    return subprocess.run(command, env=environ, cwd=folder, stdout=subprocess.DEVNULL, check=False).returncode


def recorded(run: Path) -> list[dict[str, Any]]:
    """Return the rows of all rollouts, successful and failed."""
    files = [
        file for file in run.rglob("*.jsonl") if file.name == "train.jsonl" and file.parent.name == "traces"
    ]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=56, help="tokens of prompt and replies (default: 56)")
    parser.add_argument("--code", type=Path, default=ROOT, help="a checkout (default: this one)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="long-conversations-") as name:
        status = submit(options.code.resolve(), Path(name), options.seq_len)
        rows = recorded(Path(name) / "run")
    failed = [row for row in rows if "error" in row]
    done = [row for row in rows if "error" not in row]
    long = [row for row in done if row.get("truncated")]
    trained = [row for row in long if row.get("advantage")]
    table = {
        "code": options.code.resolve().name,
        "seq_len": options.seq_len,
        "exit_status": status,
        "rollouts": len(rows),
        "failed": len(failed),
        "long": len(long),
        "long_with_an_advantage": len(trained),
        "long_share_of_done": len(long) / max(1, len(done)),
    }
    return conclude(
        "conversations at the context limit", [table], [] if long else ["none"], as_json=options.json
    )


if __name__ == "__main__":
    sys.exit(main())
