"""Benchmark mode: the trainer's ranks on made-up data, in a run directory that is gone afterwards.

    result = bench_recipe(loaded, profile, Kind.RL, request)    # of a recipe
    result = bench_run(run, process, phase, request)            # of a prepared run: its model, layout and environment

Ranks of one node are started here like those of a run (`roles/bench.py`, torchrun) under a guard, so that nothing outlives this
process; what they say goes to stderr. Those of several nodes are a SLURM job: `bench_job`.
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
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.launch.bench_job import measure_in_job
from primerl_hpc.launch.prepare import check_path, interpreter, package_root, runs_folder
from primerl_hpc.launch.submit import check_job_changes
from primerl_hpc.plan.bench import BenchRequest, for_bench
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.types import NodePlan, PhasePlan, Plan, ProcessPlan, load_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve_model
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.runtime.local_step import visible_accelerators
from primerl_hpc.runtime.steps import Launch


def bench_recipe(
    loaded: LoadedRecipe, profile: LoadedProfile, kind: Kind, request: BenchRequest
) -> dict[str, Any]:
    """Measure the trainer of a recipe, which has the profile's machines for itself.

    Raises ConfigError when the recipe has no trainer of this kind; else as `bench_run`.
    """
    recipe = for_bench(_of_kind(resolve_model(loaded), kind), request)
    folder = runs_folder(profile.profile).resolve()
    check_path(folder)
    work = _work_in(folder)
    plan = compile_plan(
        recipe, profile.profile, run_dir=str(work.root), python=interpreter(profile), only_trainer=True
    )
    (phase,) = plan.phases
    (process,) = phase.processes
    return _measure(work, _alone(plan, phase, process, work), request, lambda: profile)


def bench_run(
    run: RunDir, phase_name: str, process_name: str, request: BenchRequest, job_changes: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure the trainer of a prepared run as it would run there. The run's own files stay as they are.

    ``job_changes`` (``scheduler.time=60``) are for the job that measures several nodes.
    Raises RoleError with the ranks' own words, SchedulerError when SLURM refuses the job.
    """
    check_job_changes(job_changes)
    plan = load_plan(run)
    phase = plan.phase(phase_name)
    is_there = Path(phase.model_path).is_dir()  # not yet, where a warm-up is to make it
    changes = {
        "recipe": for_bench(phase.recipe, request),
        "model_path": phase.model_path if is_there else phase.recipe.model.name,
    }
    work = _work_in(run.root)
    alone = _alone(plan, phase.model_copy(update=changes), phase.process(process_name), work)
    return _measure(
        work, alone, request, lambda: load_profile(str(run.profile), overrides=job_changes, environ={})
    )


def _work_in(folder: Path) -> RunDir:
    """Of this process alone, also where login nodes share the folder."""
    return RunDir(folder / f".bench-{platform.node()}-{os.getpid()}")


def _alone(plan: Plan, phase: PhasePlan, process: ProcessPlan, work: RunDir) -> Plan:
    """The plan of a run whose one process is this trainer, on as many nodes as it takes, with ranks that measure."""
    # behind its interpreter, which may be in a container: module, run directory, phase, name
    argv = (*process.argv[:-4], "primerl_hpc.roles.bench", str(work.root), phase.name, process.name)
    nodes = tuple(range(len(process.nodes)))
    alone = process.model_copy(update={"argv": argv, "nodes": nodes})
    changes = {
        "name": f"{plan.name}-bench",
        "run_dir": str(work.root),
        "phases": (phase.model_copy(update={"processes": (alone,), "elastic": ()}),),
        "nodes": tuple(NodePlan(index=node, roles=(process.name,)) for node in nodes),
        "spare_nodes": 0,
    }
    return plan.model_copy(update=changes)


def _of_kind(recipe: Recipe, kind: Kind) -> Recipe:
    if recipe.kind == Kind.RL and kind == Kind.SFT and recipe.warmup is not None:
        return recipe.for_warmup()
    if recipe.kind != kind:
        other = {Kind.RL: "trainer", Kind.SFT: "sft"}.get(recipe.kind)
        mend = f"primerl-hpc {other} --bench measures it" if other else "bench a recipe of kind rl or sft"
        raise ConfigError(f"a recipe of kind {recipe.kind} has no {kind} trainer", mend=mend)
    return recipe


def _measure(
    work: RunDir, plan: Plan, request: BenchRequest, profile: Callable[[], LoadedProfile]
) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and clean up on the way
    with _folders(work):
        write_json(work.plan, plan.model_dump(mode="json"))
        write_json(work.bench_request, request.model_dump(mode="json"))
        if len(plan.nodes) > 1:
            measure_in_job(work, plan, profile())
        else:
            _measure_here(work, plan.phases[0], has_gpus=plan.accelerator == "gpu")
        return read_json(work.bench_result)


@contextlib.contextmanager
def _folders(work: RunDir) -> Iterator[None]:
    parent = work.root.parent
    was_there = parent.exists()
    work.root.mkdir(parents=True)
    try:
        for folder in (work.control, work.attempt_logs(1), work.root / "metrics"):
            folder.mkdir(parents=True)
        yield
    finally:
        shutil.rmtree(work.root, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):  # somebody else's runs are in it by now
                parent.rmdir()


def _measure_here(work: RunDir, phase: PhasePlan, *, has_gpus: bool) -> None:
    (process,) = phase.processes
    launch = Launch(process, work, phase.name, 1, 0)
    paths = [package_root(), os.environ.get("PYTHONPATH")]
    visible = visible_accelerators(launch, has_gpus=has_gpus)
    environment = {**os.environ, **visible, **launch.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    code = _run_guarded(process.argv, environment)
    if code != ExitCode.DONE:
        raise _fault(work, process.name, code)


def _run_guarded(argv: tuple[str, ...], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "primerl_hpc.runtime.guard", "--", *argv]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment) as guard:
        try:
            return guard.wait()
        except BaseException:
            guard.send_signal(signal.SIGTERM)
            guard.wait()
            raise


def _fault(work: RunDir, process: str, code: int) -> RoleError:
    """What the ranks said last; torchrun's own exit code says only 0 or 1."""
    said = read_json_or_none(work.error(process)) or {}
    error = RoleError(said.get("message", f"{process} ended with exit code {code}; what it said is above"))
    error.exit_code = ExitCode(said.get("exit_code", ExitCode.FAILED))
    return error
