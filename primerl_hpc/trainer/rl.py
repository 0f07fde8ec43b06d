"""The RL loop: batch n in, policy version n out.

Step n waits for ``rollouts/step_n``, trains on it, publishes policy version n (the last one too), and saves a checkpoint
when one is due, asked for, or the run is to stop. A checkpoint's other side is the orchestrator's; see `RunDir`.
"""

from __future__ import annotations

import logging
import time

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.metrics import MetricsWriter
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import PhasePlan
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.trainer.checkpoint import (
    is_due,
    load_checkpoint,
    present_checkpoints,
    prune_checkpoints,
)
from primerl_hpc.trainer.control import (
    Next,
    Requests,
    grant_checkpoint,
    is_whole_version_asked,
    read_requests,
    wait_for_batch,
)
from primerl_hpc.trainer.core import Core, StepResult, build_core
from primerl_hpc.trainer.export import is_whole_there
from primerl_hpc.trainer.publish import Publisher, make_publisher
from primerl_hpc.trainer.saver import Saver
from primerl_hpc.trainer.setup import World, from_leader
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.rollouts_filesystem import LAG_S, FilesystemReceiver
from primerl_hpc.transport.weights_delta import prune_chains

SIDES = ("trainer", "orchestrator")

log = logging.getLogger("primerl_hpc.trainer")


def train_rl(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    """Train to ``max_steps``. Returns (``done`` or ``stopped``, last finished step)."""
    recipe = phase.recipe
    core = build_core(recipe, phase.model_path, world, watchdog)
    publisher = make_publisher(run, core)
    start = resume(run, core, publisher)
    with Saver(run, core, SIDES) as saver:
        outcome = train_steps(run, core, publisher, saver, start)
        watchdog.beat("the last save")
    return outcome


def train_steps(run: RunDir, core: Core, publisher: Publisher, saver: Saver, start: int) -> tuple[str, int]:
    recipe, world, watchdog = core.recipe, core.world, core.watchdog
    saved = start
    receiver = FilesystemReceiver(run, world_size=world.data_size)
    writer = MetricsWriter(run.metrics("trainer"))
    for step in range(start + 1, recipe.steps + 1):
        started = time.perf_counter()
        watchdog.rest()
        while (found := wait_for_batch(run, receiver, step, world)) == Next.WHOLE_WEIGHTS:
            watchdog.beat(f"step {step - 1}, writing its weights again")
            is_asked = is_whole_version_asked(run, world)
            if is_asked and step > 1 and not is_whole_there(run, step - 1, world):
                publisher.write_whole(step - 1)
            watchdog.rest()
        if found == Next.STOP:
            watchdog.beat(f"step {step - 1}, saving")
            if saved != step - 1 or saver.wait():
                if not is_whole_there(run, step - 1, world):
                    publisher.write_whole(step - 1)  # what the next life begins with
                saver.save(step - 1, in_background=False)
            return "stopped", step - 1
        watchdog.beat(f"step {step}, reading its batch")
        waited_s = time.perf_counter() - started
        result, load_s = train_batch(core, receiver, step)
        timings = {"time/wait_for_batch": waited_s, "time/load_data": load_s}
        watchdog.beat(f"step {step}, writing its weights")
        request = read_requests(run, world, has_failed=saver.has_failed)
        is_saved = request != Requests.NONE or is_due(recipe.checkpoint, step, recipe.steps)
        is_whole = is_whole_version_asked(run, world) or is_saved or is_whole_version(recipe, step)
        timings["time/broadcast_weights"] = timed(publisher.publish, step, is_whole=is_whole)
        if is_saved:
            watchdog.beat(f"step {step}, saving")
            timings["time/save_ckpt"] = timed(saver.save, step, in_background=request.can_wait)
            saved = step
            if request == Requests.CHECKPOINT:
                grant_checkpoint(run, world)
        if world.is_leader:
            timings["time/step"] = time.perf_counter() - started
            writer.write(step, result.metrics | timings | saver.metrics)
            report(step, recipe.steps, result, timings["time/step"])
            clean_up(run, core, receiver, step)
        if request == Requests.STOP and step < recipe.steps:
            return "stopped", step
    return "done", recipe.steps


def is_whole_version(recipe: Recipe, step: int) -> bool:
    weights = recipe.weights
    is_kept = weights.interval is not None and step % weights.interval == 0
    return is_kept or step % weights.full_interval == 0 or step == recipe.steps


def resume(run: RunDir, core: Core, publisher: Publisher) -> int:
    """Load the newest complete checkpoint, if any; its policy version is written again if it is gone.

    With adapters v0 is a policy version to write as well: the engines know the policy by the adapter's name only.
    """
    step = from_leader(run.latest_checkpoint() if core.world.is_leader else None)
    if step is not None:
        load_checkpoint(run, core, step)
        log.info("resumed from checkpoint %d", step)
    elif core.recipe.lora is None:
        return 0
    step = step or 0
    if not is_whole_there(run, step, core.world):
        publisher.write_whole(step)
    return step


def train_batch(core: Core, receiver: FilesystemReceiver, step: int) -> tuple[StepResult, float]:
    started = time.perf_counter()
    received = receiver.receive(step, core.world.data_rank, timeout_s=LAG_S)
    if received is None:
        raise RoleError(f"rank 0 sees batch {step}, rank {core.world.rank} does not after {LAG_S:.0f} s")
    info, rows = received
    load_s = time.perf_counter() - started
    return core.train_step(step, rows, info.env_names), load_s


def clean_up(run: RunDir, core: Core, receiver: FilesystemReceiver, step: int) -> None:
    """Drop what nobody will ask for: batches before this one, old checkpoints, old policy versions."""
    receiver.forget(step - 1)
    prune_checkpoints(run, core.recipe.checkpoint)
    weights = core.recipe.weights
    kept = {step for step in run.stable_weights() if weights.interval and step % weights.interval == 0}
    prune_chains(run, keep_last=weights.keep_last, keep=present_checkpoints(run) | kept)


def report(step: int, max_steps: int, result: StepResult, step_s: float) -> None:
    get = result.metrics.get
    log.info(
        "step %d/%d | %.2f s | loss %.4f | entropy %.4f | mismatch KL %.5f | grad norm %.4f | lr %.2e | %.0f tok/s",
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
