"""What comes after a run: an export and an evaluation, in jobs of their own that start when the run is done.

Under SLURM each waits with ``afterok`` for the run's job (for any link of a chain: one of them finishes the run) and
vanishes when the run fails. A run that goes back into the queue has not ended, so they go on waiting. On one machine
they run one after another behind it.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile, change_profile
from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.common.registry import register_run
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.yamldoc import Document
from primerl_hpc.launch.chain import JobsTogether
from primerl_hpc.launch.export import check_target, is_exported
from primerl_hpc.launch.prepare import (
    claim_run_dir,
    freeze,
    interpreter,
    job_script,
    make_engines_script,
    make_script,
    package_root,
)
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.types import Plan
from primerl_hpc.recipe.after_schema import After
from primerl_hpc.recipe.evaluation_schema import Evaluation
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.render.job import render_export


def after_of(plan: Plan) -> After:
    """What the recipe wants after the run; an empty block when it says nothing."""
    return plan.phases[-1].recipe.after or After()


def export_script(run: RunDir) -> Path:
    return run.launch / "export.sbatch"


def check_after(plan: Plan, profile: LoadedProfile) -> None:
    """Raises ConfigError or OccupiedError for what could only fail after hours of training."""
    after = after_of(plan)
    if after.export is not None:
        change_profile(profile, after.export.profile, "after.export.profile")
        check_target(Path(after.export.to), option="after.export.to")
    if after.evaluation is not None:
        _evaluation(RunDir(Path("/checked/before/anything/is/made")), plan, profile)


def make_scripts(plan: Plan, profile: LoadedProfile) -> dict[str, str]:
    """Every script that is submitted with a run, by its name: its own, its elastic engines', its export's.

    Raises ConfigError.
    """
    scripts = {"job.sbatch": make_script(plan, profile)}
    if plan.num_elastic:
        scripts["engines.sbatch"] = make_engines_script(plan, profile)
    if after_of(plan).export is not None:
        scripts["export.sbatch"] = make_export_script(plan, profile)
    return scripts


def make_export_script(plan: Plan, profile: LoadedProfile) -> str:
    export = after_of(plan).export
    assert export is not None
    theirs = change_profile(profile, export.profile, "after.export.profile")
    return render_export(plan, theirs.profile, python=interpreter(theirs), package_root=package_root())


def prepare_after(run: RunDir, plan: Plan, profile: LoadedProfile) -> None:
    """Write the export's script, and a frozen run directory for the evaluation."""
    after = after_of(plan)
    if after.export is not None:
        write_text(export_script(run), make_export_script(plan, profile), mode=0o755)
    if after.evaluation is not None:
        recipe, theirs, their_plan = _evaluation(run, plan, profile)
        made = claim_run_dir(recipe.name, theirs, run.evaluation.root)
        values = recipe.model_dump(mode="json", exclude_defaults=True)
        loaded = LoadedRecipe(recipe, Document(values), run.recipe)
        try:
            freeze(made, loaded, theirs, their_plan, make_script(their_plan, theirs))
        except BaseException:
            shutil.rmtree(made.root, ignore_errors=True)
            raise
        register_run(made)


def _evaluation(run: RunDir, plan: Plan, profile: LoadedProfile) -> tuple[Any, LoadedProfile, Plan]:
    phase = plan.phase(MAIN_PHASE)
    recipe = phase.recipe
    assert recipe.after is not None and recipe.after.evaluation is not None
    asked = recipe.after.evaluation
    steps = (recipe.steps,) if asked.steps == "last" else asked.steps
    evaluation = recipe.for_evaluation(
        Evaluation(weights=str(run.weights), steps=steps, base=asked.base),
        model_path=phase.model_path,
        environments=asked.environments,
        replicas=asked.replicas,
    )
    theirs = change_profile(profile, asked.profile, "after.evaluation.profile")
    root = str(run.evaluation.root)
    return (
        evaluation,
        theirs,
        compile_plan(evaluation, theirs.profile, run_dir=root, python=interpreter(theirs)),
    )


def discard_after(run: RunDir, plan: Plan) -> None:
    """What `prepare_after` made for a run whose submission was refused."""
    if after_of(plan).evaluation is not None:
        shutil.rmtree(run.evaluation.root, ignore_errors=True)


def queue_after(run: RunDir, plan: Plan, jobs: JobsTogether, links: Sequence[str]) -> dict[str, Any]:
    """Queue what comes after ``links``; the content of ``after`` in control/job.json."""
    after, found = after_of(plan), {}
    options = (
        "--dependency=" + "?".join(f"afterok:{link}" for link in links),
        "--kill-on-invalid-dep=yes",
    )
    if after.export is not None and not is_exported(Path(after.export.to)):
        job = jobs.submit(run, export_script(run), *options)
        found["export"] = {"job_id": job, "to": after.export.to}
    if after.evaluation is not None:
        job = jobs.submit(run.evaluation, job_script(run.evaluation), *options)
        found["evaluation"] = {"job_id": job, "run_dir": str(run.evaluation.root)}
        _note_evaluation(run, {"scheduler": "slurm", "job_id": job})
    return found


def local_script(run: RunDir, plan: Plan) -> Path:
    """The run and what comes after it as one script for one machine; the run's own script when nothing does."""
    after = after_of(plan)
    rest = [export_script(run)] if after.export is not None else []
    rest += [job_script(run.evaluation)] if after.evaluation is not None else []
    if not rest:
        return job_script(run)
    path = run.launch / "all.sh"
    lines = [f"bash {shlex.quote(str(script))}" for script in (job_script(run), *rest)]
    text = "\n".join(
        ["#!/bin/bash", "# The run, then what comes after it.", f"{lines[0]} || exit", *lines[1:]]
    )
    write_text(path, text + "\n", mode=0o755)
    return path


def note_local_after(run: RunDir, plan: Plan, job: dict[str, Any]) -> dict[str, Any]:
    """As `queue_after`, for jobs that stand in one script with the run."""
    after, found = after_of(plan), {}
    if after.export is not None:
        found["export"] = {"job_id": job["job_id"], "to": after.export.to}
    if after.evaluation is not None:
        found["evaluation"] = {"job_id": job["job_id"], "run_dir": str(run.evaluation.root)}
        _note_evaluation(run, job)
    return found


def _note_evaluation(run: RunDir, job: dict[str, Any]) -> None:
    attempt = int((read_json_or_none(run.evaluation.state) or {}).get("attempt", 0)) + 1
    facts = {"attempt": attempt, "parent": str(run.root), "submitted": round(time.time(), 3)}
    write_json(run.evaluation.job, {**job, **facts})
