"""The part shared by training and stand-alone evaluation: start rollouts, process outcomes, report evaluations.

While engines or the router are down, rollouts fail through no fault of their own. They are retried after growing
pauses, until no rollout has succeeded for ``timeouts.inference_ready_s`` while failures continued.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.node.start_phases import own_phases
from primerl_hpc.common.safety.printable import one_line
from primerl_hpc.orchestrator.evaluation import Evaluator
from primerl_hpc.orchestrator.metrics import ErrorRateWatch
from primerl_hpc.orchestrator.progress import Failures, ProgressFile, progress_of
from primerl_hpc.orchestrator.rollout_data import Cancel, Group, Outcome, Split
from primerl_hpc.orchestrator.rollouts.environments import EnvHandle
from primerl_hpc.orchestrator.rollouts.runner import RolloutRunner
from primerl_hpc.orchestrator.rollouts.traces import TraceWriter
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher, ProcessLimit
from primerl_hpc.orchestrator.scheduling.rate_limit import RateLimit
from primerl_hpc.orchestrator.setup import ExternalAddress, RouterAddress
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.schema.model import FrozenModel
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.endpoints import publish_start
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir

logger = logging.getLogger(__name__)

TICK_S = 0.2
MAX_WARNINGS = 5  # per environment and kind of error; more are logged at level DEBUG
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 4.0
QUIET_S = 300.0  # an outage ends after this time without a fault; longer than a rollout waits for its server


@dataclass
class RolloutTally:
    """Ended rollouts of an environment, without those that failed because an engine or server died."""

    succeeded: int = 0
    failed: int = 0
    last_error: str = ""


class RolloutDriver:
    """Connects dispatcher, runner, evaluator and traces."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        dispatcher: Dispatcher,
        evaluator: Evaluator,
        runner: RolloutRunner,
        router: RouterAddress | ExternalAddress,
    ) -> None:
        self.run, self.recipe, self.router = run, recipe, router
        self.dispatcher, self.evaluator, self.runner = dispatcher, evaluator, runner
        self.eval_metrics = MetricsWriter(run.metrics("eval"))
        self.traces = {split: TraceWriter(run.traces(split.value)) for split in Split}
        # engines are paused for new weights: start nothing until the new version is live
        self.is_updating = False
        self.progress = ProgressFile(run)
        self.errors: Counter[str] = Counter()  # <environment>/<kind> → failed rollouts since the start
        # by environment, since they were last cleared
        self.tallies: dict[tuple[Split, str], RolloutTally] = {}
        self.failures: dict[str, Failures] = {}  # by environment, since the start
        self.error_rates: ErrorRateWatch | None = None  # of kind rl
        self._pause_s, self._paused_until = FIRST_PAUSE_S, 0.0
        self._faulty_since: float | None = None
        self._last_fault_at = 0.0
        self._has_started = False
        """True from the end of the first rollout until its time is published."""

    def dispatch(self, queued: int, dropped_batches: int = 0) -> None:
        """Start what may start.

        ``queued``: finished rollouts that wait for a batch; ``dropped_batches`` is only reported in the progress file.
        """
        if self.progress.is_due(time.monotonic()):
            episodes = self.runner.episodes
            progress = progress_of(self.dispatcher, self.failures, queued, dropped_batches, episodes)
            rates = [rate.as_json() for rate in self.error_rates.found] if self.error_rates else []
            self.progress.note({**progress, "high_error_rates": rates})
        if self.is_updating or self.router.url is None or time.monotonic() < self._paused_until:
            return
        for start in self.dispatcher.next_starts(queued, time.monotonic()):
            self.runner.start(start)

    def watch_error_rates(self, phase: PhasePlan) -> ErrorRateWatch:
        """Report environments whose rollouts fail in many batches. The caller passes batches to the watch."""
        self.error_rates = ErrorRateWatch(self.run, phase)
        return self.error_rates

    def cancel(self, cancels: list[Cancel]) -> None:
        """Cancel the rollouts of these groups."""
        for cancel in cancels:
            self.runner.cancel(cancel.rollout_ids)

    async def next_groups(self) -> list[Group]:
        """Return the training groups that finished within the next tick; evaluation groups are processed here."""
        try:
            async with asyncio.timeout(TICK_S):
                outcomes = [await self.runner.outcomes.get()]
        except TimeoutError:
            return []
        while not self.runner.outcomes.empty():
            outcomes.append(self.runner.outcomes.get_nowait())
        groups = [self._group_of(outcome) for outcome in outcomes if outcome is not None]
        for group in groups:
            if group is not None and group.split is Split.EVAL:
                self._evaluated(group)
        return [group for group in groups if group is not None and group.split is Split.TRAIN]

    def open_evaluation(self, version: int) -> None:
        """Start the evaluation of ``version`` if one is due."""
        if self.evaluator.open(version, self.dispatcher):
            logger.info("evaluation of policy v%d started", version)
            self.runner.wake()

    def flush(self) -> None:
        """Write the collected traces and the progress. Blocks: call it in a thread while the run continues."""
        for traces in self.traces.values():
            traces.flush()
        self.progress.flush()
        if self._has_started:
            publish_start(self.run, own_phases().seconds)
            self._has_started = False

    def _group_of(self, outcome: Outcome) -> Group | None:
        if outcome.fatal is not None:
            raise outcome.fatal
        tally = self.tallies.setdefault((outcome.split, outcome.env), RolloutTally())
        if outcome.rollout is not None:
            tally.succeeded += 1
            self._pause_s, self._faulty_since = FIRST_PAUSE_S, None
            if "first rollout" not in own_phases().seconds:
                own_phases().end("first rollout")
                self._has_started = True
            return self.dispatcher.finished(outcome.rollout_id, outcome.rollout)
        kind = f"{outcome.env}/{outcome.error.split(':', 1)[0]}"
        self.errors[kind] += 1
        self.failures.setdefault(outcome.env, Failures()).add(outcome.error)
        level = logging.WARNING if self.errors[kind] <= MAX_WARNINGS else logging.DEBUG
        logger.log(
            level, "rollout failed in environment %s, task %s: %s", outcome.env, outcome.task, outcome.error
        )
        self.traces[outcome.split].add_failure(
            env=outcome.env, task=outcome.task, version=outcome.version, error=outcome.error
        )
        if outcome.is_engine_fault:
            self._pause(outcome)
        else:
            tally.failed, tally.last_error = tally.failed + 1, outcome.error
        return self.dispatcher.failed(
            outcome.rollout_id,
            is_fault=outcome.is_engine_fault,
            is_limit=outcome.is_limit,
            error=outcome.error,
        )

    def _pause(self, outcome: Outcome) -> None:
        """Pause dispatching after a failure of an engine or server. Raises RoleError when the outage lasts too long."""
        now = time.monotonic()
        self.router.expect_change()
        if self._faulty_since is None or now - self._last_fault_at > QUIET_S:
            self._pause_s, self._faulty_since = FIRST_PAUSE_S, now
        self._last_fault_at = now
        if now - self._faulty_since > self.recipe.timeouts.inference_ready_s:
            raise RoleError(
                f"no rollout succeeded for {now - self._faulty_since:.0f} s, last error: {one_line(outcome.error)}",
                hint=failure_hint(self.recipe, outcome),
            )
        if now >= self._paused_until:
            self._paused_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _evaluated(self, group: Group) -> None:
        handle = self.runner.envs[Split.EVAL][group.env]
        for rollout, version in zip(group.results, group.versions, strict=True):
            self.traces[Split.EVAL].add(
                rollout,
                env=handle.environment.label,
                task=handle.tasks[group.task].key,
                version=version,
                eval_version=group.tag.version,
            )
        if (done := self.evaluator.add(group)) is None:
            return
        version, metrics = done
        self.eval_metrics.write(version, metrics)
        scores = ", ".join(
            f"{environment.label} {metrics[name]:.4f}"
            for environment in self.recipe.environments.eval
            if (name := f"eval/{environment.label}/avg@{environment.samples}") in metrics
        )
        logger.info(
            "evaluation of policy v%d: %s (%.1f s)",
            version,
            scores or "no rollout succeeded",
            metrics["time/eval"],
        )


