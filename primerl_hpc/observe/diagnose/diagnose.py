"""Diagnose a run.

A failed run: its root-cause failure, SLURM's accounting, the matching known fault, whether another attempt can succeed,
and the next command. A pending run: why it waits. A running one: whether it makes progress.

    found = diagnose(run)
    print(render_diagnosis(found, num_lines=20))

Reading order: `Diagnosis` → `diagnose` → `_diagnose_ended_run`, `_diagnose_active_run` → `render_diagnosis`.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from primerl_hpc.common.errors import ExitCode, PrimerlError, SchedulerError
from primerl_hpc.common.files import read_json_or_none, read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.common.safety.secret_values import mask, mask_data
from primerl_hpc.observe.diagnose.advice import advise
from primerl_hpc.observe.diagnose.known_faults import NO_CHECKPOINT, SIGNALS, KnownFault, recognize_fault
from primerl_hpc.observe.inside.stacks import collect_stacks
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import TRAINER_ROLE, Snapshot, last_job_output, take_snapshot
from primerl_hpc.observe.text import format_duration, labeled, wrap
from primerl_hpc.run.job_chain import is_reused
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.command_lines import SEPARATOR, accounting_command, is_of
from primerl_hpc.slurm.commands import ask as ask_slurm
from primerl_hpc.slurm.jobs import JobFact
from primerl_hpc.slurm.reasons import explain_reason

OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""SLURM's state of a job or step in which the kernel's OOM killer ended a process."""
OWN_CODES = (ExitCode.DONE, ExitCode.STOPPED, ExitCode.PREEMPTED)
"""Exit codes of a job whose run ended as it was asked to."""
SLURM_TIMEOUT_S = 5.0
"""Limit for one query, so that a controller that is down does not delay the result."""
_FIELDS = "JobIDRaw,JobID,JobName,State,ExitCode,NodeList,Reason,Submit"
FIRST_STEP_S, BLOCKED_LIMIT_S = 600.0, 10.0
"""Time without a first step after which the nodes are searched for blocked processes; limit of this search."""
SLOW = 5.0
"""The run is reported as stalled if the current step takes this many times the duration of the last one."""


@dataclass(frozen=True)
class SlurmOutcome:
    """SLURM's accounting record of the job, and of its first step that explains the failure."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    step: str | None = None
    step_state: str | None = None

    @property
    def sentence(self) -> str:
        ended = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        text = self.state if self.exit_code is None else f"{self.state}, {ended}"
        text += f" ({self.reason})" if self.reason else ""
        return text + (f"; step {self.step} {self.step_state}" if self.step else "")


@dataclass(frozen=True)
class Diagnosis:
    snapshot: Snapshot
    failure: dict[str, Any] | None
    """control/failure.json of the latest attempt."""
    known: KnownFault | None
    slurm: SlurmOutcome | None
    waits_for: str | None
    can_retry: bool | None
    """True if another attempt can succeed; None if no attempt has failed or stopped."""
    advice: str
    next_command: str | None
    blocked: tuple[str, ...] = ()
    """Sentences about processes of a run without progress that are blocked in the kernel."""
    slurm_trouble: str | None = None
    """Why SLURM could not be queried; the diagnosis is then based on the run's files only."""

    @property
    def recovered(self) -> list[dict[str, Any]]:
        """Return the events of failures in this attempt from which the run recovered, oldest first."""
        recoveries = [
            row for row in read_jsonl(self.snapshot.run.events) if row["event"] == "recovery_started"
        ]
        return [row for row in recoveries if row["attempt"] == self.snapshot.attempt]

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis for ``--json``. Secrets are masked, as in the text: both are pasted into reports."""
        return mask_data(self._values)

    @property
    def _values(self) -> dict[str, Any]:
        snapshot = self.snapshot
        return {
            "run": snapshot.name,
            "run_dir": str(snapshot.run.root),
            "state": snapshot.state.value,
            "attempt": snapshot.attempt,
            "step": snapshot.step,
            "message": snapshot.message,
            "failure": self.failure,
            "recovered": self.recovered,
            "known": asdict(self.known) if self.known else None,
            "slurm": asdict(self.slurm) if self.slurm else None,
            "slurm_trouble": self.slurm_trouble,
            "waits_for": self.waits_for,
            "can_retry": self.can_retry,
            "advice": self.advice,
            "warnings": snapshot.warnings,
            "blocked": list(self.blocked),
            "next": self.next_command,
        }


def diagnose(run: RunDir, ask: Callable[[list[str]], str] | None = None) -> Diagnosis:
    """Diagnose ``run`` from its files, squeue and sacct. ``ask`` runs a SLURM command and returns its output."""
    ask = partial(ask_slurm, timeout_s=SLURM_TIMEOUT_S) if ask is None else ask
    jobs = JobWatcher(ask)
    facts = jobs.facts_of([run])
    snapshot = take_snapshot(run, facts)
    if snapshot.state not in (RunState.FAILED, RunState.CANCELLED, RunState.STOPPED):
        found = _diagnose_active_run(snapshot, facts.get(str(snapshot.job.get("job_id"))))
    else:
        found = _diagnose_ended_run(snapshot, ask)
    blocked = _blocked_processes(run) if _is_without_progress(snapshot) else ()
    return replace(found, slurm_trouble=jobs.trouble, blocked=blocked)


# -- ended runs ------------------------------------------------------------------------------------


def _diagnose_ended_run(snapshot: Snapshot, ask: Callable[[list[str]], str]) -> Diagnosis:
    failure = _latest_failure(snapshot)
    slurm = _query_accounting(snapshot, ask, (failure or {}).get("process"))
    known = _find_known_fault(snapshot, failure, slurm)
    if snapshot.state != RunState.FAILED and slurm is not None and slurm.exit_code in OWN_CODES:
        slurm = None  # SLURM calls every exit code except 0 a failure
    can_retry, sentence, command = advise(snapshot.run, snapshot.state, failure, known)
    return Diagnosis(snapshot, failure, known, slurm, None, can_retry, sentence, command)


def _latest_failure(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return the failure report if it is from the latest attempt."""
    failure = read_json_or_none(snapshot.run.failure)
    return failure if failure and failure.get("attempt") == snapshot.attempt else None


