"""What a run is doing, read from its directory once: state, processes, step, numbers, time left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from primerl_hpc.common.chain import chain_of, current_job
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.lock import is_owner_alive, is_process_alive
from primerl_hpc.common.metrics import read_last_steps
from primerl_hpc.common.names import MAIN_PHASE, Kind, RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact
from primerl_hpc.observe.after import after_states, of_parent
from primerl_hpc.observe.bottleneck import Bottleneck, find_bottleneck
from primerl_hpc.observe.forecast import Forecast, make_forecast

_TAKEN = {"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT", "DEADLINE"}
WINDOW = 20
"""Last steps that pace and bottleneck are read from."""
TRAINER_OF = {Kind.SFT.value: "sft", Kind.RL.value: "trainer"}
"""The role that makes steps, by the kind of the phase."""


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
    """As in state.json, each with ``hosts``, the names of its nodes as far as they are known."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Last row of the phase's trainer, and of the orchestrator under their own names."""
    forecast: Forecast | None = None
    bottleneck: Bottleneck | None = None
    started: float | None = None
    job: dict[str, Any] = field(default_factory=dict)
    message: str | None = None
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What waits for the end of this run, see `after_states`."""
    accelerator: str = "cpu"
    num_nodes: int = 1
    accelerators_per_node: int = 1

    @property
    def seconds_left(self) -> float | None:
        return None if self.forecast is None else self.forecast.seconds_left

    @property
    def restarts(self) -> dict[str, int]:
        """How often each process was started again in this attempt, those that were."""
        counts = {name: int(each.get("incarnation", 0)) for name, each in self.processes.items()}
        return {name: count for name, count in counts.items() if count}

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
            "forecast": self.forecast.as_json() if self.forecast else None,
            "bottleneck": self.bottleneck.as_json() if self.bottleneck else None,
            "restarts": self.restarts,
            "job": self.job,
            "message": self.message,
            "after": self.after,
            "processes": self.processes,
            "metrics": self.metrics,
        }


def take_snapshot(run: RunDir, jobs: Mapping[str, JobFact] | None = None) -> Snapshot:
    """``jobs`` is what SLURM said (`JobWatcher.facts_of`); without it the run's own files decide.

    Never raises for a run that is half written or half dead, or cannot be read; says `RunState.UNKNOWN` at worst.
    """
    try:
        return _take_snapshot(run, jobs)
    except OSError as error:
        name, message = run.root.name, cannot_be_read(error)
        return Snapshot(run, name, "?", RunState.UNKNOWN, 0, None, 0, 0, {}, message=message)


def cannot_be_read(error: OSError) -> str:
    return f"its folder cannot be read: {error.strerror or error}"


def _take_snapshot(run: RunDir, jobs: Mapping[str, JobFact] | None) -> Snapshot:
    plan = read_json_or_none(run.plan) or {}
    state = read_json_or_none(run.state) or {}
    job = read_json_or_none(run.job) or {}
    phase = phase_of(plan, state.get("phase"))
    recipe = phase.get("recipe", {})
    kind = recipe.get("kind", plan.get("kind", "?"))
    rows = read_last_steps(run.metrics(TRAINER_OF[kind]), WINDOW) if kind in TRAINER_OF else {}
    batches = read_last_steps(run.metrics("orchestrator"), WINDOW) if kind == Kind.RL.value else {}
    rows = {step: row for step, row in rows.items() if step > 0}
    current, message = real_state(run, state, job, jobs)
    max_steps = int(recipe.get("max_steps") or 0)
    is_moving = current == RunState.RUNNING and _last(rows).get("attempt") == state.get("attempt")
    if (chain := chain_of(job)) is not None:
        now = current_job(job, state, jobs or {})
        job = {**job, "job_id": now, "place": chain.place(str(now))}
    return Snapshot(
        run=run,
        name=run.root.name,
        kind=plan.get("kind", "?"),
        state=current,
        attempt=int(state.get("attempt", 0)),
        phase=state.get("phase"),
        step=max(rows, default=0),
        max_steps=max_steps,
        processes=_processes(state, plan),
        metrics={**_last(batches), **_last(rows)},
        forecast=make_forecast(
            rows,
            max_steps,
            now=time.time(),
            started=state.get("started"),
            ends=state.get("ends_at"),
            resumed_from=int(state.get("resumed_from") or 0),
        )
        if is_moving
        else None,
        bottleneck=find_bottleneck(_newest(rows), _newest(batches)) if is_moving else None,
        started=state.get("started"),
        job=job,
        message=message,
        accelerator=plan.get("accelerator", "cpu"),
        num_nodes=len(plan.get("nodes", [0])),
        accelerators_per_node=int(plan.get("accelerators_per_node", 1)),
        after=after_states(job, current, jobs or {}),
    )


def _last(rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return rows[max(rows)] if rows else {}


def _newest(rows: dict[int, dict[str, Any]], count: int = 10) -> list[dict[str, Any]]:
    return [rows[step] for step in sorted(rows)[-count:]]


def _processes(state: dict[str, Any], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """With the names of their nodes. A process that publishes no endpoint runs as soon as it is started."""
    phases = plan.get("phases", [])
    plans = {each["name"]: each for phase in phases for each in phase.get("processes", [])}
    elastic = {each["name"] for phase in phases for each in phase.get("elastic", [])}
    hosts = state.get("hosts") or ([state["host"]] if state.get("host") else [])
    processes = {}
    for name, process in state.get("processes", {}).items():
        planned = plans.get(name, {})
        mine = [hosts[node] for node in planned.get("nodes", []) if node < len(hosts)]
        if name in elastic and (address := urlsplit(process.get("url") or "").hostname):
            mine = [address]  # a node of another job, known by its address alone
        is_silent = bool(planned) and not planned.get("ready_timeout_s")
        running = {"state": "running"} if is_silent and process.get("state") == "starting" else {}
        processes[name] = {**process, **running, "hosts": mine}
    return processes


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
    is_told = written is not None and written.is_final and is_of_job(state, job)
    # a link that waits changes nothing about a run that is over: it ends as soon as it starts
    now = (
        state.get("job_id") if is_told and chain_of(job) is not None else current_job(job, state, jobs or {})
    )
    fact = (jobs or {}).get(str(now))
    if written is None or not is_of_job(state, job):
        return of_parent(job, *_state_before_start(run, job, fact))
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
    newer = read_json_or_none(run.state)
    if newer and newer != state:  # its last word came while we looked, and then it gave the lock back
        return real_state(run, newer, job, jobs)
    if (
        fact is not None
    ):  # the job's batch process is the supervisor: it lives as long as its job, whatever clocks say
        return written, _silence(run, fact)
    return RunState.FAILED, f"its supervisor died; go on with: primerl-hpc resume {run.root.name}"


def _silence(run: RunDir, fact: JobFact) -> str:
    """Of a supervisor whose job goes on. The minutes are by two clocks, for people: nothing is decided by them."""
    try:
        silent = f"silent for {(time.time() - run.supervisor_lock.stat().st_mtime) / 60:.0f} min"
    except FileNotFoundError:
        silent = "silent"
    return f"its supervisor is {silent}, and SLURM says {fact.state}; if it stays so: scancel {fact.job_id}"


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
