#!/usr/bin/env python3
"""Run everything that needs a GPU: each benchmark with a figure for GPUs, and the tests marked `gpu`.

    tools/bench/gpu.py --json gpu.json               # on one H100 or H200: everything, in 17 minutes
    tools/bench/gpu.py --only speed-rl-16384 tests   # some parts, in this order
    tools/bench/gpu.py --within 300 --only rl-filesystem speed-rl-16384 --json gpu.json   # more parts in the same file
    tools/bench/gpu.py --cpu                         # without a GPU: every part in its smallest form, five minutes

Each part runs in its own process with a share of the time and the time that earlier parts left over; its child
processes end with it. The tests come first, or the parts in the order of --only: the first ones get their time. A
part that fails or exceeds its time is reported with the figures measured so far, and the next one begins. A part for
which no time remains is not started; run it separately. FILE is rewritten after each part; results of other parts
that it has from an earlier call are kept. Exits with 0 if every part finished and every required figure is met, with
69 if there is no GPU.

With --cpu the same code runs each part with short rows and tiny models, so that the first hour on a GPU is not lost to
faults of the benches. Its figures mean nothing and are not compared.
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
WITHIN_S = 1000.0  # limit for all parts
GRACE_S = 5.0  # between SIGTERM and SIGKILL
LEAST_S = 20.0  # minimum time left to start a part
TAIL_LINES = 30  # lines shown of the output of a failed part

Figure = dict[str, Any]
"""``figure``, ``value``, the required value ``asked`` ("" if none), and whether it is ``met`` (None if none)."""


def asked_figures(text: str) -> list[Figure]:
    """Parse the lines printed by `is_met`."""
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


def run_figures(text: str) -> list[Figure]:
    """Parse the JSON of `rl_run.py`: each run's figures, and the planner's beside the measured ones."""
    figures: list[Figure] = []
    document = json.loads(text) if text else {"rows": (), "wrong": ()}
    for row in document["rows"]:
        name = row["transport"]
        for key in "tokens/s step_s train_s publish_s update_s paused_s GiB mismatch_kl".split():
            figures.append({"figure": f"{name}: {key}", "value": row[key], "asked": "", "met": None})
        for found in row["planner"]:
            asked = f"planned {found['predicted']:.3g}, {found['low']:.3g} to {found['high']:.3g}"
            figure = f"{name}: {found['label']} ({found['unit']})"
            figures.append(
                {"figure": figure, "value": found["measured"], "asked": asked, "met": found["is_inside"]}
            )
    figures += [{"figure": text, "value": "-", "asked": "", "met": False} for text in document["wrong"]]
    return figures


def memory_figures(text: str) -> list[Figure]:
    rows = re.findall(r"^ *(\S.*?) +(\d+) +\d+\.\d\d +\d+\.\d\d$", text, re.MULTILINE)
    peaks = [{"figure": f"MiB, {name}", "value": int(peak), "asked": "", "met": None} for name, peak in rows]
    return peaks + asked_figures(text)


def pytest_figures(text: str) -> list[Figure]:
    """Parse the output of `pytest -v`, complete or not."""
    ends = re.findall(r"^\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", text, re.MULTILINE)
    bad = ends.count("FAILED") + ends.count("ERROR")
    return [
        {"figure": "tests passed", "value": ends.count("PASSED"), "asked": "", "met": None},
        {"figure": "tests skipped", "value": ends.count("SKIPPED"), "asked": "", "met": None},
        {"figure": "tests failed", "value": bad, "asked": "at most 0", "met": not bad},
    ]


@dataclass(frozen=True)
class Part:
    command: tuple[str, ...]  # arguments of this interpreter
    limit_s: float  # guaranteed time; the sum of all parts fits into WITHIN_S
    read: Callable[[str], list[Figure]] = asked_figures
    on_cpu: tuple[str, ...] | None = None  # arguments of the part's smallest form; None: it needs a GPU


def bench(
    line: str,
    *words: str,
    limit_s: float,
    read: Callable[[str], list[Figure]] = asked_figures,
    on_cpu: str | None = None,
) -> Part:
    """Return the part that runs ``line`` of this folder. ``on_cpu``: the line of its smallest form."""
    script, *first = line.split()
    small = None if on_cpu is None else (str(BENCH / on_cpu.split()[0]), *on_cpu.split()[1:])
    return Part((str(BENCH / script), *first, *words), limit_s, read, small)


# fmt: off
SPEED = "trainer_speed.py --json --steps 4 --cases"
SMALL_SPEED = "trainer_speed.py --json --steps 1 --divide 512 --layers 1 --set trainer.param_dtype=float32 --cases"
RUN, SMALL_RUN = "rl_run.py --json --transports", "rl_run.py --json --small --transports"
SMALL_LOOP = "trainer_loop.py --hidden 32 --layers 1 --seq-len 64 --rows 1 --lengths 16-64 --steps 2 --warm-up 1"
LOOP = "trainer_loop.py --hidden 1024 --layers 28 --vocabulary 151936 --dtype bfloat16 --seq-len 8192 --rows 2 --steps 15"  # noqa: E501
TESTS = "-m pytest tests/gpu -v --tb=short -p no:cacheprovider -o timeout=120"
NEEDS_TWO = ("rl-broadcast",)
"""Parts for which one GPU is not enough."""
BENCHED = ("test_trainer_speed.py", "test_trainer_memory.py")  # these assert the figures that other parts print

PARTS = {
    "tests": Part(
        (*TESTS.split(), *(f"--ignore=tests/gpu/{name}" for name in BENCHED)), limit_s=150, read=pytest_figures
    ),
    "speed-rl-16384": bench(SPEED, "rl-16384", limit_s=50, read=speed_figures, on_cpu=f"{SMALL_SPEED} rl-16384"),
    "speed-rl-65536": bench(SPEED, "rl-65536", limit_s=70, read=speed_figures, on_cpu=f"{SMALL_SPEED} rl-65536"),
    "speed-sft-8192": bench(SPEED, "sft-8192", limit_s=50, read=speed_figures, on_cpu=f"{SMALL_SPEED} sft-8192"),
    "rl-filesystem": bench(RUN, "filesystem", limit_s=130, read=run_figures, on_cpu=f"{SMALL_RUN} filesystem"),
    "rl-delta": bench(RUN, "delta", limit_s=120, read=run_figures, on_cpu=f"{SMALL_RUN} delta"),
    "rl-broadcast": bench(RUN, "broadcast", limit_s=120, read=run_figures, on_cpu=f"{SMALL_RUN} broadcast"),
    "trainer-loop": bench(LOOP, limit_s=45, on_cpu=SMALL_LOOP),
    "memory": bench(
        "trainer_memory.py --settings", *dict.fromkeys((*SAVES.values(), *SAVES)), limit_s=50, read=memory_figures
    ),
}
# fmt: on


def time_for(name: str, later: Sequence[str], left_s: float) -> float:
    """Return the seconds for a part: the time left minus the shares of the parts after it."""
    spare_s = left_s - sum(PARTS[each].limit_s for each in later)
    return min(left_s, max(PARTS[name].limit_s, spare_s))


def run_part(command: Sequence[str], part: Part, limit_s: float, devices: str) -> dict[str, Any]:
    """Run the ``command`` of a part.

    Return ``outcome``, ``seconds``, ``figures``, and the last lines of its output if it failed.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as name:
        out, err = Path(name) / "out", Path(name) / "err"
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",  # keep the output printed before a timeout
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": name,
            "CUDA_VISIBLE_DEVICES": devices,  # without a scheduler, a run uses these GPUs
        }
        with out.open("w") as stdout, err.open("w") as stderr:
            process = start_guarded(command, environment, stdout, stderr)
            is_late = not ends_within(process, limit_s)
        output = out.read_text(errors="replace")
        try:
            figures = part.read(output)
        except ValueError:  # no JSON document: reported below
            figures = []
        lines = [*output.splitlines(), *err.read_text(errors="replace").splitlines()]
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
    """Run the command below a guard, which ends all processes that it leaves behind."""
    guard = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--grace", str(GRACE_S), "--"]
    return subprocess.Popen(
        [*guard, sys.executable, *command], cwd=ROOT, env=environment, stdout=stdout, stderr=stderr
    )


