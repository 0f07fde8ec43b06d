"""Helpers of several tests: plans without a planner, synthetic rollouts, processes of a run.

plan = make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.TRAINER, accelerators=2)])
run_role(RunDir(tmp_path / "run"), "main", "trainer-0")
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from primerl_hpc.common import env
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role, process_name
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import NodePlan, OnExit, PhasePlan, Plan, ProcessPlan
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.transport.rollouts import MicroBatch

ROOT = Path(__file__).resolve().parents[1]


def wait_for(
    condition: Callable[[], object],
    what: str = "it",
    timeout_s: float = 30.0,
    tell: Callable[[], object] = lambda: "",
) -> None:
    """Until ``condition`` holds; ``tell`` says why, when it did not come to that."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what} {tell()}"
        time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process (not a later one of its number) still runs. A zombie has ended; its parent is slow."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_tiny_model(
    out: Path,
    *,
    task: str = "reverse-text",
    experts: int = 0,
    rows: int = 2000,
    hidden: int = 128,
    layers: int = 2,
) -> Path:
    """``out/model`` and ``out/sft.jsonl`` by tools/tiny-model; returns ``out``."""
    options = {"task": task, "experts": experts, "rows": rows, "hidden": hidden, "layers": layers}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()):
        # in this process: as a command it would import torch and transformers each time
        runpy.run_path(str(ROOT / "tools" / "tiny-model"))["main"]([str(out), *arguments])
    return out


def small_sft(model: Path) -> Recipe:
    """For tests that build a policy or a trainer of it and read no data."""
    return Recipe.model_validate(
        {
            "kind": "sft",
            "name": "test",
            "model": {"name": str(model)},
            "seq_len": 64,
            "max_steps": 1,
            "sft": {"data": {"path": "none.jsonl"}},
            "trainer": {"param_dtype": "float32"},
        }
    )


def process_plan(
    role: Role, index: int = 0, *, accelerators: int = 1, nodes: int = 1, **changes: Any
) -> ProcessPlan:
    name = process_name(role, index)
    values = {
        "name": name,
        "role": role,
        "index": index,
        "nodes": tuple(range(nodes)),
        "accelerators": tuple(range(accelerators)),
        "argv": (sys.executable, "-m", f"primerl_hpc.roles.{role.value}"),
        "on_exit": OnExit.ENDS_PHASE if role in (Role.TRAINER, Role.SFT) else OnExit.RESTART,
        "log": f"{name}.log",
    }
    return ProcessPlan.model_validate(values | changes)


def make_plan(
    run_dir: Path,
    recipe: dict[str, Any] | Recipe,
    *,
    processes: Sequence[ProcessPlan],
    phase: str = MAIN_PHASE,
    model_path: str | Path | None = None,
    accelerator: str = "cpu",
) -> Plan:
    """Write ``run_dir/plan.json`` of one phase and make the folders the supervisor would make."""
    recipe = recipe if isinstance(recipe, Recipe) else Recipe.model_validate(recipe)
    nodes = sorted({node for process in processes for node in process.nodes})
    plan = Plan(
        name=recipe.name,
        kind=Kind(recipe.kind),
        run_dir=str(run_dir),
        profile_name="local",
        scheduler="local",
        accelerator=accelerator,
        accelerators_per_node=sum(len(process.accelerators) for process in processes),
        nodes=tuple(NodePlan(index=node, roles=()) for node in nodes),
        phases=(
            PhasePlan(
                name=phase,
                recipe=recipe,
                model_path=str(model_path or recipe.model.name),
                processes=tuple(processes),
            ),
        ),
    )
    run = RunDir(run_dir)
    for folder in (run.control, run.attempt_logs(1), run.root / "metrics"):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(run.plan, plan.model_dump(mode="json"))
    return plan


def role_env(run: RunDir, phase: str, name: str, **more: str) -> dict[str, str]:
    """Environment of a role as the supervisor sets it."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        env.RUN_DIR: str(run.root),
        env.PROCESS: name,
        env.PHASE: phase,
        env.ATTEMPT: "1",
        env.INCARNATION: "0",
        **more,
    }


def start_role(run: RunDir, phase: str, name: str, **more: str) -> subprocess.Popen:
    """Start a role in its own session, output in ``logs/attempt_1/<name>.log``."""
    log = run.attempt_logs(1) / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    role = name.rsplit("-", 1)[0]
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, "-m", f"primerl_hpc.roles.{role}", str(run.root), phase, name],
            env=role_env(run, phase, name, **more),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end_role(process: subprocess.Popen) -> None:
    """Kill what is left of a role's session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run_role(run: RunDir, phase: str, name: str, *, timeout_s: float = 240, **more: str) -> tuple[int, str]:
    """Run a role to its end: exit code and log."""
    process = start_role(run, phase, name, **more)
    try:
        code = process.wait(timeout_s)
    finally:
        end_role(process)
    return code, (run.attempt_logs(1) / f"{name}.log").read_text()


def random_row(
    rng: np.random.Generator, lengths: Sequence[int], vocab_size: int = 100, num_envs: int = 1
) -> MicroBatch:
    """A packed row of random samples, the second half of each sampled by a policy close to uniform."""
    total = sum(lengths)
    mask = np.concatenate([np.arange(length) >= max(1, length // 2) for length in lengths])
    return MicroBatch(
        input_ids=rng.integers(4, vocab_size, total).astype(np.int32),
        loss_mask=mask,
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        inference_logprobs=np.where(mask, -np.log(vocab_size) + 0.1 * rng.normal(size=total), 0).astype(
            np.float32
        ),
        sample_lengths=np.array(lengths, np.int64),
        temperatures=np.ones(len(lengths), np.float32),
        rl_weights=np.ones(len(lengths), np.float32),
        ref_kl_weights=np.zeros(len(lengths), np.float32),
        env_ids=rng.integers(0, num_envs, len(lengths)).astype(np.int32),
    )
