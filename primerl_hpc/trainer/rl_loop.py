"""The RL loop: batch n in, policy version n out.

Step n waits for ``rollouts/step_n``, trains on it, publishes policy version n (the last one too), and saves a
checkpoint on schedule, on request, or before stopping. The other side of a checkpoint is the orchestrator's; see
`RunDir`. Metrics are written and old files deleted without waiting for a filesystem that does not respond; batches and
policy versions are waited for.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from primerl_hpc.common.errors import RoleError
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.checkpoint.checkpoint import (
    is_due,
    load_checkpoint,
    present_checkpoints,
    prune_checkpoints,
)
from primerl_hpc.trainer.checkpoint.saver import Saver
from primerl_hpc.trainer.control import (
    Next,
    Requests,
    StepFiles,
    clear_checkpoint_request,
    read_requests,
    report_start,
    take_full_version_request,
    wait_for_batch,
)
from primerl_hpc.trainer.device_turns import AlwaysOnDevice, make_turns
from primerl_hpc.trainer.perf import StepProfiler
from primerl_hpc.trainer.setup import World, broadcast_from_rank0
from primerl_hpc.trainer.train_step import StepResult, Trainer, build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.trainer.weights.filesystem import has_full_version
from primerl_hpc.trainer.weights.publisher import Publisher, make_publisher
from primerl_hpc.transport.rollouts.filesystem import LAG_S, FilesystemReceiver
from primerl_hpc.transport.rollouts.micro_batch import RolloutReceiver
from primerl_hpc.transport.weights.best import BestVersions
from primerl_hpc.transport.weights.delta import prune_chains

SIDES = ("trainer", "orchestrator")

log = logging.getLogger("primerl_hpc.trainer")


def train_rl(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    """Train to ``max_steps``. Returns (``done`` or ``stopped``, last finished step)."""
    recipe = phase.recipe
    turns = make_turns(recipe, run, world)
    with turns.take():
        trainer = build_trainer(recipe, phase.model_path, world, watchdog)
        trainer.profiler = StepProfiler(run, world.rank)
        publisher = make_publisher(run, trainer)
        start = resume(run, trainer, publisher)
        turns.attach(trainer)
        report_start(run, world)
    with Saver(run, trainer, SIDES) as saver, StepFiles() as files:
        outcome = train_steps(run, publisher, saver, start, turns, files)
        watchdog.heartbeat("the last save")
    return outcome


def train_steps(
    run: RunDir, publisher: Publisher, saver: Saver, start: int, turns: AlwaysOnDevice, files: StepFiles
) -> tuple[str, int]:
    trainer = saver.trainer
    recipe, world, watchdog = trainer.recipe, trainer.world, trainer.watchdog
    saved = start
    receiver = FilesystemReceiver(run, world_size=world.data_size)
    writer, best = MetricsWriter(run.metrics("trainer")), make_best(run, recipe)
    for step in range(start + 1, recipe.steps + 1):
        started = time.perf_counter()
        watchdog.pause()
        while (found := wait_for_batch(run, receiver, step, world)) == Next.FULL_WEIGHTS:
            watchdog.heartbeat(f"step {step - 1}, writing its weights again")
            is_requested = take_full_version_request(run, world)
            if is_requested and step > 1 and not has_full_version(run, step - 1, world):
                publisher.write_full(step - 1)
            watchdog.pause()
        if found == Next.STOP:
            with turns.take():
                save_before_stop(run, saver, publisher, step - 1, is_saved=saved == step - 1)
            return "stopped", step - 1
        waited_s = time.perf_counter() - started
        with turns.take() as turn:
            watchdog.heartbeat(f"step {step}, reading its batch")
            result, load_s = train_batch(trainer, receiver, step)
            timings = {"time/wait_for_batch": waited_s, "time/load_data": load_s, **turn}
            watchdog.heartbeat(f"step {step}, writing its weights")
            request = read_requests(run, world, files, has_failed=saver.has_failed, profiler=trainer.profiler)
            is_saved = request != Requests.NONE or is_due(recipe.checkpoint, step, recipe.steps)
            is_full = take_full_version_request(run, world) or is_saved or needs_full_version(recipe, step)
            timings["time/broadcast_weights"] = timed(publisher.publish, step, is_full=is_full)
            if is_saved:
                watchdog.heartbeat(f"step {step}, saving")
                timings["time/save_ckpt"] = timed(saver.save, step, in_background=request.can_wait)
                saved = step
                if request == Requests.CHECKPOINT:
                    clear_checkpoint_request(run, world)
        if world.is_leader:
            timings["time/step"] = time.perf_counter() - started
            row = writer.row(step, result.metrics | timings | saver.metrics)
            files.write(partial(writer.append, row))
            report(step, recipe.steps, result, timings["time/step"])
            files.write(partial(clean_up, run, recipe, receiver, step, best))
        if request == Requests.STOP and step < recipe.steps:
            return "stopped", step
    return "done", recipe.steps


def save_before_stop(run: RunDir, saver: Saver, publisher: Publisher, step: int, *, is_saved: bool) -> None:
    """Save a checkpoint of the last step unless there is one, and the version from which the next attempt starts."""
    saver.trainer.watchdog.heartbeat(f"step {step}, saving")
    if is_saved and not saver.wait():
        return
    if not has_full_version(run, step, saver.trainer.world):
        publisher.write_full(step)
    saver.save(step, in_background=False)


def needs_full_version(recipe: Recipe, step: int) -> bool:
    """True if the recipe's schedule makes version ``step`` a full one."""
    weights = recipe.weights
    is_kept = weights.interval is not None and step % weights.interval == 0
    return is_kept or step % weights.full_interval == 0 or step == recipe.steps


