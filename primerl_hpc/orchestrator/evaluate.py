"""Stand-alone evaluation (kind eval): policy versions one after another, the environments of each in parallel, then done.

The engines are brought from version to version as in training, so they start once; a model that is served elsewhere is
version 0 and the only one. A pair of version and environment that is done has its row in results/scores.jsonl and is
never run again: whoever runs the same directory once more gets what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import httpx

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.lock import is_owner_alive
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.scores import metrics_of, read_scores, write_score
from primerl_hpc.orchestrator.dispatcher import Dispatcher, Group, Split
from primerl_hpc.orchestrator.driver import RolloutDriver, env_limits, env_rates
from primerl_hpc.orchestrator.engines import EngineWatch
from primerl_hpc.orchestrator.evals import Evaluation, Evaluator
from primerl_hpc.orchestrator.event_loop import beside
from primerl_hpc.orchestrator.runner import EnvHandle, RolloutRunner
from primerl_hpc.orchestrator.sampler import TaskRef
from primerl_hpc.orchestrator.setup import (
    ExternalAddress,
    RouterAddress,
    load_environments,
    make_fleet,
    wait_for_peers,
)
from primerl_hpc.orchestrator.traces import keep_rows
from primerl_hpc.orchestrator.watcher import WeightWatcher
from primerl_hpc.plan.types import PhasePlan
from primerl_hpc.recipe.evaluation_schema import Evaluation as Settings
from primerl_hpc.recipe.evaluation_schema import External
from primerl_hpc.recipe.rollout_schema import Environments
from primerl_hpc.transport.weights_filesystem import FilesystemWeightReader, write_blank_adapter

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 256
MAX_FAILURES = 64  # of an environment at a version, before its first success
WATCH_S = 2.0
EXTERNAL_TIMEOUT_S = 30.0


async def run_evaluation(run: RunDir, phase: PhasePlan) -> None:
    """Until every version has its scores on every environment.

    Raises NotFoundError and DataError naming version or environment, ConfigError for a server that refuses us.
    """
    recipe, settings = phase.recipe, phase.recipe.evaluation or Settings()
    fleet = None if settings.external else make_fleet(run, recipe)
    router = ExternalAddress(settings.external.base_url) if settings.external else RouterAddress(run)
    versions = Versions(run, settings)
    envs = await load_environments(run, recipe)
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
            # where versions are adapters, none is the one of zeros
            base_model=phase.model_path if recipe.lora is None else str(run.weights_step(0)),
            engines_timeout_s=recipe.timeouts.inference_ready_s,
            next_version=lambda live, newest: newest,
            on_pending=lambda version: None,
            on_live=dispatcher.policy_live,
            holder=versions.holder,
        )
    try:
        if recipe.lora is not None:
            await versions.write_blank_adapter(run)
        while (version := await versions.next(evaluator)) is not None:
            await evaluate_version(driver, evaluator, watcher, version)
    finally:
        driver.flush()
        if watcher is not None:
            watcher.release()
        await runner.close()
        if fleet is not None:
            await fleet.close()


async def evaluate_version(
    driver: RolloutDriver, evaluator: ScoredEvaluator, watcher: WeightWatcher | None, version: int
) -> None:
    """Bring the engines to ``version`` and run what it lacks; restarted engines are brought there too, stuck ones restarted."""
    if watcher is not None:
        await watcher.load(version)
    driver.tallies.clear()
    driver.open_evaluation(version)
    others = []
    if watcher is not None:
        # a watch of this version alone: before it, the engines were paused
        engines = EngineWatch(
            watcher.fleet,
            driver.dispatcher,
            None,
            is_updating=lambda: False,
            take_back=lambda count: None,
            stuck_after_s=driver.recipe.timeouts.health_s,
            frozen=driver.recipe.served_models,
        )
        others = [watcher.hold(), engines.watch()]  # a folder that vanished explains why rollouts fail
    await beside(_until_done(driver, evaluator), *others)


async def _until_done(driver: RolloutDriver, evaluator: ScoredEvaluator) -> None:
    while evaluator.num_open:
        driver.dispatch(queued=0)
        await driver.next_groups()
        await asyncio.to_thread(driver.router.refresh)
        await asyncio.to_thread(driver.flush)
        for (_, label), tally in driver.tallies.items():
            if tally.failed >= MAX_FAILURES and not tally.succeeded:
                raise _hopeless(label, tally.last_error)
    for (_, label), tally in driver.tallies.items():
        if not tally.succeeded:
            raise _hopeless(label, tally.last_error)


def _hopeless(label: str, error: str) -> DataError:
    return DataError(f"no rollout succeeded, the last error was: {error}", place=f"environment {label}")


def make_dispatcher(phase: PhasePlan, envs: dict[Split, list[EnvHandle]]) -> Dispatcher:
    def no_task() -> TaskRef:
        raise AssertionError("evaluation draws no training task")

    return Dispatcher(
        next_task=no_task,
        group_size=1,
        batch_size=1,
        max_in_flight=phase.recipe.rollouts.max_in_flight or MAX_IN_FLIGHT,
        max_off_policy_steps=0,
        last_step=0,
        env_limits=env_limits(envs),
        env_rates=env_rates(envs),
    )


class ScoredEvaluator(Evaluator):
    """An evaluator whose pairs of version and environment are done when they have a row in results/scores.jsonl."""

    driver: RolloutDriver

    def __init__(self, run: RunDir, environments: Environments, task_counts: list[int]) -> None:
        super().__init__(environments, task_counts, 0, set())
        self.run, self.scores = run, read_scores(run)
        # of the others an earlier life left rollouts, which run again
        keep_rows(run.traces("eval"), lambda row: (row.get("version"), row.get("env")) in self.scores)

    def due(self, version: int) -> list[int]:
        return [
            index
            for index, environment in enumerate(self.environments.eval)
            if (version, environment.label) not in self.scores
        ]

    def environment_done(self, evaluation: Evaluation, label: str, metrics: dict[str, float]) -> None:
        if not metrics[f"eval/{label}/rollouts"]:
            return  # nothing to score, so it stays due
        self.driver.flush()  # the row vouches for its rollouts
        write_score(self.run, evaluation.version, label, metrics)
        self.scores = read_scores(self.run)

    def add(self, group: Group) -> tuple[int, dict[str, float]] | None:
        if (done := super().add(group)) is None:
            return None
        version, metrics = done
        before = [metrics_of(row) for (step, _), row in self.scores.items() if step == version]
        return version, {name: value for row in before for name, value in row.items()} | metrics


class Versions:
    """Which versions are to be evaluated, oldest first; while watching, as they come."""

    def __init__(self, run: RunDir, settings: Settings) -> None:
        """Raises NotFoundError for a step that is not there and is not waited for."""
        weights = Path(settings.weights) if settings.weights else run.weights
        self.settings, self.trained = settings, RunDir(weights.parent)
        self.reader = FilesystemWeightReader(run, weights=weights)
        self.holder = f"evaluation-{run.root.name}"  # of leases, in the folder of another run
        self.lost: set[int] = set()
        asked = () if settings.steps == "all" else settings.steps
        missing = set(asked) - set(self.reader.versions())
        if missing and not settings.watch:
            there = ", ".join(map(str, self.reader.versions())) or "none"
            raise NotFoundError(
                f"there are no weights of step {min(missing)}",
                place=str(weights),
                mend=f"there are those of: {there}",
            )

    async def next(self, evaluator: Evaluator) -> int | None:
        """The oldest version that lacks a score; None when none does, and none will come."""
        while True:
            # looked at first: what is published between the two looks is seen by the second
            is_over = not self.settings.watch or await asyncio.to_thread(is_run_over, self.trained)
            for version in await asyncio.to_thread(self._wanted, is_over):
                if version not in self.lost and evaluator.due(version) and self._is_still_there(version):
                    return version
            if is_over:
                return None
            await asyncio.sleep(WATCH_S)

    async def write_blank_adapter(self, run: RunDir) -> None:
        """Version 0 of ``run``: the base model. Raises NotFoundError when there is no adapter to take the shapes from."""
        while not (there := await asyncio.to_thread(self.reader.versions)):
            if not self.settings.watch or await asyncio.to_thread(is_run_over, self.trained):
                raise NotFoundError("there are no adapters", place=str(self.reader.weights))
            await asyncio.sleep(WATCH_S)
        await asyncio.to_thread(write_blank_adapter, run, self.reader.weights / f"step_{there[-1]}")

    def _wanted(self, is_over: bool) -> list[int]:
        return self.settings.versions(self.reader.versions(), is_over=is_over)

    def _is_still_there(self, version: int) -> bool:
        """A live run deletes old versions; from here to its end as live version this one is held by its lease."""
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
    """Whether nobody works on the run any more: it ended, or its supervisor is gone."""
    written, job = read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}
    state = written.get("state", RunState.SUBMITTED)
    if state in (RunState.SUBMITTED, RunState.PENDING) or job.get("attempt", 0) > written.get("attempt", 0):
        return False  # its next attempt waits
    owner = read_json_or_none(run.supervisor_lock)
    return RunState(state).is_final or not is_owner_alive(owner, run.supervisor_lock)


async def check_external(external: External, model: str) -> None:
    """One look at the server's list of models. Raises ConfigError when the key is missing or refused, RoleError when
    nobody answers; a server without such a list is believed."""
    url = f"{external.base_url.rstrip('/')}/models"
    try:
        async with httpx.AsyncClient(timeout=EXTERNAL_TIMEOUT_S) as client:
            answer = await client.get(url, headers={"Authorization": f"Bearer {external.key()}"})
    except httpx.HTTPError as error:
        raise RoleError(
            f"{url} does not answer: {type(error).__name__} {error}",
            mend="evaluation.external.base_url must be reachable from where the job runs",
        ) from error
    if answer.status_code in (401, 403):
        raise ConfigError(f"{url} refuses the key in {external.key_variable}: HTTP {answer.status_code}")
    try:
        names = [each["id"] for each in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return
    if answer.status_code == 200 and names and model not in names:
        logger.warning("%s does not list model %s, but: %s", url, model, ", ".join(names[:8]))