def failure_hint(recipe: Recipe, outcome: Outcome) -> str:
    """Return a hint for users: which log or server to check, by the kind of the error."""
    kind = outcome.error.split(":", 1)[0]
    split = recipe.environments.train if outcome.split is Split.TRAIN else recipe.environments.eval
    index, environment = next(
        (index, environment) for index, environment in enumerate(split) if environment.label == outcome.env
    )
    algorithm = recipe.algorithms[index] if outcome.split is Split.TRAIN else None
    if kind == "EnvServerDied":
        log = f"see logs/latest/envs/{outcome.split.value}/{outcome.env}*"
        return f"check whether {environment.address} responds" if environment.address else log
    if kind == "NoJudge":
        return _frozen_model_hint(recipe.judge, "judge")
    # opsd needs no teacher: it uses the policy's engines
    if (
        algorithm is not None
        and algorithm.needs_teacher
        and (algorithm.samples_from == "teacher" or kind in ("NoTeacher", "TeacherError"))
    ):
        return _frozen_model_hint(recipe.teacher, "teacher")
    if recipe.evaluation is not None and recipe.evaluation.external is not None:
        return f"check whether {recipe.evaluation.external.base_url} responds"
    return "see logs/latest/inference/*.log"


def _frozen_model_hint(frozen: FrozenModel | None, role: str) -> str:
    """Return where to find the problem of a judge or teacher. ``frozen`` None: an environment uses its own server."""
    if frozen is None:
        return "see the environment server's log in logs/latest/envs"
    if frozen.base_url is not None:
        return f"check whether {frozen.base_url} responds"
    return f"see logs/latest/{role}/*.log"


