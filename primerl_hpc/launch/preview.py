"""A run before it exists: plan, forecast, what `submit` would refuse, and when SLURM could start it."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.errors import PrimerlError, SchedulerError
from primerl_hpc.common.log import show_warnings
from primerl_hpc.common.package import package_root
from primerl_hpc.launch.checklist import Candidate, findings
from primerl_hpc.launch.compose import make_script, plan_run
from primerl_hpc.launch.planning.forecast import MeasuredLengths, PlanForecast
from primerl_hpc.plan.plan import Plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.render.lint import warnings_of
from primerl_hpc.slurm.budget import Budget, gpu_budget
from primerl_hpc.slurm.estimate import estimate_start
from primerl_hpc.slurm.sbatch import UnansweredError

ESTIMATE_TIMEOUT_S = 5.0
"""Seconds to wait for SLURM's estimate of the start time."""


def preview(
    loaded: LoadedRecipe, profile: LoadedProfile, measured: MeasuredLengths | None = None
) -> tuple[Plan, PlanForecast, list[str]]:
    """Return the plan, its forecast, and what `submit` would refuse as warnings, which are also printed to stderr.

    A missing model or dataset is a warning, because it does not change what runs where.
    """
    faults: list[PrimerlError] = []
    planned = plan_run(loaded, profile, missing=faults, measured=measured)
    uncertain: list[str] = []
    for name in ("software", "model", "memory", "environments", "models and data"):
        try:
            uncertain += findings(name, Candidate(planned))
        except PrimerlError as error:
            faults.append(error)
    warnings = [f"{fault} (submit refuses this)" for fault in dict.fromkeys(map(str, faults))]
    warnings += [*uncertain, *planned.forecast.warnings]
    show_warnings(warnings)
    return planned.plan, planned.forecast, warnings


def estimate_start_of(plan: Plan, profile: LoadedProfile) -> dict[str, Any] | None:
    """Return when SLURM would start the job, why it would refuse it, or why the start is ``unknown``.

    Returns None if the profile does not use SLURM.
    """
    if plan.scheduler != "slurm":
        return None
    if shutil.which("sbatch") is None:
        return {"unknown": "sbatch is not on this machine"}
    try:
        script = make_script(plan, profile, package_root())
        show_warnings(warnings_of(script))
        return dataclasses.asdict(estimate_start(script, timeout_s=ESTIMATE_TIMEOUT_S))
    except UnansweredError as error:
        return {"unknown": error.cause}
    except SchedulerError as error:
        return {"refused": error.cause, "hint": error.hint, "details": error.details}


def budget_of(plan: Plan, profile: LoadedProfile) -> Budget | None:
    """Return the GPU-hours that the account of the profile has left; None if that is unknown."""
    if plan.scheduler != "slurm":
        return None
    return gpu_budget(profile.profile.scheduler.charged_account, timeout_s=ESTIMATE_TIMEOUT_S)


def budget_json(budget: Budget | None) -> dict[str, Any] | None:
    if budget is None:
        return None
    return {**dataclasses.asdict(budget), "remaining_hours": budget.remaining_hours}


def describe_estimate(estimate: dict[str, Any]) -> str:
    if "unknown" in estimate:
        return f"no estimate of the start: {estimate['unknown']}"
    if "refused" in estimate:
        sentence = "; ".join(filter(None, (estimate["refused"], estimate["hint"])))
        return "\n".join(filter(None, (sentence, estimate["details"])))
    return (
        f"could start {estimate['start'].replace('T', ' ')} on {estimate['nodes']} of {estimate['partition']}"
    )
