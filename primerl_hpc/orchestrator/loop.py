"""The orchestrator: one process between environments, engines and trainer.

    start up    wait for engines, router and environment servers; resume from the last complete checkpoint
    collect     the dispatcher says what starts, the runner runs it, finished groups go to the batch cutter
    ship        batch n goes to the trainer once v{n-2} is live; the watcher brings new versions to the engines
    end         after the last batch: last version live, last evaluation, last checkpoint

Everything that decides is in modules without IO (dispatcher, batches, packing, sampler, evals); here they are wired
to clocks, files and sockets.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable

from primerl_hpc.common.errors import DataError, ExitCode, PrimerlError, TimeoutWaitingError
from primerl_hpc.common.metrics import MetricsWriter, read_steps
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.patience import Patience, outlast
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.batches import BatchCutter, Cut
from primerl_hpc.orchestrator.checkpoints import CheckpointFollower
from primerl_hpc.orchestrator.dispatcher import Dispatcher, Group, Split
from primerl_hpc.orchestrator.distillation import Distillation
from primerl_hpc.orchestrator.driver import RolloutDriver, env_limits, env_rates
from primerl_hpc.orchestrator.engines import EngineWatch
from primerl_hpc.orchestrator.evals import Evaluator
from primerl_hpc.orchestrator.event_loop import beside
from primerl_hpc.orchestrator.fleet import Fleet
from primerl_hpc.orchestrator.metrics import LoopLag, batch_metrics, disk_metrics
from primerl_hpc.orchestrator.runner import EnvHandle, RolloutRunner
from primerl_hpc.orchestrator.sampler import TaskRef, TaskSampler
from primerl_hpc.orchestrator.scoring import Scorer
from primerl_hpc.orchestrator.setup import (
    RouterAddress,
    load_environments,
    make_concurrency,
    make_fleet,
    make_reader,
    vocab_size_for_filters,
    wait_for_peers,
)
from primerl_hpc.orchestrator.state import LoopState
from primerl_hpc.orchestrator.watcher import WeightWatcher
from primerl_hpc.plan.types import PhasePlan
from primerl_hpc.transport.rollouts_filesystem import FilesystemSender

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.2


class StoppedOnRequest(PrimerlError):
    """The trainer saved and stopped, our side is saved: the run can be resumed."""

    exit_code = ExitCode.STOPPED


async def run_orchestrator(run: RunDir, phase: PhasePlan) -> None:
    """From start-up to the last checkpoint. Raises PrimerlError when the run cannot go on, or was asked to stop."""
    fleet = make_fleet(run, phase.recipe)
    router = RouterAddress(run)
    distillation = Distillation(run, phase.recipe)
    envs = await load_environments(run, phase.recipe)
    logger.info("waiting for engines, router and environment servers")
    await wait_for_peers(phase, envs, fleet, router, distillation.teacher)
    await distillation.prepare(envs[Split.TRAIN])
    vocab_size = await asyncio.to_thread(vocab_size_for_filters, phase)
    orchestrator = Orchestrator(run, phase, fleet, router, envs, vocab_size, distillation)
    try:
        await orchestrator.run_to_end()
    finally:
        orchestrator.driver.flush()
        orchestrator.watcher.release()
        await orchestrator.runner.close()
        await fleet.close()
        await distillation.close()


class Orchestrator:
    def __init__(
        self,
        run: RunDir,
        phase: PhasePlan,
        fleet: Fleet,
        router: RouterAddress,
        envs: dict[Split, list[EnvHandle]],
        vocab_size: int,
        distillation: Distillation,
    ) -> None:
        recipe = phase.recipe
        self.run, self.recipe, self.fleet, self.envs = run, recipe, fleet, envs
        self.distillation = distillation
        self.resumed = run.latest_checkpoint() or 0
        self.sampler = TaskSampler(
            [len(handle.tasks) for handle in envs[Split.TRAIN]],
            [environment.ratio for environment in recipe.environments.train],
            recipe.seed,
            [environment.curriculum for environment in recipe.environments.train],
        )
        rollouts = recipe.rollouts
        concurrency = make_concurrency(rollouts)
        self.dispatcher = Dispatcher(
            next_task=self.sampler.next,
            group_size=rollouts.group_size,
            batch_size=rollouts.batch_size,
            max_in_flight=concurrency.limit if concurrency else rollouts.in_flight_ceiling,
            max_off_policy_steps=rollouts.max_off_policy_steps,
            last_step=recipe.steps,
            step=self.resumed + 1,
            version=self.resumed,
            frozen_envs=frozenset(
                index
                for index, algorithm in enumerate(recipe.algorithms)
                if algorithm.samples_from == "teacher"
            ),
            env_limits=env_limits(envs),
            env_rates=env_rates(envs),
        )
        self.cutter = BatchCutter(
            rollouts,
            Scorer(recipe, vocab_size),
            seq_len=recipe.seq_len,
            num_ranks=phase.num_data_ranks,
            env_names=[environment.label for environment in recipe.environments.train],
        )
        self.evaluator = Evaluator(
            recipe.environments,
            [len(handle.tasks) for handle in envs[Split.EVAL]],
            recipe.steps,
            {version for version in read_steps(run.metrics("eval")) if version <= self.resumed},
        )
        self.runner = RolloutRunner(
            recipe,
            envs,
            live_version=lambda: self.dispatcher.version,
            router_url=lambda: router.url,
            distillation=distillation,
        )
        self.driver = RolloutDriver(run, recipe, self.dispatcher, self.evaluator, self.runner, router)
        self.watcher = WeightWatcher(
            run,
            fleet,
            make_reader(run, recipe),
            base_model=phase.model_path if recipe.lora is None else None,
            engines_timeout_s=recipe.timeouts.inference_ready_s,
            next_version=self.evaluator.next_due,
            on_pending=self._on_pending,
            on_live=self._on_live,
            may_update=self._may_update,
        )
        self.engines = EngineWatch(
            fleet,
            self.dispatcher,
            concurrency,
            is_updating=lambda: self.driver.is_updating,
            take_back=self._take_back,
            stuck_after_s=recipe.timeouts.health_s,
            frozen=recipe.served_models,
        )
        self.state = LoopState(
            self.sampler,
            self.dispatcher,
            self.cutter,
            self.driver.traces[Split.TRAIN],
            self.driver.traces[Split.EVAL],
            self.evaluator,
        )
        self.follower = CheckpointFollower(run, process_name(Role.TRAINER, 0), self.resumed)
        self.sender = FilesystemSender(run)
        self.metrics = MetricsWriter(run.metrics("orchestrator"))
        self.lag = LoopLag()
        self._patience = Patience("the traces")
        self._last_ship = self._last_look = time.monotonic()
        self._closed_since: float | None = None
        self._closed_s = 0.0
        self._shipping: asyncio.Task[None] | None = None
        self._following: asyncio.Task[list[int]] | None = None

    # -- life ------------------------------------------------------------------------------------------------------
    async def run_to_end(self) -> None:
        await asyncio.to_thread(self.state.restore, self.run, self.resumed)
        await self._evaluate_missed()
        await self.watcher.load(self.resumed)
        await beside(self._train_and_finish(), self.watcher.watch(), self.lag.watch(), self.engines.watch())

    async def _evaluate_missed(self) -> None:
        """What an earlier life began to evaluate and did not get done; its versions are never live again otherwise."""
        while self.evaluator.missed:
            version = self.evaluator.missed[0]
            try:
                await self.watcher.load_again(version)
            except (DataError, FileNotFoundError):
                logger.warning(
                    "policy v%d was not evaluated to the end before the run stopped, and its weights are gone: it has no "
                    "row in metrics/eval.jsonl; a larger weights.keep_last, or weights.interval, would have kept them",
                    version,
                )
            else:
                await beside(self._until_evaluated(), self.watcher.hold(), self.engines.watch())
            del self.evaluator.missed[0]

    async def _until_evaluated(self) -> None:
        while self.evaluator.num_open:
            await self._collect()
            await self._look_at_files()

    async def _train_and_finish(self) -> None:
        self._last_ship = time.monotonic()
        while self.dispatcher.step <= self.recipe.steps or self._shipping is not None:
            await self._turn()
        logger.info("the last batch is shipped")
        self.driver.cancel(self.dispatcher.stop_training())
        last = self.recipe.steps
        await self._until(lambda: self.watcher.version >= last, f"policy version {last}")
        while self.evaluator.num_open:
            await self._turn()
        if self._is_saved_at(last):
            await self._until(
                lambda: self.follower.committed >= last, f"the trainer's checkpoint of step {last}"
            )

    async def _turn(self) -> None:
        """Start what may start, take in what ended, ship what is ready, look at the files."""
        await self._collect()
        if self._shipping is not None and self._shipping.done():
            self._shipping.result()
            self._shipping = None
        if (
            self._shipping is None
            and self.dispatcher.step <= self.recipe.steps
            and self.dispatcher.may_ship
            and self.cutter.is_ready(self.dispatcher.min_fresh_version)
        ):
            self._cut()
        await self._look_at_files()
        self._watch_gate()

    async def _collect(self) -> None:
        self.driver.dispatch(self.cutter.num_queued)
        for group in await self.driver.next_groups():
            self._score(group)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Raises TimeoutWaitingError when neither ``condition`` nor a new version came within timeouts.weights_s.

        The watcher itself gives up a version that is written and that no engine takes.
        """
        start, timeout_s = time.monotonic(), self.recipe.timeouts.weights_s
        while not condition():
            waited_s = time.monotonic() - max(start, self.watcher.waiting_since)
            if waited_s > timeout_s and not self.driver.is_updating:
                raise TimeoutWaitingError(
                    f"waited {timeout_s} s for {what}", mend="see logs/latest/trainer.log"
                )
            await self._turn()

    def _is_saved_at(self, step: int) -> bool:
        checkpoint = self.recipe.checkpoint
        return checkpoint.at_end or bool(checkpoint.interval and step % checkpoint.interval == 0)

    # -- policy versions ---------------------------------------------------------------------------------------------
    def _on_pending(self, version: int) -> None:
        self.driver.is_updating = True

    def _on_live(self, version: int) -> None:
        self.driver.is_updating = False
        self.dispatcher.policy_live(version)
        self.driver.open_evaluation(version)
        self.runner.wake()

    def _may_update(self) -> bool:
        """Engines that no training rollout needs finish an evaluation with the policy that they began it with."""
        samples = {algorithm.samples_from for algorithm in self.recipe.algorithms}
        return samples != {"teacher"} or not self.evaluator.num_open

    def _take_back(self, count: int) -> None:
        """Engines are overfull: the youngest groups are begun anew later."""
        cancels = self.dispatcher.cancel_youngest(count)
        self.driver.cancel(cancels)
        self.sampler.give_back([cancel.task for cancel in cancels])

    def _watch_gate(self) -> None:
        """How long nothing could start because the trainer is behind; too long means that it is stuck.

        While engines load what it wrote, the watcher's own limit counts.
        """
        now = time.monotonic()
        if self.dispatcher.lead <= min(1, self.dispatcher.max_off_policy_steps):
            self._closed_s += now - self._closed_since if self._closed_since else 0.0
            self._closed_since = None
            return
        self._closed_since = self._closed_since or now
        waited_s = now - max(self._closed_since, self.watcher.waiting_since)
        if waited_s > self.recipe.timeouts.weights_s and not self.driver.is_updating:
            raise TimeoutWaitingError(
                f"waited {self.recipe.timeouts.weights_s} s for policy version {self.dispatcher.version + 1}",
                mend="see logs/latest/trainer.log, or raise timeouts.weights_s",
            )

    # -- batches -----------------------------------------------------------------------------------------------------
    def _score(self, group: Group) -> None:
        scored = self.cutter.add(group)
        if scored is None:
            self.sampler.missed(TaskRef(group.env, group.task))
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
            )
            self.state.totals["rollouts"] += 1
            self.state.totals["tokens"] += rollout.output_tokens

    def _cut(self) -> None:
        """Take the batch being collected; it is packed and sent while the next one is collected."""
        step = self.dispatcher.step
        cut = self.cutter.take(step, self.dispatcher.min_fresh_version)
        if cut is None:
            logger.warning("a whole batch without a signal was thrown away; collecting step %d anew", step)
            return
        self.follower.remember(step, self.state.take(), self.cutter.queue)
        cancels = self.dispatcher.advance(step + 1)
        self.driver.cancel(cancels)
        for cancel in cancels:
            self.sampler.missed(cancel.task)
        self._shipping = asyncio.create_task(self._ship(cut))
        self._shipping.add_done_callback(lambda _: self.runner.wake())

    async def _ship(self, cut: Cut) -> None:
        start = time.monotonic()
        packed = await asyncio.to_thread(self.cutter.pack, cut)
        packed_at = time.monotonic()
        cut.info.metrics = {"reward/mean": cut.mean_reward}
        await outlast("a batch's folder", lambda: self.sender.send(cut.info, packed.ranks))
        measured = {"time/pack": packed_at - start, "time/send": time.monotonic() - packed_at}
        await self._report(cut, measured | await asyncio.to_thread(disk_metrics, self.run.root))

    async def _report(self, cut: Cut, measured: dict[str, float]) -> None:
        now = time.monotonic()
        step_s, self._last_ship = now - self._last_ship, now
        self._watch_gate()
        wait_s, self._closed_s = self._closed_s, 0.0
        metrics = batch_metrics(cut, self.dispatcher) | measured
        metrics |= {"time/step": step_s, "time/wait_for_policy": wait_s}
        metrics["time/save_ckpt"], self.follower.save_seconds = self.follower.save_seconds, 0.0
        metrics |= self.watcher.take_metrics() | self.lag.take() | self.engines.take_metrics()
        metrics |= self.cutter.scorer.take_metrics()
        metrics |= {f"failures/{kind}": count for kind, count in self.driver.errors.items()}
        metrics |= {f"progress/{name}": value for name, value in self.state.totals.items()}
        for environment, epoch in zip(self.recipe.environments.train, self.sampler.epochs(), strict=True):
            metrics[f"progress/{environment.label}/epoch"] = epoch
        for environment, curriculum in zip(
            self.recipe.environments.train, self.sampler.curricula, strict=True
        ):
            for name, count in curriculum.metrics().items():
                metrics[f"curriculum/{environment.label}/{name}"] = count
        await outlast("the metrics", lambda: self.metrics.write(cut.info.step, metrics))
        logger.info(
            "step %d | %.1f s | reward %.4f | trainable %.0f %% | turns %.1f | off-policy max %d | errors %.0f %% | "
            "truncated %.0f %% | rows %d",
            cut.info.step,
            step_s,
            metrics["reward/mean"],
            100 * metrics["batch/trainable"],
            metrics["turns/mean"],
            metrics["off_policy/max"],
            100 * metrics["errors/mean"],
            100 * metrics["truncated/mean"],
            metrics["packing/rows"],
        )

    # -- files -------------------------------------------------------------------------------------------------------
    async def _look_at_files(self) -> None:
        """Router's address, trainer's checkpoints, a stop: a few existence checks, off the event loop."""
        if time.monotonic() - self._last_look < HOUSEKEEPING_S:
            return
        self._last_look = time.monotonic()
        with self._patience:
            await asyncio.to_thread(self.driver.flush)
        await asyncio.to_thread(self.driver.router.refresh)
        if self.distillation.teacher is not None:
            await asyncio.to_thread(self.distillation.teacher.refresh)
        self._follow()
        stopped_at = await asyncio.to_thread(self.follower.stopped_at)
        if stopped_at is None:
            return
        assert self._following is not None
        await self._following
        if not self.follower.is_complete(stopped_at):
            await asyncio.to_thread(self.follower.follow)  # the trainer's side appeared after the look above
        if self.follower.patience.is_tried:
            return  # saved by another look, when the filesystem answers
        if steps := ",".join(map(str, self.evaluator.unfinished)):
            logger.warning(
                f"evaluations of policy versions {steps} are not done: they are when the run is resumed, or by "
                f"primerl-hpc eval {shlex.quote(str(self.run.root))} --steps {steps}"
            )
        raise StoppedOnRequest(f"stopped on request after step {stopped_at}, state saved")

    def _follow(self) -> None:
        """Our side of checkpoints is written while rollouts go on."""
        if self._following is not None and self._following.done():
            self._following.result()
            self._following = None
        self._following = self._following or asyncio.create_task(asyncio.to_thread(self.follower.follow))
