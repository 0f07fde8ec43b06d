"""What a run is doing, read from its directory once: state, processes, step, numbers, time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.lock import is_owner_alive, is_process_alive
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import MAIN_PHASE, Kind, RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact

_TAKEN = {"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT", "DEADLINE"}
_TRAINER_OF = {Kind.SFT.value: "sft", Kind.RL.value: "trainer"}


@dataclass(frozen=True)
class Snapshot:
    run: RunDir
    name: str
    kind: str
    state: RunState
    attempt: int
    phase: str | None
    step: int
    max_steps: int
    processes: dict[str, dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)
    """Last row of the phase's trainer, and of the orchestrator under their own names."""
    seconds_left: float | None = None
    started: float | None = None
    job: dict[str, Any] = field(default_factory=dict)
    message: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "run_dir": str(self.run.root),
            "kind": self.kind,
            "state": self.state.value,
            "attempt": self.attempt,
            "phase": self.phase,
            "step": self.step,
            "max_steps": self.max_steps,
            "seconds_left": self.seconds_left,
            "job": self.job,
            "message": self.message,
            "processes": self.processes,
            "metrics": self.metrics,
        }


def take_snapshot(run: RunDir, jobs: Mapping[str, JobFact] | None = None) -> Snapshot:
    """``jobs`` is what SLURM said (`JobWatcher.facts_of`); without it the run's own files decide.

    Never raises for a run that is half written or half dead; says `RunState.UNKNOWN` at worst.
    """
    plan = read_json_or_none(run.plan) or {}
    state = read_json_or_none(run.state) or {}
    job = read_json_or_none(run.job) or {}
    phase_name = state.get("phase")
    phase = phase_of(plan, phase_name)
    recipe = phase.get("recipe", {})
    kind = recipe.get("kind", plan.get("kind", "?"))
    rows = read_steps(run.metrics(_TRAINER_OF[kind])) if kind in _TRAINER_OF else {}
    rows = {step: row for step, row in rows.items() if step > 0}
    last = rows[max(rows)] if rows else {}
    metrics = dict(last)
    if kind == Kind.RL.value:
        batches = read_steps(run.metrics("orchestrator"))
        metrics = {**(batches[max(batches)] if batches else {}), **last}
    current, message = real_state(run, state, job, jobs)
    max_steps = int(recipe.get("max_steps") or 0)
    return Snapshot(
        run=run,
        name=run.root.name,
        kind=plan.get("kind", "?"),
        state=current,
        attempt=int(state.get("attempt", 0)),
        phase=phase_name,
        step=max(rows, default=0),
        max_steps=max_steps,
        processes=state.get("processes", {}),
        metrics=metrics,
        seconds_left=time_left(rows, max_steps) if current == RunState.RUNNING else None,
        started=state.get("started"),
        job=job,
        message=message,
    )


def phase_of(plan: dict[str, Any], name: str | None) -> dict[str, Any]:
    phases = plan.get("phases") or [{}]
    for phase in phases:
        if phase.get("name") == name:
            return phase
    return next((phase for phase in phases if phase.get("name") == MAIN_PHASE), phases[-1])


