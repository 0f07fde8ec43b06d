#!/usr/bin/env python3
"""What only a GPU can show, by one command: every bench that has a figure there, and the tests marked `gpu`.

    tools/bench/gpu.py --json gpu.json               # on one H100 or H200: all of it, in less than ten minutes
    tools/bench/gpu.py --only speed-rl-16384 tests   # parts of it

Each part is a process of its own with a share of the time, and of what those before it left over, and what it started ends with it. The
tests come first. One that fails or takes too long is named with the figures it had by then, and the next one begins; a part for
which the whole has no time left is not begun: ask for it alone then. FILE is written anew after each part. Ends with 0 where every part is done and every figure asked for
met, with 69 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from machine import ROOT, describe_machine, show
from trainer_memory import SAVES

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.errors import ExitCode

BENCH = ROOT / "tools/bench"
WITHIN_S = 570.0  # all of it
GRACE_S = 5.0  # between SIGTERM and SIGKILL
LEAST_S = 20.0  # no part is begun for less
TAIL_LINES = 30  # of what a part that failed said

Figure = dict[str, Any]
"""``figure``, ``value``, what is ``asked`` ("" if nothing), whether it is ``met`` (None then)."""


def asked_figures(text: str) -> list[Figure]:
    """What `is_met` printed."""
    found = re.findall(r"^(.+): (\S+); asked: (at (?:least|most) \S+): (met|MISSED)$", text, re.MULTILINE)
    return [
        {"figure": name, "value": float(value), "asked": asked, "met": met == "met"}
        for name, value, asked, met in found
    ]


def speed_figures(text: str) -> list[Figure]:
    figures: list[Figure] = []
    for row in json.loads(text)["rows"] if text else ():
        speed, memory = row["tokens/s"], row["GiB"]
        for name, value, asked, met in (
            ("tokens/s of training", speed, f"at least {row['goal']}", speed >= row["goal"]),
            ("reserved GiB", memory, f"at most {row['their GiB']}", memory <= row["their GiB"]),
            ("MFU", row["MFU"], "", None),
        ):
            figures.append({"figure": name, "value": value, "asked": asked, "met": met})
    return figures


def memory_figures(text: str) -> list[Figure]:
    rows = re.findall(r"^ *(\S.*?) +(\d+) +\d+\.\d\d +\d+\.\d\d$", text, re.MULTILINE)
    peaks = [{"figure": f"MiB, {name}", "value": int(peak), "asked": "", "met": None} for name, peak in rows]
    return peaks + asked_figures(text)


def pytest_figures(text: str) -> list[Figure]:
    """Of `pytest -v`, also of one that did not come to its end."""
    ends = re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    bad = ends.count("FAILED") + ends.count("ERROR")
    return [
        {"figure": "tests passed", "value": ends.count("PASSED"), "asked": "", "met": None},
        {"figure": "tests skipped", "value": ends.count("SKIPPED"), "asked": "", "met": None},
        {"figure": "tests failed", "value": bad, "asked": "at most 0", "met": not bad},
    ]


@dataclass(frozen=True)
class Part:
    command: tuple[str, ...]  # of this interpreter
    limit_s: float  # what it gets at least; all of them together fit into WITHIN_S
    read: Callable[[str], list[Figure]] = asked_figures


def bench(
    line: str, *words: str, limit_s: float, read: Callable[[str], list[Figure]] = asked_figures
) -> Part:
    script, *first = line.split()
    return Part((str(BENCH / script), *first, *words), limit_s, read)


# fmt: off
SPEED = "trainer_speed.py --json --steps 4 --cases"
LOOP = "trainer_loop.py --hidden 1024 --layers 28 --vocabulary 151936 --dtype bfloat16 --seq-len 8192 --rows 2 --steps 15"
SAVE = "async_save.py --hidden 1024 --layers 8 --seq-len 2048 --rows 12"  # a checkpoint of 1.3 GB
TESTS = "-m pytest tests/gpu -v --tb=short -p no:cacheprovider -o timeout=120"
BENCHED = ("test_trainer_speed.py", "test_trainer_memory.py")  # assert what other parts print

PARTS = {
    "tests": Part(
        (*TESTS.split(), *(f"--ignore=tests/gpu/{name}" for name in BENCHED)), limit_s=150, read=pytest_figures
    ),
    "speed-rl-16384": bench(SPEED, "rl-16384", limit_s=50, read=speed_figures),
    "speed-rl-65536": bench(SPEED, "rl-65536", limit_s=70, read=speed_figures),
    "speed-sft-8192": bench(SPEED, "sft-8192", limit_s=50, read=speed_figures),
    "chunked-head": bench("chunked_head.py --device cuda", limit_s=30),
    "chunked-head-bfloat16": bench("chunked_head.py --device cuda --dtype bfloat16", limit_s=30),
    "trainer-loop": bench(LOOP, limit_s=45),
    "async-save": bench(SAVE, limit_s=50),
    "weight-write": bench("weight_write.py --turns 3", limit_s=35),
    "memory": bench(
        "trainer_memory.py --settings", *dict.fromkeys((*SAVES.values(), *SAVES)), limit_s=50, read=memory_figures
    ),
}
# fmt: on


def time_for(name: str, later: Sequence[str], left_s: float) -> float:
    """Seconds for a part: all that is left but for the shares of those that come after it."""
    spare_s = left_s - sum(PARTS[each].limit_s for each in later)
    return min(left_s, max(PARTS[name].limit_s, spare_s))


def run_part(part: Part, limit_s: float, devices: str) -> dict[str, Any]:
    """``outcome``, ``seconds``, ``figures``, and the last lines of what it said where it did not go well."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as name:
        out, err = Path(name) / "out", Path(name) / "err"
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",  # what it found before its time was up
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": name,
            "CUDA_VISIBLE_DEVICES": devices,  # a run without a scheduler has the GPUs that are named here
        }
        with out.open("w") as stdout, err.open("w") as stderr:
            process = start_guarded(part.command, environment, stdout, stderr)
            is_late = not ends_within(process, limit_s)
        said = out.read_text(errors="replace")
        try:
            figures = part.read(said)
        except ValueError:  # no document: told below
            figures = []
        lines = [*said.splitlines(), *err.read_text(errors="replace").splitlines()]
    has_missed = any(figure["met"] is False for figure in figures)
    outcome = "done"
    if is_late:
        outcome = f"took longer than {limit_s:.0f} s"
    elif process.returncode and not has_missed:
        outcome = f"failed with exit code {process.returncode}"
    elif not figures:
        outcome = "printed no figures"
    result = {"outcome": outcome, "seconds": round(time.monotonic() - started, 1), "figures": figures}
    return result if outcome == "done" and not has_missed else result | {"tail": lines[-TAIL_LINES:]}


