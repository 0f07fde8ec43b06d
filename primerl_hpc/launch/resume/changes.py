"""Change keys of a run's recipe at a resume: those that its later steps can take over without contradiction.

    change_recipe(run, ["max_steps=400", "optimizer.lr=5e-7"], 200, hint="…")    # ["learning rate at step 201: …"]

The plan of the next attempt has the new values; provenance.json records every change with its time and first step. The
frozen recipe.yaml stays as it was submitted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from primerl_hpc.checks.recipe.metric_keys import check_metric_keys
from primerl_hpc.common.document import Document, with_dots
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.recipe.load import validate_recipe, with_overrides
from primerl_hpc.recipe.schedules import lr_factor
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import Constant
from primerl_hpc.run.rundir import RunDir

CHANGEABLE = (
    "max_steps",
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.max_norm",
    "scheduler",
    "stop_when",
    "weights.keep_best",
    "checkpoint.interval",
    "checkpoint.keep_last",
    "checkpoint.keep_interval",
    "checkpoint.accept_changed_data",
    "log",
)
"""Keys that `change_recipe` accepts, each with the keys below it."""


def is_changeable(key: str) -> bool:
    """True if `change_recipe` accepts the key."""
    return any(key == known or key.startswith(f"{known}.") for known in CHANGEABLE)


def change_recipe(run: RunDir, changes: Sequence[str], step: int, *, hint: str) -> list[str]:
    """Write ``changes`` (``key=value``) to the run's plan; return lines about the learning rate.

    ``step``: the run continues after it. The run must not be running. ``hint``: how to train with other settings.

    Raises ConfigError for another key, an invalid value, or a ``max_steps`` that is not after ``step``.
    """
    plan = load_plan(run)
    phase = plan.phase(MAIN_PHASE)
    before = phase.recipe
    document = Document(before.model_dump(mode="json"), {"": str(run.plan)})
    for text in changes:
        key = with_dots(text.partition("=")[0])
        if not is_changeable(key):
            validate_recipe(with_overrides(document, [text]))  # a misspelled key has an error of its own
            raise ConfigError(
                f"{key} cannot change at a resume",
                hint=f"these keys can: {', '.join(CHANGEABLE)}; for other settings, {hint}",
            )
    after = validate_recipe(with_overrides(document, changes))
    check_metric_keys(after)
    if after.max_steps is not None and after.max_steps <= step:
        raise ConfigError(
            f"max_steps={after.max_steps}: the run continues after step {step}",
            hint="choose a higher number, or return to an earlier step with --step",
        )
    changed = phase.model_copy(update={"recipe": after})
    plan = plan.model_copy(
        update={"phases": tuple(changed if entry is phase else entry for entry in plan.phases)}
    )
    provenance = read_json_or_none(run.provenance) or {}
    entry = {"time": round(time.time(), 3), "after_step": step, "set": list(changes)}
    write_json(run.provenance, {**provenance, "changes": [*provenance.get("changes", ()), entry]})
    write_json(run.plan, plan.model_dump(mode="json"))
    return _rate_lines(before, after, step + 1)


def _rate_lines(before: Recipe, after: Recipe, step: int) -> list[str]:
    """Return a line about the learning rate at ``step`` if a changed key moves it."""
    if before.max_steps is None or after.max_steps is None:
        return []
    old, new = _rate(before, min(step, before.max_steps)), _rate(after, step)
    if old == new:
        return []
    depends = before.max_steps != after.max_steps and not isinstance(after.scheduler, Constant)
    reason = f": the schedule '{after.scheduler.type}' depends on max_steps" if depends else ""
    return [f"learning rate at step {step}: {old:.3g} → {new:.3g}{reason}"]


def _rate(recipe: Recipe, step: int) -> float:
    fork = recipe.checkpoint.fork
    start = (fork.step or 0) if fork is not None and "scheduler" in fork.skip else 0
    return recipe.optimizer.lr * lr_factor(recipe.scheduler, step - start, recipe.steps - start)