def _find_known_fault(
    snapshot: Snapshot, failure: dict[str, Any] | None, slurm: SlurmOutcome | None
) -> KnownFault | None:
    """Match the failure message and the log first, then SLURM's state.

    If a signal ended the process, SLURM's state comes first: it is the cause, and the exit its consequence.
    """
    if snapshot.state != RunState.FAILED:
        is_early = re.search(NO_CHECKPOINT, snapshot.message or "") is not None
        return recognize_fault(snapshot.message or "") if is_early else None
    from_slurm = recognize_fault(f"{slurm.state} {slurm.step_state or ''}" if slurm else "")
    if from_slurm is not None and (failure is None or failure.get("signal")):
        return from_slurm
    if failure is None:
        return recognize_fault(f"{snapshot.message or ''}\n{last_job_output(snapshot.run) or ''}")
    return recognize_fault(str(failure.get("message")), failure.get("last_lines", [])) or from_slurm


def _query_accounting(
    snapshot: Snapshot, ask: Callable[[list[str]], str], process: str | None
) -> SlurmOutcome | None:
    if snapshot.job.get("scheduler") != "slurm":
        return None
    options = ("--parsable2", f"--delimiter={SEPARATOR}", f"--format={_FIELDS}")
    try:
        text = ask(accounting_command([snapshot.job["job_id"]], *options))
    except SchedulerError:
        return None
    return parse_outcome(text, snapshot.job, process)


def parse_outcome(text: str, job: Mapping[str, Any], process: str | None = None) -> SlurmOutcome | None:
    """Parse sacct's output: the record of the job (its last requeue), and the first step that explains its failure.

    ``job``: content of control/job.json. ``process``: the process that failed. An out-of-memory step counts only if it
    is the step of this process.
    """
    record: list[str] | None = None
    step: list[str] | None = None
    for line in text.splitlines():
        number, *fields = line.strip(" ").split(SEPARATOR)
        if len(fields) != 7 or not is_of(str(job["job_id"]), *_without_step(number, fields[0])):
            continue  # another task of the same array
        if "." not in fields[0]:
            record, step = fields, None
        elif step is None and _explains(fields[1], fields[2].split(" ")[0], process):
            step = fields
    if record is None or is_reused(job, record[1], record[6]):
        return None
    code, _, signal = record[3].partition(":")
    reason = "" if record[5] in ("None", "") else record[5]
    return SlurmOutcome(
        record[2].split(" ")[0],
        int(code) if code.isdigit() else None,
        int(signal) if signal.isdigit() and signal != "0" else None,
        reason,
        step[1] if step else None,
        step[2] if step else None,
    )


