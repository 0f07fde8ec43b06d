"""The dispatcher under random orders of events: each rollout ends once, permits and staleness hold in every state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from primerl_hpc.orchestrator.rollout_data import Split, Start, TaskRef
from primerl_hpc.orchestrator.scheduling.dispatcher import (
    MAX_FAULTS_PER_MEMBER,
    Dispatcher,
    DispatchLimits,
    ProcessLimit,
)
from primerl_hpc.orchestrator.scheduling.rate_limit import RateLimit
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler

LIMITS = {field.name for field in dataclasses.fields(DispatchLimits)}


def make(**changes: Any) -> Any:
    sampler = TaskSampler([1000], [1.0], seed=0)
    limits: dict[str, Any] = {
        "group_size": 4,
        "batch_size": 8,
        "max_in_flight": 16,
        "max_off_policy_steps": 2,
    }
    limits |= {name: changes.pop(name) for name in LIMITS & changes.keys()}
    settings_ = {"next_task": sampler.next, "last_step": 100} | changes
    return Dispatcher(limits=DispatchLimits(**limits), **settings_)


def test_started_groups_are_continued_before_a_new_one_is_opened():
    dispatcher = make(max_in_flight=6)
    starts = dispatcher.next_starts(queued=0)
    assert [start.group_id for start in starts] == [0, 0, 0, 0, 1, 1]
    dispatcher.finished(starts[0].rollout_id, "a")
    assert [start.group_id for start in dispatcher.next_starts(0)] == [1]


def test_group_is_emitted_with_its_last_rollout_only():
    dispatcher = make(max_in_flight=4)
    starts = dispatcher.next_starts(0)
    assert [dispatcher.finished(start.rollout_id, index) for index, start in enumerate(starts[:3])] == [
        None
    ] * 3
    group = dispatcher.finished(starts[3].rollout_id, 3)
    assert group.results == [0, 1, 2, 3]
    assert group.versions == [0, 0, 0, 0]


def test_environments_that_start_processes_share_one_bound_in_training_and_evaluation():
    tasks = iter([TaskRef(0, 0), TaskRef(1, 0), TaskRef(0, 1)])
    limit = ProcessLimit(frozenset({(Split.TRAIN, 0), (Split.EVAL, 0)}), 3)
    dispatcher = make(next_task=lambda: next(tasks), group_size=2, process_limit=limit)
    dispatcher.open_eval(0, 0, 2, None)
    first = dispatcher.next_starts(0)
    # two of the evaluation and one of a group of environment 0; the next task, of environment 1, is free
    assert [(start.split, start.env) for start in first] == [
        (Split.EVAL, 0),
        (Split.EVAL, 0),
        (Split.TRAIN, 0),
        (Split.TRAIN, 1),
        (Split.TRAIN, 1),
    ]
    assert dispatcher.next_starts(0) == []
    dispatcher.finished(first[0].rollout_id, "a")
    (freed,) = dispatcher.next_starts(0)
    assert (freed.split, freed.env, freed.group_id) == (Split.TRAIN, 0, first[2].group_id)


def test_a_group_keeps_its_results_in_the_order_of_starts_and_its_own_errors():
    dispatcher = make(max_in_flight=4, max_retries=0)
    starts = dispatcher.next_starts(0)
    for index in (3, 0):
        dispatcher.finished(starts[index].rollout_id, index)
    dispatcher.failed(starts[1].rollout_id, error="HarnessError: no tools")
    group = dispatcher.finished(starts[2].rollout_id, 2)
    assert group.results == [0, 2, 3] and group.errors == ["HarnessError: no tools"]


def test_failed_rollout_is_retried_then_left_out():
    dispatcher = make(group_size=1, batch_size=1, max_in_flight=1, max_retries=2)
    for _ in range(2):
        (start,) = dispatcher.next_starts(0)
        assert dispatcher.failed(start.rollout_id) is None
    (start,) = dispatcher.next_starts(0)
    group = dispatcher.failed(start.rollout_id)
    assert (group.num_failed, group.results) == (1, [])


def test_engine_faults_cost_no_retry_but_are_not_endless():
    dispatcher = make(group_size=1, batch_size=1, max_in_flight=2, max_retries=0)

    def fault_while_another_succeeds():
        killer, *others = sorted(dispatcher.next_starts(0), key=lambda start: start.group_id)
        assert killer.group_id == 0
        dispatcher.finished(others[0].rollout_id, "a")
        return dispatcher.failed(killer.rollout_id, is_fault=True)

    for _ in range(MAX_FAULTS_PER_MEMBER):
        assert fault_while_another_succeeds() is None
    group = fault_while_another_succeeds()
    assert (group.num_failed, group.num_faulted) == (1, 1)


def test_an_outage_of_any_length_costs_nothing():
    dispatcher = make(group_size=1, batch_size=1, max_in_flight=1, max_retries=0)
    for _ in range(3 * MAX_FAULTS_PER_MEMBER):
        (start,) = dispatcher.next_starts(0)
        assert dispatcher.failed(start.rollout_id, is_fault=True) is None
    (start,) = dispatcher.next_starts(0)
    assert dispatcher.finished(start.rollout_id, "a").num_failed == 0


def test_gate_closes_when_no_batch_may_contain_a_rollout_and_opens_with_the_next_version():
    dispatcher = make(max_off_policy_steps=1)
    dispatcher.advance(3)  # batches 1 and 2 shipped, v0 live
    assert dispatcher.next_starts(0) == []
    assert not dispatcher.may_ship
    dispatcher.policy_live(1)
    assert dispatcher.may_ship
    assert {start.version for start in dispatcher.next_starts(0)} == {1}


@pytest.mark.parametrize("window", [2, 8])
def test_while_a_batch_waits_for_the_trainer_the_next_one_is_collected_and_no_more(window: int):
    dispatcher = make(max_off_policy_steps=window)
    dispatcher.advance(3)
    assert not dispatcher.may_ship and dispatcher.waits_for_policy(0)
    starts = dispatcher.next_starts(0)
    assert {start.version for start in starts} == {0} and len(starts) == dispatcher.batch_size
    assert not dispatcher.waits_for_policy(0)
    for start in starts:
        dispatcher.finished(start.rollout_id, None)
    assert dispatcher.waits_for_policy(8) and dispatcher.next_starts(8) == []
    dispatcher.policy_live(1)
    assert not dispatcher.waits_for_policy(8) and dispatcher.next_starts(8)


def test_synchronous_mode_starts_rollouts_of_batch_n_only_from_the_version_before_and_no_more_than_a_batch():
    dispatcher = make(max_off_policy_steps=0)
    assert len(dispatcher.next_starts(0)) == 8
    dispatcher.advance(2)
    assert dispatcher.next_starts(0) == []
    assert not dispatcher.may_ship
    dispatcher.policy_live(1)
    starts = dispatcher.next_starts(0)
    assert len(starts) == 8
    assert {start.version for start in starts} == {1}


def test_no_rollout_is_started_that_no_batch_could_use():
    dispatcher = make(max_in_flight=1000, max_off_policy_steps=2)
    assert len(dispatcher.next_starts(0)) == 24  # v0 may serve batches 1, 2 and 3
    near_the_end = make(max_in_flight=1000, max_off_policy_steps=2, last_step=2)
    assert len(near_the_end.next_starts(queued=4)) == 12


def test_groups_that_became_stale_are_cancelled_once_and_their_late_results_are_ignored():
    dispatcher = make(max_in_flight=8, max_off_policy_steps=1)
    starts = dispatcher.next_starts(0)
    dispatcher.finished(starts[0].rollout_id, "a")
    assert dispatcher.advance(2) == []  # batch 2 may hold v0
    dispatcher.policy_live(1)
    cancels = dispatcher.advance(3)
    assert [cancel.group_id for cancel in cancels] == [0, 1]
    assert sum(len(cancel.rollout_ids) for cancel in cancels) == 7
    assert dispatcher.in_flight == 0
    assert dispatcher.finished(starts[1].rollout_id, "late") is None
    assert dispatcher.advance(3) == []


def test_a_stale_group_that_had_members_to_start_is_forgotten():
    dispatcher = make(max_in_flight=6, max_off_policy_steps=0)
    dispatcher.next_starts(0)
    dispatcher.advance(2)
    dispatcher.policy_live(1)
    assert [start.group_id for start in dispatcher.next_starts(0)] == [2, 2, 2, 2, 3, 3]


def test_evaluation_goes_first_and_is_neither_gated_nor_cancelled():
    dispatcher = make(max_in_flight=4)
    dispatcher.next_starts(0)
    dispatcher.open_eval(env=0, task=7, samples=2, tag="v0")
    dispatcher.advance(9)  # far ahead: the gate is closed, every training group is stale
    starts = dispatcher.next_starts(0)
    assert [(start.split, start.task) for start in starts] == [(Split.EVAL, 7)] * 2
    dispatcher.stop_training()
    dispatcher.finished(starts[0].rollout_id, 1.0)
    assert dispatcher.finished(starts[1].rollout_id, 0.0).tag == "v0"


def test_the_youngest_groups_are_cancelled_completely_and_evaluations_stay():
    dispatcher = make(max_in_flight=10)
    dispatcher.open_eval(env=0, task=7, samples=2, tag="v0")
    dispatcher.next_starts(0)
    cancels = dispatcher.cancel_youngest(3)
    assert [(cancel.task, len(cancel.rollout_ids)) for cancel in cancels] == [
        (TaskRef(0, cancels[0].task.index), 4)
    ]
    assert dispatcher.in_flight == 6
    assert len(dispatcher.cancel_youngest(100)) == 1
    assert dispatcher.in_flight == 2  # the evaluation's


def test_rollouts_of_a_frozen_model_are_not_cancelled_for_overloaded_engines():
    tasks = iter([TaskRef(0, 0), TaskRef(1, 0), TaskRef(0, 1), TaskRef(1, 1)])
    dispatcher = make(next_task=lambda: next(tasks), max_in_flight=16, frozen_envs=frozenset({1}))
    dispatcher.next_starts(0)
    assert [cancel.task for cancel in dispatcher.cancel_youngest(5)] == [TaskRef(0, 1), TaskRef(0, 0)]
    assert dispatcher.in_flight == 8 and dispatcher.versions_in_flight() == []


def test_an_environment_at_its_limit_holds_its_turn_so_that_ratios_stay():
    tasks = iter([TaskRef(0, 0), TaskRef(0, 1), *(TaskRef(1, index) for index in range(9))])
    dispatcher = make(next_task=lambda: next(tasks), env_limits={(Split.TRAIN, 0): 4})
    starts = dispatcher.next_starts(0)
    assert [start.env for start in starts] == [0] * 4
    assert dispatcher.unfinished_tasks() == [TaskRef(0, 0), TaskRef(0, 1)]
    for start in starts:
        dispatcher.finished(start.rollout_id, None)
    assert {start.env for start in dispatcher.next_starts(queued=4)} == {0, 1}


def test_a_rate_limits_starts_per_minute_to_small_bursts():
    dispatcher = make(max_in_flight=100, env_rates={(Split.TRAIN, 0): RateLimit(60)})
    assert len(dispatcher.next_starts(0, now=1000.0)) == 6
    begun = [len(dispatcher.next_starts(0, now=1000.0 + 0.25 * tick)) for tick in range(1, 41)]
    assert sum(begun) == 10 and max(begun) == 1


def test_a_slow_rate_starts_one_rollout_at_a_time():
    dispatcher = make(env_rates={(Split.TRAIN, 0): RateLimit(2)})
    begun = [len(dispatcher.next_starts(0, now=float(second))) for second in range(1000, 1091)]
    assert [second for second, count in enumerate(begun) if count] == [0, 30, 60, 90]


# -- amounts and limits ----------------------------------------------------------------------------


def test_rollouts_and_groups_are_numbered_from_zero_over_the_complete_run():
    dispatcher = make(max_in_flight=4)
    starts = dispatcher.next_starts(0)
    assert [(start.rollout_id, start.group_id) for start in starts] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for start in starts:
        dispatcher.finished(start.rollout_id, None)
    assert {(start.rollout_id, start.group_id) for start in dispatcher.next_starts(4)} == {
        (number, 1) for number in range(4, 8)
    }


def test_every_kind_of_event_is_counted_once():
    dispatcher = make(group_size=2, batch_size=4, max_in_flight=4, max_off_policy_steps=0)
    lost, kept = dispatcher.next_starts(0)[::2]
    dispatcher.failed(lost.rollout_id)  # retried
    dispatcher.next_starts(0)
    for rollout_id in (kept.rollout_id, kept.rollout_id + 1):
        dispatcher.finished(rollout_id, None)
    dispatcher.advance(2)  # cancels the first group
    assert vars(dispatcher.counters) == {
        "dispatched": 5,
        "finished": 2,
        "failed": 1,
        "cancelled": 2,
        "retried": 1,
        "groups_started": 2,
        "groups_finished": 1,
        "groups_cancelled": 1,
    }


def test_a_group_has_four_retries_and_fifty_faults_of_engines_for_each_rollout():
    dispatcher = make(group_size=2, batch_size=2, max_in_flight=2)
    (group,) = (dispatcher._groups[start.group_id] for start in dispatcher.next_starts(0)[:1])
    assert (group.retries_left, group.fault_retries_left) == (4, 100)
    for left in (3, 2, 1, 0):
        dispatcher.failed(next(iter(group.in_flight)))
        dispatcher.next_starts(0)
        assert group.retries_left == left and group.fault_retries_left == 100
    assert dispatcher.failed(next(iter(group.in_flight)), error="last") is None
    assert (group.num_failed, group.errors) == (1, ["last"])
    assert {start.group_id for start in dispatcher.next_starts(0)} == {1}


def test_the_errors_of_a_group_are_those_of_its_own_failures():
    dispatcher = make(group_size=1, batch_size=1, max_in_flight=1)
    (start,) = dispatcher.next_starts(0)
    group = dispatcher._groups[start.group_id]
    group.fault_retries_left = 0
    assert dispatcher.failed(start.rollout_id, is_fault=True, error="engine died") is group
    assert (group.num_faulted, group.errors) == (1, [])


def test_a_retried_rollout_starts_before_the_groups_behind_it():
    dispatcher = make(group_size=2, batch_size=8, max_in_flight=4)
    starts = dispatcher.next_starts(0)
    dispatcher.max_in_flight = 5
    waiting = dispatcher.next_starts(0)  # half of a third group
    assert [start.group_id for start in waiting] == [2]
    dispatcher.failed(starts[0].rollout_id)
    assert [start.group_id for start in dispatcher.next_starts(0)] == [0]


def test_no_training_starts_after_the_last_step():
    last = make(last_step=3, step=3, version=2)
    assert len(last.next_starts(0)) == 8
    assert make(last_step=3, step=4, version=3).next_starts(0) == []
    assert make(last_step=0).next_starts(0) == []


def test_demand_is_the_batches_that_can_use_a_rollout_less_what_is_queued_or_open():
    dispatcher = make(max_off_policy_steps=1, max_in_flight=4)
    assert dispatcher.demand(0) == 16 and dispatcher.demand(3) == 13
    dispatcher.next_starts(0)
    assert dispatcher.demand(0) == 12
    dispatcher.advance(4)  # no version is live that batch 4 could use
    assert dispatcher.demand(0) == 0 and dispatcher.demand(5) == -5


def test_a_rollout_that_failed_for_good_is_demanded_again_and_an_evaluation_is_not_part_of_demand():
    dispatcher = make(group_size=2, batch_size=4, max_in_flight=2, max_off_policy_steps=0, max_retries=0)
    dispatcher.open_eval(0, 0, 2, "v0")
    first, second = dispatcher.next_starts(0)
    assert dispatcher.demand(0) == 4
    for start in (first, second):
        dispatcher.failed(start.rollout_id)
    assert dispatcher.demand(0) == 4
    first, second = dispatcher.next_starts(0)
    assert dispatcher.demand(0) == 2
    dispatcher.failed(first.rollout_id)
    assert dispatcher.demand(0) == 3
    dispatcher.finished(second.rollout_id, None)
    assert dispatcher.demand(1) == 3


def test_open_groups_fill_the_demand_before_new_ones_are_opened():
    dispatcher = make(max_off_policy_steps=0, max_in_flight=100)
    assert len(dispatcher.next_starts(0)) == 8
    assert dispatcher.next_starts(0) == [] and dispatcher.counters.groups_started == 2
    assert len(make(max_off_policy_steps=0, max_in_flight=100).next_starts(queued=7)) == 4


def test_only_as_many_youngest_groups_are_cancelled_as_needed():
    dispatcher = make(max_in_flight=16)
    dispatcher.next_starts(0)
    assert dispatcher.cancel_youngest(0) == [] and dispatcher.cancel_youngest(-1) == []
    assert [cancel.group_id for cancel in dispatcher.cancel_youngest(4)] == [3]
    assert [cancel.group_id for cancel in dispatcher.cancel_youngest(5)] == [2, 1]
    assert {cancel.reason for cancel in dispatcher.cancel_youngest(1)} == {"engines are overloaded"}


def test_a_group_without_a_running_rollout_is_not_cancelled_for_overloaded_engines():
    dispatcher = make(max_in_flight=4)
    starts = dispatcher.next_starts(0)
    dispatcher.max_in_flight = 5
    dispatcher.next_starts(0)
    dispatcher.failed(4)  # the only running rollout of the second group
    assert [cancel.group_id for cancel in dispatcher.cancel_youngest(1)] == [0]
    assert len(starts) == 4 and dispatcher.unfinished_tasks() != []


def test_a_frozen_models_rollouts_never_become_stale():
    dispatcher = make(max_in_flight=4, max_off_policy_steps=0, frozen_envs=frozenset({0}))
    starts = dispatcher.next_starts(0)
    assert dispatcher.advance(9) == []
    assert [cancel.reason for cancel in dispatcher.stop_training()] == ["training is over"]
    assert len(starts) == 4 and dispatcher.in_flight == 0


def test_a_group_is_as_stale_as_its_oldest_rollout():
    dispatcher = make(max_in_flight=2, max_off_policy_steps=1)
    dispatcher.next_starts(0)
    dispatcher.policy_live(1)
    dispatcher.max_in_flight = 4
    dispatcher.next_starts(0)
    assert sorted(dispatcher.versions_in_flight()) == [0, 0, 1, 1]
    assert dispatcher.advance(2) == []
    (cancel,) = dispatcher.advance(3)
    assert (len(cancel.rollout_ids), cancel.reason) == (4, "stale")


def test_a_group_that_has_started_nothing_is_not_stale():
    dispatcher = make(max_in_flight=4, env_limits={(Split.TRAIN, 0): 4})
    dispatcher.next_starts(0)
    dispatcher._open(Split.TRAIN, 0, 5, 4, None)
    assert [cancel.group_id for cancel in dispatcher.advance(9)] == [0]


def test_groups_that_wait_for_their_environment_keep_their_order():
    tasks = iter([TaskRef(0, 0), TaskRef(1, 0), TaskRef(0, 1)])
    dispatcher = make(next_task=lambda: next(tasks), group_size=2, max_in_flight=9)
    dispatcher.env_limits = {(Split.EVAL, 0): 1}
    for task in range(3):
        dispatcher.open_eval(0, task, 1, None)
    dispatcher.last_step = 0
    order = []
    while starts := dispatcher.next_starts(0):
        assert len(starts) == 1
        order.append(starts[0].task)
        dispatcher.finished(starts[0].rollout_id, None)
    assert order == [0, 1, 2]


def test_the_limit_of_an_environment_counts_its_own_split():
    dispatcher = make(max_in_flight=9, env_limits={(Split.TRAIN, 0): 1, (Split.EVAL, 0): 2})
    dispatcher.open_eval(0, 0, 3, None)
    splits = [start.split for start in dispatcher.next_starts(0)]
    assert splits == [Split.EVAL, Split.EVAL, Split.TRAIN]


def test_a_rate_counts_starts_of_its_environment_only():
    tasks = iter([TaskRef(0, 0), TaskRef(1, 0), TaskRef(0, 1), TaskRef(1, 1)])
    rates = {(Split.TRAIN, 0): RateLimit(60)}
    dispatcher = make(next_task=lambda: next(tasks), group_size=2, env_rates=rates, max_in_flight=8)
    assert [start.env for start in dispatcher.next_starts(0, now=50.0)] == [0, 0, 1, 1, 0, 0, 1, 1]


class AnyOrder(RuleBasedStateMachine):
    """Outcomes, versions, batches and evaluations in any order that a run can produce."""

    @initialize(
        off_policy=st.integers(0, 3),
        permits=st.integers(1, 20),
        retries=st.integers(0, 2),
        limit=st.none() | st.integers(1, 5),
    )
    def begin(self, off_policy, permits, retries, limit):
        self.permits = permits
        self.limit = limit
        self.dispatcher = make(
            group_size=2,
            batch_size=2,
            max_in_flight=permits,
            max_off_policy_steps=off_policy,
            max_retries=retries,
            env_limits={} if limit is None else {(Split.TRAIN, 0): limit},
        )
        self.off_policy = off_policy
        self.live: dict[int, Start] = {}
        self.ends: Counter[int] = Counter()
        self.started = 0
        self.queue = []

    def _absorb(self, group):
        if group is not None and group.split is Split.TRAIN and group.results:
            self.queue.append(group)

    def _cancelled(self, cancels):
        for cancel in cancels:
            for rollout_id in cancel.rollout_ids:
                self.ends[rollout_id] += 1
                del self.live[rollout_id]

    @rule()
    def dispatch(self):
        for start in self.dispatcher.next_starts(sum(len(group.results) for group in self.queue)):
            assert start.rollout_id not in self.ends
            if start.split is Split.TRAIN:
                assert start.version >= self.dispatcher.min_fresh_version
            self.live[start.rollout_id] = start
            self.started += 1

    @precondition(lambda self: bool(getattr(self, "live", None)))
    @rule(data=st.data(), outcome=st.sampled_from(["finish", "finish", "finish", "fail", "fault"]))
    def end(self, data, outcome):
        rollout_id = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[rollout_id]
        self.ends[rollout_id] += 1
        if outcome == "finish":
            self._absorb(self.dispatcher.finished(rollout_id, "result"))
        else:
            self._absorb(self.dispatcher.failed(rollout_id, is_fault=outcome == "fault"))

    @rule(data=st.data())
    def late_outcome_of_an_ended_rollout_changes_nothing(self, data):
        if self.ends:
            rollout_id = data.draw(st.sampled_from(sorted(self.ends)))
            assert self.dispatcher.finished(rollout_id, "late") is None
            assert self.dispatcher.failed(rollout_id) is None

    @precondition(lambda self: hasattr(self, "dispatcher") and self.dispatcher.lead > 0)
    @rule()
    def new_version(self):
        self.dispatcher.policy_live(self.dispatcher.version + 1)

    @precondition(lambda self: bool(getattr(self, "queue", None)) and self.dispatcher.may_ship)
    @rule()
    def ship(self):
        step = self.dispatcher.step
        fresh = [group for group in self.queue if group.oldest_version >= self.dispatcher.min_fresh_version]
        if sum(len(group.results) for group in fresh) < self.dispatcher.batch_size:
            self.queue = fresh
            return
        size = 0
        while size < self.dispatcher.batch_size:
            group = fresh.pop(0)
            size += len(group.results)
            assert all((step - 1) - version <= self.off_policy for version in group.versions)
        self.queue = fresh
        self._cancelled(self.dispatcher.advance(step + 1))

    @rule(count=st.integers(0, 6))
    def take_back(self, count):
        before = self.dispatcher.in_flight
        self._cancelled(self.dispatcher.cancel_youngest(count))
        only_evals = all(start.split is Split.EVAL for start in self.live.values())
        assert only_evals or self.dispatcher.in_flight <= before - count

    @rule(permits=st.integers(1, 20))
    def permit(self, permits):
        self.dispatcher.max_in_flight = permits
        self.permits = max(permits, self.dispatcher.in_flight)

    @rule(samples=st.integers(1, 3))
    def evaluate(self, samples):
        self.dispatcher.open_eval(0, 0, samples, "tag")

    @invariant()
    def accounts_balance(self):
        if not hasattr(self, "dispatcher"):
            return
        counters = self.dispatcher.counters
        # only a batch that is shipped makes anything stale, and that cancels it
        fresh = self.dispatcher.min_fresh_version
        assert all(version >= fresh for version in self.dispatcher.versions_in_flight())
        assert all(count == 1 for count in self.ends.values())
        assert self.dispatcher.in_flight == len(self.live) <= self.permits
        assert counters.dispatched == self.started
        assert counters.dispatched == (
            self.dispatcher.in_flight + counters.finished + counters.failed + counters.cancelled
        )
        assert counters.finished + counters.failed + counters.cancelled == len(self.ends)
        train = sum(start.split is Split.TRAIN for start in self.live.values())
        assert self.limit is None or train <= self.limit

    def teardown(self):
        if hasattr(self, "dispatcher"):
            self._cancelled(self.dispatcher.stop_training())
            assert all(start.split is Split.EVAL for start in self.live.values())
            self.accounts_balance()
            assert all(start.split is Split.EVAL for start in self.dispatcher.next_starts(0))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("off_policy", [0, 1, 3])
def test_a_run_without_faults_reaches_its_last_step(off_policy):
    dispatcher = make(max_off_policy_steps=off_policy, last_step=6)
    queue = []
    while dispatcher.step <= 6:
        for start in dispatcher.next_starts(sum(len(group.results) for group in queue)):
            group = dispatcher.finished(start.rollout_id, start.version)
            queue += [group] if group else []
        if sum(len(group.results) for group in queue) >= 8 and dispatcher.may_ship:
            taken, queue = queue[:2], queue[2:]
            assert all(group.oldest_version >= dispatcher.min_fresh_version for group in taken)
            dispatcher.advance(dispatcher.step + 1)
        else:
            assert dispatcher.lead > 0, "nothing to do and nothing to wait for"
            dispatcher.policy_live(dispatcher.version + 1)
    assert dispatcher.next_starts(0) == []