def resume(run: RunDir, trainer: Trainer, publisher: Publisher) -> int:
    """Load the newest complete checkpoint and return its step; 0 if there is none.

    Its policy version is written again if it is missing. With adapters, v0 is written too: engines know the policy only
    by the adapter's name.
    """
    step = broadcast_from_rank0(run.latest_checkpoint() if trainer.world.is_leader else None)
    if step is not None:
        load_checkpoint(run, trainer, step)
        log.info("resumed from checkpoint %d", step)
    elif trainer.recipe.lora is None:
        return 0
    step = step or 0
    if not has_full_version(run, step, trainer.world):
        publisher.write_full(step)
    return step


def train_batch(trainer: Trainer, receiver: RolloutReceiver, step: int) -> tuple[StepResult, float]:
    started = time.perf_counter()
    received = receiver.receive(step, trainer.world.data_rank, timeout_s=LAG_S)
    if received is None:
        raise RoleError(
            f"rank 0 sees batch {step}, but rank {trainer.world.rank} still does not after {LAG_S:.0f} s"
        )
    info, rows = received
    load_s = time.perf_counter() - started
    return trainer.train_step(step, rows, info.env_names), load_s


def make_best(run: RunDir, recipe: Recipe) -> BestVersions | None:
    """Return the choice of ``weights.keep_best``; None without it."""
    best = recipe.weights.keep_best
    if best is None:
        return None
    label = best.metric.split("/")[1] if best.metric.startswith("eval/") else None
    intervals = [
        environment.interval for environment in recipe.environments.eval if environment.label == label
    ]

    def is_due(version: int) -> bool:
        return (
            label is None or version == recipe.steps or any(version % interval == 0 for interval in intervals)
        )

    return BestVersions(run, best.metric, best.n, is_due, best.lowest)


def clean_up(
    run: RunDir, recipe: Recipe, receiver: RolloutReceiver, step: int, best: BestVersions | None = None
) -> None:
    """Delete batches before this one, old checkpoints and old policy versions."""
    receiver.forget(step - 1)
    prune_checkpoints(run, recipe.checkpoint)
    weights = recipe.weights
    versions = run.stable_weights()
    kept = {version for version in versions if weights.interval and version % weights.interval == 0}
    kept |= best.keep(versions) if best is not None else set()
    prune_chains(run, keep_last=recipe.kept_versions, keep=present_checkpoints(run) | kept)


def report(step: int, max_steps: int, result: StepResult, step_s: float) -> None:
    get = result.metrics.get
    log.info(
        "step %d/%d | %.2f s | loss %.4f | entropy %.4f | mismatch KL %.5f | grad norm %.4f | lr "
        "%.2e | %.0f tok/s",
        step,
        max_steps,
        step_s,
        get("loss/mean", 0.0),
        get("entropy/all/mean", 0.0),
        get("mismatch_kl/all/mean", 0.0),
        get("optim/grad_norm", 0.0),
        get("optim/lr", 0.0),
        get("perf/throughput", 0.0),
    )


def timed(call, *arguments, **options) -> float:
    started = time.perf_counter()
    call(*arguments, **options)
    return time.perf_counter() - started
