#!/usr/bin/env python3
"""Measure the cost of a rollout in the complete RL loop: CPU per rollout by role, and speed against bare parts and TRL.

    tools/bench/loop.py --sizes 7                                # this checkout
    tools/bench/loop.py --sizes 7 --before ../before --runs 5    # and another one, in turns; ratios of medians
    tools/bench/loop.py --sizes 7 --profile outputs/profile      # py-spy by role
    tools/bench/loop.py --install-trl outputs/trl                # once: TRL on top of this checkout's environment
    tools/bench/loop.py --sizes 90 256 --trl outputs/trl --json > docs/measurements/loop.json

Sizes: rollouts of 7, about 90, and 256 sampled tokens, and of 10 turns of 7 tokens (`loop_sizes`). Each row is one run
on this machine; ratios are formed only between rows of the same call. CPU times are those of the processes between two
steps of the run, so they contain neither start nor end. Use ``chrt -r 5`` on a machine with other work: all processes
of the bench inherit it.

    ms per rollout   CPU of a role / rollouts finished in the measured steps
    us per token     CPU of the API server / sampled tokens
    idle             share of the steps' time: trainer without a batch, orchestrator without a policy version, and
                     machine: cores that did nothing
    first step       seconds after the command, and CPU seconds of all processes that live then
    peak PSS         of the sum over all processes, up to the last measured step
    ratios           rollouts/s against TRL; time of a step against the sum of bare generation and a bare training step
                     with 2 threads each
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
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from loop_processes import cpu_by_role, hottest, pss_mib, start_profiles  # noqa: E402
from loop_sizes import SIZES, prepare  # noqa: E402
from machine import describe_machine  # noqa: E402

TRL = "trl==1.16.0"
SKIP, TAIL = 4, 3
"""Steps at the start and at the end of a run that are not measured: engines warm up, and the last batches have no
successor."""
PEERS = Path(__file__).resolve().parent / "loop_peers.py"
COMPARED = ("rollouts_per_s", "cpu_ms_per_rollout_all", "first_step_s", "first_step_cpu_s", "peak_pss_mib")
POLL_S, PSS_S, LIMIT_S = 0.05, 1.0, 600.0


def environment(checkout: Path) -> dict[str, str]:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = str(checkout)  # several checkouts may share one environment
    return variables | {"PATH": f"{checkout / '.venv/bin'}:{os.environ['PATH']}"}


class Run:
    """A run of the loop in a child process."""

    def __init__(self, checkout: Path, recipe: Path, folder: Path) -> None:
        self.checkout, self.folder = checkout, folder
        words = [
            "primerl-hpc",
            "submit",
            str(recipe),
            "--profile",
            "local",
            "--run-dir",
            str(folder),
            "--follow",
        ]
        self.log = folder.parent / f"{folder.name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=folder.parent, env=environment(checkout), stdout=log, stderr=subprocess.STDOUT
            )
        self.started = time.time()
        self.start_cpu_s: float | None = None
        """CPU time of all processes up to the first step."""
        self.peak_pss_mib = 0.0
        self._pss_due = 0.0

    def sample(self) -> None:
        """Sample memory and CPU time; each sample of the memory costs some milliseconds for each process."""
        if time.time() >= self._pss_due:
            self.peak_pss_mib = max(self.peak_pss_mib, pss_mib(self.process.pid))
            self._pss_due = time.time() + PSS_S
        if self.start_cpu_s is None and self.rows("orchestrator"):
            self.start_cpu_s = sum(cpu_by_role(self.process.pid).values())

    def stop(self) -> None:
        """Cancel a run that has not ended."""
        if self.process.poll() is None:
            words = ["primerl-hpc", "cancel", str(self.folder)]
            subprocess.run(words, env=environment(self.checkout), check=False)
            self.process.wait(timeout=60)

    def rows(self, role: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics" / f"{role}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_step(self, step: int, *, has_samples: bool = False) -> tuple[float, Counter[str]]:
        """Return the time of a step's end and the CPU seconds by role at that time. Raises RuntimeError at the end.

        ``has_samples``: sample memory and CPU time meanwhile.
        """
        while not (rows := self.rows("orchestrator")) or rows[-1]["step"] < step:
            if self.process.poll() is not None or time.time() - self.started > LIMIT_S:
                raise RuntimeError(f"the run ended before step {step}:\n{self.log.read_text()[-2000:]}")
            if has_samples:
                self.sample()
            time.sleep(POLL_S)
        return time.time(), cpu_by_role(self.process.pid)


def measure_loop(
    checkout: Path, recipe: Path, name: str, folder: Path, steps: int, profile: Path | None
) -> dict[str, Any]:
    """Run the loop once and return its row."""
    run = Run(checkout, recipe, folder)
    try:
        started, before = run.wait_for_step(SKIP, has_samples=True)
        profiles = start_profiles(run.process.pid, profile, seconds=15) if profile is not None else []
        until, after = run.wait_for_step(steps - TAIL)
        run.sample()
        for process in profiles:
            process.wait()
        if run.process.wait() != 0:
            raise RuntimeError(f"the run failed:\n{run.log.read_text()[-2000:]}")
    finally:
        run.stop()
    rows = {row["step"]: row for row in run.rows("orchestrator")}
    first, last = rows[SKIP], rows[steps - TAIL]
    rollouts = last["progress/rollouts"] - first["progress/rollouts"]
    tokens = last["progress/tokens"] - first["progress/tokens"]
    measured = [rows[step] for step in range(SKIP + 1, steps - TAIL + 1)]
    trainer = [row for row in run.rows("trainer") if SKIP < row["step"] <= steps - TAIL]
    cpu = {role: after[role] - before[role] for role in after if role != "command"}
    wall_s = until - started
    return {
        "what": "loop",
        "size": name,
        "rollouts_per_s": rollouts / wall_s,
        "tokens_per_s": tokens / wall_s,
        "tokens_per_rollout": tokens / rollouts,
        "step_s": [row["time/step"] for row in measured],
        "s_per_batch": wall_s * SIZES[name].batch / rollouts,
        "cpu_ms_per_rollout": {role: 1e3 * seconds / rollouts for role, seconds in sorted(cpu.items())},
        "cpu_ms_per_rollout_all": 1e3 * sum(cpu.values()) / rollouts,
        "api_server_us_per_token": 1e6 * cpu.get("api_server", 0.0) / tokens,
        "idle_trainer": _share(trainer, "time/wait_for_batch"),
        "idle_orchestrator": _share(measured, "time/wait_for_policy"),
        "idle_machine": 1 - sum(cpu.values()) / (wall_s * (os.cpu_count() or 1)),
        "first_step_s": rows[1]["time"] - run.started,
        "first_step_cpu_s": run.start_cpu_s,
        "peak_pss_mib": run.peak_pss_mib,
        "reward": statistics.mean(row["reward/mean"] for row in measured),
        "mismatch_kl": statistics.mean(row["mismatch_kl/all/mean"] for row in trainer),
        "off_policy_max": max(row["off_policy/max"] for row in measured),
    }


def _share(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / sum(row["time/step"] for row in rows)


def measure_peer(python: Path, what: str, folder: Path, name: str, *words: str) -> dict[str, Any]:
    """Run a part of `loop_peers` and return its row."""
    command = [str(python), str(PEERS), what, str(folder), name, *words]
    variables = {**environment(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = statistics.mean(found["seconds"])
    row = {"what": what, "size": name, "s_per_batch": seconds, "step_s": found["seconds"]}
    return (
        row
        | {"rollouts_per_s": SIZES[name].batch / seconds}
        | {key: found[key] / seconds for key in ("tokens",) if key in found}
    )


def measure_size(name: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    steps = options.steps or SIZES[name].steps
    recipe = prepare(folder, name, steps)
    checkouts = (
        {"after": ROOT} if options.before is None else {"before": options.before.resolve(), "after": ROOT}
    )
    rows: list[dict[str, Any]] = []
    for number in range(options.runs):
        for label, checkout in [*checkouts.items()][:: -1 if number % 2 else 1]:
            profile = options.profile / name / label if options.profile else None
            run = folder / f"run-{name}-{label}-{number}"
            row = measure_loop(checkout, recipe, name, run, steps, profile)
            rows.append({**row, "checkout": label})
            report(rows[-1])
    python = Path(sys.executable)
    if options.parts:
        tokens = round(statistics.median(row["tokens_per_rollout"] for row in rows))
        rows.append(measure_peer(python, "generate", folder, name))
        rows.append(measure_peer(python, "train", folder, name, "--tokens", str(tokens)))
    if options.trl is not None:
        for more in ((), ("--vllm",)):
            row = measure_peer(options.trl / "bin/python", "trl", folder, name, "--steps", "8", *more)
            rows.append({**row, "what": "TRL, vLLM" if more else "TRL, transformers"})
    for row in rows[options.runs * len(checkouts) :]:
        report(row)
    return rows


def ratios_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratios between the rows of one size."""
    loops = [row for row in rows if row["what"] == "loop"]
    found: dict[str, float] = {}
    for label in dict.fromkeys(row["checkout"] for row in loops):
        rate = statistics.median(row["rollouts_per_s"] for row in loops if row["checkout"] == label)
        tokens = statistics.median(row["tokens_per_s"] for row in loops if row["checkout"] == label)
        for peer in (row for row in rows if row["what"].startswith("TRL")):
            found[f"{label}: tokens/s / {peer['what']}"] = tokens / peer["tokens"]
        parts = [row["s_per_batch"] for row in rows if row["what"] in ("generate", "train")]
        if parts:
            found[f"{label}: step / sum of bare parts"] = SIZES[rows[0]["size"]].batch / rate / sum(parts)
    if {row["checkout"] for row in loops} == {"after", "before"}:
        for name in COMPARED:
            after, before = (
                statistics.median(row[name] for row in loops if row["checkout"] == label)
                for label in ("after", "before")
            )
            found[f"after / before: {name}"] = after / before
    return found


