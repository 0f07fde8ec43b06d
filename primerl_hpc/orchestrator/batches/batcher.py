"""Build batches for the trainer from scored groups: staleness, groups without a signal, batch size, packing.

    builder.add(group)                                       # scores the group and queues it
    if builder.is_ready(min_fresh_version):
        batch = builder.next_batch(step, min_fresh_version)  # None: nothing in it has a signal
        packed = builder.pack(batch)                         # slow; may run in a thread

``batch_size`` counts rollouts, ``batch_tokens`` their tokens. Groups are never divided, so a batch may exceed its size,
for example where a group lost members to errors. A batch in which nothing has a signal is not a step: with
``zero_advantage: drop`` it is discarded and collected again.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.safety.printable import kind_of, last_error
from primerl_hpc.orchestrator.batches.packing import Packed, pack
from primerl_hpc.orchestrator.rollout_data import Group, ScoredGroup, TrainSample
from primerl_hpc.orchestrator.scoring.scoring import Scorer
from primerl_hpc.recipe.schema.rollout import Rollouts
from primerl_hpc.transport.rollouts.micro_batch import StepInfo

Window = deque[tuple[int, int]]
ERROR_WINDOW_GROUPS = 100
LENGTH_WINDOW_GROUPS = 256
MIN_GROUPS_FOR_ERROR_SHARE = 10


class NoSignalError(RoleError):
    """Several consecutive batches had no training signal. A restart would have the same result."""

    exit_code = ExitCode.NO_CONTINUE


class TooManyErrorsError(RoleError):
    """Too many rollouts of one environment failed for reasons of their own (engine failures do not count)."""

    exit_code = ExitCode.NO_CONTINUE


@dataclass
class DiscardTally:
    """Groups since the last batch that are not in it, by reason."""

    stale_groups: int = 0
    stale_rollouts: int = 0
    refilled_groups: int = 0  # without a signal, replaced
    rejected_groups: int = 0  # by a gate
    # refilled, rejected, or in a batch without a signal; stored without their tokens
    passed_over: list[ScoredGroup] = field(default_factory=list)
    failed_groups: int = 0  # none of their rollouts succeeded
    lost_rollouts: Counter[int] = field(default_factory=Counter)  # of failed groups, by environment


@dataclass
class Batch:
    """One batch: the groups that were consumed for it, and what is sent to the trainer."""

    info: StepInfo
    groups: list[ScoredGroup]
    packed: Packed | None
    tally: DiscardTally
    samples: list[TrainSample] = field(default_factory=list)
    queued_versions: list[int] = field(default_factory=list)  # of the rollouts left in the queue

    @property
    def generated(self) -> list[ScoredGroup]:
        """The batch's groups and those passed over since the last batch.

        They measure how well the policy does, as opposed to what is trained.
        """
        return [*self.groups, *self.tally.passed_over]

    @property
    def mean_reward(self) -> float:
        return float(np.mean([rollout.reward for group in self.generated for rollout in group.rollouts]))


class BatchBuilder:
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
        self._num_queued = self._queued_tokens = 0
        # (rollouts, tokens) of the last groups, by which the number of rollouts of a batch is estimated
        self._lengths: Window = deque(maxlen=LENGTH_WINDOW_GROUPS)
        self._swept_for: int | None = None  # no group in the queue is stale at this min_fresh_version
        # for each environment, (failed, total) rollouts of each of its last groups
        self._windows: list[Window] = [deque(maxlen=ERROR_WINDOW_GROUPS) for _ in env_names]
        # errors of the same groups; not saved in checkpoints
        self._errors: list[deque[list[str]]] = [deque(maxlen=ERROR_WINDOW_GROUPS) for _ in env_names]
        self._tally = DiscardTally()
        self._num_consecutive_empty = self._num_consecutive_passed_over = 0
        self.num_empty_batches = 0
        """Batches dropped because nothing in them had a signal, since the process started."""

    @property
    def num_queued(self) -> int:
        """Number of rollouts that wait for a batch."""
        return self._num_queued

    @property
    def batch_size(self) -> int:
        """Number of rollouts of a batch; with ``batch_tokens`` an estimate, more than are queued until it is ready."""
        wanted, size = self.rollouts.batch_tokens, self.rollouts.batch_size
        if wanted is None:
            return size
        if self._lengths:
            rollouts, tokens = (sum(column) for column in zip(*self._lengths, strict=True))
            group = self.rollouts.group_size
            size = max(1, math.ceil(wanted * rollouts / max(1, tokens) / group)) * group
        return (
            size if self._is_full(self._num_queued, self._queued_tokens) else max(size, self._num_queued + 1)
        )

    def _is_full(self, rollouts: int, tokens: int) -> bool:
        wanted = self.rollouts.batch_tokens
        return rollouts >= self.rollouts.batch_size if wanted is None else tokens >= wanted

    @property
    def queue(self) -> list[ScoredGroup]:
        return list(self._queue)

    def state(self) -> dict[str, list[tuple[int, int]]]:
        """Return (failed, total) rollouts of the last groups of each environment; JSON-able.

        The queue is saved separately.
        """
        return {name: list(window) for name, window in zip(self.env_names, self._windows, strict=True)}

    def restore(self, state: dict[str, list[tuple[int, int]]] | list, queue: list[ScoredGroup]) -> None:
        """Continue from what `state` and `queue` returned; the queued rollouts are not scored again.

        A list, which earlier versions of the package wrote, does not name the environments of its groups and is
        ignored.
        """
        if isinstance(state, list):
            state = {}
        for name, window in zip(self.env_names, self._windows, strict=True):
            window.extend((failed, size) for failed, size in state.get(name, ()))
        for group in queue:
            self._enqueue(group)

    def add(self, group: Group) -> ScoredGroup | None:
        """Score a finished group and queue it unless it is passed over. Return None if none of its rollouts succeeded.

        Raises TooManyErrorsError, or NoSignalError after passing over ``max_empty_batches`` batches' worth of rollouts.
        """
        self._check_error_share(group)
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
                self._num_consecutive_passed_over = 0
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
        self._queued_tokens -= sum(group.num_tokens for group in stale)

    def is_ready(self, min_fresh_version: int) -> bool:
        self.sweep(min_fresh_version)
        return self._is_full(self._num_queued, self._queued_tokens)

    def next_batch(self, step: int, min_fresh_version: int) -> Batch | None:
        """Take complete groups from the queue, in the order in which they finished, until they fill a batch.

        Return None if none of their samples is to be trained. Raises NoSignalError when that happened
        ``max_empty_batches`` times in a row, ValueError when no batch is ready.
        """
        if not self.is_ready(min_fresh_version):
            raise ValueError("no batch is ready")
        groups, count, tokens = [], 0, 0
        while not self._is_full(count, tokens):
            groups.append(self._queue.popleft())
            count, tokens = count + len(groups[-1].rollouts), tokens + groups[-1].num_tokens
        self._num_queued, self._queued_tokens = self._num_queued - count, self._queued_tokens - tokens
        samples = [sample for group in groups for samples in group.samples for sample in samples]
        if not samples:
            self._num_consecutive_empty += 1
            self.num_empty_batches += 1
            self._tally.passed_over += map(_without_tokens, groups)
            if self._num_consecutive_empty >= self.rollouts.max_empty_batches:
                self._give_up()
            return None
        self._num_consecutive_empty = self._num_consecutive_passed_over = 0
        tally, self._tally = self._tally, DiscardTally()
        aging = [group for group in groups if not group.is_frozen] or groups
        return Batch(
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

    def pack(self, batch: Batch) -> Packed:
        """Pack the samples of ``batch``. Slow; reads and writes only ``batch``, so it may run in a thread."""
        batch.packed = pack(batch.samples, seq_len=self.seq_len, num_ranks=self.num_ranks)
        return batch.packed

    def _enqueue(self, group: ScoredGroup) -> None:
        self._queue.append(group)
        self._num_queued += len(group.rollouts)
        self._queued_tokens += group.num_tokens
        self._lengths.append((len(group.rollouts), group.num_tokens))
        self._swept_for = None

    def _pass_over(self, scored: ScoredGroup) -> None:
        self._tally.passed_over.append(_without_tokens(scored))
        self._num_consecutive_passed_over += len(scored.rollouts)
        if self._num_consecutive_passed_over >= self.rollouts.max_empty_batches * self.batch_size:
            self._give_up()

    def _check_error_share(self, group: Group) -> None:
        """Raise TooManyErrorsError if too many of the environment's recent rollouts failed.

        Environments are judged one by one: one of several that always fails is a small share of all rollouts. Rollouts
        that failed because an engine or environment server died do not count.
        """
        window, errors = self._windows[group.env], self._errors[group.env]
        window.append((group.num_failed - group.num_faulted, group.size - group.num_faulted))
        errors.append(group.errors)
        failed, total = (sum(column) for column in zip(*window, strict=True))
        limit = self.rollouts.max_error_fraction
        if len(window) >= MIN_GROUPS_FOR_ERROR_SHARE and failed > limit * total:
            raise TooManyErrorsError(
                f"{failed} of its last {total} rollouts failed, more than rollouts.max_error_fraction {limit:g} allows"
                + _describe_last_error([error for group_errors in errors for error in group_errors]),
                location=f"environment {self.env_names[group.env]}",
                hint="see the errors in the logs of the orchestrator and the environment server",
            )

    def _give_up(self) -> None:
        raise NoSignalError(
            f"{self.rollouts.max_empty_batches} batches in a row had nothing to learn from: "
            f"all rollouts of a group got the same reward, or gates and filters rejected them all",
            hint="make the task easier or harder, raise rollouts.group_size, or start from another model",
        )


def _describe_last_error(errors: list[str]) -> str:
    """Return the last error as the end of a sentence; empty if none is known, as right after a resume."""
    if not errors:
        return ""
    count = sum(kind_of(error) == kind_of(errors[-1]) for error in errors)
    return f"; {last_error(errors[-1], count)}"


def _without_tokens(group: ScoredGroup) -> ScoredGroup:
    """Return the group without its tokens: many groups may be passed over before a batch is full."""
    return replace(
        group,
        rollouts=[
            replace(rollout, samples=[sample.without_tokens() for sample in rollout.samples], text=[])
            for rollout in group.rollouts
        ],
        samples=[[] for _ in group.rollouts],
    )
