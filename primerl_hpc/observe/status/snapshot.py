"""The snapshot of a run, read once from its directory: state, processes, step, metrics, remaining time.

Reading order: `Snapshot` → `take_snapshot` → `real_state`, which combines state.json, the supervisor's lock and SLURM's
answer.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import MAIN_PHASE, Kind, RunState
from primerl_hpc.observe.rollouts import read_progress, warning_sentences
from primerl_hpc.observe.status.bottleneck import Bottleneck, find_bottleneck
from primerl_hpc.observe.status.follow_up_jobs import follow_up_states, state_with_parent
from primerl_hpc.observe.status.forecast import Forecast, make_forecast
from primerl_hpc.observe.status.predicted import compare_with_plan
from primerl_hpc.run.job_chain import chain_of, current_job
from primerl_hpc.run.ledger.measures import Comparison
from primerl_hpc.run.lock import is_local_job_alive, is_owner_alive
from primerl_hpc.run.metrics import read_last_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.jobs import JobFact
from primerl_hpc.slurm.reasons import explain_reason

_ENDED_BY_SLURM = {"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT", "DEADLINE"}
WINDOW = 20
"""Number of steps from which pace and bottleneck are computed."""
TAIL_BYTES, LINE_CHARS = 1 << 16, 4096
"""Bytes read from the end of a job's output, and characters shown of its last line."""
_DEFAULT_LEVELS = {"level": "info", "verifiers": "warning"}
"""Defaults of the recipe's ``log`` block."""
TRAINER_ROLE = {Kind.SFT.value: "sft", Kind.RL.value: "trainer"}
"""The role that executes training steps, by the kind of the phase."""


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
    """As in state.json, with ``hosts`` added: the names of the process's nodes that are known."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The last row of the phase's trainer, and of the orchestrator."""
    forecast: Forecast | None = None
    bottleneck: Bottleneck | None = None
    comparisons: tuple[Comparison, ...] = ()
    """Predicted figures that the last steps measured."""
    advice: dict[str, Any] = field(default_factory=dict)
    """Result of the split advisor for the newest attempt; see `launch.planning.advice`."""
    started: float | None = None
    job: dict[str, Any] = field(default_factory=dict)
    message: str | None = None
    rollouts: dict[str, Any] = field(default_factory=dict)
    """Counts of rollouts in this attempt, with the last error; see `read_progress`."""
    skipped: str = ""
    """Sentence about steps without an update; empty for fewer than two of the last steps."""
    log_levels: dict[str, str] = field(default_factory=dict)
    """Levels of the recipe's ``log`` other than the defaults, by role or ``level`` or ``verifiers``."""
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Jobs that wait for the end of this run; see `follow_up_states`."""
    accelerator: str = "cpu"
    nodes_of_kinds: tuple[tuple[int, int], ...] = ((1, 1),)
    """(nodes, accelerators of each) for every kind of node in the plan; 0 accelerators: the CPU partition."""
    allocated_nodes: int = 1
    """With spare nodes."""
    allocated_gpus: int = 0
    """As in `plan.plan.Plan`."""

    @property
    def num_nodes(self) -> int:
        return sum(count for count, _ in self.nodes_of_kinds)

    @property
    def num_accelerators(self) -> int:
        return sum(count * accelerators for count, accelerators in self.nodes_of_kinds)

    @property
    def seconds_left(self) -> float | None:
        """Until the end of the run."""
        forecast = self.forecast
        return None if forecast is None or forecast.phase is not None else forecast.seconds_left

    @property
    def split_sentence(self) -> str | None:
        """Return the result of the split advisor, and if the next attempt uses it."""
        if not self.advice:
            return None
        applied = "; applied" if self.advice.get("is_applied") else ""
        return f"{self.advice.get('sentence')}, from attempt {self.advice.get('attempt')}{applied}"

    @property
    def warnings(self) -> list[str]:
        """Return sentences about rollouts that fail, steps without an update and rows that are not trained."""
        sentences = self.skipped, untrained_sentence(self.run, self.metrics)
        return [*warning_sentences(self.rollouts), *filter(None, sentences)]

    @property
    def restarts(self) -> dict[str, int]:
        """Return the number of restarts in this attempt by process, without processes that were not restarted."""
        counts = {name: int(process.get("incarnation", 0)) for name, process in self.processes.items()}
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
            "predicted": [comparison.as_json() for comparison in self.comparisons],
            "split_advice": self.advice or None,
            "restarts": self.restarts,
            "job": self.job,
            "message": self.message,
            "rollouts": self.rollouts,
            "warnings": self.warnings,
            "log_levels": self.log_levels,
            "after": self.after,
            "processes": self.processes,
            "metrics": self.metrics,
        }


def take_snapshot(run: RunDir, jobs: Mapping[str, JobFact] | None = None) -> Snapshot:
    """Read the snapshot of ``run``. ``jobs``: SLURM's answer (`JobWatcher.facts_of`); without it the run's files
    decide.

    Does not raise for an incomplete or unreadable run directory: the state is `RunState.UNKNOWN` if nothing better is
    known.
    """
    try:
        return _take_snapshot(run, jobs)
    except OSError as error:
        name, message = run.root.name, unreadable_message(error)
        return Snapshot(run, name, "?", RunState.UNKNOWN, 0, None, 0, 0, {}, message=message)


def unreadable_message(error: OSError) -> str:
    return f"the run directory cannot be read: {error.strerror or error}"


def _take_snapshot(run: RunDir, jobs: Mapping[str, JobFact] | None) -> Snapshot:
    plan = read_json_or_none(run.plan) or {}
    state = read_json_or_none(run.state) or {}
    job = read_json_or_none(run.job) or {}
    phase = phase_of(plan, state.get("phase"))
    recipe = phase.get("recipe", {})
    kind = recipe.get("kind", plan.get("kind", "?"))
    rows = read_last_steps(run.metrics(TRAINER_ROLE[kind]), WINDOW) if kind in TRAINER_ROLE else {}
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
        metrics={**_last(batches), **_last(rows), **_validation(run, kind, recipe)},
        forecast=make_forecast(
            rows,
            max_steps,
            now=time.time(),
            started=state.get("started"),
            ends=state.get("ends_at"),
            resumed_from=int(state.get("resumed_from") or 0),
            phase=phase.get("name") if phase.get("name") != MAIN_PHASE else None,
        )
        if is_moving
        else None,
        bottleneck=find_bottleneck(_newest(rows), _newest(batches))
        if is_moving or current.is_final
        else None,
        comparisons=compare_with_plan(run, plan),
        advice=read_json_or_none(run.advice) or {},
        started=state.get("started"),
        job=job,
        message=message,
        rollouts=read_progress(run) if is_from_latest_job(state, job) else {},
        skipped=_skipped_sentence(rows),
        log_levels=_log_levels(recipe.get("log") or {}),
        accelerator=plan.get("accelerator", "cpu"),
        nodes_of_kinds=_nodes_of_kinds(plan),
        allocated_nodes=len(plan.get("nodes", [0])) + int(plan.get("spare_nodes", 0)),
        allocated_gpus=int(plan.get("allocated_gpus", 0)),
        after=follow_up_states(job, current, jobs or {}),
    )


def untrained_sentence(run: RunDir, row: Mapping[str, Any]) -> str:
    """Return a sentence if this last row of an SFT trainer counts rows of the data without a trained token."""
    if not (count := int(row.get("progress/total_skipped") or 0)):
        return ""
    log = f"primerl-hpc logs {shlex.quote(run.root.name)} {TRAINER_ROLE[Kind.SFT.value]}"
    return f"rows skipped without a trained token, in all epochs: {count:,}; the first one is in {log}"


def _skipped_sentence(rows: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a sentence if several of these steps of a trainer made no update.

    Steps of the search for a loss scale are not counted: their loss is finite. What is not, is text in metrics files.
    """
    skipped = [
        step
        for step, row in rows.items()
        if row.get("optim/skipped")
        and ("optim/loss_scale" not in row or isinstance(row.get("loss/mean"), str))
    ]
    if len(skipped) < 2:
        return ""
    return (
        f"{len(skipped)} of the last {len(rows)} steps made no update, because loss or gradient were not finite "
        f"(last: step {skipped[-1]}; the trainer's log names loss and norm of each): decrease optimizer.lr, or set "
        f"trainer.param_dtype: float32; after trainer.max_skipped_steps in a row the run ends"
    )


