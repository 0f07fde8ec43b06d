"""Inputs and result of a simulation: the workload, the engines, the trainer; means of the simulated steps."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal

from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.recipe.schema.rollout import default_async_level


@dataclass(frozen=True)
class Workload:
    """The rollouts of the recipe and the shape of an episode."""

    batch_size: int
    group_size: int
    max_in_flight: int
    max_off_policy_steps: int
    lengths: Lengths
    turns: int = 1
    """Requests per rollout, each with an equal share of its tokens."""
    env_s: float = 0.0
    """Seconds that the environment takes after each turn, the last included."""
    kept_share: float = 1.0
    """Share of finished groups that enter a batch; gates and ``zero_advantage: refill`` replace the others."""
    async_level: int | None = None
    """Batches ahead of the live version; None: ``default_async_level(max_off_policy_steps)``."""

    @property
    def max_lead(self) -> int:
        """``async_level``, or its default."""
        if self.async_level is None:
            return default_async_level(self.max_off_policy_steps)
        return self.async_level


@dataclass(frozen=True)
class PrefillSide:
    """Identical engines that only process prompts (``layout.inference.prefill``)."""

    num_engines: int
    prompt_s: float
    """Time for which the prompt of a group occupies an engine that processes many of them together."""
    alone_s: float = 0.0
    """Shortest time of a prompt, in an engine without other work."""
    turn_s: float = 0.0
    """As ``prompt_s``, for a later turn of a rollout: the reply of the turn before is processed again."""
    transfer_s: float = 0.0
    """From the end of a prompt until the decoding engine has its KV blocks. Occupies neither engine."""

    def work_s(self, group_size: int, turns: int) -> float:
        """Return the time that a group occupies, over all engines, on average."""
        spread = self.num_engines * (1 - (1 - 1 / self.num_engines) ** group_size)
        return spread * self.prompt_s + group_size * (turns - 1) * self.turn_s


@dataclass(frozen=True)
class EngineSide:
    """Identical engines."""

    num_engines: int
    curve: tuple[tuple[float, float], ...]
    """(running sequences, seconds per token of each of them), ascending; interpolated linearly."""
    max_running: int
    """Sequences that an engine runs at the same time; others wait."""
    prefill_s: float = 0.0
    """Time for which a group's first request occupies an engine before its first token."""
    turn_prefill_s: float = 0.0
    """The same for every other request of the group, whose prompt is mostly cached."""
    pause_s: float = 0.0
    """Weight update: seconds for which engines are paused."""
    routing: Literal["prefix", "least_busy", "session"] = "prefix"
    """``layout.inference.routing``; ``least_busy`` is what ``prefix`` does with prompts shorter than a block."""
    detect_s: float = 0.0
    """Seconds from the publication of a version to the start of the update."""
    prefill: PrefillSide | None = None
    """Engines that process the prompts, which then take no time of these ones; None: there are none."""

    def token_s(self, running: float) -> float:
        """Return the seconds per token of each of ``running`` sequences."""
        points = self.curve
        place = min(max(bisect_right(points, (running, float("inf"))), 1), len(points) - 1)
        if len(points) == 1:
            return points[0][1]
        (left, low), (right, high) = points[place - 1], points[place]
        return max(low + (high - low) * (running - left) / (right - left), 0.0) if running > left else low


@dataclass(frozen=True)
class TrainerSide:
    """Times of the trainer, in seconds. It has one batch at a time."""

    fixed_s: float
    """Part of a step that does not depend on the batch: optimizer, collectives."""
    token_s: float = 0.0
    """Per generated token of the batch, over all ranks."""
    publish_s: float = 0.0
    """Writing a policy version, during which the trainer does nothing else."""
    deliver_s: float = 0.0
    """Packing and sending of a batch before the trainer can start it; the next batch is collected meanwhile."""

    def step_s(self, tokens: float) -> float:
        return self.fixed_s + self.token_s * tokens + self.publish_s


@dataclass(frozen=True)
class SimulatedRun:
    """Means over the steps after the warm-up."""

    step_s: float
    """Time from one finished trainer step to the next."""
    trainer_idle: float
    """Share of time in which the trainer waits for a batch (``time/wait_for_batch`` / ``time/step``)."""
    engine_idle: float
    """Share of engine time without a running request (``inference/idle``)."""
    staleness_mean: float
    """``off_policy/mean``: trainer step - 1 - version with which a rollout started, over rollouts of batches."""
    staleness_max: int
    """The largest ``off_policy/max`` of a step."""
    in_flight: float
    """Mean number of rollouts in flight."""
    tokens_per_s: float
    """Generated tokens of the batches per second."""
    engine_tokens_per_s: float
    """Tokens that all engines generate per second, also those of rollouts that no batch uses."""
    discarded: float
    """Share of started rollouts that no batch used: stale, cancelled or passed over."""
    num_started: int
    num_used: int
    """Rollouts of batches, over all steps."""
    num_discarded: int
    num_left: int
    """Rollouts in flight, in open groups or queued at the end."""
    prefill_idle: float | None = None
    """Share of the time in which a prefill engine has no prompt to process; None without prefill engines."""


def closed_form_step_s(workload: Workload, engines: EngineSide, trainer: TrainerSide) -> float:
    """Return max(trainer, engines): the step time if neither side ever waited for the other.

    Usually too optimistic: `simulate` includes the losses to long tails and to small windows.
    """
    tokens = workload.batch_size * workload.lengths.mean
    running = min(workload.max_in_flight / engines.num_engines, engines.max_running)
    running = max(1.0, min(running, workload.batch_size * (1 + workload.max_off_policy_steps)))
    decode_s = tokens / workload.kept_share * engines.token_s(running) / running / engines.num_engines
    requests = workload.batch_size * workload.turns / workload.kept_share
    groups = workload.batch_size / workload.group_size / workload.kept_share
    prefill_s = groups * engines.prefill_s + (requests - groups) * engines.turn_prefill_s
    engine_s = decode_s + prefill_s / engines.num_engines
    if engines.prefill is not None:
        work_s = groups * engines.prefill.work_s(workload.group_size, workload.turns)
        engine_s = max(engine_s, work_s / engines.prefill.num_engines)
    engine_s += engines.pause_s
    trainer_s = trainer.step_s(tokens)
    if workload.max_off_policy_steps == 0:
        return engine_s + trainer_s + trainer.deliver_s + engines.detect_s
    return max(trainer_s, engine_s)
