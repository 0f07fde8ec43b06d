"""Which rollout starts when: a pure state machine without clock or IO.

Events in: a rollout finished or failed, a batch shipped (`advance`), a policy version went live, an evaluation
opened. Actions out: `Start` a rollout, `Cancel` a group. The caller carries them out.

    starts = dispatcher.next_starts(queued=cutter.num_queued)     # as many as permits, gate and demand allow
    done = dispatcher.finished(rollout_id, result)                # a Group when it was the group's last rollout
    cancels = dispatcher.advance(step)                            # groups that no coming batch may use any more

Rules
- One permit is one rollout in flight; training and evaluation share the permits, evaluation goes first, so that its
  rollouts are of one policy version as far as possible.
- Started groups are continued before a new one is begun (their prompts are in the engines' prefix caches).
- Every dispatched rollout ends exactly once: finished, failed, or covered by the one cancellation of its group.
- Gate: with batch n being collected and v live, no training rollout starts while (n-1) - v > 1; with
  ``max_off_policy_steps`` 0 while (n-1) - v > 0, because nothing it made could be used.
- Staleness: batch n takes rollouts that started at version (n-1) - max_off_policy_steps or later. A group's version
  is that of its oldest rollout.
- Demand: a rollout that starts at v may land in batches n … v+1+max_off_policy_steps; no more are started than those
  batches hold, so that none is generated only to become stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from primerl_hpc.orchestrator.rate import RateLimit
from primerl_hpc.orchestrator.sampler import TaskRef

MAX_FAULTS_PER_MEMBER = 50


class Split(Enum):
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True)
class Start:
    rollout_id: int
    group_id: int
    split: Split
    env: int  # index into environments.train or environments.eval
    task: int  # index into that environment's tasks
    version: int  # live when it starts: the version of its oldest token


@dataclass(frozen=True)
class Cancel:
    group_id: int
    rollout_ids: tuple[int, ...]  # in flight until now
    reason: str
    task: TaskRef


@dataclass
class Group:
    """All rollouts of one task that are compared with each other (train) or averaged (eval)."""

    group_id: int
    split: Split
    env: int
    task: int
    size: int
    to_start: int
    retries_left: int  # for rollouts that failed
    fault_retries_left: int = 0  # for rollouts whose engine or environment server died
    in_flight: dict[int, int] = field(default_factory=dict)  # rollout → version when it started
    results: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of `results`, when they started
    num_failed: int = 0  # given up after retries
    num_faulted: int = 0  # of them, by the deaths of others
    tag: Any = None  # whose evaluation

    @property
    def is_done(self) -> bool:
        return not self.to_start and not self.in_flight

    @property
    def oldest_version(self) -> int | None:
        return min([*self.versions, *self.in_flight.values()], default=None)


@dataclass
class Counters:
    dispatched: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    groups_started: int = 0
    groups_finished: int = 0
    groups_cancelled: int = 0


class Dispatcher:
    def __init__(
        self,
        *,
        next_task: Callable[[], TaskRef],
        group_size: int,
        batch_size: int,
        max_in_flight: int,
        max_off_policy_steps: int,
        last_step: int,
        step: int = 1,
        version: int = 0,
        max_retries: int = 4,
        frozen_envs: frozenset[int] = frozenset(),
        env_limits: dict[tuple[Split, int], int] | None = None,
        env_rates: dict[tuple[Split, int], RateLimit] | None = None,
    ) -> None:
        """``step`` is the batch being collected; ``last_step`` 0: no training. ``max_retries`` is per group.

        ``frozen_envs``: training environments whose rollouts a frozen model samples, so that they never become stale.
        ``env_limits``: most rollouts in flight in an environment; ``env_rates``: most begun in a time.
        """
        self.next_task, self.group_size, self.batch_size = next_task, group_size, batch_size
        self.max_in_flight, self.max_off_policy_steps = max_in_flight, max_off_policy_steps
        self.last_step, self.step, self.version = last_step, step, version
        self.max_retries, self.frozen_envs = max_retries, frozen_envs
        self.env_limits, self.env_rates = env_limits or {}, env_rates or {}
        self._now = 0.0
        self.counters = Counters()
        self.next_group = self._next_rollout = 0
        self._groups: dict[int, Group] = {}  # open, in the order they were begun
        self._startable: dict[Split, deque[int]] = {Split.TRAIN: deque(), Split.EVAL: deque()}
        self._group_of: dict[int, int] = {}  # rollout in flight → group
        # rollout in flight → how many had finished when it started
        self._finished_before: dict[int, int] = {}
        self._env_in_flight: dict[tuple[Split, int], int] = {}
        self._held_task: TaskRef | None = None  # drawn, waits for room in its environment
        self._num_pending = 0  # training rollouts of open groups that were not given up

    # -- what the rules say ----------------------------------------------------------------------------------------
    @property
    def in_flight(self) -> int:
        return len(self._group_of)

    @property
    def lead(self) -> int:
        """Versions that the trainer still owes for the batches it was given."""
        return (self.step - 1) - self.version

    @property
    def min_fresh_version(self) -> int:
        """Oldest version that the batch being collected may hold."""
        return (self.step - 1) - self.max_off_policy_steps

    @property
    def is_gate_open(self) -> bool:
        return self.step <= self.last_step and self.lead <= min(1, self.max_off_policy_steps)

    @property
    def may_ship(self) -> bool:
        """Batch n may ship once v{n-2} is live (v{n-1} when synchronous)."""
        return self.lead <= min(1, self.max_off_policy_steps)

    def demand(self, queued: int) -> int:
        """Rollouts that may still be started, given ``queued`` finished ones that wait for a batch."""
        last_usable = min(self.version + 1 + self.max_off_policy_steps, self.last_step)
        room = max(0, last_usable - self.step + 1) * self.batch_size
        return room - queued - self._num_pending

    def versions_in_flight(self) -> list[int]:
        """Of the training rollouts in flight that become stale, when they started."""
        groups = [group for group in self._groups.values() if self._is_policys(group)]
        return [version for group in groups for version in group.in_flight.values()]

    # -- actions ---------------------------------------------------------------------------------------------------
    def next_starts(self, queued: int, now: float = 0.0) -> list[Start]:
        """Everything that may start at ``now`` (seconds; only rates need it): evaluation, started groups, new groups."""
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
                    break  # the ratio of environments holds even where one of them is slow
                self._open(Split.TRAIN, task.env, task.index, self.group_size, None)
                demand -= self.group_size
                self._continue_groups(Split.TRAIN, starts)
        return starts

    def finished(self, rollout_id: int, result: Any) -> Group | None:
        """The group when this was its last rollout; None too when the rollout had been cancelled."""
        group = self._take(rollout_id)
        if group is None:
            return None
        self.counters.finished += 1
        group.results.append(result)
        group.versions.append(group.in_flight.pop(rollout_id))
        return self._close_if_done(group)

    def failed(self, rollout_id: int, *, is_fault: bool = False) -> Group | None:
        """The rollout is tried again as a new one while its group has retries left; else the group goes on without it.

        ``is_fault``: not the rollout's own (its engine or environment server died); such retries are counted apart and
        are many, but not endless, because a request may be what kills its engine. While nothing at all succeeds they
        cost nothing: an outage is judged by whoever sees how long it lasts.
        """
        is_outage = self._finished_before.get(rollout_id) == self.counters.finished
        group = self._take(rollout_id)
        if group is None:
            return None
        self.counters.failed += 1
        del group.in_flight[rollout_id]
        retries_left = group.fault_retries_left if is_fault else group.retries_left
        if retries_left:
            group.fault_retries_left -= is_fault and not is_outage
            group.retries_left -= not is_fault
            group.to_start += 1
            self.counters.retried += 1
            if group.group_id not in self._startable[group.split]:
                self._startable[group.split].appendleft(group.group_id)
        else:
            group.num_failed += 1
            group.num_faulted += is_fault
            self._num_pending -= group.split is Split.TRAIN
        return self._close_if_done(group)

    def advance(self, step: int) -> list[Cancel]:
        """Batch ``step - 1`` was shipped, ``step`` is being collected; cancels what it may not use."""
        self.step = step
        return [
            self._cancel(group, "stale")
            for group in list(self._groups.values())
            if self._is_policys(group)
            and group.oldest_version is not None
            and group.oldest_version < self.min_fresh_version
        ]

    def policy_live(self, version: int) -> None:
        self.version = version

    def cancel_youngest(self, count: int) -> list[Cancel]:
        """Take the youngest training groups back until ``count`` rollouts fewer are in flight; evaluations stay, and
        what a frozen model samples: it is not at the engines that are too full."""
        cancels: list[Cancel] = []
        for group in reversed(list(self._groups.values())):
            if count <= 0:
                break
            if self._is_policys(group) and group.in_flight:
                cancels.append(self._cancel(group, "engines are overfull"))
                count -= len(cancels[-1].rollout_ids)
        return cancels

    def stop_training(self) -> list[Cancel]:
        """The last batch was shipped: no more training rollouts; evaluations go on."""
        self.last_step = 0
        groups = [group for group in self._groups.values() if group.split is Split.TRAIN]
        return [self._cancel(group, "training is over") for group in groups]

    def open_eval(self, env: int, task: int, samples: int, tag: Any) -> None:
        """One more task to evaluate: ``samples`` rollouts, never stale, never gated."""
        self._open(Split.EVAL, env, task, samples, tag)

    def unfinished_tasks(self) -> list[TaskRef]:
        """Training tasks that were drawn and whose group is not done."""
        tasks = [
            TaskRef(group.env, group.task) for group in self._groups.values() if group.split is Split.TRAIN
        ]
        return tasks + ([self._held_task] if self._held_task else [])

    # -- inside ----------------------------------------------------------------------------------------------------
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

    def _is_policys(self, group: Group) -> bool:
        """Whether the policy samples it, for training."""
        return group.split is Split.TRAIN and group.env not in self.frozen_envs

    def _has_room(self, split: Split, env: int) -> bool:
        limit, rate = self.env_limits.get((split, env)), self.env_rates.get((split, env))
        if rate is not None and not rate.allows(self._now):
            return False
        return limit is None or self._env_in_flight.get((split, env), 0) < limit

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

    def _take(self, rollout_id: int) -> Group | None:
        """Give the permit back; None when the rollout is no longer in flight."""
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
            self._take(rollout_id)
        if group.to_start:
            self._startable[group.split].remove(group.group_id)
        self._remove(group)
        self.counters.cancelled += len(group.in_flight)
        self.counters.groups_cancelled += 1
        return Cancel(group.group_id, tuple(group.in_flight), reason, TaskRef(group.env, group.task))

    def _remove(self, group: Group) -> None:
        del self._groups[group.group_id]
        self._num_pending -= (group.size - group.num_failed) if group.split is Split.TRAIN else 0
