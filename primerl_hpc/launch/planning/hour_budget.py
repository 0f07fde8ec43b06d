"""A budget of GPU-hours or node-hours for all attempts of a run: ``--budget 500GPUh``.

The supervisor saves and stops the run in time (`runtime/job/walltime.py`); a run that has used its budget is not
started again. Jobs of elastic engines, and jobs that wait in the queue, do not count.
"""

from __future__ import annotations

import re
import shlex

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.launch.planning.forecast import PlanForecast
from primerl_hpc.launch.planning.screen import hours_text
from primerl_hpc.plan.types import HourBudget, Plan, load_plan
from primerl_hpc.run.ledger.attempts import used_s
from primerl_hpc.run.rundir import RunDir

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(GPUh|nodeh)", re.IGNORECASE)


def with_budget(plan: Plan, text: str | None) -> Plan:
    """Return the plan with the budget ``text``. Raises ConfigError if the text is not a budget."""
    if text is None:
        return plan
    match = _FORM.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--budget {text!r} is not a number of hours", hint="write 500GPUh or 60nodeh")
    nodes = len(plan.nodes) + plan.spare_nodes
    gpus = sum(
        len(part.nodes) * part.accelerators_per_node for part in plan.all_components if not part.is_cpu
    )
    is_gpus = match[2].lower() == "gpuh"
    if is_gpus and plan.accelerator != "gpu":
        raise ConfigError(f"--budget {text}: the run uses no GPUs", hint="write node-hours, e.g. 60nodeh")
    hours = float(match[1]) / ((gpus + plan.spare_nodes * plan.accelerators_per_node) if is_gpus else nodes)
    return plan.model_copy(update={"budget": HourBudget(text=text.strip(), job_s=3600 * hours)})


def hours_warning(plan: Plan, forecast: PlanForecast | None) -> str:
    """Return a sentence if the run may need more time than its budget allows; empty otherwise."""
    prediction = forecast.prediction if forecast is not None else None
    duration = prediction.figures.get("run.duration") if prediction is not None else None
    if plan.budget is None or duration is None or duration.high <= plan.budget.job_s:
        return ""
    verb = "needs" if duration.value > plan.budget.job_s else "may need"
    number = duration.value if verb == "needs" else duration.high
    return (
        f"the run {verb} {hours_text(number)} by the prediction, and --budget {plan.budget.text} is used up after "
        f"{hours_text(plan.budget.job_s)}: it saves and stops then, and continues with resume --budget HOURS"
    )


def check_budget(run: RunDir, plan: Plan) -> None:
    """Raise ConfigError if the run has used its budget, or was stopped by one that is not larger now."""
    if plan.budget is None:
        return
    share, earlier = used_s(run) / plan.budget.job_s, load_plan(run).budget
    was_stopped = (read_json_or_none(run.stop_request) or {}).get("reason") == "budget"
    is_not_larger = earlier is not None and plan.budget.job_s <= earlier.job_s
    if share >= 1 or (was_stopped and is_not_larger):
        more = "" if share >= 1 else ", and one more step and a save would exceed it"
        raise ConfigError(
            f"this run has used its budget of {plan.budget.text} ({share:.0%}){more}",
            location=str(run.root),
            hint=f"set a larger budget: primerl-hpc resume {shlex.quote(run.root.name)} --budget HOURS",
        )
