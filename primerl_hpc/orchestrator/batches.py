"""Scored groups → batches for the trainer: staleness, groups without a signal, size, packing.

    cutter.add(group)                                   # scores the group and queues it
    if cutter.is_ready(min_fresh_version):
        cut = cutter.take(step, min_fresh_version)      # None: nothing in it has a signal
        packed = cutter.pack(cut)                       # slow; may run in a thread

``batch_size`` counts rollouts; groups stay whole, so a batch may exceed it where a group lost members to errors.
A batch in which nothing has a signal is not a step: with ``drop`` it is thrown away and collected anew.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.orchestrator.dispatcher import Group
from primerl_hpc.orchestrator.packing import Packed, TrainSample, pack
from primerl_hpc.orchestrator.scoring import ScoredGroup, Scorer
from primerl_hpc.recipe.rollout_schema import Rollouts
from primerl_hpc.transport.rollouts import StepInfo

Window = deque[tuple[int, int]]
ERROR_WINDOW_GROUPS = 100
MIN_GROUPS_TO_JUDGE_ERRORS = 10


class NoSignalError(RoleError):
    """Nothing to learn from, batch after batch: starting again would find the same."""

    exit_code = ExitCode.NO_CONTINUE


class TooManyErrorsError(RoleError):
    """Rollouts fail for their own reasons (not an engine's death), again and again."""

    exit_code = ExitCode.NO_CONTINUE


@dataclass
class Tally:
    """What became of groups since the last batch, beside being trained on."""

    stale_groups: int = 0
    stale_rollouts: int = 0
    refilled_groups: int = 0  # without a signal, replaced
    rejected_groups: int = 0  # turned away by a gate
    # replaced, turned away, or of a batch without a signal; without their tokens
    passed_over: list[ScoredGroup] = field(default_factory=list)
    failed_groups: int = 0  # no rollout survived
    lost_rollouts: Counter[int] = field(default_factory=Counter)  # of failed groups, by environment


@dataclass
class Cut:
    """One batch: what was consumed for it, and what goes to the trainer."""

    info: StepInfo
    groups: list[ScoredGroup]
    packed: Packed | None
    tally: Tally
    samples: list[TrainSample] = field(default_factory=list)
    queued_versions: list[int] = field(default_factory=list)  # of rollouts that wait for the next batch

    @property
    def generated(self) -> list[ScoredGroup]:
        """With the groups that were passed over since the last batch: how well the policy does, not what is trained."""
        return [*self.groups, *self.tally.passed_over]

    @property
    def mean_reward(self) -> float:
        return float(np.mean([rollout.reward for group in self.generated for rollout in group.rollouts]))


class BatchCutter:
    def __init__(
        self,
        rollouts: Rollouts,
        scorer: Scorer,
        *,
        seq_len: int,
        num_ranks: int,
        env_names: list[str],
    ) -> None:
        self.rollouts, self.scorer = rollouts, scorer
        self.seq_len, self.num_ranks, self.env_names = seq_len, num_ranks, env_names
        self._queue: deque[ScoredGroup] = deque()
        self._num_queued = 0
        self._swept_for: int | None = None  # nothing in the queue is too old for this version
        # per environment, (failed, all) of each of its last groups
        self._windows: list[Window] = [deque(maxlen=ERROR_WINDOW_GROUPS) for _ in env_names]
        self._tally = Tally()
        self._num_empty_in_a_row = self._passed_over_in_a_row = 0

    @property
    def num_queued(self) -> int:
        """Rollouts that wait for a batch."""
        return self._num_queued

    @property
    def queue(self) -> list[ScoredGroup]:
        return list(self._queue)

    def state(self) -> dict[str, list[tuple[int, int]]]:
        """Beside the queue, what a cut leaves behind: by environment, failed and all rollouts of its last groups; JSON-able."""
        return {name: list(window) for name, window in zip(self.env_names, self._windows, strict=True)}

    def restore(self, state: dict[str, list[tuple[int, int]]] | list, queue: list[ScoredGroup]) -> None:
        """Go on from what `state` and `queue` gave; the queued rollouts are not scored again.

        A list, as earlier versions wrote it, does not say of which environment its groups are.
        """
        if isinstance(state, list):
            state = {}
        for name, window in zip(self.env_names, self._windows, strict=True):
            window.extend((failed, size) for failed, size in state.get(name, ()))
        for group in queue:
            self._enqueue(group)

    def add(self, group: Group) -> ScoredGroup | None:
        """Score a finished group, and queue it unless it is passed over; None when no rollout of it survived.

        Raises TooManyErrorsError, or NoSignalError when passing over leads nowhere.
        """
        self._judge_errors(group)
        if not group.results:
            self._tally.failed_groups += 1
            self._tally.lost_rollouts[group.env] += group.num_failed
            return None
        scored = self.scorer.score(group)
        if not self.scorer.admits(scored):
            self._tally.rejected_groups += 1
            self._pass_over(scored)
        elif self.rollouts.zero_advantage == "refill" and not scored.has_signal:
            self._tally.refilled_groups += 1
            self._pass_over(scored)
        else:
            self._enqueue(scored)
            if scored.has_signal:
                self._passed_over_in_a_row = 0
        return scored

    def sweep(self, min_fresh_version: int) -> None:
        """Drop queued groups whose oldest rollout is too old for the batch being collected."""
        if self._swept_for == min_fresh_version:
            return
        self._swept_for = min_fresh_version
        stale = [group for group in self._queue if group.is_stale(min_fresh_version)]
        if not stale:
            return
        num_rollouts = sum(len(group.rollouts) for group in stale)
        self._tally.stale_groups += len(stale)
        self._tally.stale_rollouts += num_rollouts
        self._queue = deque(group for group in self._queue if not group.is_stale(min_fresh_version))
        self._num_queued -= num_rollouts

    def is_ready(self, min_fresh_version: int) -> bool:
        self.sweep(min_fresh_version)
        return self.num_queued >= self.rollouts.batch_size

    def take(self, step: int, min_fresh_version: int) -> Cut | None:
        """Whole groups in the order they finished, enough for a batch, with what of them will be trained.

        None when nothing of them has a signal; raises NoSignalError when that happened too often in a row.
        """
        if not self.is_ready(min_fresh_version):
            raise ValueError("no batch is ready")
        groups, count = [], 0
        while count < self.rollouts.batch_size:
            groups.append(self._queue.popleft())
            count += len(groups[-1].rollouts)
        self._num_queued -= count
        samples = [sample for group in groups for each in group.samples for sample in each]
        if not samples:
            self._num_empty_in_a_row += 1
            self._tally.passed_over += map(_without_tokens, groups)
            if self._num_empty_in_a_row >= self.rollouts.max_empty_batches:
                self._give_up()
            return None
        self._num_empty_in_a_row = self._passed_over_in_a_row = 0
        tally, self._tally = self._tally, Tally()
        aging = [group for group in groups if not group.is_frozen] or groups
        return Cut(
            info=StepInfo(
                step=step,
                env_names=self.env_names,
                policy_version_min=min(group.oldest_version for group in aging),
                policy_version_max=max(rollout.last_version for group in aging for rollout in group.rollouts),
                num_samples=len(samples),
            ),
            groups=groups,
            packed=None,
            tally=tally,
            samples=samples,
            queued_versions=[
                version for group in self._queue if not group.is_frozen for version in group.versions
            ],
        )

    def pack(self, cut: Cut) -> Packed:
        """The slow part of a cut; touches nothing but ``cut``, so it may run in a thread."""
        cut.packed = pack(cut.samples, seq_len=self.seq_len, num_ranks=self.num_ranks)
        return cut.packed

    def _enqueue(self, group: ScoredGroup) -> None:
        self._queue.append(group)
        self._num_queued += len(group.rollouts)
        self._swept_for = None

    def _pass_over(self, scored: ScoredGroup) -> None:
        self._tally.passed_over.append(_without_tokens(scored))
        self._passed_over_in_a_row += len(scored.rollouts)
        if self._passed_over_in_a_row >= self.rollouts.max_empty_batches * self.rollouts.batch_size:
            self._give_up()

    def _judge_errors(self, group: Group) -> None:
        """Environment by environment: one of several that always fails is a small share of them all.

        What others' deaths took says nothing about it.
        """
        window = self._windows[group.env]
        window.append((group.num_failed - group.num_faulted, group.size - group.num_faulted))
        failed, total = (sum(column) for column in zip(*window, strict=True))
        limit = self.rollouts.max_error_fraction
        if len(window) >= MIN_GROUPS_TO_JUDGE_ERRORS and failed > limit * total:
            raise TooManyErrorsError(
                f"{failed} of its last {total} rollouts failed, more than rollouts.max_error_fraction {limit:g}",
                place=f"environment {self.env_names[group.env]}",
                mend="see the errors in the orchestrator's and the environment server's logs",
            )

    def _give_up(self) -> None:
        raise NoSignalError(
            f"{self.rollouts.max_empty_batches} batches in a row without anything to learn from: no difference of reward "
            f"within a group, or all turned away by gates and filters",
            mend="make the task easier or harder, raise rollouts.group_size, or start from another model",
        )


def _without_tokens(group: ScoredGroup) -> ScoredGroup:
    """What its numbers are made of; many groups may be passed over before a batch is full."""
    return replace(
        group,
        rollouts=[
            replace(rollout, samples=[each.without_tokens() for each in rollout.samples], text=[])
            for rollout in group.rollouts
        ],
        samples=[[] for _ in group.rollouts],
    )
