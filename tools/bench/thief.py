#!/usr/bin/env python3
"""Start complete runs while another user of the machine takes the place of ranks in gloo groups: who runs whose code?

    tools/bench/thief.py                            # 5 starts of each case, about half a minute each; needs root and cc
    tools/bench/thief.py --cases sft --starts 20 --json

The thief (tests/support/gloo_thief.c) runs as user 65534 without key or files of the run. It finds the run's new
listeners as `ss` does, connects to each 200 times with guessed sequence numbers, and as a peer sends a pickle that
writes a file. Columns: connections that gloo accepted as a rank; whether a command of the thief ran; lines of ranks
about a group that they form again; starts in which a role was restarted; runs that did not end as done; median seconds
to the first step.
Exits with 1 if a command ran or a run did not end as done.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from listeners import RL, SMALL
from machine import ROOT, conclude

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport import members
from tests.support.runs import SFT_RECIPE, TINY, events
from tests.support.stranger import NOBODY, Command

GUESSES = 200
SFT = ("max_steps=4", "sft.batch_size=16", "checkpoint.interval=null", "weights.interval=null")
CASES: dict[str, tuple[str, ...]] = {
    "sft": (*SFT, "layout.trainer.ranks=2"),
    "sft, 4 ranks, TP 2": (*SFT, "layout.trainer.ranks=4", "layout.trainer.tensor_parallel=2"),
    "rl, 2 ranks": (*SMALL, "layout.trainer.ranks=2"),
    "rl, engine with DP 2": (*SMALL, "layout.inference.data_parallel=2", "layout.inference.replicas=1"),
}


@contextlib.contextmanager
def stranger(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Let the thief work until the end of the context. Yields the file that its commands create, and its output."""
    own = folder / "stranger"
    own.mkdir()
    folder.chmod(0o711)
    own.chmod(0o777)
    program, mark, pickled, said = (own / name for name in ("thief", "ran", "pickle", "said"))
    source = ROOT / "tests" / "support" / "gloo_thief.c"
    subprocess.run(["cc", "-O2", "-pthread", "-o", str(program), str(source)], check=True)
    data = pickle.dumps(Command(mark))
    pickled.write_bytes(data + b"." * (-len(data) % 8))
    with program.open("rb") as executable, pickled.open("rb") as content, said.open("wb") as output:
        paths = [f"/proc/self/fd/{file.fileno()}" for file in (executable, content)]
        numbers = [str(-members.MAX_SKIPPED), str(GUESSES)]
        process = subprocess.Popen(
            [paths[0], str(os.getuid()), "3600", paths[1], *numbers],
            stdout=output, user=NOBODY, group=NOBODY, extra_groups=[],
            pass_fds=[executable.fileno(), content.fileno()],
        )  # fmt: skip
    try:
        yield mark, said
    finally:
        process.terminate()
        process.wait()


def start(case: str, number: int, folder: Path) -> dict[str, Any]:
    """Run the case once, and return what happened in it."""
    run = RunDir(folder / "runs" / f"{list(CASES).index(case)}-{number}")
    words = [word for text in CASES[case] for word in ("--set", text)]
    recipe = "sft.yaml" if case.startswith("sft") else RL
    command = [
        sys.executable,
        "-m",
        "primerl_hpc",
        "submit",
        recipe,
        "-p",
        "local",
        "--run-dir",
        str(run.root),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    began = time.time()
    subprocess.run(
        [*command, *words, "--follow"], cwd=folder, env=environment, check=False, stdout=sys.stderr
    )
    logs = "".join(path.read_text(errors="replace") for path in run.latest_logs.rglob("*.log"))
    trainer = "sft" if recipe == "sft.yaml" else "trainer"
    first = next(iter(read_steps(run.metrics(trainer)).values()), {})
    return {
        "formed again": logs.count("forming a process group of"),
        "restarts": len(events(run, "role_restarting")) + len(events(run, "recovery_started")),
        "done": (read_json_or_none(run.state) or {}).get("state") == "done",
        "first step s": first["time"] - began if "time" in first else float("nan"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--starts", type=int, default=5, help="of each case [default: 5]")
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bench-thief-") as name:
        folder = Path(name)
        subprocess.run(
            [str(ROOT / "tools" / "tiny-model"), "outputs/tiny"], cwd=folder, check=True, stdout=sys.stderr
        )
        (folder / "sft.yaml").write_text(SFT_RECIPE.format(tiny=TINY, data="outputs/tiny/sft.jsonl"))
        with stranger(folder) as (mark, said):
            for case in options.cases:
                before = len(said.read_bytes().splitlines())
                starts = [start(case, number, folder) for number in range(options.starts)]
                rows.append(
                    {
                        "case": case,
                        "starts": len(starts),
                        "accepted": len(said.read_bytes().splitlines()) - before,
                        "ran": mark.exists(),
                        "formed again": sum(each["formed again"] for each in starts),
                        "starts with restart": sum(each["restarts"] > 0 for each in starts),
                        "not done": sum(not each["done"] for each in starts),
                        "first step s": round(statistics.median(each["first step s"] for each in starts), 1),
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
                wrong += [f"{case}: a command of the thief ran"] if mark.exists() else []
                wrong += [f"{case}: {rows[-1]['not done']} runs are not done"] if rows[-1]["not done"] else []
                mark.unlink(missing_ok=True)
    what = f"Complete runs beside a stranger who takes the place of ranks, {GUESSES} guesses a listener"
    return conclude(what, rows, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
