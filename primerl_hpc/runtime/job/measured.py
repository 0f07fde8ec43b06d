"""At the end of an attempt, use what it measured: rows of the ledger, and advice on the split of its nodes.

    await use_measurements(context, may_apply=True)

Rows for the figures that the plan predicted are written to the run's ledger.jsonl and appended to the user's ledger,
from which the next plan takes its corrections. A plan without a prediction writes nothing.

The advice is written to control/advice.json and recorded as an event. With ``layout.auto_split`` plan.json is replaced
by the plan for the advised split, which the next attempt runs; logs/attempt_K/plan.json keeps that of each attempt. The
number of nodes and components of the job does not change, because the next job may be in the queue already.

Nothing here can fail the run or delay its end: an I/O error is an event, and all of it is given up after `TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError, PrimerlError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role
from primerl_hpc.common.waiting import in_daemon_thread
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.pools import Pools
from primerl_hpc.plan.predict.ledger import LedgerKey
from primerl_hpc.plan.simulation.advisor import Advice, UnitSplit, advise, measure_sides
from primerl_hpc.plan.types import BUNDLE_PYTHON, PhasePlan, Plan
from primerl_hpc.run.ledger.measures import Row, compare, metric_rows, steady_rows
from primerl_hpc.run.ledger.rows import LedgerRow
from primerl_hpc.run.ledger.store import append_rows, user_ledger
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.context import RunContext

MIN_STEPS = 3
"""Steps of an attempt without which its rates say nothing: the first one is left out."""
TIMEOUT_S = 20.0
"""Time for records and advice together; less than `walltime.RESERVE_S`, in which the job is also requeued."""
WINDOW = 60
"""Last steps of the attempt from which a split is advised."""


async def use_measurements(context: RunContext, *, may_apply: bool = False) -> None:
    """Record and advise. ``may_apply``: the next attempt may have another plan."""
    deadline = time.monotonic() + TIMEOUT_S
    await record_measured(context)
    await advise_split(context, may_apply=may_apply, timeout_s=deadline - time.monotonic())


async def record_measured(context: RunContext) -> None:
    """Write the ledger rows of this attempt, if there are any."""
    if context.plan.prediction is None:
        return
    try:
        async with asyncio.timeout(TIMEOUT_S):
            rows = await in_daemon_thread(
                partial(measured_rows, context.plan, context.run_dir, context.attempt)
            )
            for path in (context.run_dir.ledger, user_ledger()):
                await _append(context, path, rows)
    except TimeoutError:
        context.journal.record("ledger_not_written", message=f"no response within {TIMEOUT_S:.0f} s")
    except OSError as error:
        message = f"the metrics cannot be read: {error}"
        context.journal.record("ledger_not_written", message=message)


async def _append(context: RunContext, path: Path, rows: list[LedgerRow]) -> None:
    try:
        await in_daemon_thread(partial(append_rows, path, rows))
    except OSError as error:
        context.journal.record("ledger_not_written", message=f"{path}: {error.strerror or error}")


def measured_rows(plan: Plan, run: RunDir, attempt: int) -> list[LedgerRow]:
    """Return one row for every predicted figure that ``attempt`` measured; none after fewer than `MIN_STEPS` steps."""
    record = plan.prediction
    if record is None:
        return []
    rows = metric_rows(run, attempt)
    if len(rows.get("trainer", ())) < MIN_STEPS:
        return []
    figures = {name: figure.model_dump() for name, figure in record.figures.items()}
    key = LedgerKey(record.gpu, record.family, record.layout, record.software, record.engine_gpu)
    uncorrected = {name: correction.factor for name, correction in record.corrections.items()}
    return [
        LedgerRow(
            figure=comparison.figure,
            measured=comparison.measured,
            unit=comparison.unit,
            gpu=key.gpu_of(comparison.figure),
            # the formula's value: a factor learned from corrected values would be applied to uncorrected ones
            predicted=comparison.predicted / uncorrected.get(comparison.figure, 1.0),
            family=record.family,
            layout=record.layout,
            software=record.software,
            time=round(time.time(), 3),
            run=run.root.name,
            attempt=attempt,
        )
        for comparison in compare(figures, rows)
    ]


@dataclass(frozen=True)
class SplitShape:
    """How a plan splits its nodes, or the accelerators of its single node."""

    split: UnitSplit
    unit: str
    span: int
    """Units of one engine."""
    engines: int
    ranks: int


def shape_of(plan: Plan) -> SplitShape | None:
    """Return the split of an RL plan; None if its engines and trainer cannot exchange nodes."""
    phase = plan.phases[-1]
    engines, trainers = phase.of_role(Role.INFERENCE), phase.of_role(Role.TRAINER)
    if (
        phase.name != MAIN_PHASE
        or phase.recipe.kind != Kind.RL
        or phase.elastic
        or phase.recipe.layout.colocated is not None
        or not (engines and trainers)
    ):
        return None
    trainer = trainers[0]
    engine_nodes = {node for engine in engines for node in engine.nodes}
    ranks = len(trainer.nodes) * len(trainer.accelerators)
    if len(engine_nodes | set(trainer.nodes)) == 1:
        per_engine = len(engines[0].accelerators)
        split = UnitSplit(len(engines) * per_engine, ranks)
        return SplitShape(split, "accelerator", per_engine, len(engines), ranks)
    both = engine_nodes | set(trainer.nodes)
    is_one_component = any(both <= set(component.nodes) for component in plan.all_components)
    if engine_nodes & set(trainer.nodes) or not is_one_component:
        return None
    split = UnitSplit(len(engine_nodes), len(trainer.nodes))
    return SplitShape(split, "node", len(engines[0].nodes), len(engines), ranks)


def advice_for(plan: Plan, profile: Profile, rows: dict[str, list[Row]]) -> Advice | None:
    """Return the advice for an attempt of ``plan`` with these metrics; None if it measured too little."""
    shape = shape_of(plan)
    if shape is None:
        return None
    rollouts = plan.phases[-1].recipe.rollouts
    trainer, orchestrator = (
        steady_rows(rows.get(name, []))[-WINDOW:] for name in ("trainer", "orchestrator")
    )
    measured = measure_sides(
        trainer,
        orchestrator,
        batch_size=rollouts.batch_size if rollouts.batch_tokens is None else None,
        group_size=rollouts.group_size,
        max_in_flight=rollouts.in_flight_ceiling,
        max_off_policy_steps=rollouts.max_age,
        async_level=rollouts.explicit_level,
    )
    if measured is None:
        return None
    node = Pools(profile).of(plan.phases[-1].recipe.layout.trainer.node_type, "layout.trainer").node
    least = min_trainer_units(shape.split, node, trainer)
    return advise(measured, shape.split, unit=shape.unit, span=shape.span, min_trainer=least)


def min_trainer_units(split: UnitSplit, node: Node, rows: Sequence[Row]) -> int:
    """Return the units that the trainer needs if all of its memory were divided among its ranks.

    The current number if the memory of a GPU or the measured peak is unknown; 1 without GPUs. ``node``: hardware of a
    node of the trainer.
    """
    if not node.gpus:
        return 1
    peaks = [row["perf/peak_memory"] for row in rows if isinstance(row.get("perf/peak_memory"), int | float)]
    limit = node.gpu_memory_gib
    if not peaks or limit is None:
        return split.trainer
    return min(split.trainer, math.ceil(split.trainer * max(peaks) / (0.95 * limit)))


def replan(plan: Plan, profile: Profile, split: UnitSplit) -> Plan:
    """Return the plan with another split of the same nodes. Raises ConfigError if the recipe does not allow it.

    It has no prediction, because the figures of the earlier split do not hold for it.
    """
    shape, phase = shape_of(plan), plan.phases[-1]
    assert shape is not None
    engines = max(1, shape.engines * split.engines // shape.split.engines)
    ranks = shape.ranks * split.trainer // shape.split.trainer
    inference: dict[str, Any] = {"replicas": engines}
    trainer: dict[str, Any] = {"ranks": ranks}
    if shape.unit == "node":
        inference["nodes"], trainer["nodes"] = split.engines, split.trainer
    layout = phase.recipe.layout
    changed = layout.model_copy(
        update={
            "inference": layout.inference.model_copy(update=inference),
            "trainer": layout.trainer.model_copy(update=trainer),
        }
    )
    recipe = phase.recipe.model_copy(update={"layout": changed})
    python = BUNDLE_PYTHON if plan.bundle is not None else profile.software.host_python or sys.executable
    found = compile_plan(recipe, profile, run_dir=plan.run_dir, python=python)
    here, needed = ([len(part.nodes) for part in of.all_components] for of in (plan, found))
    if here != needed:
        raise ConfigError(f"the job has {sum(here)} nodes, the advised split needs {sum(needed)}")
    # the initial weights of a fork and similar values were resolved at submission
    phases = tuple(_with_model(after, plan.phases) for after in found.phases)
    return found.model_copy(update={"phases": phases, "bundle": plan.bundle})


def _with_model(phase: PhasePlan, earlier: tuple[PhasePlan, ...]) -> PhasePlan:
    path = next((before.model_path for before in earlier if before.name == phase.name), phase.model_path)
    return phase.model_copy(update={"model_path": path})


async def advise_split(context: RunContext, *, may_apply: bool, timeout_s: float = TIMEOUT_S) -> None:
    """Write the advice for the split of this attempt. ``may_apply``: the next attempt may have another plan."""
    if shape_of(context.plan) is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            found = await in_daemon_thread(partial(_load_and_advise, context))
    except (PrimerlError, OSError, TimeoutError, ValueError, ArithmeticError) as error:
        context.journal.record("advice_failed", message=str(error) or "no result in time")
        return
    if found is None:
        return
    profile, advice = found
    is_applied = advice.is_advised and may_apply and context.plan.phases[-1].recipe.layout.auto_split
    if is_applied:
        is_applied = _apply(context, profile, advice)
    value = {
        **advice.as_json(),
        "attempt": context.attempt,
        "is_applied": is_applied,
        "time": round(time.time(), 3),
    }
    context.journal.write(lambda: write_json(context.run_dir.advice, value))
    context.journal.record("split_advice", message=advice.sentence, applied=is_applied)


def _load_and_advise(context: RunContext) -> tuple[Profile, Advice] | None:
    """Return the profile of the run and the advice; None if the attempt measured too little."""
    rows = metric_rows(context.run_dir, context.attempt)
    if len(rows.get("trainer", ())) <= MIN_STEPS:
        return None
    profile = load_profile(str(context.run_dir.profile), environ={}).profile
    advice = advice_for(context.plan, profile, rows)
    return None if advice is None else (profile, advice)


def _apply(context: RunContext, profile: Profile, advice: Advice) -> bool:
    """Replace plan.json for the next attempt. False if the recipe does not allow the split."""
    try:
        plan = replan(context.plan, profile, advice.best)
    except PrimerlError as error:
        context.journal.record("split_refused", message=str(error))
        return False
    context.journal.write(
        lambda: write_json(context.run_dir.plan, plan.model_dump(mode="json")), is_vital=True
    )
    return True
