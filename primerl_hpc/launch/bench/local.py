"""Benchmark mode: the trainer's ranks on synthetic data, in a temporary run directory.

    result = bench_recipe(loaded, profile, Kind.RL, request)    # of a recipe
    result = bench_run(run, process, phase, request)            # of a prepared run: its model, layout and environment

On one node the ranks are started here like those of a run (`roles/bench.py`, torchrun), under a guard, so that they do
not outlive this process; their output goes to stderr. On several nodes they run as a SLURM job: `job.py`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.common.errors import ConfigError, ExitCode, RoleError
from primerl_hpc.common.files import read_json, read_json_or_none, write_json
from primerl_hpc.common.names import Kind
from primerl_hpc.common.package import with_package
from primerl_hpc.launch.bench.job import measure_in_job
from primerl_hpc.launch.compose import check_path
from primerl_hpc.launch.submit import check_job_changes
from primerl_hpc.plan.bench_plans import BenchRequest, for_bench
from primerl_hpc.plan.plan import NodePlan, PhasePlan, Plan, ProcessPlan, load_plan, with_interpreter
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve_model
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.local import visible_accelerators


def bench_recipe(
    loaded: LoadedRecipe, profile: LoadedProfile, kind: Kind, request: BenchRequest
) -> dict[str, Any]:
    """Measure the trainer of a recipe, with all machines of the profile.

    Raises ConfigError if the recipe has no trainer of this kind; otherwise like `bench_run`.
    """
    recipe = for_bench(_of_kind(resolve_model(loaded), kind), request)
    folder = profile.profile.runs_folder().resolve()
    check_path(folder)
    work = bench_folder(folder)
    plan = compile_plan(
        recipe,
        profile.profile,
        run_dir=str(work.root),
        python=profile.profile.software.python_here,
        only_trainer=True,
    )
    (phase,) = plan.phases
    (process,) = phase.processes
    return _measure(work, _only_trainer(plan, phase, process, work), request, lambda: profile)


def bench_run(
    run: RunDir, phase_name: str, process_name: str, request: BenchRequest, job_changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure the trainer of a prepared run with its layout. The run's own files are not changed.

    ``job_changes`` (``scheduler.time=60``) apply to the job that measures several nodes. Raises RoleError with the
    ranks' error, SchedulerError if SLURM refuses the job.
    """
    check_job_changes(job_changes)
    plan = with_interpreter(load_plan(run), sys.executable).model_copy(update={"bundle": None})
    phase = plan.phase(phase_name)
    is_there = Path(phase.model_path).is_dir()  # False before a warm-up has created it
    changes = {
        "recipe": for_bench(phase.recipe, request),
        "model_path": phase.model_path if is_there else phase.recipe.model.name,
    }
    work = bench_folder(run.root)
    changed = phase.model_copy(update=changes)
    plan = _only_trainer(plan, changed, phase.process(process_name), work)
    return _measure(
        work, plan, request, lambda: load_profile(str(run.profile), overrides=job_changes, environ={})
    )


def bench_folder(folder: Path) -> RunDir:
    """Return a run directory for this process only, also if several login nodes share the folder."""
    return RunDir(folder / f".bench-{platform.node()}-{os.getpid()}")


def _only_trainer(plan: Plan, phase: PhasePlan, process: ProcessPlan, work: RunDir) -> Plan:
    """Return the plan of a run with this trainer as its only process, on its nodes, with ranks that measure."""
    # the last four arguments follow its interpreter, which may be in a container: module, run directory, phase, name
    argv = (*process.argv[:-4], "primerl_hpc.roles.bench", str(work.root), phase.name, process.name)
    nodes = tuple(range(len(process.nodes)))
    trainer = process.model_copy(update={"argv": argv, "nodes": nodes})
    changes = {
        "name": f"{plan.name}-bench",
        "run_dir": str(work.root),
        "phases": (phase.model_copy(update={"processes": (trainer,), "elastic": ()}),),
        "nodes": tuple(NodePlan(index=node, roles=(process.name,)) for node in nodes),
        "components": tuple(
            component.model_copy(update={"nodes": nodes, "spare_nodes": 0})
            for component in plan.components
            if set(process.nodes) <= set(component.nodes)
        ),
        "spare_nodes": 0,
    }
    return plan.model_copy(update=changes)


def _of_kind(recipe: Recipe, kind: Kind) -> Recipe:
    if recipe.kind == Kind.RL and kind == Kind.SFT and recipe.warmup is not None:
        return recipe.for_warmup()
    if recipe.kind != kind:
        other = {Kind.RL: "trainer", Kind.SFT: "sft"}.get(recipe.kind)
        hint = f"use primerl-hpc bench {other}" if other else "use a recipe of kind rl or sft"
        raise ConfigError(f"a recipe of kind {recipe.kind} has no {kind} trainer", hint=hint)
    return recipe


def _measure(
    work: RunDir, plan: Plan, request: BenchRequest, profile: Callable[[], LoadedProfile]
) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the folders are removed
    with folders_of(work):
        write_json(work.plan, plan.model_dump(mode="json"))
        write_json(work.bench_request, request.model_dump(mode="json"))
        if len(plan.nodes) > 1:
            measure_in_job(work, plan, profile())
        else:
            _measure_here(work, plan.phases[0], has_gpus=plan.accelerator == "gpu")
        return read_json(work.bench_result)


@contextlib.contextmanager
def folders_of(work: RunDir) -> Iterator[None]:
    """Create the folders of a run directory; remove it at the end."""
    parent = work.root.parent
    existed = parent.exists()
    work.root.mkdir(parents=True)
    try:
        for folder in (work.control, work.attempt_logs(1), work.root / "metrics"):
            folder.mkdir(parents=True)
        yield
    finally:
        shutil.rmtree(work.root, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):  # another process created a run in it
                parent.rmdir()


def _measure_here(work: RunDir, phase: PhasePlan, *, has_gpus: bool) -> None:
    (process,) = phase.processes
    launch = Launch(process, work, phase.name, 1, 0)
    visible = visible_accelerators(launch, has_gpus=has_gpus)
    environment = with_package({**os.environ, **visible, **launch.environment})
    code = _run_guarded(process.argv, environment)
    if code != ExitCode.DONE:
        raise _fault(work, process.name, code)


def _run_guarded(argv: tuple[str, ...], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--", *argv]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment) as guard:
        try:
            return guard.wait()
        except BaseException:
            guard.send_signal(signal.SIGTERM)
            guard.wait()
            raise


def _fault(work: RunDir, process: str, code: int) -> RoleError:
    """Return the ranks' last error; torchrun's own exit code is only 0 or 1."""
    report = read_json_or_none(work.error(process)) or {}
    error = RoleError(report.get("message", f"{process} exited with code {code}; see its output above"))
    error.exit_code = ExitCode(report.get("exit_code", ExitCode.FAILED))
    return error