def _log_levels(log: Mapping[str, Any]) -> dict[str, str]:
    """Return the levels of a plan's ``log`` block that differ from `_DEFAULT_LEVELS`; roles: from the run's level."""
    levels = {name: log.get(name, default) for name, default in _DEFAULT_LEVELS.items()}
    changed = {name: level for name, level in levels.items() if level != _DEFAULT_LEVELS[name]}
    roles: dict[str, str] = log.get("roles") or {}
    return changed | {role: level for role, level in roles.items() if level != levels["level"]}


def _nodes_of_kinds(plan: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return (nodes, accelerators of each) of every component of plan.json."""
    if components := plan.get("components"):
        return tuple((len(part["nodes"]), int(part["accelerators_per_node"])) for part in components)
    return ((len(plan.get("nodes", [0])), int(plan.get("accelerators_per_node", 1))),)


def _last(rows: dict[int, dict[str, Any]]) -> dict[str, Any]:
    return rows[max(rows)] if rows else {}


def _validation(run: RunDir, kind: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last validation loss of an SFT phase and its step; only every n-th row contains one."""
    settings = (recipe.get("sft") or {}).get("validation")
    if kind != Kind.SFT.value or settings is None:
        return {}
    rows = read_last_steps(run.metrics("sft"), int(settings.get("interval") or 1) + 1)
    found = [(step, row["val/loss"]) for step, row in rows.items() if "val/loss" in row]
    return {"val/loss": found[-1][1], "val/step": found[-1][0]} if found else {}


def _newest(rows: dict[int, dict[str, Any]], count: int = 10) -> list[dict[str, Any]]:
    return [rows[step] for step in sorted(rows)[-count:]]


def starting_processes(state: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """Return the names of the processes that were started and are not ready yet."""
    return [name for name, process in _processes(state, plan).items() if process.get("state") == "starting"]


def _processes(state: dict[str, Any], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the processes with the names of their nodes.

    A process that publishes no endpoint is reported as running as soon as it is started.
    """
    phases = plan.get("phases", [])
    plans = {planned["name"]: planned for phase in phases for planned in phase.get("processes", [])}
    elastic = {planned["name"] for phase in phases for planned in phase.get("elastic", [])}
    hosts = state.get("hosts") or ([state["host"]] if state.get("host") else [])
    processes = {}
    for name, process in state.get("processes", {}).items():
        planned = plans.get(name, {})
        names = [hosts[node] for node in planned.get("nodes", []) if node < len(hosts)]
        if name in elastic and (address := urlsplit(process.get("url") or "").hostname):
            names = [address]  # a node of another job: only its address is known
        has_no_endpoint = bool(planned) and not planned.get("ready_timeout_s")
        running = {"state": "running"} if has_no_endpoint and process.get("state") == "starting" else {}
        processes[name] = {**process, **running, "hosts": names}
    return processes


def phase_of(plan: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Return the phase ``name`` of the plan; the main phase if there is none of that name."""
    phases = plan.get("phases") or [{}]
    for phase in phases:
        if phase.get("name") == name:
            return phase
    return next((phase for phase in phases if phase.get("name") == MAIN_PHASE), phases[-1])


def real_state(
    run: RunDir, state: dict[str, Any], job: dict[str, Any], jobs: Mapping[str, JobFact] | None = None
) -> tuple[RunState, str | None]:
    """Return the state of the run and a message.

    The state last written by the supervisor, corrected if the supervisor has died or if SLURM reports another state.
    """
    written = RunState(state["state"]) if state.get("state") in set(RunState) else None
    is_final = written is not None and written.is_final and is_from_latest_job(state, job)
    # a pending job of the chain does not change the state of a finished run: it exits as soon as it starts
    now = (
        state.get("job_id") if is_final and chain_of(job) is not None else current_job(job, state, jobs or {})
    )
    fact = (jobs or {}).get(str(now))
    # 1. no supervisor of the latest job has written yet: SLURM knows more than the files
    if written is None or not is_from_latest_job(state, job):
        return state_with_parent(job, *_state_before_start(run, job, fact))
    # 2. SLURM contradicts what the supervisor wrote before it was requeued or killed
    if fact is not None and fact.is_forgotten:
        if written == RunState.PENDING:
            return RunState.FAILED, _forgotten(run, fact)
        fact = None  # the run's files decide
    if fact is not None and fact.is_waiting:  # requeued: by the supervisor after a save, or by SLURM
        reason = f"back in the queue: {_wait_reason(fact)}" if fact.reason else "back in the queue"
        return RunState.PENDING, reason if written != RunState.PENDING else state.get("message")
    if written in (RunState.FAILED, RunState.CANCELLED) and fact is not None and "here" not in job:
        if not fact.has_ended:
            return RunState.STOPPING, "SLURM is ending its job, and may requeue it"
        if fact.state in _ENDED_BY_SLURM:  # the failure inside the job is a consequence
            return _state_of_ended_job(run, fact)
    # 3. both agree, or only the supervisor knows
    if written.is_final:
        return written, state.get("message")
    # 4. it was running when it last wrote: does it still?
    if fact is not None and fact.has_ended:
        return _state_of_ended_job(run, fact)
    if written == RunState.PENDING:  # requeued by the supervisor
        return written, state.get("message")
    owner = read_json_or_none(run.supervisor_lock)
    if is_owner_alive(owner, run.supervisor_lock):
        return written, state.get("message")
    newer = read_json_or_none(run.state)
    if newer and newer != state:  # the supervisor wrote its final state and released the lock in the meantime
        return real_state(run, newer, job, jobs)
    # the supervisor is the job's batch process: it runs as long as the job, whatever the age of its heartbeat
    if fact is not None:
        return written, _heartbeat_message(run, fact)
    return (
        RunState.FAILED,
        f"its supervisor died; continue with: primerl-hpc resume {shlex.quote(run.root.name)}",
    )


def _heartbeat_message(run: RunDir, fact: JobFact) -> str:
    """Report that the supervisor of a running job has stopped its heartbeat.

    The minutes compare the clocks of two machines, so they are shown but no decision depends on them.
    """
    try:
        silent = f"has not updated its heartbeat for {(time.time() - run.supervisor_lock.stat().st_mtime) / 60:.0f} min"
    except FileNotFoundError:
        silent = "has no heartbeat"
    return f"its supervisor {silent}, and SLURM reports {fact.state}; if this persists: scancel {fact.job_id}"


def is_from_latest_job(state: dict[str, Any], job: dict[str, Any]) -> bool:
    """True if the written state is from the job that was submitted last, or a requeue of it.

    Compares attempts, not times, because the clocks of login and compute nodes differ.
    """
    return int(state.get("attempt", 0)) >= int(job.get("attempt", 0))


def _state_of_ended_job(run: RunDir, fact: JobFact) -> tuple[RunState, str]:
    """Return state and message of a run whose job ended before the supervisor could write its final state."""
    advice = f"continue with: primerl-hpc resume {shlex.quote(run.root.name)}"
    if fact.state == "CANCELLED":
        step = run.latest_checkpoint()
        saved = (
            "before the run saved a checkpoint" if step is None else f"after the checkpoint of step {step}"
        )
        return RunState.CANCELLED, f"its job was canceled {saved}; {advice}"
    detail = f" ({fact.reason})" if fact.reason else ""
    return RunState.FAILED, f"SLURM ended its job: {fact.state}{detail}; {advice}"


def _state_before_start(
    run: RunDir, job: dict[str, Any], fact: JobFact | None
) -> tuple[RunState, str | None]:
    if not job:
        return RunState.UNKNOWN, "prepared, never submitted"
    if fact is not None and fact.has_ended:
        if fact.state == "CANCELLED":
            return RunState.CANCELLED, "its job was canceled before it started"
        return RunState.FAILED, last_job_output(
            run
        ) or f"its job ended before its supervisor started: {fact.state}"
    if fact is not None and fact.is_forgotten:
        return RunState.FAILED, _forgotten(run, fact)
    if job.get("scheduler") != "local":
        is_waiting = fact is None or fact.is_waiting
        reason = _wait_reason(fact) if fact is not None and is_waiting else None
        return RunState.PENDING if is_waiting else RunState.STARTING, reason
    is_alive = is_local_job_alive(job) or time.time() - job.get("submitted", 0) < 5
    if is_alive:
        return RunState.SUBMITTED, None
    return RunState.FAILED, last_job_output(run) or "the job ended before its supervisor started"


def _wait_reason(fact: JobFact) -> str:
    """Return SLURM's reason and its estimated start. The estimate is omitted for held jobs, for which it is wrong."""
    reason = explain_reason(fact.reason)
    if reason is not None and reason.is_held:
        return f"{reason.text}: {reason.remedy(fact.job_id)}"
    start = f", expected start {fact.start}" if fact.start else ""
    return f"{fact.reason or 'waiting'}{start}"


def _forgotten(run: RunDir, fact: JobFact) -> str:
    return (
        f"SLURM no longer knows job {fact.job_id}: it was canceled or lost before it started; "
        f"continue with: primerl-hpc resume {run.root.name}"
    )


def last_job_output(run: RunDir) -> str | None:
    """Return the last line of the job's output, for jobs that failed before the supervisor started."""
    logs = sorted((run.launch / "submitit").glob("*_log.out"), key=lambda path: path.stat().st_mtime)
    logs += sorted((run.root / "logs").glob("slurm-*.out"))
    if not logs:
        return None
    with logs[-1].open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    printed = [line.strip() for line in lines if line.strip()]
    return printed[-1][:LINE_CHARS] if printed else None
