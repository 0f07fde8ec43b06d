"""A budget of GPU-hours or node-hours for all attempts of a run: ``--budget 500GPUh``.

The supervisor saves and stops the run in time (`runtime/job/walltime.py`); a run that its budget has stopped is not
started again with the same one. GPUs count as in `status`: all that SLURM allocates to the job. Jobs of elastic
engines, and jobs that wait in the queue, do not count.
"""

from __future__ import annotations

import re

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.launch.planning.forecast import PlanForecast
from primerl_hpc.launch.planning.screen import hours_text
from primerl_hpc.plan.plan import HourBudget, Plan
from primerl_hpc.run.ledger.attempts import BudgetStop, budget_stop, used_s
from primerl_hpc.run.registry import word_for
from primerl_hpc.run.rundir import RunDir

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(GPUh|nodeh)", re.IGNORECASE)


def with_budget(plan: Plan, text: str | None) -> Plan:
    """Return the plan with the budget ``text``. Raises ConfigError if the text is not a budget."""
    if text is None:
        return plan
    match = _FORM.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--budget {text!r} is not a number of hours", hint="write 500GPUh or 60nodeh")
    is_gpus = match[2].lower() == "gpuh"
    if is_gpus and not plan.allocated_gpus:
        raise ConfigError(f"--budget {text}: the run has no GPUs", hint="write node-hours, e.g. 60nodeh")
    hours = float(match[1]) / (plan.allocated_gpus if is_gpus else plan.allocated_nodes)
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


def check_new_budget(plan: Plan) -> None:
    """Raise ConfigError if the budget of a new run ends before its first step."""
    if plan.budget is not None and (why := why_too_small(plan.budget, 0.0, plan.signal_margin_s or 0, None)):
        raise ConfigError(f"--budget {plan.budget.text} {why}", hint="set a larger budget")


def check_budget(run: RunDir, plan: Plan) -> None:
    """Raise ConfigError if the run cannot continue within its budget."""
    if plan.budget is None:
        return
    why = why_too_small(plan.budget, used_s(run), plan.signal_margin_s or 0, budget_stop(run))
    if why is not None:
        raise ConfigError(
            f"the budget of this run, {plan.budget.text}, {why}",
            location=str(run.root),
            hint=f"set a larger budget: primerl-hpc resume {word_for(run)} --budget HOURS",
        )


def why_too_small(budget: HourBudget, used: float, margin_s: float, stop: BudgetStop | None) -> str | None:
    """Return why an attempt would stop before its first step; None if the budget suffices for one. Pure.

    ``used``: seconds of the attempts so far. ``margin_s``: how long before its end an attempt must begin to save.
    ``stop``: the last stop of the run, if the budget was its reason.
    """
    share, left_s = used / budget.job_s, budget.job_s - used
    if share >= 1:
        return f"is used ({share:.0%})"
    if stop is not None and budget.job_s <= stop.budget_s:
        return f"has stopped it ({share:.0%} are used, and one more step and a save would exceed it)"
    need_s = max(margin_s, stop.need_s if stop is not None else 0.0)
    if left_s > need_s:
        return None
    what = "one more step and its save need" if need_s > margin_s else "the save before its end needs"
    more_than = f"it must be more than {_scaled(budget, used + need_s)}"
    return f"leaves {_scaled(budget, left_s)}, and {what} {_scaled(budget, need_s)}: {more_than}"


def _scaled(budget: HourBudget, seconds: float) -> str:
    """Return the hours of ``seconds`` of the job in the unit of the budget."""
    match = _FORM.fullmatch(budget.text)
    assert match is not None
    return f"{float(match[1]) * seconds / budget.job_s:.3g}{match[2]}"
