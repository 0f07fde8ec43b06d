"""State of the train loop in a checkpoint: taken right after a batch is built, restored before the first rollout.

    state = LoopState(sampler, dispatcher, builder, traces, eval_traces, evaluator)
    follower.remember(step, state.snapshot(), builder.queue)
    state.restore(run, step)

Rollouts that were in flight at the snapshot start over. Everything else is as if the run had not stopped: finished
rollouts wait for their batch, scored, traced and counted as they were; what was scored, traced and counted after the
snapshot is discarded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.safety.decoding import decoding, is_count
from primerl_hpc.orchestrator.batches.batcher import BatchBuilder
from primerl_hpc.orchestrator.checkpoint.follower import SIDE, load_queue, load_state
from primerl_hpc.orchestrator.evaluation import Evaluator
from primerl_hpc.orchestrator.rollout_data import ScoredGroup
from primerl_hpc.orchestrator.rollouts.traces import TraceWriter
from primerl_hpc.orchestrator.scheduling.dispatcher import Dispatcher
from primerl_hpc.orchestrator.scheduling.sampler import TaskSampler
from primerl_hpc.run.rundir import RunDir

logger = logging.getLogger(__name__)

_STATE: dict[str, Any] = {
    "sampler": dict,
    "algorithms": list,
    "cutter": dict | list,
    "next_group": int,
    "totals": dict,
    "traces_bytes": int,
}
"""Required keys of every state and their types. The parts themselves check the contents when they are restored."""


@dataclass
class LoopState:
    """The parts that have state. ``totals``: scored rollouts and their sampled tokens since the run began."""

    sampler: TaskSampler
    dispatcher: Dispatcher
    builder: BatchBuilder
    traces: TraceWriter
    eval_traces: TraceWriter
    evaluator: Evaluator
    totals: dict[str, int] = field(default_factory=lambda: {"rollouts": 0, "tokens": 0})

    def snapshot(self) -> dict[str, Any]:
        """Return the state, JSON-able; the queue of finished rollouts is saved separately."""
        return {
            "sampler": self.sampler.state(self.dispatcher.unfinished_tasks()),
            "algorithms": self.builder.scorer.state(),
            "cutter": self.builder.state(),
            "evaluations": self.evaluator.state(self.dispatcher.version),
            "next_group": self.dispatcher.next_group,
            "totals": dict(self.totals),
            "traces_bytes": self.traces.size_bytes,
        }

    def restore(self, run: RunDir, step: int) -> None:
        """Restore the state of the checkpoint of ``step``.

        For step 0, or a fork without data state, start at the beginning.
        Raises DataError if the checkpoint is incomplete or belongs to other environments.
        """
        done = self.evaluator.evaluated  # all other versions are evaluated again, with all their rollouts
        self.eval_traces.keep(lambda row: row.get("eval_version", row.get("version")) in done)
        if not step or "data" in run.fork_skips(step):
            self.traces.rewind(0)
            return
        state = load_state(run, step)
        queue = load_queue(run, step, state)
        with decoding("the orchestrator's state is incomplete", location=run.checkpoint_side(step, SIDE)):
            self._restore(state, queue, run, step)

    def _restore(self, state: dict[str, Any], queue: list[ScoredGroup], run: RunDir, step: int) -> None:
        for name, kind in _STATE.items():
            if not isinstance(state[name], kind):
                raise TypeError(f"{name} is {state[name]!r:.80}")
        counts = (state["next_group"], state["traces_bytes"], *state["totals"].values())
        if not all(map(is_count, counts)):
            raise ValueError("a count is not a non-negative integer")
        try:
            changed = self.sampler.restore(state["sampler"])
        except ValueError as error:
            raise DataError(
                str(error),
                location=str(run.checkpoint_side(step, SIDE)),
                hint="resume with the tasks of the original run, or continue with the new ones with primerl-hpc resume "
                "RUN --set checkpoint.accept_changed_data=true",
            ) from error
        queue = [group for group in queue if group.task.env not in changed]
        self.builder.scorer.restore(state["algorithms"])
        is_fork = run.fork_note(step).exists()
        if is_fork:  # a fork may score and select differently from the run that produced the queue
            self.sampler.requeue([group.task for group in queue])
            queue = []
        elif "evaluations" in state:  # absent in checkpoints of earlier versions
            self.evaluator.restore(state["evaluations"], step)
        self.builder.restore(state["cutter"], queue)
        self.dispatcher.next_group = state["next_group"]
        self.totals.update(state["totals"])
        self.traces.rewind(0 if is_fork else state["traces_bytes"])  # the original run has a file of its own
        logger.info(
            "resuming after step %d with %d finished rollouts in the queue", step, self.builder.num_queued
        )
