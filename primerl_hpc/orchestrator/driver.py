"""The part that training and stand-alone evaluation share: rollouts out, outcomes in, evaluations reported.

While engines or router are away, rollouts fail for no fault of their own: they are tried again after a growing pause,
until nothing succeeded for ``timeouts.inference_ready_s`` while they went on failing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.metrics import MetricsWriter
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.dispatcher import Cancel, Dispatcher, Group, Split
from primerl_hpc.orchestrator.evals import Evaluator
from primerl_hpc.orchestrator.rate import RateLimit
from primerl_hpc.orchestrator.runner import EnvHandle, Outcome, RolloutRunner
from primerl_hpc.orchestrator.setup import ExternalAddress, RouterAddress
from primerl_hpc.orchestrator.traces import TraceWriter
from primerl_hpc.recipe.algorithm_schema import NEED_TEACHER
from primerl_hpc.recipe.model_schema import FrozenModel
from primerl_hpc.recipe.schema import Recipe

logger = logging.getLogger(__name__)

TICK_S = 0.2
LOUD_ERRORS = 5  # of one kind in one environment; more are logged for debugging only
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 4.0
QUIET_S = 300.0  # without a fault, and they are over; longer than a rollout waits for its environment server


@dataclass
class Tally:
    """How the rollouts of an environment ended, engines' faults left out."""

    succeeded: int = 0
    failed: int = 0
    last_error: str = ""


class RolloutDriver:
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
        self.is_updating = (
            False  # engines are paused for new weights: what starts now would be older than need be
        )
        self.errors: Counter[str] = Counter()  # <environment>/<kind> → rollouts, since the start
        self.tallies: dict[tuple[Split, str], Tally] = {}  # by environment, since somebody last cleared them
        self._pause_s, self._paused_until = FIRST_PAUSE_S, 0.0
        self._faulty_since: float | None = None
        self._last_fault_at = 0.0

    def dispatch(self, queued: int) -> None:
        if self.is_updating or self.router.url is None or time.monotonic() < self._paused_until:
            return
        for start in self.dispatcher.next_starts(queued, time.monotonic()):
            self.runner.start(start)

    def cancel(self, cancels: list[Cancel]) -> None:
        for cancel in cancels:
            self.runner.cancel(cancel.rollout_ids)

    async def next_groups(self) -> list[Group]:
        """Groups that were finished by what happened within the next tick; evaluation's are dealt with here."""
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
        if self.evaluator.open(version, self.dispatcher):
            logger.info("evaluating policy v%d", version)
            self.runner.wake()

    def flush(self) -> None:
        """Write the traces that were gathered; blocks, so call it in a thread while the run goes on."""
        for traces in self.traces.values():
            traces.flush()

    def _group_of(self, outcome: Outcome) -> Group | None:
        if outcome.fatal is not None:
            raise outcome.fatal
        tally = self.tallies.setdefault((outcome.split, outcome.env), Tally())
        if outcome.rollout is not None:
            tally.succeeded += 1
            self._pause_s, self._faulty_since = FIRST_PAUSE_S, None
            return self.dispatcher.finished(outcome.rollout_id, outcome.rollout)
        kind = f"{outcome.env}/{outcome.error.split(':', 1)[0]}"
        self.errors[kind] += 1
        level = logging.WARNING if self.errors[kind] <= LOUD_ERRORS else logging.DEBUG
        logger.log(
            level, "environment %s, task %s: rollout failed: %s", outcome.env, outcome.task, outcome.error
        )
        self.traces[outcome.split].add_failure(
            env=outcome.env, task=outcome.task, version=outcome.version, error=outcome.error
        )
        if outcome.is_engine_fault:
            self._pause(outcome)
        else:
            tally.failed, tally.last_error = tally.failed + 1, outcome.error
        return self.dispatcher.failed(outcome.rollout_id, is_fault=outcome.is_engine_fault)

    def _pause(self, outcome: Outcome) -> None:
        now = time.monotonic()
        if self._faulty_since is None or now - self._last_fault_at > QUIET_S:
            self._pause_s, self._faulty_since = FIRST_PAUSE_S, now
        self._last_fault_at = now
        if now - self._faulty_since > self.recipe.timeouts.inference_ready_s:
            raise RoleError(
                f"no rollout succeeded for {now - self._faulty_since:.0f} s, last error: {outcome.error}",
                mend=where_to_look(self.recipe, outcome),
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
            "eval of policy v%d: %s (%.1f s)", version, scores or "no rollout succeeded", metrics["time/eval"]
        )


def where_to_look(recipe: Recipe, outcome: Outcome) -> str:
    """For people: at whoever did not answer, by the kind of the error."""
    kind = outcome.error.split(":", 1)[0]
    split = recipe.environments.train if outcome.split is Split.TRAIN else recipe.environments.eval
    index, environment = next((i, each) for i, each in enumerate(split) if each.label == outcome.env)
    algorithm = recipe.algorithms[index] if outcome.split is Split.TRAIN else None
    if kind == "EnvServerDied":
        log = f"see logs/latest/envs/{outcome.split.value}/{outcome.env}*"
        return f"look whether {environment.address} answers" if environment.address else log
    if kind == "NoJudge":
        return _look_at(recipe.judge, "judge")
    has_teacher = algorithm is not None and algorithm.type in NEED_TEACHER  # opsd asks the policy's engines
    if has_teacher and (algorithm.samples_from == "teacher" or kind in ("NoTeacher", "TeacherError")):
        return _look_at(recipe.teacher, "teacher")
    if recipe.evaluation is not None and recipe.evaluation.external is not None:
        return f"look whether {recipe.evaluation.external.base_url} answers"
    return "see logs/latest/inference/*.log"


def _look_at(frozen: FrozenModel | None, role: str) -> str:
    """``frozen`` None: environments ask somebody of their own."""
    if frozen is None:
        return "see the environment server's log in logs/latest/envs"
    if frozen.base_url is not None:
        return f"look whether {frozen.base_url} answers"
    return f"see logs/latest/{role}/*.log"


def env_rates(envs: dict[Split, list[EnvHandle]]) -> dict[tuple[Split, int], RateLimit]:
    return {
        (split, index): RateLimit(handle.environment.tasks_per_minute)
        for split, handles in envs.items()
        for index, handle in enumerate(handles)
        if handle.environment.tasks_per_minute is not None
    }


def env_limits(envs: dict[Split, list[EnvHandle]]) -> dict[tuple[Split, int], int]:
    return {
        (split, index): handle.environment.max_concurrent
        for split, handles in envs.items()
        for index, handle in enumerate(handles)
        if handle.environment.max_concurrent is not None
    }
