"""Stand-alone evaluation (kind eval): policy versions one after another, the environments of each in parallel.

The engines are brought from version to version as in training, so they start once. A model on an external server is
version 0 and the only one. A finished pair of version and environment has its row in results/scores.jsonl and is never
run again: running the same directory again evaluates only what is missing.

A run of kind sft with an ``evaluation`` block uses the same process: it evaluates the versions that the run's trainer
publishes until the last one has its scores, and deletes the versions that are no longer needed.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.safety.printable import one_line
from primerl_hpc.orchestrator.driver import RolloutDriver, RolloutTally, env_bounds
from primerl_hpc.orchestrator.engines.load_monitor import EngineMonitor
from primerl_hpc.orchestrator.engines.weight_watcher import VersionHooks, WeightWatcher
from primerl_hpc.orchestrator.evaluation import Evaluator, OpenEvaluation
from primerl_hpc.orchestrator.event_loop import StoppedOnRequest, run_with_background
from primerl_hpc.orchestrator.rollout_data import Group, Split, TaskRef
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.runner import RolloutRunner
from primerl_hpc.orchestrator.rollouts.traces import keep_rows
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, DispatchLimits
from primerl_hpc.orchestrator.setup import (
    ExternalAddress,
    RouterAddress,
    load_environments,
    make_fleet,
    wait_for_peers,
)
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.schema.evaluation import EvaluationSettings as Settings
from primerl_hpc.recipe.schema.evaluation import External
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Environments
from primerl_hpc.run.endpoints import must_save
from primerl_hpc.run.lock import is_owner_alive
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import metrics_of, read_scores, write_score
from primerl_hpc.transport.weights.best import BestVersions
from primerl_hpc.transport.weights.filesystem import (
    FilesystemWeightReader,
    prune_weights,
    write_blank_adapter,
)

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
MAX_FAILURES = 64  # of an environment at a version before its first success
WATCH_S = 2.0
EXTERNAL_TIMEOUT_S = 30.0


async def run_evaluation(run: RunDir, phase: PhasePlan) -> None:
    """Evaluate until every version has its scores on every environment.

    Raises NotFoundError and DataError naming version or environment, ConfigError for a server that refuses the key.
    """
    recipe, settings = phase.recipe, phase.recipe.evaluation or Settings()
    if recipe.is_evaluated_online:
        settings = settings.while_training(str(run.weights))
        await run_with_background(_evaluate(run, phase, settings), raise_when_stopped(run))
    else:
        await _evaluate(run, phase, settings)


async def raise_when_stopped(run: RunDir) -> None:
    """Raise StoppedOnRequest as soon as the run is asked to stop; a resumed run evaluates what is missing."""
    while not await asyncio.to_thread(must_save, run):
        await asyncio.sleep(WATCH_S)
    raise StoppedOnRequest("stopped on request; the scores so far are saved")


async def _evaluate(run: RunDir, phase: PhasePlan, settings: Settings) -> None:
    recipe = phase.recipe
    fleet = None if settings.external else make_fleet(run, recipe)
    endpoints = None if fleet is None else fleet.endpoints
    router = (
        ExternalAddress(settings.external.base_url)
        if settings.external
        else RouterAddress(run, endpoints=endpoints)
    )
    versions = Versions(run, settings, last_step=recipe.steps if recipe.is_evaluated_online else None)
    envs = await load_environments(run, recipe, endpoints)
    if settings.external is not None:
        await check_external(settings.external, recipe.model.name)
    await wait_for_peers(phase, envs, fleet, router)
    dispatcher = make_dispatcher(phase, envs)
    evaluator = ScoredEvaluator(run, recipe.environments, [len(handle.tasks) for handle in envs[Split.EVAL]])
    runner = RolloutRunner(
        recipe, envs, live_version=lambda: dispatcher.version, router_url=lambda: router.url
    )
    driver = evaluator.driver = RolloutDriver(run, recipe, dispatcher, evaluator, runner, router)
    watcher = None
    if fleet is not None:
        watcher = WeightWatcher(
            run,
            fleet,
            versions.reader,
            VersionHooks(
                next_version=lambda live, newest: newest,
                on_pending=lambda version: None,
                on_live=dispatcher.policy_live,
            ),
            base_model=_base_model(run, phase),
            engines_timeout_s=recipe.timeouts.inference_ready_s,
            holder=versions.holder,
        )
    try:
        if recipe.lora is not None and not recipe.is_evaluated_online:
            await versions.write_blank_adapter(run)
        while (version := await versions.next(evaluator)) is not None:
            await evaluate_version(driver, evaluator, watcher, version)
            if recipe.is_evaluated_online:
                await asyncio.to_thread(prune_evaluated, run, recipe, evaluator)
    finally:
        driver.flush()
        if watcher is not None:
            watcher.release()
        await runner.close()
        if fleet is not None:
            await fleet.close()


def _base_model(run: RunDir, phase: PhasePlan) -> str | None:
    """Return the source of version 0; None if the run's own trainer writes it (untrained adapters)."""
    if phase.recipe.lora is None:
        return phase.model_path
    return None if phase.recipe.is_evaluated_online else str(run.weights_step(0))


