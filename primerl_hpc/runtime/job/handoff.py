"""Decide how the run continues after this job: by the requeued job, by another job of its chain, or not at all.

    handoff = Handoff(context)
    code = await handoff.start()                      # a job of a chain may have nothing to do
    result = await handoff.hand_over(end, saved, …)   # Continuation: does the run continue, and if not, why
    await handoff.cancel_waiting()                    # the run is over: cancel the waiting jobs of the chain

SLURM starts a job of a chain when all jobs before it have ended, however they ended. So the rule that a chain without
progress ends is applied twice: by a job at its end, and by the next one at its start, in case the previous job was
killed before it could report anything. See docs/decisions/0007-chains.md.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Collection

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.waiting import IO_RETRY_LIMIT_S
from primerl_hpc.plan.plan import DEFAULT_ASK_EVERY_S
from primerl_hpc.run.job_chain import JobChain
from primerl_hpc.run.rundir import CANCEL
from primerl_hpc.runtime.context import RunContext
from primerl_hpc.runtime.files.journal import retry_run_directory
from primerl_hpc.runtime.job.chain import (
    cancel_links,
    queue_next_link,
    read_chain,
    waiting_links,
    why_fault_ends_chain,
    why_not_begin,
)
from primerl_hpc.runtime.job.requeue import decide_continuation, explain_refused_requeue, requeue
from primerl_hpc.runtime.step import Continuation, PhaseEnd
from primerl_hpc.runtime.step_history import next_start


class Handoff:
    def __init__(self, context: RunContext) -> None:
        self.context, self.run_dir, self.journal = context, context.run_dir, context.journal
        self.job = os.environ.get("SLURM_JOB_ID", "")
        self.chain: JobChain | None = None
        self.is_cancelled = False
        """True if a user requested the end of the run, not only SLURM that of its job."""

    async def start(self) -> ExitCode | None:
        """Return the code to exit with if this job of a chain has nothing to do, None to run."""
        self.chain = read_chain(self.run_dir, self.job)
        if self.chain is None:
            return None
        earlier = read_json_or_none(self.run_dir.state) or {}
        start = next_start(self.run_dir, self.context.plan)
        verdict = why_not_begin(self.chain, self.job, earlier, start)
        if verdict is None:
            return None
        state, why = verdict
        self.journal.record("link_idle", job=self.job, reason=why)
        # the previous job was killed before it could record the end of the run
        if earlier.get("state") != state:
            self.journal.state = earlier
            await self.cancel_waiting()
            self.journal.set_state(state, message=why)
            self.journal.record("run_failed", message=why)
        return ExitCode.DONE if state == RunState.DONE else ExitCode.NO_CONTINUE

    async def hand_over(
        self, end: PhaseEnd, saved: int, *, progressed: bool, excluded: Collection[str]
    ) -> Continuation:
        """Requeue this job or leave the run to the next one, which continues after step ``saved``, if that is right.

        ``progressed``: this attempt saved a new step or finished a phase. ``excluded``: hosts that a requeued job must
        not get again.
        """
        request = await retry_run_directory(self.context.stop.read, limit_s=IO_RETRY_LIMIT_S)
        self.is_cancelled = request.get("reason") == CANCEL
        signals = self.context.stop.signals
        waiting = await self._waiting()
        if end == PhaseEnd.FAILED:
            why = why_fault_ends_chain(self.journal.failure, progressed=progressed) if waiting else ""
            if why is not None:
                return Continuation.ended(why)
        else:
            decision = decide_continuation(request, signals, progressed=progressed, is_followed=bool(waiting))
            if not decision.is_automatic:
                return decision
        is_preempted = request.get("reason") == "scheduler" and signal.SIGTERM not in signals
        if self.chain is None or (is_preempted and end != PhaseEnd.FAILED):
            result = await self._requeue(saved, excluded)
            if result.is_automatic or self.chain is None:
                return result
        return await self._leave_to_next_link(self.chain, waiting, saved)

    async def requeue_without(
        self, excluded: Collection[str], saved: int, *, is_hopeful: bool = True
    ) -> Continuation:
        """Continue on other nodes: requeue this job, or leave the run to a waiting job of the chain.

        ``is_hopeful``: False if a requeue of this job would fail in the same way.
        """
        result = await self._requeue(saved, excluded) if is_hopeful else Continuation.ended()
        if result.is_automatic or self.chain is None or not (waiting := await self._waiting()):
            return result
        return await self._leave_to_next_link(self.chain, waiting, saved)

    async def cancel_waiting(self) -> None:
        """Cancel the jobs of the chain that wait in the queue: they are not needed any more."""
        if waiting := await self._waiting():
            refused = await cancel_links(waiting)
            self.journal.record("chain_ended", cancelled=",".join(waiting), refused=refused)

    async def _waiting(self) -> tuple[str, ...]:
        return await waiting_links(self.chain, self.job) if self.chain is not None else ()

    async def _requeue(self, saved: int, excluded: Collection[str]) -> Continuation:
        """Requeue this job without the excluded hosts.

        SLURM then kills this attempt's processes, so everything must be written before.
        """
        job = await retry_run_directory(
            lambda: read_json_or_none(self.run_dir.job) or {}, limit_s=IO_RETRY_LIMIT_S
        )
        if "here" in job:
            advice = f"continue with: primerl-hpc resume {shlex.quote(self.run_dir.root.name)}"
            return Continuation.ended(
                f"its allocation was not made for this run and is not requeued; {advice}"
            )
        hosts = sorted(excluded) if self.context.plan.may_name_nodes else []
        without = f" without {', '.join(hosts)}" if hosts else ""
        message = f"requeued{without}, continues after step {saved}"
        self.journal.set_state(RunState.PENDING, message=message)
        await self.journal.settle()
        await self.journal.release_lock()
        may_poll = self.context.plan.ask_every_s <= DEFAULT_ASK_EVERY_S
        if (refused := await requeue(self.job, hosts, may_poll=may_poll)) is None:
            self.journal.record("run_requeued", after_step=saved, without=hosts or None)
            return Continuation.automatic()
        self.journal.record("requeue_refused", message=refused)
        advice = f"continue with: primerl-hpc resume {self.run_dir.root.name}"
        if self.chain is None:
            advice += " (--chain N or --until-done continue without requeue)"
        return Continuation.ended(f"{explain_refused_requeue(refused)}; {advice}")

    async def _leave_to_next_link(
        self, chain: JobChain, waiting: tuple[str, ...], saved: int
    ) -> Continuation:
        """Leave the run to the first waiting job of the chain; submit one if the chain runs until the run is done."""
        advice = f"continue with: primerl-hpc resume {shlex.quote(self.run_dir.root.name)}"
        link = next(iter(waiting), None)
        if link is None and not chain.is_until_done:
            return Continuation.ended(
                f"{chain.place(self.job)}, the last one, ended after step {saved}; {advice}"
            )
        if link is None:
            queued = await queue_next_link(self.run_dir, chain, self.job)
            if queued.job_id is None:
                self.journal.record("link_refused", message=queued.refused)
                return Continuation.ended(f"saved after step {saved}, but {queued.refused}; {advice}")
            link = queued.job_id
            chain = JobChain((*chain.links, link), is_until_done=True)
        self.journal.set_state(RunState.PENDING, message=f"{chain.place(link)} continues after step {saved}")
        self.journal.record("link_ended", next_job=link, after_step=saved)
        return Continuation.automatic()
