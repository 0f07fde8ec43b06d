"""All figures of a plan, and the verdict: does it fit, which side is the bottleneck, what does it cost.

    prediction = predict(case, choice)
    prediction.figures["time.step"], prediction.misfits, prediction.bottleneck
    prediction.figure("memory.trainer.activations")          # also the parts of others

A part that cannot be predicted is in ``absent`` with the reason; no number takes its place.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.names import Kind
from primerl_hpc.plan.assess.balance import Balance, Side
from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice
from primerl_hpc.plan.assess.colocated import (
    engine_limit,
    hand_over,
    runs_together,
    takes_turns,
    trainer_limit,
    waiting_states,
)
from primerl_hpc.plan.assess.parts import DELIVER_S, DETECT_S, RESERVED, Parts
from primerl_hpc.plan.assess.prefilling import prefill_memory, prefill_side, prompt_time, transfer_time
from primerl_hpc.plan.predict.figure import Figure, exact, multiply
from primerl_hpc.plan.predict.timing.host_cores import host_cores
from primerl_hpc.plan.simulation.sides import EngineSide, SimulatedRun, TrainerSide, closed_form_step_s

GIB = 2**30
ENGINES, TRAINER, BOTH, PREFILL = "engines", "trainer", "both", "prefill engines"
UPDATES = "weight updates"
UNVERIFIED_FP8 = (
    "products in FP8 (trainer.fp8) are predicted with the rates of engines' kernels; no FP8 kernel of the trainer has "
    "been measured"
)
UPDATE_SHARE = 0.5
"""If engines are paused for a larger share of the time and the trainer waits, weight updates are the bottleneck."""
Depth = Literal["closed_form", "quick", "full"]
BUSY = 0.05
"""A side that is idle for less than this share is a bottleneck."""


@dataclass(frozen=True)
class Misfit:
    """A role that needs more memory than there is."""

    role: str
    needed: float
    available: float
    """Bytes, or tokens where ``unit`` is ``tokens``."""
    unit: str = "B"
    where: str = "a GPU"

    @property
    def excess(self) -> float:
        """Needed / available."""
        return self.needed / max(self.available, 1.0)

    def __str__(self) -> str:
        if self.unit == "tokens":
            return (
                f"{self.role}: the KV cache holds {self.available:,.0f} tokens, one sequence of "
                f"inference.max_model_len needs {self.needed:,.0f}"
            )
        verb = "needs" if self.role == TRAINER else "need"
        needed, available = self.needed / GIB, self.available / GIB
        return (
            f"{self.role} {verb} {needed:.1f} GiB of {available:.1f} on {self.where}, "
            f"{needed - available:.1f} too much"
        )


@dataclass(frozen=True)
class Prediction:
    choice: LayoutChoice
    figures: dict[str, Figure] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    """Reason by figure that could not be predicted."""
    limits: dict[str, float] = field(default_factory=dict)
    """Bytes of a GPU that a role may use, by its figure."""
    misfits: tuple[Misfit, ...] = ()
    run: SimulatedRun | None = None
    bottleneck: str | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.misfits

    def walk(self) -> Iterator[Figure]:
        """Yield all figures with their inputs."""
        for figure in self.figures.values():
            yield from figure.walk()

    def figure(self, name: str) -> Figure:
        """Return the figure ``name``, or one of the inputs of the others. Raises NotFoundError."""
        if name in self.figures:
            return self.figures[name]
        for figure in self.walk():
            if figure.name == name:
                return figure
        if name in self.absent:
            raise NotFoundError(f"{name} is not predicted: {self.absent[name]}")
        near = difflib.get_close_matches(name, sorted({figure.name for figure in self.walk()}), n=3)
        names = f"did you mean {' or '.join(near)}? " if near else ""
        hint = f"{names}figures of this plan: {', '.join(sorted(self.figures))}"
        raise NotFoundError(f"no figure '{name}' in this plan", hint=hint)


class _Collector:
    """Collects figures; a part that raises ConfigError is absent."""

    def __init__(self) -> None:
        self.figures: dict[str, Figure] = {}
        self.absent: dict[str, str] = {}

    def add(self, name: str, compute: Callable[[], Figure]) -> Figure | None:
        try:
            self.figures[name] = compute()
        except ConfigError as error:
            self.absent[name] = error.cause
            return None
        return self.figures[name]


def predict(
    case: Case, choice: LayoutChoice, *, parts: Parts | None = None, depth: Depth = "full"
) -> Prediction:
    """Return the prediction of one layout.

    ``parts``: those of the case, shared with other layouts. ``depth`` closed_form: the step time without waits, no idle
    shares; quick: one simulation of a fraction of the run, figures without intervals; full: five simulations.
    """
    found, parts = _Collector(), parts or Parts(case)
    misfits: list[Misfit] = []
    if choice.trainer_ranks:
        found.add("memory.trainer", lambda: parts.trainer_memory(choice))
        found.add(RESERVED, lambda: parts.trainer_reserved(choice))
        misfits += _trainer_misfits(parts, choice, found)
        found.add("checkpoint.size", lambda: parts.checkpoint_size(choice))
    if choice.num_engines:
        found.add("memory.engine", lambda: parts.engine_memory(choice))
        found.add("kv.tokens", lambda: parts.kv_tokens(choice))
        misfits += _engine_misfits(case, found.figures.get("memory.engine"), found.figures.get("kv.tokens"))
        misfits += _prefill_misfits(parts, choice, found)
        if not misfits:
            found.add("kv.concurrency", lambda: parts.kv_concurrency(choice))
            found.add("time.engine.decode", lambda: parts.decode(choice))
            if (prefill := choice.prefill) is not None:
                found.add("time.prefill", lambda: prompt_time(parts, prefill))
                found.add("time.kv_transfer", lambda: transfer_time(parts, choice))
    if choice.trainer_ranks and not misfits:
        found.add("time.trainer.step", lambda: parts.trainer_step(choice))
        found.add("time.checkpoint", lambda: parts.checkpoint_write(choice))
    run = bottleneck = None
    if not misfits and case.recipe.kind == Kind.RL:
        run, bottleneck = _balance(parts, choice, found, depth)
    elif not misfits and case.recipe.kind == Kind.SFT and "time.trainer.step" in found.figures:
        found.figures["time.step"] = found.figures["time.trainer.step"].renamed("time.step")
        bottleneck = TRAINER
    _add_cost(case, choice, found)
    assumptions = _assumptions(case)
    limits = {"memory.trainer": trainer_limit(parts, choice), "memory.engine": engine_limit(case)}
    if choice.prefill is not None:
        limits["memory.prefill"] = case.gpu_of_prefill.memory_bytes * case.recipe.engine_memory_share
    return Prediction(
        choice, found.figures, found.absent, limits, tuple(misfits), run, bottleneck, assumptions
    )


def trainer_fits(parts: Parts, choice: LayoutChoice) -> bool:
    """True if the trainer's memory fits, on its GPUs and in the nodes' host memory."""
    found = _Collector()
    found.add("memory.trainer", lambda: parts.trainer_memory(choice))
    return not _trainer_misfits(parts, choice, found)


def _trainer_misfits(parts: Parts, choice: LayoutChoice, found: _Collector) -> list[Misfit]:
    memory, case = found.figures.get("memory.trainer"), parts.case
    misfits = []
    available = trainer_limit(parts, choice)
    if memory is not None and memory.value > available:
        misfits.append(Misfit(TRAINER, memory.value, available))
    limit = case.trainer_node.memory_gib
    if memory is not None and limit is not None:
        host = parts.host_memory(choice).value
        host += waiting_states(parts, choice).value if takes_turns(case) else 0.0
        if host > limit * GIB:
            misfits.append(Misfit(TRAINER, host, limit * GIB, where="a node's host memory"))
    return misfits


def _engine_misfits(
    case: Case, memory: Figure | None, tokens: Figure | None, role: str = ENGINES, limit: float | None = None
) -> list[Misfit]:
    limit = engine_limit(case) if limit is None else limit
    if memory is not None and memory.value > limit:
        return [Misfit(role, memory.value, limit)]
    length = case.recipe.max_model_len
    if case.recipe.inference.kv_cache_gib is not None and tokens is not None and tokens.value < length:
        return [Misfit(role, float(length), tokens.value, "tokens")]
    return []


def _prefill_misfits(parts: Parts, choice: LayoutChoice, found: _Collector) -> list[Misfit]:
    if (prefill := choice.prefill) is None:
        return []
    case = parts.case
    memory = found.add("memory.prefill", lambda: prefill_memory(parts, prefill))
    limit = case.gpu_of_prefill.memory_bytes * case.recipe.engine_memory_share
    return _engine_misfits(case, memory, parts.kv_tokens(prefill), PREFILL, limit)


def _balance(
    parts: Parts, choice: LayoutChoice, found: _Collector, depth: Depth
) -> tuple[SimulatedRun | None, str | None]:
    if runs_together(parts.case):
        found.absent["time.step"] = "engines and trainer compute on the same GPUs at the same time"
        return None, None
    found.add("time.weight_update", lambda: parts.weight_update(choice))
    if takes_turns(parts.case):
        found.add("time.hand_over", lambda: hand_over(parts, choice))
    needed = ["kv.concurrency", "time.engine.decode", "time.trainer.step", "time.weight_update"]
    needed += ["time.prefill", "time.kv_transfer"] if choice.prefill is not None else []
    if missing := [name for name in needed if name not in found.figures]:
        found.absent["time.step"] = found.absent.get(missing[0], f"{missing[0]} is not predicted")
        return None, None
    balance = make_balance(parts, choice, found.figures)
    if depth == "quick":
        run = balance.fraction().quick()
        found.figures["time.step"] = exact(
            "time.step", run.step_s, "s", "simulated fraction", balance.inputs()
        )
        return run, _bottleneck(run, balance.engines.pause_s)
    if depth == "closed_form":
        ideal = closed_form_step_s(balance.workload, balance.engines, balance.trainer)
        formula = "max(trainer, engines), without waits of one side for the other"
        found.figures["time.step"] = exact("time.step", ideal, "s", formula, balance.inputs())
        tokens = balance.workload.batch_size * balance.workload.lengths.mean
        is_trainer = balance.trainer.step_s(tokens) >= 0.999 * ideal
        return None, TRAINER if is_trainer else ENGINES
    run, figures = balance.figures()
    found.figures |= figures
    found.figures |= busy_cores(parts.case, figures["time.step"].value)
    return run, _bottleneck(run, balance.engines.pause_s)


def busy_cores(case: Case, step_s: float) -> dict[str, Figure]:
    """Return the CPU cores that rollouts keep busy."""
    rollouts = case.batch_size / step_s
    return host_cores(rollouts, case.recipe.rollouts.expected.turns, rollouts * case.distribution.mean)


def make_balance(parts: Parts, choice: LayoutChoice, figures: dict[str, Figure]) -> Balance:
    """Return both sides for the simulation."""
    case, step = parts.case, figures["time.trainer.step"]
    prefill = prefill_side(parts, choice, figures)
    engines = EngineSide(
        choice.num_engines,
        parts.decode_curve(choice),
        parts.max_running(choice),
        prefill_s=parts.prefill_s(choice) if prefill is None else 0.0,
        pause_s=figures["time.weight_update"].value,
        routing=case.recipe.layout.inference.routing,
        detect_s=DETECT_S,
        prefill=prefill,
    )
    moved = figures["time.hand_over"].value if "time.hand_over" in figures else 0.0
    fixed = parts.trainer_fixed_s(choice)
    tokens = case.batch_size * case.distribution.mean
    trainer = TrainerSide(
        fixed + moved, max(0.0, step.value - fixed) / tokens, parts.publish_s(choice), DELIVER_S
    )
    intervals = _interval(figures["time.engine.decode"]), _interval(step)
    return Balance(case.workload(choice), engines, trainer, *intervals)


def _interval(figure: Figure) -> Side:
    return Side(figure.low / figure.value, figure.high / figure.value) if figure.value else Side()


def _bottleneck(run: SimulatedRun, pause_s: float) -> str:
    """Return the side that waits less; both if neither is idle; or what makes both wait."""
    if run.trainer_idle >= BUSY and pause_s >= UPDATE_SHARE * run.step_s:
        return UPDATES
    if run.prefill_idle is not None and run.prefill_idle < min(run.engine_idle, run.trainer_idle):
        return PREFILL
    if run.trainer_idle < BUSY and run.engine_idle < BUSY:
        return BOTH
    return TRAINER if run.trainer_idle <= run.engine_idle else ENGINES


def _add_cost(case: Case, choice: LayoutChoice, found: _Collector) -> None:
    step, recipe = found.figures.get("time.step"), case.recipe
    if step is None or recipe.max_steps is None:
        return
    steps = exact("run.steps", float(recipe.max_steps), "1", "max_steps")
    of_trainer = max(1, choice.trainer_nodes) * case.trainer_node.gpus if choice.trainer_ranks else 0
    of_engines = 0 if choice.shares_node else choice.engine_nodes * case.engine_node.gpus
    of_engines += choice.prefill_nodes * case.node_of_prefill.gpus
    of_engines += 0 if choice.shares_node else case.frozen_gpus
    text = "GPUs of all nodes"
    if recipe.layout.inference.elastic:
        # a job of an elastic engine requests only the GPUs of its engine
        of_engines, text = (
            choice.num_engines * choice.engine_gpus,
            "GPUs of all nodes and of the elastic engines",
        )
    gpus = exact("run.gpus", float(of_trainer + of_engines), "1", text)
    duration = multiply(
        "run.duration", "s", [step, steps], formula="time.step × max_steps, without start and saves"
    )
    hours = exact("hour", 1 / 3600, "1", "h / s")
    found.figures["run.duration"] = duration
    found.figures["run.gpu_hours"] = multiply(
        "run.gpu_hours", "GPU h", [duration, gpus, hours], formula="run.duration × run.gpus / 3600"
    )


def _assumptions(case: Case) -> tuple[str, ...]:
    is_rounded = case.recipe.kind in (Kind.RL, Kind.SFT) and case.recipe.trainer.fp8 != "none"
    unverified = (UNVERIFIED_FP8,) if is_rounded else ()
    if case.recipe.kind != Kind.RL or not case.is_assumed:
        return unverified
    expected = case.recipe.rollouts.expected
    return (
        *unverified,
        f"lengths of rollouts are assumed: {case.completion.value:,.0f} tokens on average, cv {expected.cv:g}; set "
        "rollouts.expected or use --like RUN",
    )