def report(row: dict[str, Any]) -> None:
    """Print one row to standard error."""
    print(
        f"{row['size']:>4} {row['what']}, {row.get('checkout', '')}: {row['rollouts_per_s']:.1f} rollouts/s",
        end="",
        file=sys.stderr,
    )
    if row["what"] == "loop":
        roles = ", ".join(f"{role} {value:.2f}" for role, value in row["cpu_ms_per_rollout"].items())
        print(
            f", {row['cpu_ms_per_rollout_all']:.2f} ms of CPU per rollout ({roles}), API server "
            f"{row['api_server_us_per_token']:.0f} us/token, idle: trainer {row['idle_trainer']:.0%}, orchestrator "
            f"{row['idle_orchestrator']:.0%}, machine {row['idle_machine']:.0%}; first step after "
            f"{row['first_step_s']:.1f} s and {row['first_step_cpu_s']:.1f} s of CPU, peak PSS "
            f"{row['peak_pss_mib']:.0f} MiB",
            end="",
            file=sys.stderr,
        )
    print(file=sys.stderr)


def report_profiles(folder: Path) -> None:
    for path in sorted(folder.rglob("*.txt")):
        print(f"\n{path}", file=sys.stderr)
        for share, frame in hottest(path):
            print(f"  {share:6.1%}  {frame}", file=sys.stderr)