def _without_step(number: str, listed: str) -> tuple[str, str]:
    return number.partition(".")[0], listed.partition(".")[0]


def _explains(step: str, state: str, process: str | None) -> bool:
    """True if the end of ``step`` may be the cause of the failure of ``process``."""
    return state == "NODE_FAIL" or (state == OUT_OF_MEMORY and process in (None, step))


# -- active runs -----------------------------------------------------------------------------------


def _diagnose_active_run(snapshot: Snapshot, fact: JobFact | None) -> Diagnosis:
    watch = f"primerl-hpc status {shlex.quote(snapshot.name)} --watch"
    match snapshot.state:
        case RunState.DONE:
            return _healthy(snapshot, "nothing is wrong: the run is done", None)
        case RunState.UNKNOWN:
            return _healthy(
                snapshot,
                "the run was prepared but never submitted",
                f"primerl-hpc resume {shlex.quote(snapshot.name)}",
            )
        case RunState.PENDING | RunState.SUBMITTED:
            return _diagnose_pending_run(snapshot, fact, watch)
    return _healthy(snapshot, _progress_sentence(snapshot), watch)


def _healthy(snapshot: Snapshot, advice: str, command: str | None) -> Diagnosis:
    return Diagnosis(snapshot, None, None, None, None, None, advice, command)


def _diagnose_pending_run(snapshot: Snapshot, fact: JobFact | None, watch: str) -> Diagnosis:
    reason = explain_reason(fact.reason) if fact else None
    if fact is None or reason is None:
        return _healthy(snapshot, "the job waits in the queue; nothing has failed", watch)
    waits_for = f"{fact.reason}: {reason.text}"
    if reason.is_held:
        advice = (
            f"nothing has failed; the job is held and starts after its release: {reason.remedy(fact.job_id)}"
        )
        command = watch if reason.held_by == "site" else f"scontrol release {fact.job_id}"
        return Diagnosis(snapshot, None, None, None, waits_for, None, advice, command)
    waits_for += f"; SLURM expects it to start at {fact.start.replace('T', ' ')}" if fact.start else ""
    if reason.is_hopeless:
        advice, command = (
            "waiting does not help: cancel the job, change the resources that it requests, and submit again",
            f"primerl-hpc cancel {shlex.quote(snapshot.name)}",
        )
    else:
        advice, command = "the job waits in the queue; nothing has failed", watch
    return Diagnosis(snapshot, None, None, None, waits_for, None, advice, command)


def _silent_s(snapshot: Snapshot) -> float:
    """Return the seconds since the last step, or since this attempt's start if that is later."""
    started = float(snapshot.started or 0.0)
    return time.time() - (max(float(snapshot.metrics.get("time") or 0.0), started) or time.time())


def _is_without_progress(snapshot: Snapshot) -> bool:
    """True if an active run has no new step for much longer than a step takes, or no step at all for minutes."""
    step_s = snapshot.metrics.get("time/step")
    limit_s = max(60.0, SLOW * step_s) if isinstance(step_s, float) else FIRST_STEP_S
    return snapshot.state.is_alive and _silent_s(snapshot) > limit_s


def _blocked_processes(run: RunDir) -> tuple[str, ...]:
    """Return a sentence for each process in state D; empty if the nodes cannot be asked."""
    try:
        report = collect_stacks(run, only_blocked=True, limit_s=BLOCKED_LIMIT_S)
    except PrimerlError:
        return ()
    return tuple(process.blocked_sentence for process in report.processes)


