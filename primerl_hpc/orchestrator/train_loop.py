"""The orchestrator: one process between environments, engines and trainer.

    start up    wait for engines, router and environment servers; resume from the last complete checkpoint
    collect     the dispatcher decides what starts, the runner runs it, finished groups go to the batch builder
    ship        batch n goes to the trainer once v{n-1-async_level} is live; the watcher updates the engines
    end         after the last batch: last version live, last evaluation, last checkpoint

All decisions are made in modules without I/O (scheduling, algorithms, scoring, batches, evaluation); this module
connects them to clocks, files and sockets.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from contextlib import nullcontext

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError, TimeoutWaitingError
from primerl_hpc.common.files import is_there
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.node.start_phases import own_phases
from primerl_hpc.common.waiting import TransientIOErrors, retry_io
from primerl_hpc.orchestrator.batches.batcher import Batch
from primerl_hpc.orchestrator.checkpoint.follower import CheckpointFollower
from primerl_hpc.orchestrator.components import Components, build_components
from primerl_hpc.orchestrator.engines.fleet import Fleet
from primerl_hpc.orchestrator.engines.load_monitor import EngineMonitor
from primerl_hpc.orchestrator.engines.turns import DeviceTurns, TurnHooks
from primerl_hpc.orchestrator.engines.weight_watcher import VersionHooks, WeightWatcher
from primerl_hpc.orchestrator.event_loop import BackgroundCheck, StoppedOnRequest, run_with_background
from primerl_hpc.orchestrator.metrics import LoopLag, Stopwatch, batch_metrics, disk_metrics
from primerl_hpc.orchestrator.rollout_data import Group, Split, TaskRef
from primerl_hpc.orchestrator.rollouts.distillation import Distillation
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.scheduling.concurrency import Concurrency
from primerl_hpc.orchestrator.setup import (
    RouterAddress,
    load_environments,
    make_fleet,
    make_reader,
    names_of_peers,
    vocab_size_for_filters,
    wait_for_peers,
)
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.rollouts.filesystem import FilesystemSender
from primerl_hpc.transport.rollouts.micro_batch import RolloutSender

logger = logging.getLogger(__name__)

HOUSEKEEPING_S, IDLE_HOUSEKEEPING_S = 0.2, 10.0


async def run_orchestrator(run: RunDir, phase: PhasePlan) -> None:
    """Run from start-up to the last checkpoint.

    Raises PrimerlError if the run cannot continue, StoppedOnRequest if it was asked to stop.
    """
    fleet = make_fleet(run, phase.recipe)
    if not phase.recipe.layout.takes_turns:
        return await _run(run, phase, fleet, None)
    turns = DeviceTurns(run, fleet, attempt=env.attempt(), num_engines=len(phase.of_role(Role.INFERENCE)))
    await turns.run_with(_run(run, phase, fleet, turns))


async def _run(run: RunDir, phase: PhasePlan, fleet: Fleet, turns: DeviceTurns | None) -> None:
    router = RouterAddress(run, endpoints=fleet.endpoints)
    distillation = Distillation(run, phase.recipe)
    envs = await load_environments(run, phase.recipe, fleet.endpoints)
    if turns is not None:
        logger.info("waiting for the end of the trainer's first turn")
        await turns.opened.wait()
    logger.info("waiting for %s", ", ".join(names_of_peers(phase)))
    await wait_for_peers(phase, envs, fleet, router, distillation.teacher)
    own_phases().end("engines and environments")
    await distillation.prepare(envs[Split.TRAIN])
    vocab_size = await asyncio.to_thread(vocab_size_for_filters, phase)
    components = build_components(run, phase, router, envs, vocab_size, distillation)
    orchestrator = Orchestrator(run, phase, fleet, envs, components, distillation, turns)
    try:
        await orchestrator.run_to_end()
    finally:
        orchestrator.driver.flush()
        orchestrator.watcher.release()
        await orchestrator.runner.close()
        await fleet.close()
        await distillation.close()


class Orchestrator:
    """Connects the components to the engines and the trainer, and runs them to the last step."""

    def __init__(
        self,
        run: RunDir,
        phase: PhasePlan,
        fleet: Fleet,
        envs: dict[Split, list[EnvHandle]],
        components: Components,
        distillation: Distillation,
        turns: DeviceTurns | None = None,
    ) -> None:
        """``turns``: of engines and trainer on shared accelerators; None: each has its own."""
        self.run, self.recipe, self.fleet, self.envs = run, phase.recipe, fleet, envs
        self.distillation, self.resumed = distillation, components.resumed
        self.sampler, self.dispatcher = components.sampler, components.dispatcher
        self.builder, self.evaluator = components.builder, components.evaluator
        self.runner, self.driver, self.state = components.runner, components.driver, components.state
        self.turns = turns
        self.watcher = self._make_watcher(phase)
        if turns is not None:
            turns.hooks = TurnHooks(self._may_hand_over, self._on_sleep, self._wake)
        self.engines = self._make_monitor(components.concurrency)
        self.follower = CheckpointFollower(
            run, process_name(Role.TRAINER, 0), self.resumed, max_lead=self.dispatcher.async_level
        )
        self.sender: RolloutSender = FilesystemSender(run)
        self.metrics = MetricsWriter(run.metrics("orchestrator"))
        self.lag, self.error_rates = LoopLag(), self.driver.watch_error_rates(phase)
        self._patience = TransientIOErrors("the traces")
        self._shipped_at = time.monotonic()
        self._files = BackgroundCheck(self._check_files, HOUSEKEEPING_S, IDLE_HOUSEKEEPING_S)
        self._behind_since: float | None = None  # the trainer
        self._waits_for_policy = Stopwatch()
        self._shipping: asyncio.Task[None] | None = None
        self._following: asyncio.Task[list[int]] | None = None

    def _make_watcher(self, phase: PhasePlan) -> WeightWatcher:
        return WeightWatcher(
            self.run,
            self.fleet,
            make_reader(self.run, self.recipe),
            VersionHooks(
                next_version=self.evaluator.next_due,
                on_pending=self._on_pending,
                on_live=self._on_live,
                may_update=self._may_update,
                exclusive=nullcontext() if self.turns is None else self.turns.exclusive,
            ),
            base_model=phase.model_path if self.recipe.lora is None else None,
            engines_timeout_s=self.recipe.timeouts.inference_ready_s,
        )

    def _make_monitor(self, concurrency: Concurrency | None) -> EngineMonitor:
        return EngineMonitor(
            self.fleet,
            self.dispatcher,
            concurrency,
            is_updating=lambda: self.driver.is_updating,
            cancel_youngest_rollouts=self._cancel_youngest,
            stuck_after_s=self.recipe.timeouts.health_s,
            frozen=self.recipe.served_models,
        )

    # -- main loop ---------------------------------------------------------------------------------
    async def run_to_end(self) -> None:
        """Restore the state, finish interrupted evaluations, then train."""
        await asyncio.to_thread(self.state.restore, self.run, self.resumed)
        await self._evaluate_interrupted()
        await self.watcher.load(self.resumed)
        await run_with_background(
            self._train_and_finish(), self.watcher.watch(), self.lag.watch(), self.engines.watch()
        )

    async def _evaluate_interrupted(self) -> None:
        """Finish evaluations that an earlier incarnation started: their versions would never be live again."""
        while self.evaluator.interrupted:
            version = self.evaluator.interrupted[0]
            try:
                await self.watcher.load_again(version)
            except (DataError, FileNotFoundError):
                logger.warning(
                    "evaluation of policy v%d was interrupted, and its weights no longer exist: it has no row in "
                    "metrics/eval.jsonl; increase weights.keep_last or set weights.interval to keep them",
                    version,
                )
            else:
                await run_with_background(self._until_evaluated(), self.watcher.hold(), self.engines.watch())
            del self.evaluator.interrupted[0]

    async def _until_evaluated(self) -> None:
        while self.evaluator.num_open:
            await self._collect()
            await self._files.run_if_due()

    async def _train_and_finish(self) -> None:
        self._shipped_at = time.monotonic()
        while self.dispatcher.step <= self.recipe.steps or self._shipping is not None:
            await self._iterate()
        logger.info("shipped the last batch")
        self.driver.cancel(self.dispatcher.stop_training())
        last = self.recipe.steps
        await self._wait_until(lambda: self.watcher.version >= last, f"policy version {last}")
        while self.evaluator.num_open:
            await self._iterate()
        if self._is_saved_at(last):
            await self._wait_until(
                lambda: self.follower.committed >= last, f"the trainer's checkpoint of step {last}"
            )
        await self._files.finish()

    async def _iterate(self) -> None:
        """Start what may start, process what ended, ship what is ready, check the files."""
        await self._collect()
        await self._files.run_if_due()
        self._check_gate()
        if self._shipping is not None and self._shipping.done():
            self._shipping.result()
            self._shipping = None
        if (
            self._shipping is None
            and self.dispatcher.step <= self.recipe.steps
            and self.dispatcher.may_ship
            and self.builder.is_ready(self.dispatcher.min_fresh_version)
        ):
            self._build_batch()

    async def _collect(self) -> None:
        self.dispatcher.batch_size = self.builder.batch_size
        self.driver.dispatch(self.builder.num_queued, self.builder.num_empty_batches)
        for group in await self.driver.next_groups():
            self._files.note_change()
            self._score(group)

    async def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Iterate until ``condition()`` is true.

        Raises TimeoutWaitingError if neither it nor a new version occurred within timeouts.weights_s. The watcher
        itself abandons a version that is written and that no engine loads.
        """
        start, timeout_s = time.monotonic(), self.recipe.timeouts.weights_s
        while not condition():
            waited_s = time.monotonic() - max(start, self.watcher.waiting_since)
            if waited_s > timeout_s and not self.driver.is_updating:
                raise TimeoutWaitingError(
                    f"{what} did not arrive within {timeout_s} s", hint="see logs/latest/trainer.log"
                )
            await self._iterate()

    def _is_saved_at(self, step: int) -> bool:
        checkpoint = self.recipe.checkpoint
        return checkpoint.at_end or bool(checkpoint.interval and step % checkpoint.interval == 0)

    # -- policy versions ---------------------------------------------------------------------------
    def _on_pending(self, version: int) -> None:
        self.driver.is_updating = True

    def _on_live(self, version: int) -> None:
        self.driver.is_updating = False
        self.dispatcher.policy_live(version)
        self.driver.open_evaluation(version)
        self.runner.wake()

    def _may_update(self) -> bool:
        """False while an evaluation is open and all training rollouts come from a teacher.

        The engines then finish the evaluation with the policy version that it started with.
        """
        samples = {algorithm.samples_from for algorithm in self.recipe.algorithms}
        return samples != {"teacher"} or not self.evaluator.num_open

    async def _may_hand_over(self) -> bool:
        """False while an evaluation is open: it uses one policy version. A run that stops does not wait for it."""
        if not self.evaluator.num_open or await asyncio.to_thread(is_there, self.run.stop_request):
            return True
        self.watcher.waiting_since = time.monotonic()  # the trainer waits for the evaluation
        return False

    def _on_sleep(self) -> None:
        self.driver.is_updating = True

    async def _wake(self) -> None:
        await self.watcher.wake()
        self.driver.is_updating = False
        self.runner.wake()

    def _cancel_youngest(self, count: int) -> None:
        """Cancel the youngest groups because engines are overloaded; their tasks start over later."""
        cancels = self.dispatcher.cancel_youngest(count)
        self.driver.cancel(cancels)
        self.sampler.requeue([cancel.task for cancel in cancels])

    def _check_gate(self) -> None:
        """Measure how long the loop waits for the trainer; raise TimeoutWaitingError if it is behind for too long.

        While engines load a version, the watcher's own timeout applies instead.
        """
        now = time.monotonic()
        self._waits_for_policy.observe(self.dispatcher.waits_for_policy(self.builder.num_queued), now)
        if self.dispatcher.may_ship:
            self._behind_since = None
            return
        self._behind_since = self._behind_since or now
        waited_s = now - max(self._behind_since, self.watcher.waiting_since)
        if waited_s > self.recipe.timeouts.weights_s and not self.driver.is_updating:
            raise TimeoutWaitingError(
                f"policy version {self.dispatcher.version + 1} did not arrive within "
                f"{self.recipe.timeouts.weights_s} s",
                hint="see logs/latest/trainer.log, or raise timeouts.weights_s",
            )

    # -- batches -----------------------------------------------------------------------------------
    def _score(self, group: Group) -> None:
        scored = self.builder.add(group)
        if scored is None:
            self.sampler.record_failure(TaskRef(group.env, group.task))
            return
        self.sampler.observe(scored.task, scored.mean_reward)
        handle = self.envs[Split.TRAIN][group.env]
        for rollout, version, advantages in zip(
            scored.rollouts, scored.versions, scored.trace_advantages, strict=True
        ):
            self.driver.traces[Split.TRAIN].add(
                rollout,
                env=handle.environment.label,
                task=handle.tasks[group.task].key,
                version=version,
                advantages=advantages.tolist(),
                group=group.group_id,
                step=self.dispatcher.step,
            )
            self.state.totals["rollouts"] += 1
            self.state.totals["tokens"] += rollout.output_tokens

    def _build_batch(self) -> None:
        """Take the batch being collected; it is packed and sent while the next one is collected."""
        step = self.dispatcher.step
        batch = self.builder.next_batch(step, self.dispatcher.min_fresh_version)
        if batch is None:
            logger.warning("dropped a batch in which nothing has a signal; collecting step %d again", step)
            return
        self.follower.remember(step, self.state.snapshot(), self.builder.queue)
        cancels = self.dispatcher.advance(step + 1)
        self.driver.cancel(cancels)
        for cancel in cancels:
            self.sampler.record_failure(cancel.task)
        self._shipping = asyncio.create_task(self._ship(batch))
        self._shipping.add_done_callback(lambda _: self.runner.wake())

    async def _ship(self, batch: Batch) -> None:
        start = time.monotonic()
        packed = await asyncio.to_thread(self.builder.pack, batch)
        packed_at = time.monotonic()
        batch.info.metrics = {"reward/mean": batch.mean_reward}
        await retry_io("a batch's folder", lambda: self.sender.send(batch.info, packed.ranks))
        measured = {"time/pack": packed_at - start, "time/send": time.monotonic() - packed_at}
        await self._report(batch, measured | await asyncio.to_thread(disk_metrics, self.run.root))

    async def _report(self, batch: Batch, measured: dict[str, float]) -> None:
        now = time.monotonic()
        step_s, self._shipped_at = now - self._shipped_at, now
        self._check_gate()
        metrics = batch_metrics(batch, self.dispatcher) | measured
        metrics |= {"time/step": step_s, "time/wait_for_policy": self._waits_for_policy.take()}
        metrics["time/save_ckpt"], self.follower.save_seconds = self.follower.save_seconds, 0.0
        metrics |= self.watcher.take_metrics() | self.lag.take() | self.engines.take_metrics()
        metrics |= self.builder.scorer.take_metrics() | (self.turns.take_metrics() if self.turns else {})
        metrics |= {f"failures/{kind}": count for kind, count in self.driver.errors.items()}
        metrics |= {f"progress/{name}": value for name, value in self.state.totals.items()}
        for environment, epoch in zip(self.recipe.environments.train, self.sampler.epochs(), strict=True):
            metrics[f"progress/{environment.label}/epoch"] = epoch
        for environment, curriculum in zip(
            self.recipe.environments.train, self.sampler.curricula, strict=True
        ):
            for name, count in curriculum.metrics().items():
                metrics[f"curriculum/{environment.label}/{name}"] = count
        await retry_io("the metrics", lambda: self.metrics.write(batch.info.step, metrics))
        self.error_rates.observe(metrics)
        logger.info(
            "step %d | %.1f s | reward %.4f | trainable %.0f %% | turns %.1f | off-policy max %d | errors %.0f %% | "
            "truncated %.0f %% | rows %d",
            batch.info.step,
            step_s,
            metrics["reward/mean"],
            100 * metrics["batch/trainable"],
            metrics["turns/mean"],
            metrics["off_policy/max"],
            100 * metrics["errored_rollouts/all"],
            100 * metrics["truncated/mean"],
            metrics["packing/rows"],
        )

    # -- files -------------------------------------------------------------------------------------
    async def _check_files(self) -> None:
        """Check the router's address, the trainer's checkpoints and a stop request, off the event loop."""
        with self._patience:
            await asyncio.to_thread(self.driver.flush)
        await asyncio.to_thread(self.driver.router.refresh)
        if self.distillation.teacher is not None:
            await asyncio.to_thread(self.distillation.teacher.refresh)
        self._follow()
        stopped_at = await asyncio.to_thread(self.follower.stopped_at)
        if self.follower.is_stopping:
            self._files.note_change()  # the trainer stops soon
        if stopped_at is None:
            return
        assert self._following is not None
        await self._following
        if not self.follower.is_complete(stopped_at):
            await asyncio.to_thread(self.follower.follow)  # the trainer's side appeared after the check above
        if self.follower.patience.is_failing:
            return  # the next check saves it, when the filesystem responds
        if steps := ",".join(map(str, self.evaluator.unfinished)):
            logger.warning(
                f"evaluations of policy versions {steps} are not finished: resume the run to finish them, or run "
                f"primerl-hpc eval {shlex.quote(str(self.run.root))} --steps {steps}"
            )
        raise StoppedOnRequest(f"stopped on request after step {stopped_at}, state saved")

    def _follow(self) -> None:
        """Write the orchestrator's side of checkpoints while rollouts continue."""
        if self._following is not None and self._following.done():
            self._following.result()
            self._following = None
        self._following = self._following or asyncio.create_task(asyncio.to_thread(self.follower.follow))