def install_trl(folder: Path) -> None:
    """Create an environment with TRL that sees the packages of this one, so that both use the same torch and vLLM."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    own = next(path for path in sys.path if path.endswith("site-packages"))
    site = next((folder / "lib").glob("python3*/site-packages"))
    (site / "checkout.pth").write_text(own + "\n")
    subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "--no-deps", TRL], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument(
        "--runs",
        type=int,
        default=1,
        help="runs of each checkout; ratios are those of medians, the order alternates",
    )
    parser.add_argument("--steps", type=int, help="steps of a run (default: by size)")
    parser.add_argument("--before", type=Path, help="checkout of the revision to compare with, with a .venv")
    parser.add_argument(
        "--parts", action="store_true", help="also measure LLM.generate and a bare training step"
    )
    parser.add_argument("--trl", type=Path, help="environment of --install-trl: also measure TRL")
    parser.add_argument("--install-trl", type=Path, metavar="DIR", help="create TRL's environment and exit")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write py-spy's samples by role")
    parser.add_argument("--folder", type=Path, help="keep models and runs here (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.install_trl is not None:
        install_trl(options.install_trl)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = {name: measure_size(name, folder, options) for name in options.sizes}
    ratios = {name: ratios_of(found) for name, found in rows.items()}
    if options.profile is not None:
        report_profiles(options.profile)
    if options.json:
        command = " ".join(sys.argv[1:]).replace(str(options.before), "../before")
        document = {"command": command, **describe_machine()}
        print(json.dumps({**document, "rows": list(chain(*rows.values())), "ratios": ratios}, indent=1))
    for name, found in ratios.items():
        for what, value in found.items():
            print(f"{name:>4} {what}: {value:.3f}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
