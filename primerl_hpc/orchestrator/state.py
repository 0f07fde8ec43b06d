"""What a resumed orchestrator must know: taken right after a cut, put back before the first rollout.

    state = LoopState(sampler, dispatcher, cutter, traces, eval_traces, evaluator)
    follower.remember(step, state.take(), cutter.queue)
    state.restore(run, step)

What was in flight at the cut begins anew. All else is as if the run had not stopped: finished rollouts wait for their
batch, scored, traced and counted as they were, and what was scored, traced and counted after the cut is forgotten.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.batches import BatchCutter
from primerl_hpc.orchestrator.checkpoints import load_queue, load_state
from primerl_hpc.orchestrator.dispatcher import Dispatcher
from primerl_hpc.orchestrator.evals import Evaluator
from primerl_hpc.orchestrator.sampler import TaskSampler
from primerl_hpc.orchestrator.traces import TraceWriter

logger = logging.getLogger(__name__)


@dataclass
class LoopState:
    """``totals``: scored rollouts and their sampled tokens since the run began."""

    sampler: TaskSampler
    dispatcher: Dispatcher
    cutter: BatchCutter
    traces: TraceWriter
    eval_traces: TraceWriter
    evaluator: Evaluator
    totals: dict[str, int] = field(default_factory=lambda: {"rollouts": 0, "tokens": 0})

    def take(self) -> dict[str, Any]:
        """JSON-able; the queue itself goes beside it."""
        return {
            "sampler": self.sampler.state(self.dispatcher.unfinished_tasks()),
            "algorithms": self.cutter.scorer.state(),
            "cutter": self.cutter.state(),
            "evaluations": self.evaluator.state(self.dispatcher.version),
            "next_group": self.dispatcher.next_group,
            "totals": dict(self.totals),
            "traces_bytes": self.traces.size_bytes,
        }

    def restore(self, run: RunDir, step: int) -> None:
        """Be as after the cut of batch ``step``, as its checkpoint has it; step 0, or without its data: at the start.

        Raises DataError when the checkpoint is not whole or is of other environments.
        """
        done = self.evaluator.evaluated  # the others are done again, with all their rollouts
        self.eval_traces.keep(lambda row: row.get("eval_version", row.get("version")) in done)
        if not step or "data" in run.fork_skips(step):
            self.traces.rewind(0)
            return
        state = load_state(run, step)
        queue = load_queue(run, step, state)
        try:
            self.sampler.restore(state["sampler"])
        except ValueError as error:
            raise DataError(
                str(error), mend="resume with the environments that the run was started with"
            ) from error
        self.cutter.scorer.restore(state["algorithms"])
        is_fork = run.fork_note(step).exists()
        if is_fork:  # it may score and select otherwise than the run that these are of
            self.sampler.give_back([group.task for group in queue])
            queue = []
        elif "evaluations" in state:  # earlier versions did not write it
            self.evaluator.restore(state["evaluations"], step)
        self.cutter.restore(state["cutter"], queue)
        self.dispatcher.next_group = state["next_group"]
        self.totals.update(state["totals"])
        self.traces.rewind(0 if is_fork else state["traces_bytes"])  # the other run has a file of its own
        logger.info("resuming after step %d with %d finished rollouts", step, self.cutter.num_queued)
