"""What is wrong with a run: its first fault, what SLURM says, what it looks like, whether trying again can help, and the
next command. Of a run that waits: why. Of one that runs: whether it moves.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import read_json_or_none, read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import SEPARATOR, JobFact, ask
from primerl_hpc.observe.patterns import SIGNALS, Known, recognise
from primerl_hpc.observe.plot import format_duration
from primerl_hpc.observe.reasons import explain_reason
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import TRAINER_OF, Snapshot, last_words, take_snapshot
from primerl_hpc.observe.text import labelled, wrap

_FIELDS = "JobID,JobName,State,ExitCode,NodeList,Reason"
SLOW = 5.0
"""A step that takes this many times as long as the ones before it is worth a word."""


@dataclass(frozen=True)
class Verdict:
    """What SLURM's accounting says of the job, and of the first of its steps that did not end well."""

    state: str
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    step: str | None = None
    step_state: str | None = None

    @property
    def sentence(self) -> str:
        ended = f"signal {self.signal}" if self.signal else f"exit code {self.exit_code}"
        words = self.state if self.exit_code is None else f"{self.state}, {ended}"
        words += f" ({self.reason})" if self.reason else ""
        return words + (f"; step {self.step} {self.step_state}" if self.step else "")


@dataclass(frozen=True)
class Diagnosis:
    snapshot: Snapshot
    failure: dict[str, Any] | None
    """control/failure.json of the last attempt."""
    known: Known | None
    slurm: Verdict | None
    waits_for: str | None
    can_retry: bool | None
    """None where there is nothing to retry."""
    advice: str
    next_command: str | None

    @property
    def recovered(self) -> list[dict[str, Any]]:
        """Faults of this attempt from which the run went on by itself, the first one first."""
        rows = read_jsonl(self.snapshot.run.events)
        mine = [row for row in rows if row["event"] == "recovery_started"]
        return [row for row in mine if row["attempt"] == self.snapshot.attempt]

    def as_json(self) -> dict[str, Any]:
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
            "waits_for": self.waits_for,
            "can_retry": self.can_retry,
            "advice": self.advice,
            "next": self.next_command,
        }


def diagnose(run: RunDir, ask: Callable[[list[str]], str] = ask) -> Diagnosis:
    jobs = JobWatcher(ask)
    facts = jobs.facts_of([run])
    snapshot = take_snapshot(run, facts)
    if snapshot.state not in (RunState.FAILED, RunState.CANCELLED, RunState.STOPPED):
        return _of_a_living_run(snapshot, facts.get(str(snapshot.job.get("job_id"))))
    failure = _failure_of(snapshot)
    slurm = _ask_accounting(snapshot, ask)
    known = _recognise(snapshot, failure, slurm)
    return _of_an_ended_run(snapshot, failure, slurm, known)


def can_retry(failure: dict[str, Any] | None, known: Known | None = None) -> bool:
    """A fault of configuration or data comes back; a crash, a signal or a lost machine may not."""
    if (failure or {}).get("exit_code") in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.NO_CONTINUE):
        return False
    return known is None or known.retry != "with another recipe"


# -- ended ---------------------------------------------------------------------------------------------------------------


def _failure_of(snapshot: Snapshot) -> dict[str, Any] | None:
    """Of this attempt only: an earlier one's fault is history."""
    failure = read_json_or_none(snapshot.run.failure)
    return failure if failure and failure.get("attempt") == snapshot.attempt else None


def _recognise(snapshot: Snapshot, failure: dict[str, Any] | None, slurm: Verdict | None) -> Known | None:
    """The fault's own words first; SLURM's word counts before a mere exit, which is its echo."""
    if snapshot.state != RunState.FAILED:
        return None
    said = f"{slurm.state} {slurm.step_state or ''}" if slurm else ""
    taken = recognise(said)
    if taken is not None and (failure is None or failure.get("signal")):
        return taken
    if failure is None:
        return recognise(f"{snapshot.message or ''}\n{last_words(snapshot.run) or ''}")
    return recognise(str(failure.get("message")), failure.get("last_lines", [])) or taken