def real_state(
    run: RunDir, state: dict[str, Any], job: dict[str, Any], jobs: Mapping[str, JobFact] | None = None
) -> tuple[RunState, str | None]:
    """What the supervisor wrote last, corrected by whether it still lives and by what SLURM says; and a message."""
    written = RunState(state["state"]) if state.get("state") in set(RunState) else None
    fact = (jobs or {}).get(str(job.get("job_id")))
    if written is None or not is_of_job(state, job):
        return _state_before_start(run, job, fact)
    if fact is not None and fact.is_waiting:  # requeued: by the supervisor after a save, or by SLURM
        why = f"back in the queue: {fact.reason}" if fact.reason else "back in the queue"
        return RunState.PENDING, why if written != RunState.PENDING else state.get("message")
    if written in (RunState.FAILED, RunState.CANCELLED) and fact is not None:
        if not fact.has_ended:
            return RunState.STOPPING, "SLURM is taking its job down, and may put it back into the queue"
        if fact.state in _TAKEN:  # what went wrong inside is an echo
            return _state_of_ended_job(fact, run.root.name)
    if written.is_final:
        return written, state.get("message")
    if fact is not None and fact.has_ended:
        return _state_of_ended_job(fact, run.root.name)
    if written == RunState.PENDING:  # it went back into the queue itself
        return written, state.get("message")
    owner = read_json_or_none(run.supervisor_lock)
    if is_owner_alive(owner, run.supervisor_lock):
        return written, state.get("message")
    return RunState.FAILED, f"its supervisor died; go on with: primerl-hpc resume {run.root.name}"


def is_of_job(state: dict[str, Any], job: dict[str, Any]) -> bool:
    """Whether the written state is of the job that was submitted last (or of a requeue of it), not of one before.

    By attempt, not by time: clocks of login and compute nodes differ.
    """
    return int(state.get("attempt", 0)) >= int(job.get("attempt", 0))


def _state_of_ended_job(fact: JobFact, name: str) -> tuple[RunState, str]:
    """A job that ended while its supervisor could not say a last word."""
    advice = f"go on with: primerl-hpc resume {name}"
    if fact.state == "CANCELLED":
        return RunState.CANCELLED, f"its job was cancelled before the run could save; {advice}"
    detail = f" ({fact.reason})" if fact.reason else ""
    return RunState.FAILED, f"SLURM ended its job: {fact.state}{detail}; {advice}"


def _state_before_start(
    run: RunDir, job: dict[str, Any], fact: JobFact | None
) -> tuple[RunState, str | None]:
    if not job:
        return RunState.UNKNOWN, "prepared, never submitted"
    if fact is not None and fact.has_ended:
        if fact.state == "CANCELLED":
            return RunState.CANCELLED, "its job was cancelled before it started"
        return RunState.FAILED, last_words(
            run
        ) or f"its job ended before its supervisor started: {fact.state}"
    if job.get("scheduler") != "local":
        is_waiting = fact is None or fact.is_waiting
        start = f", expected start {fact.start}" if fact is not None and fact.start else ""
        why = f"{fact.reason or 'waiting'}{start}" if fact is not None and is_waiting else None
        return RunState.PENDING if is_waiting else RunState.STARTING, why
    is_alive = is_process_alive(int(job["job_id"])) or time.time() - job.get("submitted", 0) < 5
    if is_alive:
        return RunState.SUBMITTED, None
    return RunState.FAILED, last_words(run) or "the job ended before its supervisor started"


def last_words(run: RunDir) -> str | None:
    """The last line the job itself printed, for jobs that never came as far as a supervisor."""
    logs = sorted((run.launch / "submitit").glob("*_log.out"), key=lambda path: path.stat().st_mtime)
    logs += sorted((run.root / "logs").glob("slurm-*.out"))
    lines = logs[-1].read_text(errors="replace").split("\n") if logs else []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else None


def time_left(rows: dict[int, dict[str, Any]], max_steps: int, window: int = 20) -> float | None:
    """Seconds to the last step at the pace of the last ``window`` steps; None before two steps."""
    steps = sorted(rows)[-window:]
    if len(steps) < 2 or not max_steps:
        return None
    pace = (rows[steps[-1]]["time"] - rows[steps[0]]["time"]) / max(1, steps[-1] - steps[0])
    return max(0.0, pace * (max_steps - steps[-1]))


def log_files(run: RunDir, attempt: int | None = None) -> dict[str, Path]:
    """Log files of an attempt (default: the latest) by their path below it."""
    folder = run.attempt_logs(attempt) if attempt is not None else run.latest_logs
    if not folder.is_dir():
        return {}
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.log")) if path.is_file()}
