"""Helpers for several tests: plans without the planner, synthetic rollouts, processes of a run.

plan = make_plan(tmp_path / "run", recipe, processes=[process_plan(Role.TRAINER, accelerators=2)])
run_role(RunDir(tmp_path / "run"), "main", "trainer-0")
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from primerl_hpc.common import env
from primerl_hpc.common.document import dump_yaml
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role, process_name
from primerl_hpc.plan.plan import NodePlan, OnExit, PhasePlan, Plan, ProcessPlan
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:  # most tests need neither: tools/python-versions runs them without extras
    import numpy as np

    from primerl_hpc.transport.rollouts.micro_batch import MicroBatch

ROOT = Path(__file__).resolve().parents[2]
TOY_RECIPE: dict[str, Any] = {
    "kind": "rl",
    "name": "toy",
    "model": {"name": "some/model"},
    "max_steps": 3,
    "environments": {"train": [{"id": "reverse-text"}]},
    "recovery": {"in_place": False},
}
"""Recipe of runs whose processes are scripts of a test."""
MINIMAL_RL: dict[str, Any] = {"kind": "rl", "name": "r", "model": {"name": "m"}, "max_steps": 1}
"""Keys that each recipe of kind rl needs, without its environments."""


PATIENCE_S = 600.0 * float(os.environ.get("TEST_PATIENCE") or 1)
"""Limit of each wait of a test, in seconds: a busy machine does not reach it, a hang does. $PRIMERL_TEST_PATIENCE
multiplies it (`tests.support.isolation`)."""
POLL_S = float(os.environ.get("TEST_POLL_S") or 0.05)
"""Seconds between two looks of a test ($PRIMERL_TEST_POLL_S). A test that passes with 5 s does not depend on a state
that ends by itself, which it may miss on a busy machine."""


def wait_for(
    condition: Callable[[], object], what: str = "it", tell: Callable[[], object] = lambda: ""
) -> None:
    """Wait until ``condition`` holds; ``tell`` returns the explanation for a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not (seen := condition()):
        _check_deadline(deadline, what, seen, tell)
        time.sleep(POLL_S)


async def wait_for_async(
    condition: Callable[[], object], what: str = "it", tell: Callable[[], object] = lambda: ""
) -> None:
    """As ``wait_for``, in an event loop; ``condition`` may return an awaitable."""
    deadline = time.monotonic() + PATIENCE_S
    while not (seen := await _value_of(condition())):
        _check_deadline(deadline, what, seen, tell)
        await asyncio.sleep(0.01)


async def _value_of(seen: object) -> object:
    return await seen if inspect.isawaitable(seen) else seen


def _check_deadline(deadline: float, what: str, seen: object, tell: Callable[[], object]) -> None:
    assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}; last {seen!r} {tell()}"


def is_alive(process: psutil.Process) -> bool:
    """True if this process (not a later one with its pid) still runs. A zombie has ended."""
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
    """Create ``out/model`` and ``out/sft.jsonl`` with tools/tiny-model; return ``out``."""
    options = {"task": task, "experts": experts, "rows": rows, "hidden": hidden, "layers": layers}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()):
        # in this process: as a command it would import torch and transformers each time
        runpy.run_path(str(ROOT / "tools" / "tiny-model"))["main"]([str(out), *arguments])
    return out


def small_sft(model: Path, **trainer: Any) -> Recipe:
    """Return a recipe for tests that build a policy or its trainer and read no data. ``trainer``: of its keys."""
    return parse_recipe(
        {
            "kind": "sft",
            "name": "test",
            "model": {"name": str(model)},
            "seq_len": 64,
            "max_steps": 1,
            "sft": {"data": {"path": "none.jsonl"}},
            "trainer": {"param_dtype": "float32"} | trainer,
        }
    )


def small_rl(model: Path, **changes: Any) -> Recipe:
    """Return a recipe of kind rl, as `small_sft`. ``changes``: blocks instead of its own."""
    values = {
        "kind": "rl",
        "name": "test",
        "model": {"name": str(model)},
        "seq_len": 64,
        "max_steps": 1,
        "environments": {"train": [{"id": "reverse-text"}]},
        "rollouts": {"sampling": {"max_tokens": 12}},
        "trainer": {"param_dtype": "float32"},
    }
    return parse_recipe(values | changes)


def safetensors_bytes(*names: str) -> bytes:
    """Return a file with tensors of no elements, which is complete all the same."""
    entries = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header


def unusable_model(folder: Path) -> Path:
    """Write a complete model folder without tensors, for tests of submission that start no role; return it."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text('{"model_type": "qwen3"}')
    (folder / "model.safetensors").write_bytes(safetensors_bytes())
    return folder


def unusable_sft_recipe(folder: Path) -> str:
    """Write a recipe whose model cannot be loaded, for tests of submission that start no role; return its path."""
    unusable_model(folder / "model")
    (folder / "rows.jsonl").write_text('{"prompt": "ab", "completion": "ba"}\n')
    model = {"name": str(folder / "model"), "renderer": {"name": "chatml"}}
    values = {"kind": "sft", "name": "small", "model": model, "max_steps": 3}
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml({**values, "sft": {"data": {"path": str(folder / "rows.jsonl")}}}))
    return str(path)


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
    """Write ``run_dir/plan.json`` with one phase and create the folders that the supervisor would create."""
    recipe = recipe if isinstance(recipe, Recipe) else parse_recipe(recipe)
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
    """Return the environment of a role as the supervisor sets it."""
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


def captured(
    command: Sequence[str | Path], *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; ``options`` are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


def start_role(run: RunDir, phase: str, name: str, **more: str) -> subprocess.Popen:
    """Start a role in its own session, with output in ``logs/attempt_1/<name>.log``."""
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
    """Kill the remaining processes of a role's session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run_role(run: RunDir, phase: str, name: str, **more: str) -> tuple[int, str]:
    """Run a role until it ends; return exit code and log."""
    process = start_role(run, phase, name, **more)
    try:
        code = process.wait(PATIENCE_S)
    finally:
        end_role(process)
    return code, (run.attempt_logs(1) / f"{name}.log").read_text()


def random_row(
    rng: np.random.Generator, lengths: Sequence[int], vocab_size: int = 100, num_envs: int = 1
) -> MicroBatch:
    """Return a packed row of random samples; the second half of each is sampled by a policy close to uniform."""
    import numpy as np

    from primerl_hpc.transport.rollouts.micro_batch import MicroBatch

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