def _of_an_ended_run(
    snapshot: Snapshot, failure: dict[str, Any] | None, slurm: Verdict | None, known: Known | None
) -> Diagnosis:
    saved = snapshot.run.latest_checkpoint()
    after = f"after step {saved}" if saved else "from the beginning"
    resume, again = f"primerl-hpc resume {snapshot.name}", _submit_command(snapshot.run)
    if snapshot.state != RunState.FAILED:
        advice = f"it was {snapshot.state.value}, nothing failed; resume goes on {after}"
        return Diagnosis(snapshot, failure, None, slurm, None, True, advice, resume)
    is_worth_it = can_retry(failure, known)
    if not is_worth_it:
        advice = "trying again as it is would fail again: mend the cause, then submit anew"
        return Diagnosis(snapshot, failure, known, slurm, None, False, advice, again)
    first = "after the mend, " if known and known.retry == "after the mend" else ""
    advice = f"{first}resume goes on {after}"
    return Diagnosis(snapshot, failure, known, slurm, None, True, advice, resume)


def _submit_command(run: RunDir) -> str:
    """The command line that made this run, to be repeated with the mend."""
    command = (read_json_or_none(run.provenance) or {}).get("command") or []
    if "submit" not in command:
        return "primerl-hpc submit RECIPE --profile PROFILE"
    return shlex.join(["primerl-hpc", *command[command.index("submit") :]])


def _ask_accounting(snapshot: Snapshot, ask: Callable[[list[str]], str]) -> Verdict | None:
    if snapshot.job.get("scheduler") != "slurm":
        return None
    listing = ["sacct", "--noheader", "--parsable2", f"--delimiter={SEPARATOR}", f"--format={_FIELDS}"]
    try:
        return parse_verdict(ask([*listing, f"--jobs={snapshot.job['job_id']}"]))
    except SchedulerError:
        return None


def parse_verdict(text: str) -> Verdict | None:
    """The job's own line (its last life), and the first step that SLURM itself ended."""
    job: list[str] | None = None
    step: list[str] | None = None
    for line in text.splitlines():
        fields = line.strip(" ").split(SEPARATOR)
        if len(fields) != 6:
            continue
        if "." not in fields[0]:
            job, step = fields, None
        elif step is None and fields[2].split(" ")[0] in ("OUT_OF_MEMORY", "NODE_FAIL"):
            step = fields
    if job is None:
        return None
    code, _, signal = job[3].partition(":")
    reason = "" if job[5] in ("None", "") else job[5]
    return Verdict(
        job[2].split(" ")[0],
        int(code) if code.isdigit() else None,
        int(signal) if signal.isdigit() and signal != "0" else None,
        reason,
        step[1] if step else None,
        step[2] if step else None,
    )


# -- alive -----------------------------------------------------------------------------------------------------------------


def _of_a_living_run(snapshot: Snapshot, fact: JobFact | None) -> Diagnosis:
    watch = f"primerl-hpc status {snapshot.name} --watch"
    match snapshot.state:
        case RunState.DONE:
            return _healthy(snapshot, "nothing is wrong: the run is done", None)
        case RunState.UNKNOWN:
            return _healthy(
                snapshot, "it was prepared but never submitted", f"primerl-hpc resume {snapshot.name}"
            )
        case RunState.PENDING | RunState.SUBMITTED:
            return _of_a_waiting_run(snapshot, fact, watch)
    return _healthy(snapshot, _pulse(snapshot), watch)


def _healthy(snapshot: Snapshot, advice: str, command: str | None) -> Diagnosis:
    return Diagnosis(snapshot, None, None, None, None, None, advice, command)


