"""Decide which rollout starts when: a pure state machine without clock or I/O.

Events in: a rollout finished or failed, a batch was shipped (`advance`), a policy version went live, an evaluation
opened. Actions out: `Start` a rollout, `Cancel` a group. The caller carries them out.

    starts = dispatcher.next_starts(queued=builder.num_queued)    # as many as permits, gate and demand allow
    group = dispatcher.finished(rollout_id, result)               # the group if this was its last rollout, else None
    cancels = dispatcher.advance(step)                            # groups that no later batch may use

Rules
- One permit is one rollout in flight. Training and evaluation share the permits; evaluation goes first, so that its
  rollouts use one policy version as far as possible.
- Started groups are continued before a new one is opened (their prompts are in the engines' prefix caches).
- Every dispatched rollout ends exactly once: finished, failed, or covered by the one cancellation of its group.
- Gate: with batch n being collected and v live, no training rollout starts while (n-1) - v > ``async_level``, which
  is at most ``max_off_policy_steps`` because no batch could use the result. Without ``async_level`` rollouts start for
  one more batch, if it may contain them: otherwise a trainer and engines of similar speed wait for each other in turn.
- Staleness: batch n accepts rollouts that started at version (n-1) - max_off_policy_steps or later. A group's version
  is that of its oldest rollout.
- Demand: a rollout that starts at v may be part of batches n … v+1+max_off_policy_steps; no more rollouts are started
  than those batches hold, so that none becomes stale in the queue.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.orchestrator.rollout_data import Cancel, Group, Split, Start, TaskRef
from primerl_hpc.orchestrator.scheduling.rate_limit import RateLimit
from primerl_hpc.recipe.schema.rollout import default_async_level, start_lead

MAX_FAULTS_PER_MEMBER = 50


@dataclass(frozen=True)
class ProcessLimit:
    """Joint limit on the rollouts in flight of environments that start processes on shared cores."""

    envs: frozenset[tuple[Split, int]]
    rollouts: int
    labels: tuple[str, ...] = ()  # of the environments, for reports


@dataclass
class Counters:
    """Counts since the process started."""

    dispatched: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    groups_started: int = 0
    groups_finished: int = 0
    groups_cancelled: int = 0


@dataclass(frozen=True)
class DispatchLimits:
    """Sizes and bounds of what is in flight."""

    group_size: int
    batch_size: int
    max_in_flight: int
    max_off_policy_steps: int
    async_level: int | None = None
    """Batches ahead of the live version; None: ``default_async_level(max_off_policy_steps)``, see the gate."""
    max_retries: int = 4
    """Per group."""
    env_limits: Mapping[tuple[Split, int], int] = field(default_factory=dict)
    """Maximum number of rollouts in flight per environment."""
    env_rates: Mapping[tuple[Split, int], RateLimit] = field(default_factory=dict)
    """Maximum start rate per environment."""
    process_limit: ProcessLimit | None = None


class Dispatcher:
    def __init__(
        self,
        *,
        next_task: Callable[[], TaskRef],
        limits: DispatchLimits,
        last_step: int,
        step: int = 1,
        version: int = 0,
        frozen_envs: frozenset[int] = frozenset(),
    ) -> None:
        """``step`` is the batch being collected; ``last_step`` 0 disables training.

        ``frozen_envs``: training environments whose rollouts are sampled by a frozen model, so they never become stale.
        """
        self.next_task, self.frozen_envs = next_task, frozen_envs
        self.group_size, self.batch_size = limits.group_size, limits.batch_size
        self.max_in_flight, self.max_off_policy_steps = limits.max_in_flight, limits.max_off_policy_steps
        self.async_level = (
            default_async_level(limits.max_off_policy_steps)
            if limits.async_level is None
            else limits.async_level
        )
        self.start_lead = start_lead(limits.async_level, limits.max_off_policy_steps)
        self.last_step, self.step, self.version = last_step, step, version
        self.max_retries, self.process_limit = limits.max_retries, limits.process_limit
        self.env_limits, self.env_rates = limits.env_limits, limits.env_rates
        self._now = 0.0
        self.counters = Counters()
        self.next_group = self._next_rollout = 0
        self._groups: dict[int, Group] = {}  # open, in the order in which they were opened
        self._startable: dict[Split, deque[int]] = {Split.TRAIN: deque(), Split.EVAL: deque()}
        self._group_of: dict[int, int] = {}  # rollout in flight → group
        # rollout in flight → how many had finished when it started
        self._finished_before: dict[int, int] = {}
        self._env_in_flight: dict[tuple[Split, int], int] = {}
        self._held_task: TaskRef | None = None  # drawn; waits for a permit of its environment
        self._num_pending = 0  # training rollouts of open groups, without those that failed for good

    # -- rules -------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return len(self._group_of)

    @property
    def lead(self) -> int:
        """Number of policy versions that the trainer has not published yet for the batches it received."""
        return (self.step - 1) - self.version

    @property
    def min_fresh_version(self) -> int:
        """Oldest policy version that the batch being collected may contain."""
        return (self.step - 1) - self.max_off_policy_steps

    @property
    def is_gate_open(self) -> bool:
        return self.step <= self.last_step and self.lead <= self.start_lead

    @property
    def may_ship(self) -> bool:
        """True if the batch may be shipped: batch n once v{n-1-async_level} is live."""
        return self.lead <= self.async_level

    def demand(self, queued: int) -> int:
        """Return how many rollouts may still start, given ``queued`` finished ones that wait for a batch."""
        last_usable = min(self.version + 1 + self.max_off_policy_steps, self.last_step)
        num_batches = max(0, last_usable - self.step + 1)
        if not self.may_ship:
            num_batches = min(1, num_batches)
        return num_batches * self.batch_size - queued - self._num_pending

    def waits_for_policy(self, queued: int) -> bool:
        """True while the trainer is behind and the next batch is complete, or no training rollout is in flight."""
        num_training = sum(
            len(group.in_flight) for group in self._groups.values() if group.split is Split.TRAIN
        )
        return not self.may_ship and (queued >= self.batch_size or not num_training)

    def versions_in_flight(self) -> list[int]:
        """Return the start versions of the training rollouts in flight that can become stale."""
        groups = [group for group in self._groups.values() if self._is_sampled_by_policy(group)]
        return [version for group in groups for version in group.in_flight.values()]

    # -- actions -----------------------------------------------------------------------------------
    def next_starts(self, queued: int, now: float = 0.0) -> list[Start]:
        """Return everything that may start at ``now`` (seconds; used only by start rates).

        Evaluation comes first, then open groups, then new groups.
        """
        self._now = now
        starts: list[Start] = []
        self._continue_groups(Split.EVAL, starts)
        if self.is_gate_open:
            self._continue_groups(Split.TRAIN, starts)
            demand = self.demand(queued)
            while self.in_flight < self.max_in_flight and demand > 0:
                task = self._held_task or self.next_task()
                self._held_task = task if not self._has_room(Split.TRAIN, task.env) else None
                if self._held_task is not None:
                    break  # keeps the ratio of environments even if one of them is slow
                self._open(Split.TRAIN, task.env, task.index, self.group_size, None)
                demand -= self.group_size
                self._continue_groups(Split.TRAIN, starts)
        return starts

    def finished(self, rollout_id: int, result: Any) -> Group | None:
        """Record a result. Return the group if this was its last rollout; None also if the rollout was cancelled."""
        group = self._release(rollout_id)
        if group is None:
            return None
        self.counters.finished += 1
        # in the order of the starts, not of the ends: algorithms with a running baseline depend on the order
        position = bisect(group.result_ids, rollout_id)
        group.result_ids.insert(position, rollout_id)
        group.results.insert(position, result)
        group.versions.insert(position, group.in_flight.pop(rollout_id))
        return self._close_if_done(group)

    def failed(
        self, rollout_id: int, *, is_fault: bool = False, is_limit: bool = False, error: str = ""
    ) -> Group | None:
        """Record a failure: retry as a new rollout while the group has retries left, else continue without it.

        ``is_fault``: the failure is not the rollout's own (its engine or environment server died). These retries have a
        separate, large limit; it is finite because a request may itself crash its engine. While nothing at all succeeds
        they are free: the driver decides how long an outage may last. ``is_limit``: the policy reached a limit
        (context, time); an evaluation does not try again, because only successful tries would count.
        """
        is_outage = self._finished_before.get(rollout_id) == self.counters.finished
        group = self._release(rollout_id)
        if group is None:
            return None
        self.counters.failed += 1
        del group.in_flight[rollout_id]
        retries_left = group.fault_retries_left if is_fault else group.retries_left
        is_final = is_limit and group.split is Split.EVAL
        if retries_left and not is_final:
            group.fault_retries_left -= is_fault and not is_outage
            group.retries_left -= not is_fault
            group.to_start += 1
            self.counters.retried += 1
            if group.group_id not in self._startable[group.split]:
                self._startable[group.split].appendleft(group.group_id)
        else:
            group.num_failed += 1
            group.num_faulted += is_fault
            group.num_limited += is_limit
            if not is_fault:
                group.errors.append(error)
            self._num_pending -= group.split is Split.TRAIN
        return self._close_if_done(group)

    def advance(self, step: int) -> list[Cancel]:
        """Start collecting batch ``step``, after the previous one was shipped; cancel the groups it may not use."""
        self.step = step
        return [
            self._cancel(group, "stale")
            for group in list(self._groups.values())
            if self._is_sampled_by_policy(group)
            and group.oldest_version is not None
            and group.oldest_version < self.min_fresh_version
        ]

    def policy_live(self, version: int) -> None:
        self.version = version

    def cancel_youngest(self, count: int) -> list[Cancel]:
        """Cancel the youngest training groups until at least ``count`` fewer rollouts are in flight.

        Evaluations are kept, and so are the rollouts of frozen models, which do not run on the overloaded engines.
        """
        cancels: list[Cancel] = []
        for group in reversed(list(self._groups.values())):
            if count <= 0:
                break
            if self._is_sampled_by_policy(group) and group.in_flight:
                cancels.append(self._cancel(group, "engines are overloaded"))
                count -= len(cancels[-1].rollout_ids)
        return cancels

    def stop_training(self) -> list[Cancel]:
        """Cancel all training groups after the last batch was shipped; evaluations continue."""
        self.last_step = 0
        groups = [group for group in self._groups.values() if group.split is Split.TRAIN]
        return [self._cancel(group, "training is over") for group in groups]

    def open_eval(self, env: int, task: int, samples: int, tag: Any) -> None:
        """Add a task to evaluate: ``samples`` rollouts, never stale, never gated."""
        self._open(Split.EVAL, env, task, samples, tag)

    def unfinished_tasks(self) -> list[TaskRef]:
        """Return the training tasks that were drawn and whose group is not finished."""
        tasks = [
            TaskRef(group.env, group.task) for group in self._groups.values() if group.split is Split.TRAIN
        ]
        return tasks + ([self._held_task] if self._held_task else [])

    # -- internals ---------------------------------------------------------------------------------
    def _open(self, split: Split, env: int, task: int, size: int, tag: Any) -> None:
        group = Group(
            self.next_group,
            split,
            env,
            task,
            size,
            to_start=size,
            retries_left=self.max_retries,
            fault_retries_left=size * MAX_FAULTS_PER_MEMBER,
            tag=tag,
        )
        self.next_group += 1
        self._groups[group.group_id] = group
        self._startable[split].append(group.group_id)
        self._num_pending += size if split is Split.TRAIN else 0
        self.counters.groups_started += 1

    def _is_sampled_by_policy(self, group: Group) -> bool:
        """True if the policy samples the group, for training."""
        return group.split is Split.TRAIN and group.env not in self.frozen_envs

    def _has_room(self, split: Split, env: int) -> bool:
        limit, rate = self.env_limits.get((split, env)), self.env_rates.get((split, env))
        if rate is not None and not rate.allows(self._now):
            return False
        shared = self.process_limit
        if (
            shared is not None
            and (split, env) in shared.envs
            and self._num_with_processes() >= shared.rollouts
        ):
            return False
        return limit is None or self._env_in_flight.get((split, env), 0) < limit

    def _num_with_processes(self) -> int:
        """Return the number of rollouts in flight in the environments of `process_limit`."""
        assert self.process_limit is not None
        return sum(self._env_in_flight.get(key, 0) for key in self.process_limit.envs)

    def _continue_groups(self, split: Split, starts: list[Start]) -> None:
        blocked: list[int] = []
        queue = self._startable[split]
        while queue and self.in_flight < self.max_in_flight:
            group = self._groups[queue[0]]
            while group.to_start and self.in_flight < self.max_in_flight and self._has_room(split, group.env):
                starts.append(self._start(group))
            if not group.to_start:
                queue.popleft()
            elif not self._has_room(split, group.env):
                blocked.append(queue.popleft())
        queue.extendleft(reversed(blocked))

    def _start(self, group: Group) -> Start:
        rollout_id, self._next_rollout = self._next_rollout, self._next_rollout + 1
        group.to_start -= 1
        group.in_flight[rollout_id] = self.version
        self._group_of[rollout_id] = group.group_id
        self._finished_before[rollout_id] = self.counters.finished
        key = (group.split, group.env)
        self._env_in_flight[key] = self._env_in_flight.get(key, 0) + 1
        if (rate := self.env_rates.get(key)) is not None:
            rate.take(self._now)
        self.counters.dispatched += 1
        return Start(rollout_id, group.group_id, group.split, group.env, group.task, self.version)

    def _release(self, rollout_id: int) -> Group | None:
        """Release the permit of the rollout and return its group; None if it is no longer in flight."""
        group_id = self._group_of.pop(rollout_id, None)
        if group_id is None:
            return None
        del self._finished_before[rollout_id]
        group = self._groups[group_id]
        self._env_in_flight[(group.split, group.env)] -= 1
        return group

    def _close_if_done(self, group: Group) -> Group | None:
        if not group.is_done:
            return None
        self._remove(group)
        self.counters.groups_finished += 1
        return group

    def _cancel(self, group: Group, reason: str) -> Cancel:
        for rollout_id in list(group.in_flight):
            self._release(rollout_id)
        if group.to_start:
            self._startable[group.split].remove(group.group_id)
        self._remove(group)
        self.counters.cancelled += len(group.in_flight)
        self.counters.groups_cancelled += 1
        return Cancel(group.group_id, tuple(group.in_flight), reason, TaskRef(group.env, group.task))

    def _remove(self, group: Group) -> None:
        del self._groups[group.group_id]
        self._num_pending -= (group.size - group.num_failed) if group.split is Split.TRAIN else 0
