"""Roles whose speed depends on the split of the nodes in plan.json, started in place of the real ones.

    python rated_split.py -m primerl_hpc.roles.trainer RUN_DIR PHASE NAME

A profile names an executable that starts this file as its interpreter. The trainer takes the step time that the
simulation gives for the plan's split, sleeps that long, and writes the metrics of both sides. It saves when asked.
"""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from primerl_hpc.plan.simulation.lengths import Lengths  # noqa: E402
from primerl_hpc.plan.simulation.sides import EngineSide, SimulatedRun, TrainerSide, Workload  # noqa: E402
from primerl_hpc.plan.simulation.simulate import simulate  # noqa: E402

LENGTHS = Lengths.lognormal(mean=100, cv=0.5, longest=400)
BATCH, GROUP, IN_FLIGHT, OFF_POLICY = 16, 4, 32, 2
CURVE = ((1.0, 0.0024), (256.0, 0.1044))
TRAINER_S = 1.2
"""Forward and backward of a batch on one node."""


@cache
def speed(engines: int, trainer_nodes: int) -> tuple[EngineSide, TrainerSide, SimulatedRun]:
    """Return both sides and the simulated run with this number of engines and of nodes of the trainer."""
    side = EngineSide(engines, CURVE, 256, pause_s=0.02, detect_s=0.02)
    trainer = TrainerSide(0.02, TRAINER_S / (BATCH * LENGTHS.mean) / trainer_nodes, publish_s=0.02)
    workload = Workload(BATCH, GROUP, IN_FLIGHT, OFF_POLICY, LENGTHS)
    return side, trainer, simulate(workload, side, trainer, steps=40)


def metrics(engines: int, trainer_nodes: int, step_s: float) -> tuple[dict[str, float], dict[str, float]]:
    """Return the rows of trainer and orchestrator of one step."""
    side, trainer, run = speed(engines, trainer_nodes)
    running = run.in_flight
    orchestrator: dict[str, Any] = {
        "completion_tokens/mean": LENGTHS.mean,
        "completion_tokens/p10": LENGTHS.values[409],
        "completion_tokens/p90": LENGTHS.values[3686],
        "completion_tokens/max": LENGTHS.values[-1],
        "inference/engines": engines,
        "inference/running": running,
        "inference/waiting": 0,
        "inference/tokens_per_s": running / side.token_s(running / engines),
        "turns/mean": 1.0,
        "time/engines_paused": 0.02,
        "time/weight_update": 0.04,
    }
    compute_s = trainer.token_s * BATCH * LENGTHS.mean
    of_trainer = {
        "time/step": step_s,
        "time/forward_backward": compute_s,
        "time/optimizer": 0.02,
        "time/broadcast_weights": 0.02,
    }
    return of_trainer, orchestrator


def train(root: str) -> int:
    """Train until a stop is requested or ``enough`` exists."""
    from primerl_hpc.plan.plan import load_plan
    from primerl_hpc.run.metrics import MetricsWriter
    from primerl_hpc.run.rundir import RunDir

    run = RunDir(Path(root))
    phase = load_plan(run).phases[-1]
    (trainer,) = (process for process in phase.processes if process.role.value == "trainer")
    engines = sum(process.role.value == "inference" for process in phase.processes)
    is_first = os.environ["SLURM_NODEID"] == "0"
    step = run.latest_checkpoint() or 0
    _, _, simulated = speed(engines, len(trainer.nodes))
    writers = [MetricsWriter(run.metrics(name)) for name in ("trainer", "orchestrator")]
    while True:
        start = time.monotonic()
        time.sleep(simulated.step_s)
        step += 1
        if is_first:
            rows = metrics(engines, len(trainer.nodes), time.monotonic() - start)
            for writer, row in zip(writers, rows, strict=True):
                writer.write(step, row)
        is_last, is_stop = (run.root / "enough").exists(), run.stop_request.exists()
        if is_last or is_stop:
            if is_first:
                run.finish_checkpoint_side(step, "trainer", ("trainer",))
            return 0 if is_last else 75


def wait(root: str, name: str, *, is_server: bool) -> int:
    """Serve nothing until the phase ends; the orchestrator ends like the trainer."""
    from primerl_hpc.run.endpoints import publish_endpoint
    from primerl_hpc.run.rundir import RunDir

    run = RunDir(Path(root))
    if is_server:
        publish_endpoint(run, name, "http://x:1")
    while True:
        if not is_server and (run.stop_request.exists() or (run.root / "enough").exists()):
            return 75 if run.stop_request.exists() else 0
        time.sleep(0.05)


def main(arguments: list[str]) -> int:
    module, root, _, name = arguments[-4:]
    role = module.rpartition(".")[2]
    if role == "trainer":
        return train(root)
    return wait(root, name, is_server=role != "orchestrator")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