def _of_a_waiting_run(snapshot: Snapshot, fact: JobFact | None, watch: str) -> Diagnosis:
    reason = explain_reason(fact.reason) if fact else None
    if fact is None or reason is None:
        return _healthy(snapshot, "it waits in the queue; nothing has failed", watch)
    start = f"; SLURM expects it to start at {fact.start.replace('T', ' ')}" if fact.start else ""
    waits_for = f"{fact.reason}: {reason.words}{start}"
    if reason.is_hopeless:
        advice, command = (
            "waiting does not help: cancel it, mend, submit anew",
            f"primerl-hpc cancel {snapshot.name}",
        )
    else:
        advice, command = "it waits in the queue; nothing has failed", watch
    return Diagnosis(snapshot, None, None, None, waits_for, None, advice, command)


def _pulse(snapshot: Snapshot) -> str:
    """Whether it moves, from its last step, its restarts and saves. A last step may be of an earlier attempt."""
    began = float(snapshot.started or 0.0)
    since_s = time.time() - (max(float(snapshot.metrics.get("time") or 0.0), began) or time.time())
    step_s = snapshot.metrics.get("time/step")
    if isinstance(step_s, float) and since_s > max(60.0, SLOW * step_s):
        return (
            f"no new step for {format_duration(since_s)}, a step took {format_duration(step_s)}: "
            f"primerl-hpc logs {snapshot.name} {TRAINER_OF[snapshot.kind]} says what it does"
        )
    notes = []
    if died := ", ".join(f"{name} {count} times" for name, count in snapshot.restarts.items()):
        notes.append(f"started again: {died}")
    if failed := snapshot.metrics.get("checkpoint/failed"):
        last = snapshot.run.latest_checkpoint() or "none"
        log = f"primerl-hpc logs {snapshot.name} {TRAINER_OF[snapshot.kind]}"
        notes.append(f"saves that failed: {failed}, last checkpoint: {last}; {log} says why")
    return f"it is {snapshot.state.value}; {'; '.join(notes) or 'nothing has failed'}"


# -- in words --------------------------------------------------------------------------------------------------------------


def tell(found: Diagnosis, num_lines: int) -> str:
    """Lines of a log are not broken; everything else has 80 columns."""
    snapshot, failure = found.snapshot, found.failure
    at = f" at step {snapshot.step} of {snapshot.max_steps}" if snapshot.step else ""
    life = f", attempt {snapshot.attempt}" if snapshot.attempt else ""
    lines = [f"{snapshot.name}: {snapshot.state.value}{at}{life}"]
    for fault in found.recovered:
        lines += labelled("recovered", f"after step {fault['after_step']}, from {_who(fault)}", 13)
    for label, words in (
        ("first fault", _who(failure) if failure else None),
        ("", failure["message"] if failure else snapshot.message if not found.waits_for else None),
        ("SLURM", found.slurm.sentence if found.slurm else None),
        ("waits for", found.waits_for),
        ("looks like", found.known.what if found.known else None),
        ("mend", found.known.mend if found.known else None),
    ):
        lines += labelled(label, words, 13)
    if failure and failure.get("last_lines"):
        lines += [f"\nlast lines of {failure['log']}:"]
        lines += [f"    {line}" for line in failure["last_lines"][-num_lines:]]
    if found.can_retry is not None:
        lines += ["", *labelled("try again?", f"{'yes' if found.can_retry else 'no'}: {found.advice}", 13)]
    else:
        lines += wrap(found.advice, "")
    if found.next_command:  # to be copied: in one line
        lines.append(f"next         {found.next_command}")
    return "\n".join(lines)


def _who(failure: dict[str, Any]) -> str:
    rank = f" rank {failure['rank']}" if failure.get("rank") is not None else ""
    if signal := failure.get("signal"):
        means = "by the supervisor" if failure.get("was_ended_by_us") else SIGNALS.get(signal)
        ended = f"{signal} ({means})" if means else signal
    else:
        ended = _named(failure.get("exit_code"))
    return f"{failure['process']}{rank} on {failure['node']}: {ended}"


def _named(code: int | None) -> str:
    try:
        return f"exit code {code} ({ExitCode(code).name.lower().replace('_', ' ')})"  # type: ignore[arg-type]
    except ValueError:
        return f"exit code {code}"