def env_bounds(envs: dict[Split, list[EnvHandle]]) -> dict[str, Any]:
    """Return the limits on rollouts in flight and on their start rate per environment: arguments of `Dispatcher`.

    Environment servers report the processes that they start when they publish themselves, so call it when they are
    ready.
    """
    return {
        "env_limits": env_limits(envs),
        "env_rates": env_rates(envs),
        "process_limit": process_limit(envs),
    }


def process_limit(envs: dict[Split, list[EnvHandle]]) -> ProcessLimit | None:
    """Limit environments that start processes for each episode to the cores of their servers' nodes, in total.

    Return None without such environments. An environment with ``max_concurrent`` is limited only by that.
    """
    keys: set[tuple[Split, int]] = set()
    started: dict[str, str] = {}  # processes by environment, for the log
    cores: dict[str, int] = {}  # by node
    for split, handles in envs.items():
        for index, handle in enumerate(handles):
            servers = [
                endpoint for endpoint in handle.client.published_endpoints if endpoint.get("processes")
            ]
            if servers and handle.environment.max_concurrent is None:
                keys.add((split, index))
                started[handle.environment.label] = ", ".join(servers[0]["processes"])
                cores |= {server["host"]: server["cores"] for server in servers}
    if not keys:
        return None
    limit = ProcessLimit(frozenset(keys), sum(cores.values()), tuple(started))
    logger.warning(
        "limited to %d concurrent episodes, one per core of %s, in environments that start processes for each episode: "
        "%s; the logs of their servers explain how to start fewer processes",
        limit.rollouts,
        ", ".join(sorted(cores)),
        "; ".join(f"{name} ({processes})" for name, processes in started.items()),
    )
    return limit


def env_rates(envs: dict[Split, list[EnvHandle]]) -> dict[tuple[Split, int], RateLimit]:
    """Return the start rates by environment."""
    return {
        (split, index): RateLimit(handle.environment.tasks_per_minute)
        for split, handles in envs.items()
        for index, handle in enumerate(handles)
        if handle.environment.tasks_per_minute is not None
    }


def env_limits(envs: dict[Split, list[EnvHandle]]) -> dict[tuple[Split, int], int]:
    """Return the limits on rollouts in flight by environment."""
    return {
        (split, index): handle.environment.max_concurrent
        for split, handles in envs.items()
        for index, handle in enumerate(handles)
        if handle.environment.max_concurrent is not None
    }