def _progress_sentence(snapshot: Snapshot) -> str:
    """Report whether the run makes progress, from its last step, its restarts and its failed checkpoints."""
    since_s = _silent_s(snapshot)
    step_s = snapshot.metrics.get("time/step")
    if isinstance(step_s, float) and _is_without_progress(snapshot):
        return (
            f"no new step for {format_duration(since_s)}, a step took {format_duration(step_s)}; see "
            f"primerl-hpc logs {shlex.quote(snapshot.name)} {TRAINER_ROLE[snapshot.kind]}"
        )
    notes = []
    if restarted := ", ".join(f"{name} ({count}×)" for name, count in snapshot.restarts.items()):
        notes.append(f"restarted: {restarted}")
    if failed := snapshot.metrics.get("checkpoint/failed"):
        last = snapshot.run.latest_checkpoint() or "none"
        log = f"primerl-hpc logs {shlex.quote(snapshot.name)} {TRAINER_ROLE[snapshot.kind]}"
        notes.append(f"failed checkpoints: {failed}, last complete checkpoint: {last}; see {log}")
    return f"the run is {snapshot.state.value}; {'; '.join(notes) or 'nothing has failed'}"


# -- text ------------------------------------------------------------------------------------------


def render_diagnosis(found: Diagnosis, num_lines: int) -> str:
    """Return the diagnosis as text of 80 columns with the last ``num_lines`` lines of the log, which are not
    wrapped.
    """
    snapshot, failure = found.snapshot, found.failure
    at = f" at step {snapshot.step} of {snapshot.max_steps}" if snapshot.step else ""
    attempt = f", attempt {snapshot.attempt}" if snapshot.attempt else ""
    lines = [f"{snapshot.name}: {snapshot.state.value}{at}{attempt}"]
    for fault in found.recovered:
        lines += labeled(
            "recovered", f"after step {fault['after_step']}, from {_failure_sentence(fault)}", 13
        )
    for label, text in (
        ("first failure", _failure_sentence(failure, found.slurm) if failure else None),
        ("", failure["message"] if failure else snapshot.message if not found.waits_for else None),
        ("SLURM", found.slurm.sentence if found.slurm else _slurm_trouble(found)),
        ("waits for", found.waits_for),
        ("known fault", found.known.what if found.known else None),
        ("hint", found.known.hint if found.known else None),
    ):
        lines += labeled(label, text, 13)
    for blocked in found.blocked:
        lines += labeled("blocked", blocked, 13)
    for warning in snapshot.warnings:
        lines += labeled("warning", warning, 13)
    if failure and failure.get("last_lines"):
        lines += [f"\nlast lines of {failure['log']}:"]
        lines += [f"    {line}" for line in failure["last_lines"][-num_lines:]]
    if found.can_retry is not None:
        lines += ["", *labeled("try again?", f"{'yes' if found.can_retry else 'no'}: {found.advice}", 13)]
    else:
        lines += wrap(found.advice, "")
    if found.next_command:  # never wrapped, so that it can be copied
        lines.append(f"next         {found.next_command}")
    return mask("\n".join(lines))


def _slurm_trouble(found: Diagnosis) -> str | None:
    if found.slurm_trouble is None:
        return None
    return f"{found.slurm_trouble}; this diagnosis uses the run's files only"


def _failure_sentence(failure: dict[str, Any], slurm: SlurmOutcome | None = None) -> str:
    """Return process, rank, node, and exit code or signal.

    ``slurm`` is the accounting record of the same attempt: its OUT_OF_MEMORY is evidence for a kill by the kernel.
    """
    rank = f" rank {failure['rank']}" if failure.get("rank") is not None else ""
    if signal := failure.get("signal"):
        is_oom = slurm is not None and OUT_OF_MEMORY in (slurm.state, slurm.step_state)
        is_oom = signal == "SIGKILL" and (is_oom or failure.get("out_of_memory") is not None)
        cause = "by the kernel: out of memory" if is_oom else SIGNALS.get(signal)
        cause = "by the supervisor" if failure.get("was_ended_by_us") else cause
        ended = f"{signal} ({cause})" if cause else signal
    else:
        ended = _exit_code_text(failure.get("exit_code"))
    return f"{failure['process']}{rank} on {failure['node']}: {ended}"


def _exit_code_text(code: int | None) -> str:
    try:
        return f"exit code {code} ({ExitCode(code).name.lower().replace('_', ' ')})"
    except ValueError:
        return f"exit code {code}"
