"""Use what the attempts of a run measured: rows of the ledger, and advice on the split of its nodes.

    refresh(run)                       # `status`, `report` and `resume`, for the owner of the run
    python -m primerl_hpc.launch.planning.advice RUN_DIR      # the supervisor, before an attempt with layout.auto_split

Rows for the figures that the plan predicted are written to the run's ledger.jsonl and appended to the user's ledger,
from which the next plan takes its corrections. A plan without a prediction writes nothing.

The advice is written to control/advice.json. As a program, the module replaces plan.json by the plan for the advised
split and prints ``{"sentence": …}``, or ``{"refused": …}`` with the reason, or ``{}`` if nothing is advised. The number
of nodes and components of the job does not change, because the next job may be in the queue already.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError, PrimerlError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.locks import lock_file
from primerl_hpc.common.names import MAIN_PHASE, Kind, Role, RunState
from primerl_hpc.plan.plan import BUNDLE_PYTHON, PhasePlan, Plan, load_plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.pools import Pools
from primerl_hpc.plan.predict.ledger import LedgerKey
from primerl_hpc.plan.simulation.advisor import Advice, UnitSplit, advise, measure_sides
from primerl_hpc.run.ledger.measures import Row, compare, metric_rows, steady_rows
from primerl_hpc.run.ledger.rows import LedgerRow
from primerl_hpc.run.ledger.store import append_rows, read_rows, user_ledger
from primerl_hpc.run.rundir import RunDir

MIN_STEPS = 3
"""Steps of an attempt without which its rates say nothing: the first one is left out."""
WINDOW = 60
"""Last steps of the attempt from which a split is advised."""


def refresh(run: RunDir) -> None:
    """Record what ended attempts measured, and write the advice for the newest attempt.

    Does nothing for a user who cannot write into the run. What cannot be read or written is left out with a warning.
    """
    if not os.access(run.control, os.W_OK | os.X_OK):
        return
    try:
        load_plan(run)
    except PrimerlError:  # of another version
        return
    try:
        record_measured(run)
        if (advice := newest_advice(run)) is not None and advice != read_json_or_none(run.advice):
            write_json(run.advice, advice)
    except (PrimerlError, OSError, ValueError, ArithmeticError) as error:
        print(f"warning: the measurements of {run.root.name} are not used: {error}", file=sys.stderr)


# -- the ledger ------------------------------------------------------------------------------------


def record_measured(run: RunDir) -> None:
    """Write the rows of attempts that have ended and are not in the run's ledger. Raises OSError."""
    attempts = [attempt for attempt in _ended_attempts(run) if _plan_of(run, attempt).prediction is not None]
    if not attempts:
        return
    with open(run.control / "ledger.lock", "w", encoding="utf-8") as lock:
        lock_file(
            lock.fileno(), between_nodes=True
        )  # without locks, two commands at once may write rows twice
        known = {row.attempt for row in read_rows(run.ledger, warn=lambda _: None)}
        for attempt in attempts:
            if attempt not in known:
                rows = measured_rows(_plan_of(run, attempt), run, attempt)
                for path in (run.ledger, user_ledger()):
                    append_rows(path, rows)


def _ended_attempts(run: RunDir) -> list[int]:
    state = read_json_or_none(run.state) or {}
    newest = int(state.get("attempt", 0))
    has_ended = RunState(state.get("state", RunState.UNKNOWN)).is_final
    return list(range(1, newest + has_ended))


def _plan_of(run: RunDir, attempt: int) -> Plan:
    """Return the plan that an attempt ran."""
    kept = read_json_or_none(run.attempt_plan(attempt))
    return load_plan(run) if kept is None else Plan.model_validate(kept)


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


# -- the split of the nodes ------------------------------------------------------------------------


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
    python = BUNDLE_PYTHON if plan.bundle is not None else profile.software.python_here
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


def newest_advice(run: RunDir) -> dict[str, Any] | None:
    """Return the advice for the newest attempt that measured enough, as JSON; None if there is none."""
    for attempt in range(int((read_json_or_none(run.state) or {}).get("attempt", 0)), 0, -1):
        plan, rows = _plan_of(run, attempt), metric_rows(run, attempt)
        if shape_of(plan) is None:
            return None
        if len(rows.get("trainer", ())) > MIN_STEPS:
            advice = advice_for(plan, _profile_of(run), rows)
            present = shape_of(load_plan(run))
            is_applied = advice is not None and present is not None and present.split == advice.best
            applied = {
                "attempt": attempt,
                "is_applied": advice is not None and is_applied and advice.is_advised,
            }
            return None if advice is None else {**advice.as_json(), **applied}
    return None


def _profile_of(run: RunDir) -> Profile:
    return load_profile(str(run.profile), environ={}).profile


def apply_advice(run: RunDir) -> dict[str, str]:
    """Replace plan.json by the plan for the advised split. Returns what the module prints as a program.

    Raises PrimerlError, OSError, ValueError or ArithmeticError if the advice cannot be computed.
    """
    plan = load_plan(run)
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 0))
    rows = metric_rows(run, attempt)
    if shape_of(plan) is None or len(rows.get("trainer", ())) <= MIN_STEPS:
        return {}
    profile = _profile_of(run)
    advice = advice_for(plan, profile, rows)
    if advice is None or not advice.is_advised:
        return {}
    try:
        changed = replan(plan, profile, advice.best)
    except PrimerlError as error:
        return {"refused": str(error)}
    write_json(run.plan, changed.model_dump(mode="json"))
    return {"sentence": advice.sentence}


def main(argv: list[str]) -> int:
    try:
        print(json.dumps(apply_advice(RunDir(Path(argv[0])))))
    except (PrimerlError, OSError, ValueError, ArithmeticError) as error:
        print(json.dumps({"refused": str(error)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
