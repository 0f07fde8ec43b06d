"""Reads of the run directory by a running phase. All of them are done in a thread, so that the event loop never waits.

    files = PhaseFiles(context, phase, resumed_from=10)
    seen = files.look(processes, is_stopping=False)     # endpoints, restart requests, elastic engines, stop request
    exit = files.describe_exit(process, status)         # how a process ended, for policy and failure.json

Methods may raise OSError; they change nothing that a second call would not repeat.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.run.endpoints import ControlWatch, EndpointWatch, take_restart_request
from primerl_hpc.runtime.context import RunContext
from primerl_hpc.runtime.elastic_members import ElasticEngines
from primerl_hpc.runtime.failures import (
    delete_earlier_reports,
    describe_failure,
    effective_code,
    fault_cause,
    is_killed_from_outside,
    log_sizes,
)
from primerl_hpc.runtime.policy import ProcessExit
from primerl_hpc.runtime.process_state import ProcessState
from primerl_hpc.runtime.step import ExitStatus, Launch, Step
from primerl_hpc.runtime.step_history import ProgressWatch, StepHistory, rewind_phase

CONTROL_S = 0.5
"""Interval between looks for requests and endpoints shortly after a change."""


@dataclass(frozen=True)
class Seen:
    """Contents of the run directory at one moment."""

    endpoints: Mapping[str, dict[str, Any]]
    """By process; empty if no process is expected to report."""
    restarts: Mapping[str, dict[str, Any]]
    """Requests to restart the current incarnation, by process."""
    elastic: list[tuple[str, dict[str, Any]]]
    """Changes of elastic engines."""
    stop: dict[str, Any] | None
    """The request to stop; None without one."""


@dataclass(frozen=True)
class DescribedExit:
    end: ProcessExit
    fault: dict[str, Any]
    """The content of failure.json, should the exit be a failure."""
    stop_reason: str | None
    """Why the run is stopping, if it is."""


class PhaseFiles:
    def __init__(self, context: RunContext, phase: PhasePlan, *, resumed_from: float) -> None:
        self.context, self.phase, self.run_dir = context, phase, context.run_dir
        self.history = StepHistory(self.run_dir, phase, context.attempt, resumed_from)
        self.endpoints = EndpointWatch(self.run_dir, busy_s=CONTROL_S, idle_s=1.0)
        self.control = ControlWatch(self.run_dir, busy_s=CONTROL_S)
        self.progress = ProgressWatch(self.run_dir, phase)
        self.elastic = ElasticEngines(self.run_dir, [process.name for process in phase.elastic])
        self._is_phase_prepared = False

    def look(self, processes: Mapping[str, ProcessState], *, is_stopping: bool) -> Seen:
        running = {name: process for name, process in processes.items() if process.waiter is not None}
        is_expected = any(process.is_report_expected for process in running.values())
        requested = self.control.restarts() & running.keys() if running else set()
        taken = {
            name: take_restart_request(self.run_dir, name, running[name].incarnation) for name in requested
        }
        is_stopping = is_stopping or self.control.is_stop_requested()
        return Seen(
            endpoints=self.endpoints.all() if is_expected else {},
            restarts={name: request for name, request in taken.items() if request is not None},
            elastic=list(self.elastic.changes()),
            stop=self.context.stop.read() if is_stopping else None,
        )

    def prepare(self, process: ProcessState, step: Step, launch: Launch) -> None:
        """Delete reports of earlier incarnations, note the sizes of their logs and open the log of the next one."""
        if launch.incarnation:
            delete_earlier_reports(self.run_dir, [process.name])
        elif not self._is_phase_prepared:
            delete_earlier_reports(self.run_dir, [plan.name for plan in self.phase.processes])
            logs = self.run_dir.attempt_logs(launch.attempt)
            for folder in {(logs / plan.log).parent for plan in self.phase.processes} - {logs}:
                folder.mkdir(parents=True, exist_ok=True)
            self._is_phase_prepared = True
        process.written = log_sizes(launch) if launch.incarnation else {}
        step.prepare()

    def describe_exit(self, process: ProcessState, status: ExitStatus, *, is_stopping: bool) -> DescribedExit:
        """Describe how a process ended; if the supervisor killed it, its verdict is the reason."""
        assert process.launch is not None
        code = effective_code(self.run_dir, process.plan, status)
        host = status.host or socket.gethostname()
        fault = describe_failure(process.launch, status, "", host, process.written)
        if process.verdict:
            fault |= {"reason": "it hung", "message": process.verdict, "was_ended_by_us": True}
        end = ProcessExit(
            code,
            progress=self.history.progress(),
            step=self.history.last(),
            after_step=self.history.current(),
            cause=fault_cause(fault),
            is_killed=is_killed_from_outside(fault),
            served_s=process.served_s,
        )
        reason = self.context.stop.read().get("reason") if is_stopping else None
        return DescribedExit(end, fault, reason)

    def last_steps(self) -> tuple[int, int]:
        """Return the last batch of the orchestrator and the last step of the trainer."""
        return self.history.last("orchestrator"), self.history.last()

    def drop_lost_steps(self) -> int:
        """Delete what was written after the last complete checkpoint; return its step."""
        step = rewind_phase(self.run_dir, self.phase)
        self.history.restart_after(step)
        return step