def ends_within(process: subprocess.Popen, limit_s: float) -> bool:
    """Return True if the process exited by itself; otherwise end it and its descendants."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
        return True
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(2 * GRACE_S)
    except subprocess.TimeoutExpired:  # a descendant cannot be killed, for example in a hanging driver
        process.kill()
        process.wait()
    return False


def describe_device() -> dict[str, Any] | None:
    """Return a description of the GPU; None without a GPU."""
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
        **{name: version_of(name) for name in ("transformers", "triton", "flash-attn", "flash-attn-4")},
    }


def parts_in(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the results of the parts in the JSON document of an earlier call; none without a file."""
    if path is None or not path.exists():
        return {}
    return json.loads(path.read_text())["parts"]


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


GOALS = (
    ("1 × H100, 0.6B, RL, 16,384 tokens", 1, "> 30,000 tokens/s at ≤ 12.5 GiB reserved", "16,400", "speed-rl-16384"),
    ("1 × H100, 0.6B, SFT, 8,192", 1, "> 45,000 tokens/s", "26,005", "speed-sft-8192"),
    ("1 × H100, 0.6B, RL, 65,536", 1, "> 18,000 tokens/s", "10,800", "speed-rl-65536"),
    ("8 × H100, Qwen3-30B-A3B, RL, 16,384", 8, "> 60,000 tokens/s", "32,100", "primerl-hpc bench trainer"),
)  # fmt: skip
"""What, GPUs, our goal, prime-rl's figure, and the part that measures it."""


