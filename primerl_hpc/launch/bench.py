"""Benchmark mode: the trainer's ranks on this machine, on made-up data, in a run directory that is gone afterwards.

    result = bench_recipe(loaded, profile, Kind.RL, request)    # of a recipe
    result = bench_run(run, process, phase, request)            # of a prepared run: its model, layout and environment

The ranks are started like those of a run (`roles/bench.py`, torchrun) under a guard, so that nothing outlives this process.
What they say goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.errors import ConfigError, ExitCode, RoleError
from primerl_hpc.common.files import read_json, read_json_or_none, write_json
from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.launch.prepare import check_path, interpreter, package_root, runs_folder
from primerl_hpc.plan.bench import BenchRequest, for_bench
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.types import Plan, load_plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve_model
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.runtime.local_step import visible_accelerators
from primerl_hpc.runtime.steps import Launch


def bench_recipe(
    loaded: LoadedRecipe, profile: LoadedProfile, kind: Kind, request: BenchRequest
) -> dict[str, Any]:
    """Measure the trainer of a recipe, which has the profile's machine for itself.

    Raises ConfigError when the recipe has no trainer of this kind.
    """
    recipe = for_bench(_of_kind(resolve_model(loaded), kind), request)
    folder = runs_folder(profile.profile).resolve()
    check_path(folder)
    work = RunDir(folder / f".bench-{os.getpid()}")
    plan = compile_plan(
        recipe, profile.profile, run_dir=str(work.root), python=interpreter(profile), only_trainer=True
    )
    return _measure(work, plan, request)


def bench_run(run: RunDir, phase_name: str, process_name: str, request: BenchRequest) -> dict[str, Any]:
    """Measure the trainer of a prepared run as it would run there. The run's own files stay as they are."""
    plan = load_plan(run)
    phase = plan.phase(phase_name)
    process = phase.process(process_name)
    is_there = Path(phase.model_path).is_dir()  # not yet, where a warm-up is to make it
    alone = phase.model_copy(
        update={
            "recipe": for_bench(phase.recipe, request),
            "model_path": phase.model_path if is_there else phase.recipe.model.name,
            "processes": (process,),
            "elastic": (),
        }
    )
    work = RunDir(run.root / f".bench-{os.getpid()}")
    return _measure(work, plan.model_copy(update={"phases": (alone,), "run_dir": str(work.root)}), request)


def _of_kind(recipe: Recipe, kind: Kind) -> Recipe:
    if recipe.kind == Kind.RL and kind == Kind.SFT and recipe.warmup is not None:
        return recipe.for_warmup()
    if recipe.kind != kind:
        other = {Kind.RL: "trainer", Kind.SFT: "sft"}.get(recipe.kind)
        mend = f"primerl-hpc {other} --bench measures it" if other else "bench a recipe of kind rl or sft"
        raise ConfigError(f"a recipe of kind {recipe.kind} has no {kind} trainer", mend=mend)
    return recipe


def _measure(work: RunDir, plan: Plan, request: BenchRequest) -> dict[str, Any]:
    (phase,) = plan.phases
    (process,) = phase.processes
    if len(process.nodes) > 1:
        raise ConfigError(
            f"the trainer has {len(process.nodes)} nodes, and benchmark mode starts ranks on one machine",
            mend="lower layout.trainer.ranks or nodes, e.g. --set layout.trainer.nodes=1",
        )
    parent = work.root.parent
    was_there = parent.exists()
    try:
        for folder in (work.control, work.attempt_logs(1), work.root / "metrics"):
            folder.mkdir(parents=True)
        write_json(work.plan, plan.model_dump(mode="json"))
        write_json(work.bench_request, request.model_dump(mode="json"))
        launch = Launch(process, work, phase.name, 1, 0)
        # behind its interpreter, which may be in a container: module, run directory, phase, name
        argv = (*process.argv[:-4], "primerl_hpc.roles.bench", str(work.root), phase.name, process.name)
        paths = [package_root(), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, **visible_accelerators(launch), **launch.environment}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        code = _run_guarded(argv, environment)
        if code != ExitCode.DONE:
            raise _fault(work, process.name, code)
        return read_json(work.bench_result)
    finally:
        shutil.rmtree(work.root, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):  # somebody else's runs are in it by now
                parent.rmdir()


def _run_guarded(argv: tuple[str, ...], environment: dict[str, str]) -> int:
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and clean up on the way
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