def prune_evaluated(run: RunDir, recipe: Recipe, evaluator: Evaluator) -> None:
    """Delete the run's versions that are neither due for evaluation nor kept by ``weights`` or a checkpoint."""
    weights, versions = recipe.weights, run.stable_weights()
    keep = {version for version in versions if evaluator.due(version) and _is_requested(recipe, version)}
    keep |= {version for version in versions if weights.interval and version % weights.interval == 0}
    if (best := weights.keep_best) is not None:
        keep |= BestVersions(run, best.metric, best.n, lambda _: False, best.lowest).keep(versions)
    prune_weights(run, keep_last=weights.keep_last, keep=keep | set(run.complete_checkpoints()))


def _is_requested(recipe: Recipe, version: int) -> bool:
    return recipe.evaluation is not None and version in recipe.evaluation.versions_of_training(recipe.steps)


async def evaluate_version(
    driver: RolloutDriver, evaluator: ScoredEvaluator, watcher: WeightWatcher | None, version: int
) -> None:
    """Bring the engines to ``version`` and run its missing evaluations.

    Meanwhile, restarted engines are brought to the version too, and stuck ones are restarted.
    """
    if watcher is not None:
        await watcher.load(version)
    driver.tallies.clear()
    driver.open_evaluation(version)
    background = []
    if watcher is not None:
        # a new monitor for each version: the engines were paused before
        engines = EngineMonitor(
            watcher.fleet,
            driver.dispatcher,
            None,
            is_updating=lambda: False,
            cancel_youngest_rollouts=lambda count: None,
            stuck_after_s=driver.recipe.timeouts.health_s,
            frozen=driver.recipe.served_models,
        )
        background = [watcher.hold(), engines.watch()]  # first: a deleted folder explains why rollouts fail
    await run_with_background(_run_until_done(driver, evaluator), *background)


async def _run_until_done(driver: RolloutDriver, evaluator: ScoredEvaluator) -> None:
    while evaluator.num_open:
        driver.dispatch(queued=0)
        await driver.next_groups()
        await asyncio.to_thread(driver.router.refresh)
        await asyncio.to_thread(driver.flush)
        for (_, label), tally in driver.tallies.items():
            if tally.failed >= MAX_FAILURES and not tally.succeeded:
                raise _no_success(label, tally)
    for (_, label), tally in driver.tallies.items():
        if not tally.succeeded:
            raise _no_success(label, tally)


def _no_success(label: str, tally: RolloutTally) -> DataError:
    return DataError(
        f"no rollout succeeded and {tally.failed} failed; last error: {one_line(tally.last_error)}",
        location=f"environment {label}",
    )


def make_dispatcher(phase: PhasePlan, envs: dict[Split, list[EnvHandle]]) -> Dispatcher:
    def no_task() -> TaskRef:
        raise AssertionError("evaluation draws no training task")

    max_in_flight = phase.recipe.rollouts.max_in_flight
    return Dispatcher(
        next_task=no_task,
        limits=DispatchLimits(
            group_size=1,
            batch_size=1,
            max_in_flight=max_in_flight if isinstance(max_in_flight, int) else MAX_IN_FLIGHT,
            max_off_policy_steps=0,
            **env_bounds(envs),
        ),
        last_step=0,
    )


class ScoredEvaluator(Evaluator):
    """An evaluator for which a pair of version and environment is finished if results/scores.jsonl has its row."""

    driver: RolloutDriver

    def __init__(self, run: RunDir, environments: Environments, task_counts: list[int]) -> None:
        super().__init__(environments, task_counts, 0, set())
        self.run, self.scores = run, read_scores(run)
        # drop the rollouts that an earlier incarnation left of unfinished pairs: they run again
        keep_rows(run.traces("eval"), lambda row: (row.get("version"), row.get("env")) in self.scores)

    def due(self, version: int) -> list[int]:
        return [
            index
            for index, environment in enumerate(self.environments.eval)
            if (version, environment.label) not in self.scores
        ]

    def environment_done(self, evaluation: OpenEvaluation, label: str, metrics: dict[str, float]) -> None:
        if not metrics[f"eval/{label}/rollouts"]:
            return  # nothing to score, so it stays due
        self.driver.flush()  # the rollouts must be in the traces before the row declares them finished
        write_score(self.run, evaluation.version, label, metrics)
        self.scores = read_scores(self.run)

    def add(self, group: Group) -> tuple[int, dict[str, float]] | None:
        if (done := super().add(group)) is None:
            return None
        version, metrics = done
        earlier = [metrics_of(row) for (step, _), row in self.scores.items() if step == version]
        return version, {name: value for row in earlier for name, value in row.items()} | metrics