def goal_rows(num_gpus: int) -> list[dict[str, Any]]:
    return [
        {
            "what": what,
            "goal": goal,
            "prime-rl": theirs,
            "part": part if num_gpus >= gpus else f"needs {gpus} GPUs",
        }
        for what, gpus, goal, theirs, part in GOALS
    ]


def run_small(names: Sequence[str]) -> int:
    """Run the smallest form of the parts on CPUs. Exits with 1 if one of them fails or prints no figures."""
    bad = False
    for name, part in PARTS.items():
        if name not in names or part.on_cpu is None:
            continue
        result = run_part(part.on_cpu, part, WITHIN_S, "")
        failures = [figure["figure"] for figure in result["figures"] if figure["value"] == "-"]
        is_well = result["outcome"] == "done" and not failures
        print(
            f"{name}: {result['outcome']}, {len(result['figures'])} figures, {result['seconds']} s",
            flush=True,
        )
        if not is_well:
            print("".join(f"    {line}\n" for line in [*result.get("tail", []), *failures]), end="")
        bad |= not is_well
    return 1 if bad else 0


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
        help=f"limit for all parts in seconds [default: {WITHIN_S:.0f}]",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="run the smallest form of each part, without a GPU"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    ends = time.monotonic() + options.within
    if options.cpu:
        return run_small(options.only)
    if (device := describe_device()) is None:
        print("torch finds no NVIDIA GPU on this machine; all parts need one", file=sys.stderr)
        return ExitCode.UNAVAILABLE
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(device["devices"])))
    results: dict[str, dict[str, Any]] = {}
    names = list(dict.fromkeys(options.only))
    earlier = {name: result for name, result in parts_in(options.json).items() if name not in names}
    for number, name in enumerate(names, start=1):
        left_s = ends - time.monotonic() - 2 * GRACE_S
        if name in NEEDS_TWO and device["devices"] < 2:
            missing = {"figure": "needs 2 GPUs", "value": "-", "asked": "", "met": None}
            results[name] = {"outcome": "done", "seconds": 0.0, "figures": [missing]}
        elif left_s < LEAST_S:
            results[name] = {"outcome": "not begun: no time is left", "seconds": 0.0, "figures": []}
        else:
            limit_s = time_for(name, names[number:], left_s)
            results[name] = run_part(PARTS[name].command, PARTS[name], limit_s, devices)
        result = results[name]
        print(f"{name}: {result['outcome']}, {result['seconds']} s", file=sys.stderr, flush=True)
        print("".join(f"    {line}\n" for line in result.get("tail", ())), end="", file=sys.stderr)
        if options.json:
            document = {**device, **describe_machine(), "parts": earlier | results}
            options.json.write_text(json.dumps(document, indent=1))
    description = ", ".join(f"{key} {value}" for key, value in device.items())
    show(description, rows_of(results), as_json=False)
    print()
    show(
        "goals, and published figures of prime-rl on the same GPUs",
        goal_rows(device["devices"]),
        as_json=False,
    )
    is_well = all(
        result["outcome"] == "done" and all(figure["met"] is not False for figure in result["figures"])
        for result in results.values()
    )
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