def start_guarded(
    command: Sequence[str], environment: dict[str, str], stdout: Any, stderr: Any
) -> subprocess.Popen:
    """Below a guard, which ends whatever the command leaves behind."""
    guard = [sys.executable, "-m", "primerl_hpc.runtime.guard", "--grace", str(GRACE_S), "--"]
    return subprocess.Popen(
        [*guard, sys.executable, *command], cwd=ROOT, env=environment, stdout=stdout, stderr=stderr
    )


def ends_within(process: subprocess.Popen, limit_s: float) -> bool:
    """Whether it ended by itself; otherwise it is ended here, with everything below it."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
        return True
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(2 * GRACE_S)
    except subprocess.TimeoutExpired:  # something below it cannot even be killed: a driver that hangs
        process.kill()
        process.wait()
    return False


def describe_device() -> dict[str, Any] | None:
    """None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    return {
        "device": torch.cuda.get_device_name(0),
        "devices": torch.cuda.device_count(),
        "gib": round(memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version_of(name) for name in ("transformers", "triton", "flash-attn")},
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rows_of(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name, result in results.items():
        figures = list(result["figures"])
        if result["outcome"] != "done":
            figures.append({"figure": result["outcome"], "value": "-", "asked": "", "met": False})
        words = {None: "-", True: "met", False: "MISSED"}
        for figure in figures:
            asked = {"asked": figure["asked"] or "-", "met": words[figure["met"]]}
            value = figure["value"]
            value = f"{value:.4g}" if isinstance(value, float) else value  # differences are small
            row = {"part": name, "figure": figure["figure"], "value": value}
            rows.append(row | asked | {"seconds": result["seconds"]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="NAME")
    parser.add_argument(
        "--within",
        type=float,
        default=WITHIN_S,
        metavar="SECONDS",
        help=f"of the whole; default: {WITHIN_S:.0f}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    ends = time.monotonic() + options.within
    if (device := describe_device()) is None:
        print("torch sees no NVIDIA GPU here, and everything below needs one", file=sys.stderr)
        return ExitCode.UNAVAILABLE
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(device["devices"])))
    results: dict[str, dict[str, Any]] = {}
    names = [name for name in PARTS if name in options.only]
    for number, name in enumerate(names, start=1):
        left_s = ends - time.monotonic() - 2 * GRACE_S
        if left_s < LEAST_S:
            results[name] = {"outcome": "not begun: no time is left", "seconds": 0.0, "figures": []}
        else:
            results[name] = run_part(PARTS[name], time_for(name, names[number:], left_s), devices)
        result = results[name]
        print(f"{name}: {result['outcome']}, {result['seconds']} s", file=sys.stderr, flush=True)
        print("".join(f"    {line}\n" for line in result.get("tail", ())), end="", file=sys.stderr)
        if options.json:
            document = {**device, **describe_machine(), "parts": results}
            options.json.write_text(json.dumps(document, indent=1))
    said = ", ".join(f"{key} {value}" for key, value in device.items())
    show(said, rows_of(results), as_json=False)
    is_well = all(
        result["outcome"] == "done" and all(figure["met"] is not False for figure in result["figures"])
        for result in results.values()
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