class Versions:
    """The versions to evaluate, oldest first; while watching, as they appear."""

    def __init__(self, run: RunDir, settings: Settings, *, last_step: int | None = None) -> None:
        """``last_step``: the last version that the run's own trainer writes.

        Raises NotFoundError for a step that does not exist and is not waited for.
        """
        self.last_step = last_step
        weights = Path(settings.weights) if settings.weights else run.weights
        self.settings, self.trained = settings, RunDir(weights.parent)
        self.reader = FilesystemWeightReader(run, weights=weights)
        self.holder = (
            f"evaluation-{run.root.name}"  # name in the leases, which may be in the folder of another run
        )
        self.lost: set[int] = set()
        asked = () if settings.steps == "all" else settings.steps
        missing = set(asked) - set(self.reader.versions())
        if missing and not settings.watch:
            available = ", ".join(map(str, self.reader.versions())) or "none"
            raise NotFoundError(
                f"the weights of step {min(missing)} do not exist",
                location=str(weights),
                hint=f"available steps: {available}",
            )

    async def next(self, evaluator: Evaluator) -> int | None:
        """Return the oldest version that lacks a score; None if there is none and none will appear."""
        while True:
            # checked first: a version published between the two checks is seen by the second
            is_over = await asyncio.to_thread(self._is_over)
            for version in await asyncio.to_thread(self._wanted, is_over):
                if version not in self.lost and evaluator.due(version) and self._lease(version):
                    return version
            if is_over:
                return None
            await asyncio.sleep(WATCH_S)

    async def write_blank_adapter(self, run: RunDir) -> None:
        """Write version 0 of ``run``, an adapter without effect: the base model.

        Raises NotFoundError if there is no adapter from which to copy the shapes.
        """
        while not (versions := await asyncio.to_thread(self.reader.versions)):
            if await asyncio.to_thread(self._is_over):
                raise NotFoundError("no adapter exists", location=str(self.reader.weights))
            await asyncio.sleep(WATCH_S)
        await asyncio.to_thread(write_blank_adapter, run, self.reader.weights / f"step_{versions[-1]}")

    def _is_over(self) -> bool:
        """True if no more versions will appear."""
        if self.last_step is not None:
            return self.reader.has(self.last_step)
        return not self.settings.watch or is_run_over(self.trained)

    def _wanted(self, is_over: bool) -> list[int]:
        return self.settings.versions(self.reader.versions(), is_over=is_over)

    def _lease(self, version: int) -> bool:
        """Lease the version. False if it has been deleted, as a live run deletes old versions.

        The lease keeps it until the evaluation of the version is finished.
        """
        if version == 0 or not self.settings.watch:
            return True
        try:
            self.reader.open(version, self.holder)
        except (DataError, FileNotFoundError):
            logger.warning("policy v%d was deleted before it could be evaluated", version)
            self.lost.add(version)
            return False
        return True


def is_run_over(run: RunDir) -> bool:
    """True if no process works on the run any more: it ended, or its supervisor died."""
    written, job = read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}
    state = written.get("state", RunState.SUBMITTED)
    if state in (RunState.SUBMITTED, RunState.PENDING) or job.get("attempt", 0) > written.get("attempt", 0):
        return False  # its next attempt is queued
    owner = read_json_or_none(run.supervisor_lock)
    return RunState(state).is_final or not is_owner_alive(owner, run.supervisor_lock)


async def check_external(external: External, model: str) -> None:
    """Check the server's list of models once. A server without such a list is accepted.

    Raises ConfigError if the key is missing or refused, RoleError if the server does not respond.
    """
    url = f"{external.base_url.rstrip('/')}/models"
    try:
        async with httpx.AsyncClient(timeout=EXTERNAL_TIMEOUT_S) as client:
            response = await client.get(url, headers={"Authorization": f"Bearer {external.key()}"})
    except httpx.HTTPError as error:
        raise RoleError(
            f"{url} does not respond: {type(error).__name__} {error}",
            hint="evaluation.external.base_url must be reachable from where the job runs",
        ) from error
    if response.status_code in (401, 403):
        raise ConfigError(f"{url} refuses the key in {external.key_variable}: HTTP {response.status_code}")
    try:
        names = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return
    if response.status_code == 200 and names and model not in names:
        logger.warning("%s does not list model %s; it lists: %s", url, model, ", ".join(names[:8]))
