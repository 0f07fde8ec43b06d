#!/usr/bin/env python3
"""Compare vLLM's log-probabilities before and after weight updates with transformers', for families without a test.

    tools/bench/served_families.py --out docs/measurements/served_families.json      # about two minutes
    tools/bench/served_families.py --families granite phi                            # some of them

Tiny random models, one process, CPU: float32, or bfloat16 for layers with state, because vLLM's CPU kernels of them
take nothing else. ``start``, ``folder`` and ``back`` are the largest differences of 23 tokens with the first version,
after an update to the second, and after one back; ``stale`` is the difference of the second version from the first.
docs/models.md lists the families for which ``is_met`` is true. The others have the difference, or the error, of this
version of vLLM on CPUs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, describe_machine

sys.path.insert(0, str(ROOT))
from tests.support.served_updates import HALF, MEASURED, environment, is_updated

LONGEST_ERROR = 160


def row_of(family: str, found: dict[str, Any]) -> dict[str, Any]:
    row = {"family": family, "dtype": "bfloat16" if family in HALF else "float32"}
    error = found.pop("error", None)
    if error is not None:
        return {**row, "is_met": False, "error": " ".join(error.split())[:LONGEST_ERROR]}
    numbers = {key: float(f"{found[key]:.2g}") for key in ("start", "folder", "back", "stale")}
    return {**row, "is_met": is_updated(family, found), **numbers}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=MEASURED, default=list(MEASURED), metavar="FAMILY")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        words = [sys.executable, "-m", "tests.support.served_updates", folder, *options.families]
        environ = environment(Path(folder) / "run")
        with subprocess.Popen(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"case"'):
                    found = json.loads(line)
                    rows.append(row_of(found.pop("case"), found))
                    print(json.dumps(rows[-1]), flush=True)
    if process.returncode:
        print(f"the process ended with {process.returncode}", file=sys.stderr)
        return 1
    if options.out:
        import vllm

        record = {"command": f"tools/bench/served_families.py --out {options.out}", **describe_machine()}
        options.out.write_text(
            json.dumps({**record, "vllm": vllm.__version__, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
