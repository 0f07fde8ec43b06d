"""Who goes on with the run after this job: the job itself, requeued, or another link of its chain; or nobody, and why.

    succession = Succession(supervisor)
    code = await succession.begin()                 # a link may have nothing to do
    reason = await succession.hand_over(end, saved) # None: somebody goes on
    await succession.end()                          # nobody needs to: the links that wait leave the queue

SLURM starts a link when all before it have ended, however they ended. So the rule that a chain ends when nothing comes
of it is applied twice: by a link at its own end, and by the next one at its beginning, for a link that was killed before
it could say anything. See docs/decisions/0007-chains.md.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from primerl_hpc.common.chain import Chain
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.runtime.chain import (
    cancel_links,
    queue_next_link,
    read_chain,
    waiting_links,
    why_fault_ends_chain,
    why_not_begin,
)
from primerl_hpc.runtime.journal import patiently
from primerl_hpc.runtime.phase import PhaseEnd
from primerl_hpc.runtime.requeue import CANCEL, requeue, why_not_again

if TYPE_CHECKING:
    from primerl_hpc.runtime.supervisor import Supervisor


class Succession:
    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor, self.run_dir = supervisor, supervisor.run_dir
        self.journal = supervisor.journal
        self.job = os.environ.get("SLURM_JOB_ID", "")
        self.chain: Chain | None = None
        self.is_cancelled = False
        """Whether people asked for the end of the run itself, not only SLURM for that of its job."""

    async def begin(self) -> ExitCode | None:
        """The code to end with at once, when this is a link that has nothing to do; None: go on with the run."""
        self.chain = read_chain(self.run_dir, self.job)
        if self.chain is None:
            return None
        earlier = read_json_or_none(self.run_dir.state) or {}
        verdict = why_not_begin(self.chain, self.job, earlier, self.supervisor.begins())
        if verdict is None:
            return None
        state, why = verdict
        self.journal.record("link_idle", job=self.job, reason=why)
        if (
            earlier.get("state") != state
        ):  # the one before was killed; nobody has said yet that the run is over
            self.journal.state = earlier
            await self.end()
            self.journal.set_state(state, message=why)
            self.journal.record("run_failed", message=why)
        return ExitCode.DONE if state == RunState.DONE else ExitCode.NO_CONTINUE

    async def hand_over(self, end: PhaseEnd, saved: int) -> str | None:
        """None when somebody goes on after step ``saved``; else why nobody does ("": people asked for the end)."""
        request = await patiently(lambda: read_json_or_none(self.run_dir.stop_request)) or {}
        self.is_cancelled = request.get("reason") == CANCEL
        signals = self.supervisor.signals
        progressed = self.supervisor.has_finished_a_phase or saved > self.supervisor.resumed_from
        waiting = await self._waiting()
        if end == PhaseEnd.FAILED:
            fault = self.journal.failure
            reason = why_fault_ends_chain(fault, progressed=progressed) if waiting else ""
        else:
            reason = why_not_again(request, signals, progressed=progressed, is_followed=bool(waiting))
        if reason is not None:
            return reason
        is_preempted = request.get("reason") == "scheduler" and signal.SIGTERM not in signals
        if self.chain is None or (is_preempted and end != PhaseEnd.FAILED):
            refused = await self.go_back_into_the_queue(saved)
            if refused is None or self.chain is None:
                return refused
        return await self._leave_to_next_link(self.chain, waiting, saved)

    async def give_nodes_back(self, saved: int, *, is_hopeful: bool = True) -> str | None:
        """None when this job, or a link that waits for it, goes on with other nodes; else why nobody does.

        ``is_hopeful``: whether another try of this very job would be any different.
        """
        refused = await self.go_back_into_the_queue(saved) if is_hopeful else ""
        if refused is None or self.chain is None or not (waiting := await self._waiting()):
            return refused
        return await self._leave_to_next_link(self.chain, waiting, saved)

    async def end(self) -> None:
        """Take the links that are not needed any more out of the queue."""
        if waiting := await self._waiting():
            refused = await cancel_links(waiting)
            self.journal.record("chain_ended", cancelled=",".join(waiting), refused=refused)

    async def _waiting(self) -> tuple[str, ...]:
        return await waiting_links(self.chain, self.job) if self.chain is not None else ()

    async def go_back_into_the_queue(self, saved: int) -> str | None:
        """None when SLURM took the job back, to run without the nodes that were found bad; else why not.

        It ends this attempt's last processes: say all before.
        """
        supervisor = self.supervisor
        without = sorted(supervisor.nodes.excluded) if supervisor.nodes is not None else []
        self.journal.set_state(RunState.PENDING, message=f"back in the queue, goes on after step {saved}")
        await self.journal.settle()
        supervisor.lock.release()
        if (refused := await requeue(self.job, without)) is None:
            self.journal.record("run_requeued", after_step=saved, without=without or None)
            return None
        self.journal.record("requeue_refused", message=refused)
        return f"SLURM does not requeue it: {refused}"

    async def _leave_to_next_link(self, chain: Chain, waiting: tuple[str, ...], saved: int) -> str | None:
        """None when a link is in the queue, or was put there now; else why none is."""
        advice = f"go on with: primerl-hpc resume {self.run_dir.root.name}"
        link = next(iter(waiting), None)
        if link is None and not chain.is_until_done:
            return f"{chain.place(self.job)}, the last one, ended after step {saved}; {advice}"
        if link is None:
            link, refused = await queue_next_link(self.run_dir, chain, self.job)
            if link is None:
                self.journal.record("link_refused", message=refused)
                return f"saved after step {saved}, but {refused}; {advice}"
            chain = Chain((*chain.links, link), is_until_done=True)
        self.journal.set_state(RunState.PENDING, message=f"{chain.place(link)} goes on after step {saved}")
        self.journal.record("link_ended", next_job=link, after_step=saved)
        return None
