"""Benchmarks of engines, of the orchestrator, and of the complete loop: a run with the regular supervisor and roles.

    bench_engines(target, LoadRequest(...))    # engines and router under load
    bench_loop(target, LoopRequest(...))       # rollouts without a trainer, or the complete loop

The run has a temporary directory and a recipe without checkpoints. Outside of SLURM the supervisor runs under a guard,
so that no process outlives this one; with SLURM it is a job that ends with this process (`job.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.block import Block
from primerl_hpc.common.errors import ConfigError, ExitCode, RoleError
from primerl_hpc.common.files import is_there, read_json, write_json
from primerl_hpc.common.package import with_package
from primerl_hpc.common.waiting import Polling
from primerl_hpc.launch.bench.job import RESULT_S, reported_failure, run_job, write_scripts
from primerl_hpc.launch.bench.local import bench_folder, folders_of
from primerl_hpc.launch.bench.loop_rates import loop_rates
from primerl_hpc.launch.bench.target import BenchTarget
from primerl_hpc.launch.compose import check_path
from primerl_hpc.observe.follow import POLL_S, RunFollower
from primerl_hpc.plan.bench_plans import (
    LoadRequest,
    LoopRequest,
    for_load,
    for_loop,
    longest_of,
    with_idle_trainer,
    with_load,
)
from primerl_hpc.plan.plan import Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.schema.cross_checks import check_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import CANCEL, RunDir

LAST_LINES = 20
"""Lines of the supervisor's log that are printed if it records no failure."""
ENDING_S = 60.0
"""Time for the supervisor to end its processes; then its guard kills them."""


def bench_engines(target: BenchTarget, request: LoadRequest) -> dict[str, Any]:
    """Measure the engines of a recipe at the requested levels of load.

    Raises ConfigError if it has no engines or a request does not fit into their context, RoleError if they fail.
    """
    recipe = target.resolved(for_load(target.loaded.recipe))
    tokens = longest_of(request.prompt_tokens) + longest_of(request.output_tokens)
    if tokens > recipe.max_model_len:
        raise ConfigError(
            f"requests of up to {tokens} tokens do not fit into inference.max_model_len {recipe.max_model_len}",
            hint="reduce --prompt-tokens or --output-tokens, or raise the key",
        )
    work, plan = _plan(target, recipe)
    with folders_of(work):
        _run(work, with_load(plan), target.profile, request, lambda: is_there(work.bench_result))
        return _facts(plan, request) | read_json(work.bench_result)


def bench_loop(target: BenchTarget, request: LoopRequest) -> dict[str, Any]:
    """Measure the steps of a recipe of kind rl; without a trainer, its batches.

    Raises ConfigError if the recipe has no such loop, RoleError if a role fails.
    """
    recipe = target.resolved(for_loop(target.loaded.recipe, request))
    check_recipe(recipe)
    work, plan = _plan(target, recipe)
    plan = plan if request.has_trainer else with_idle_trainer(plan)
    last = request.num_steps
    roles = ("orchestrator", "trainer") if request.has_trainer else ("orchestrator",)

    def is_measured() -> bool:
        return all(last in read_steps(work.metrics(role)) for role in roles)

    with folders_of(work):
        _run(work, plan, target.profile, request, is_measured)
        rows = {role: read_steps(work.metrics(role)) for role in roles}
    rates = loop_rates(rows["orchestrator"], rows.get("trainer", {}), warmup=request.warmup, last=last)
    return _facts(plan, request) | rates


def _plan(target: BenchTarget, recipe: Recipe) -> tuple[RunDir, Plan]:
    """Return a run directory for this process only, and the plan of a run in it."""
    folder = target.folder.resolve()
    check_path(folder)
    work = bench_folder(folder)
    profile = target.profile
    plan = compile_plan(
        recipe, profile.profile, run_dir=str(work.root), python=profile.profile.software.python_here
    )
    return work, plan.model_copy(update={"name": f"{recipe.name}-bench"})


def _facts(plan: Plan, request: Block) -> dict[str, Any]:
    (phase,) = plan.phases
    return {
        "model": phase.recipe.model.name,
        "profile": plan.profile_name,
        "accelerator": plan.accelerator,
        "nodes": len(plan.nodes),
        "layout": phase.recipe.layout.model_dump(mode="json"),
        "request": request.model_dump(mode="json"),
    }


def _run(
    work: RunDir, plan: Plan, profile: LoadedProfile, request: Block, is_measured: Callable[[], bool]
) -> None:
    """Run the plan until ``is_measured()``. Raises RoleError if it ends before."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the folders are removed
    write_json(work.plan, plan.model_dump(mode="json"))
    write_json(work.bench_request, request.model_dump(mode="json"))
    if plan.scheduler == "slurm":
        run_job(work, plan, profile, is_measured)
    else:
        _run_here(work, plan, profile, is_measured)
    for _ in Polling(
        RESULT_S if plan.scheduler == "slurm" else 0, POLL_S
    ):  # a file of a node becomes visible later
        if is_measured():
            return
    raise RoleError("the run ended without a result; see its output above")


def _run_here(work: RunDir, plan: Plan, profile: LoadedProfile, is_measured: Callable[[], bool]) -> None:
    """Run the supervisor on this machine until ``is_measured()``. Raises RoleError if it fails."""
    write_scripts(work, plan, profile)
    guard = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--grace", "15"]
    follower, output = RunFollower(work, to_stderr=True), work.root / "supervisor.log"
    # a session of its own: ^C reaches this process only, which ends the run in order
    with (
        output.open("wb") as log,
        subprocess.Popen(
            [*guard, "--", "bash", str(work.job_script)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=with_package(os.environ),
            start_new_session=True,
        ) as process,
    ):
        try:
            while process.poll() is None and not is_measured():
                follower.poll()
                time.sleep(POLL_S)
        finally:
            _end_here(work, process)
    if is_measured():
        return
    error = reported_failure(work)
    if error is None:
        print(*output.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
        error = RoleError(f"the run ended with exit code {process.returncode}; see its output above")
    if error.exit_code == ExitCode.FAILED and process.returncode in set(ExitCode) - {ExitCode.DONE}:
        error.exit_code = ExitCode(process.returncode)
    raise error


def _end_here(work: RunDir, process: subprocess.Popen[bytes]) -> None:
    """End the supervisor; after `ENDING_S` its guard kills what is left."""
    if process.poll() is not None:
        return
    write_json(work.stop_request, {"reason": CANCEL, "now": True})
    try:
        process.wait(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
