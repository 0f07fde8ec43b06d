#!/usr/bin/env python3
"""Kill training runs repeatedly, and check that their results are bit-identical to those of a run without kills.

    tools/bench/kills.py                            # twelve kills in each of three runs; some minutes each
    tools/bench/kills.py --cases sft --kills 3 --seed 7 --json

Trainers with two ranks under torchrun on CPU: `sft`; `experts`, RL of a mixture of experts under expert parallelism;
`lora`, the same with adapters. AdamW, a checkpoint after every step, synthetic rollouts and orchestrator checkpoints.
torchrun and all ranks receive SIGKILL at a uniformly drawn time, measured in steps after an incarnation has built its
model (the first fraction includes the loading of the checkpoint), while the previous step is being saved. Each
incarnation resumes from the last complete checkpoint, as after a requeue. Compared at the end, file by file: the last
policy version, and weights and optimizer state of the last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, show

sys.path.insert(0, str(ROOT))

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import Role
from primerl_hpc.run.step_dirs import COMPLETE
from primerl_hpc.trainer.rl_loop import SIDES
from tests.e2e.test_trainer import kill_all, long_sft, make_run, rl_recipe, send
from tests.support.helpers import end_role, make_tiny_model, start_role

RANKS = 2
LIFE_S = 600.0


class Case:
    """A run of ``steps`` steps in ``folder``, before its first incarnation."""

    def __init__(self, name: str, folder: Path, model: Path, steps: int) -> None:
        self.name, self.steps = name, steps
        self.role = Role.SFT if name == "sft" else Role.TRAINER
        changes: dict[str, Any] = {"max_steps": steps, "checkpoint": {"interval": 1, "keep_last": 2}}
        if name == "sft":
            recipe = long_sft(model, **changes)
        else:
            recipe = rl_recipe(model / "model", **changes, layout={"trainer": {"expert_parallel": RANKS}})
            recipe["trainer"]["deterministic"] = True
            recipe["lora"] = {"rank": 8} if name == "lora" else None
        self.run = make_run(folder, recipe, model / "model", ranks=RANKS, role=self.role)
        self.log = self.run.attempt_logs(1) / f"{self.role}-0.log"

    def start(self) -> subprocess.Popen:
        """Start the next incarnation. Files beyond the last checkpoint are deleted, as the supervisor does."""
        last = self.run.latest_checkpoint() or 0
        self.run.delete_after(last)
        if self.role == Role.TRAINER:
            ahead = range(last + 1, self.steps + 1)
            send(self.run, ahead, ranks=RANKS)
            for step in ahead:
                self.run.finish_checkpoint_side(step, "orchestrator", SIDES)
        return start_role(self.run, "main", f"{self.role}-0")

    def num_built(self) -> int:
        """Return the number of incarnations that have built their model."""
        return self.log.read_text(errors="replace").count(" M parameters, ") if self.log.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of every finished step of every incarnation, in order."""
        return list(read_jsonl(self.run.metrics(self.role)))

    def part(self, *, is_first: bool) -> str:
        """Return the activity in which the last incarnation was killed, derived from its files; ``is_first``: it
        finished no step.
        """
        last = self.run.latest_checkpoint() or 0
        if any(self.run.checkpoints.glob("step_*/trainer.tmp")):
            return "save"
        if any(self.run.weights.glob("*.tmp")):
            return "weights"
        sides = self.run.checkpoints.glob("step_*/trainer")
        if unmarked := [side for side in sides if not (side.parent / COMPLETE).exists()]:
            is_new = any(side == self.run.checkpoint_side(last + 1, "trainer") for side in unmarked)
            return "marker" if is_new else "deletion"
        return "start" if is_first else "step"

    def results(self) -> dict[str, bytes]:
        folders = (self.run.weights_step(self.steps), self.run.checkpoint_side(self.steps, "trainer"))
        return {
            f"{folder.parent.name}/{path.name}": path.read_bytes()
            for folder in folders
            for path in sorted(folder.glob("*.safetensors"))
        }

    def wait_for(self, condition: Callable[[], bool], process: subprocess.Popen) -> None:
        """Wait until then, or until the incarnation ends."""
        deadline = time.monotonic() + LIFE_S
        while not condition() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)


def run_straight(case: Case) -> float:
    """Return the seconds from the built model to the first finished step."""
    process = case.start()
    try:
        case.wait_for(lambda: case.num_built() > 0, process)
        built = time.time()
        if process.wait(LIFE_S) != 0:
            raise SystemExit(f"{case.name} failed: {case.log.read_text()[-3000:]}")
    finally:
        end_role(process)
    return case.rows()[0]["time"] - built


def run_killed(case: Case, kills: int, start_s: float, rng: np.random.Generator) -> list[tuple[int, str]]:
    """Draw step and fraction of each kill. The last incarnation finishes before its kill is due."""
    reach = 2 * case.steps / (kills + 1)  # so that all incarnations together execute about all steps
    met: list[tuple[int, str]] = []
    while True:
        built, finished = case.num_built(), len(case.rows())
        num_steps, share = divmod(rng.uniform(0, reach), 1)
        process = case.start()
        try:
            case.wait_for(lambda built=built: case.num_built() > built, process)
            until = finished + (num_steps if len(met) < kills else math.inf)
            case.wait_for(lambda until=until: len(case.rows()) >= until, process)
            rows = case.rows()[finished:]
            try:
                code = process.wait(share * (rows[-1]["time/step"] if rows else start_s))
            except subprocess.TimeoutExpired:
                kill_all(process)
            else:
                if code != 0:
                    raise SystemExit(f"{case.name} failed: {case.log.read_text()[-3000:]}")
                return met
        finally:
            end_role(process)
        rows = case.rows()[finished:]
        step = int(rows[-1]["step"]) if rows else case.run.latest_checkpoint() or 0
        met.append((step + 1, case.part(is_first=not rows)))


def measure(name: str, folder: Path, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    straight = Case(name, folder / "straight", model, options.steps)
    start_s = run_straight(straight)
    killed = Case(name, folder / "killed", model, options.steps)
    met = run_killed(killed, options.kills, start_s, np.random.default_rng(options.seed))
    parts = Counter(part for _, part in met)
    expected = straight.results()
    return {
        "case": name,
        "kills": len(met),
        "at steps": " ".join(str(step) for step, _ in met),
        "in": ", ".join(f"{part} {count}" for part, count in parts.most_common()),
        "files": len(expected),
        "identical": bool(expected) and killed.results() == expected,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["sft", "experts", "lora"])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="seed of the kill times [default: random]")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int(np.random.default_rng().integers(1 << 31))
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as temporary:
        folder = Path(temporary)
        for name in options.cases:
            experts = 0 if name == "sft" else 4
            model = make_tiny_model(folder / f"{name}-model", experts=experts, rows=300, hidden=64)
            rows.append(measure(name, folder / name, model, options))
            print(rows[-1], file=sys.stderr)
    show(
        f"killed at random moments (seed {options.seed}), beside a straight run",
        rows,
        as_json=options.as_json,
    )
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
