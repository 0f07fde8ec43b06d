"""Step time, idle shares and staleness of a run: the simulation, fed with the predicted times of both sides.

The interval of a simulated figure comes from five more simulations, of a fraction of the run: one with the predicted
times, and with the engines' times, then the trainer's, at the ends of their intervals. The changes add in quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from primerl_hpc.plan.predict.figure import Figure
from primerl_hpc.plan.simulation.sides import EngineSide, PrefillSide, SimulatedRun, TrainerSide, Workload
from primerl_hpc.plan.simulation.simulate import simulate

STEPS, WARM_UP = 32, 4
MAX_REQUESTS = 40_000
"""Requests of the batches of a simulation: large batches and many turns are simulated for fewer steps."""
QUICK_BATCH, QUICK_ENGINES = 128, 2
"""A quick simulation has at least this many rollouts in a batch and engines: a fraction of both sides."""
QUICK_STEPS, QUICK_TURNS = 16, 8
"""Steps of a quick simulation, and its largest number of turns: more are merged into requests of more tokens."""
SOURCE = "plan.simulation (discrete events)"
RATIOS = ("time.step", "rate.tokens", "rate.engines", "run.in_flight")
AGES = ("staleness.mean",)
"""Simulations of a fraction of the run show how a figure changes within the intervals of the times: `RATIOS` change by
a factor, `AGES` by a difference, and so do all others, which are shares of at most 1."""


@dataclass(frozen=True)
class Side:
    """Predicted times of one side: a factor on all of them spans its interval."""

    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Balance:
    """Both sides of a run, and the simulation of them."""

    workload: Workload
    engines: EngineSide
    trainer: TrainerSide
    engine_interval: Side = Side()
    trainer_interval: Side = Side()

    def run(
        self, engine_factor: float = 1.0, trainer_factor: float = 1.0, *, steps: int = STEPS
    ) -> SimulatedRun:
        """Simulate with all times of a side multiplied by a factor.

        Step times rise and fall with a period of ``max_off_policy_steps`` + 1: the gate opens for a batch when a
        version goes live. So the measured steps are complete periods.
        """
        requests = self.workload.batch_size * self.workload.turns
        steps = min(steps, max(WARM_UP + 2, MAX_REQUESTS // requests))
        period, measured = self.workload.max_off_policy_steps + 1, steps - WARM_UP
        if period < 2 * measured:
            measured = max(1, measured // period) * period
        return simulate(
            self.workload,
            slower_engines(self.engines, engine_factor),
            slower_trainer(self.trainer, trainer_factor),
            steps=WARM_UP + measured,
            warm_up=WARM_UP,
        )

    def quick(self, engine_factor: float = 1.0, trainer_factor: float = 1.0) -> SimulatedRun:
        """Simulate fewer steps, which suffices to compare."""
        return self.run(engine_factor, trainer_factor, steps=QUICK_STEPS)

    def fraction(self) -> Balance:
        """Return a fraction of both sides, with the same times per step, whose simulation is fast.

        The tail of a smaller batch is shorter, so its steps are a little faster than those of the complete run.
        """
        workload, engines, trainer = self.workload, self.engines, self.trainer
        by_batch = workload.batch_size // max(QUICK_BATCH, 8 * workload.group_size)
        share = min(by_batch, engines.num_engines // QUICK_ENGINES)
        if self.workload.turns > QUICK_TURNS:
            return self._with_turns(QUICK_TURNS).fraction()
        if share < 2:
            return self
        num_engines = engines.num_engines // share
        exact = num_engines / engines.num_engines
        prefill = engines.prefill and _fraction_of(engines.prefill, exact, workload.group_size)
        size = workload.group_size
        batch = max(size, round(workload.batch_size * exact / size) * size)
        part = batch / workload.batch_size
        return replace(
            self,
            workload=replace(
                workload,
                batch_size=batch,
                max_in_flight=max(size, round(workload.max_in_flight * part)),
            ),
            engines=replace(engines, num_engines=num_engines, prefill=prefill),
            trainer=replace(trainer, token_s=trainer.token_s / part),
        )

    def _with_turns(self, turns: int) -> Balance:
        """Return both sides with the same tokens and times in this number of turns."""
        merged, engines = self.workload.turns / turns, self.engines
        later = (self.workload.turns - 1) / (turns - 1)
        prefill = engines.prefill and replace(engines.prefill, turn_s=engines.prefill.turn_s * later)
        return replace(
            self,
            workload=replace(self.workload, turns=turns, env_s=self.workload.env_s * merged),
            engines=replace(engines, turn_prefill_s=engines.turn_prefill_s * later, prefill=prefill),
        )

    def figures(self) -> tuple[SimulatedRun, dict[str, Figure]]:
        """Return the central simulation, and its figures by name."""
        center, part = self.run(), self.fraction()
        middle = part.quick()
        ends = [
            (part.quick(self.engine_interval.low), part.quick(self.engine_interval.high)),
            (part.quick(1.0, self.trainer_interval.low), part.quick(1.0, self.trainer_interval.high)),
        ]
        names: dict[str, tuple[str, Callable[[SimulatedRun], float], str]] = {
            "time.step": ("s", lambda run: run.step_s, "mean time between trainer steps"),
            "rate.tokens": (
                "tokens/s",
                lambda run: run.tokens_per_s,
                "generated tokens of batches / time",
            ),
            "rate.engines": (
                "tokens/s",
                lambda run: run.engine_tokens_per_s,
                "tokens that all engines generate / time, discarded ones included",
            ),
            "idle.trainer": (
                "1",
                lambda run: run.trainer_idle,
                "share of time in which the trainer waits",
            ),
            "idle.engines": ("1", lambda run: run.engine_idle, "share of engine time without a request"),
            "staleness.mean": ("1", lambda run: run.staleness_mean, "step − 1 − version, mean over rollouts"),
            "run.in_flight": ("1", lambda run: run.in_flight, "mean rollouts in flight"),
            "run.discarded": (
                "1",
                lambda run: run.discarded,
                "rollouts that no batch uses / started rollouts",
            ),
        }
        if self.engines.prefill is not None:
            names["idle.prefill"] = (
                "1",
                lambda run: run.prefill_idle or 0.0,
                "share of time in which a prefill engine has no prompt to process",
            )
        inputs = self.inputs()
        return center, {
            name: Figure(
                name,
                read(center),
                *_interval(name, read(center), read(middle), [(read(low), read(high)) for low, high in ends]),
                unit,
                formula,
                inputs,
                SOURCE,
            )
            for name, (unit, read, formula) in names.items()
        }

    def inputs(self) -> dict[str, float | str | Figure]:
        """Return the inputs of the simulation, for ``--why``."""
        workload, engines, trainer = self.workload, self.engines, self.trainer
        running = min(engines.max_running, max(1.0, workload.max_in_flight / engines.num_engines))
        prefill = engines.prefill
        more = (
            {}
            if prefill is None
            else {f"prefill engines: {key}": value for key, value in vars(prefill).items()}
        )
        return more | {
            "batch_size": workload.batch_size,
            "group_size": workload.group_size,
            "max_in_flight": workload.max_in_flight,
            "max_off_policy_steps": workload.max_off_policy_steps,
            "async_level": workload.max_lead,
            "lengths": repr(workload.lengths),
            "engines": engines.num_engines,
            "sequences per engine": engines.max_running,
            "seconds per token": engines.token_s(running),
            "prefill s": engines.prefill_s,
            "pause s": engines.pause_s,
            "trainer step s": trainer.step_s(workload.batch_size * workload.lengths.mean),
        }


def slower_engines(engines: EngineSide, factor: float) -> EngineSide:
    """Return the engines with all times multiplied by ``factor``."""
    return replace(
        engines,
        curve=tuple((running, seconds * factor) for running, seconds in engines.curve),
        prefill_s=engines.prefill_s * factor,
        turn_prefill_s=engines.turn_prefill_s * factor,
        pause_s=engines.pause_s * factor,
        prefill=engines.prefill
        and replace(
            engines.prefill,
            prompt_s=engines.prefill.prompt_s * factor,
            alone_s=engines.prefill.alone_s * factor,
            turn_s=engines.prefill.turn_s * factor,
            transfer_s=engines.prefill.transfer_s * factor,
        ),
    )


def _fraction_of(prefill: PrefillSide, share: float, group_size: int) -> PrefillSide:
    """Return fewer prefill engines that together process this share of the prompts in the same time.

    The rollouts of a group are spread over fewer engines, so that fewer of them process its prompt.
    """
    number = max(1, round(prefill.num_engines * share))
    speed = number / (prefill.num_engines * share)
    spread = replace(prefill, turn_s=0.0, prompt_s=1.0)
    copies = spread.work_s(group_size, 1) / replace(spread, num_engines=number).work_s(group_size, 1)
    return replace(
        prefill, num_engines=number, prompt_s=prefill.prompt_s * speed * copies, turn_s=prefill.turn_s * speed
    )


def slower_trainer(trainer: TrainerSide, factor: float) -> TrainerSide:
    """Return the trainer with all times multiplied by ``factor``."""
    return replace(
        trainer,
        fixed_s=trainer.fixed_s * factor,
        token_s=trainer.token_s * factor,
        publish_s=trainer.publish_s * factor,
    )


def _interval(name: str, value: float, middle: float, ends: list[tuple[float, float]]) -> tuple[float, float]:
    """Return both ends of the interval of a figure.

    ``middle``, ``ends``: the figure in a fraction of the run with the predicted times of both sides, and with the
    lowest and highest times of each side.
    """
    if name in RATIOS:
        return _ratios(value, middle, ends)
    low, high = _differences(value, middle, ends)
    return low, high if name in AGES else max(value, min(high, 1.0))


def _ratios(value: float, middle: float, ends: list[tuple[float, float]]) -> tuple[float, float]:
    """Return both ends of the interval of ``value``, whose ratios to it are those of ``ends`` to ``middle``."""
    if not middle:
        return value, value
    below = above = 0.0
    for pair in ends:
        changes = [math.log(max(end, 1e-9) / middle) for end in pair]
        below, above = math.hypot(below, min(*changes, 0.0)), math.hypot(above, max(*changes, 0.0))
    return value * math.exp(-below), value * math.exp(above)


def _differences(value: float, middle: float, ends: list[tuple[float, float]]) -> tuple[float, float]:
    """Return both ends of the interval of ``value``, which differ from it as ``ends`` differ from ``middle``."""
    below = above = 0.0
    for pair in ends:
        changes = [end - middle for end in pair]
        below, above = math.hypot(below, min(*changes, 0.0)), math.hypot(above, max(*changes, 0.0))
    return max(0.0, value - below), value + above
