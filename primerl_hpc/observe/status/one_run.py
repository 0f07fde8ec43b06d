"""``status RUN``: one run in detail: metrics, bottleneck, forecast, usage, processes, last events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.common.node.start_phases import phases_sentence
from primerl_hpc.observe.metric_catalog import find_metric
from primerl_hpc.observe.rollouts import failure_sentences, progress_sentence
from primerl_hpc.observe.status.all_runs import colored
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.predicted import sentence
from primerl_hpc.observe.status.snapshot import Snapshot, take_snapshot
from primerl_hpc.observe.status.usage import (
    Accounting,
    Usage,
    usage_from_events,
)
from primerl_hpc.observe.table import cell, column, make_table, render, score_table, score_text
from primerl_hpc.observe.text import HARD_BLANK, WIDTH, cut, format_age, format_count, labeled, wrap
from primerl_hpc.run.ledger.attempts import Attempt, attempts_from_events, last_activity
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores
from primerl_hpc.slurm.jobs import JobFact
from primerl_hpc.slurm.reasons import explain_reason

LAST_EVENTS = 20
"""Number of events in JSON."""
SHOWN_EVENTS = 4
"""Number of events on the screen, which should fit into 24 lines."""
MAX_PROCESSES = 12
"""If there are more processes, the screen counts them by role and state."""
STATUS_METRICS = (
    "reward/mean",
    "loss/mean",
    "mismatch_kl/all/mean",
    "entropy/all/mean",
    "off_policy/max",
    "time/step",
    "val/loss",
    "perf/throughput",
    "perf/peak_memory",
    "inference/kv_usage/max",
    "inference/idle",
    "time/weight_update",
)
"""Metrics of the last step, in the order of the screen. Labels and formats come from the metric catalog."""


class OneRun:
    """A `View` of one run."""

    def __init__(self, run: RunDir, jobs: JobWatcher, accounting: Accounting) -> None:
        self.run, self.jobs, self.accounting = run, jobs, accounting
        self.snapshot: Snapshot
        self.fact: JobFact | None = None
        self.usage: Usage | None = None
        self.events: list[dict[str, Any]] = []
        self.attempts: list[Attempt] = []
        self._activity: tuple[object, dict[int, float]] = None, {}

    def refresh(self) -> None:
        facts = self.jobs.facts_of([self.run])
        self.snapshot = take_snapshot(self.run, facts)
        self.fact = facts.get(str(self.snapshot.job.get("job_id")))
        self.events = list(read_jsonl(self.run.events))
        self.attempts = self._attempts()
        self.usage = self._usage()

    def _attempts(self) -> list[Attempt]:
        """Return the attempts. Metrics are read only when an attempt begins or ends, not at every refresh."""
        attempt, is_alive = self.snapshot.attempt, self.snapshot.state.is_alive
        if self._activity[0] != (attempt, is_alive):
            self._activity = (attempt, is_alive), last_activity(self.run, attempt)
        return attempts_from_events(self.events, is_running=is_alive, activity=self._activity[1])

    def _usage(self) -> Usage | None:
        snapshot, attempts = self.snapshot, self.attempts
        gpus = snapshot.allocated_gpus / snapshot.allocated_nodes
        if snapshot.job.get("scheduler") == "slurm":
            usage = self.accounting.usage(attempts, gpus, snapshot.job.get("engines_job_id"))
            if usage is not None:
                return usage
        return usage_from_events(attempts, snapshot.allocated_nodes, gpus, time.time()) if attempts else None

    def change_key(self) -> object:
        last = self.events[-1]["time"] if self.events else None
        return self.snapshot.state, self.snapshot.step, self.snapshot.message, last

    def as_json(self) -> dict[str, Any]:
        return {
            **self.snapshot.as_json(),
            "usage": self.usage.as_json() if self.usage else None,
            "last_events": self.events[-LAST_EVENTS:],
            "slurm_trouble": self.jobs.trouble,
        }

    def text(self) -> str:
        snapshot, trouble = self.snapshot, self.jobs.trouble
        lines = [
            f"{snapshot.name}  {colored(snapshot.state)}  {snapshot.kind}, {_job_sentence(snapshot)}",
            f"  {snapshot.run.root}",
        ]
        for message in (snapshot.message, trouble and f"from the run's files only: {trouble}"):
            lines += wrap(f"  {message}", "  ") if message else []
        lines += _related_jobs(snapshot)
        lines += ["", *_metrics(snapshot)]
        reason = explain_reason(self.fact.reason) if self.fact and self.fact.is_waiting else None
        for label, text in (
            ("waits for", reason.text if reason else None),
            ("bottleneck", snapshot.bottleneck.sentence if snapshot.bottleneck else None),
            ("split", snapshot.split_sentence),
            ("rollouts", _rollouts(snapshot)),
            ("time", snapshot.forecast.sentence if snapshot.forecast else None),
            ("used", self.usage.sentence if self.usage else None),
            ("start-up", _slowest_start(snapshot)),
            ("log level", ", ".join(f"{name} {level}" for name, level in snapshot.log_levels.items())),
            ("restarts", ", ".join(f"{name} ×{count}" for name, count in snapshot.restarts.items())),
        ):
            lines += labeled(label, text, 12)
        for warning in snapshot.warnings:
            lines += labeled("warning", warning, 12)
        for index, comparison in enumerate(snapshot.comparisons):
            lines += labeled("" if index else "predicted", sentence(comparison), 12)
        if snapshot.processes:
            lines += ["", *_processes(snapshot)]
        return "\n".join([*lines, *_events(self.events)])


def _slowest_start(snapshot: Snapshot) -> str | None:
    """Return the phases of the slowest start of this attempt; all others are in the report and in JSON."""
    starts = {name: process["start"] for name, process in snapshot.processes.items() if process.get("start")}
    if not starts or not snapshot.state.is_alive:
        return None
    name = max(starts, key=lambda process: sum(starts[process].values()))
    return f"{name} {sum(starts[name].values()):.0f} s: {phases_sentence(starts[name])}"


def _job_sentence(snapshot: Snapshot) -> str:
    job = snapshot.job
    attempt = f"attempt {snapshot.attempt}" if snapshot.attempt else "not started"
    place = f", {job['place']}" if "place" in job else ""
    engines = f", engines in job {job['engines_job_id']}" if "engines_job_id" in job else ""
    return f"{attempt}, job {job.get('job_id')} ({job.get('scheduler')}){engines}{place}" if job else attempt


def _related_jobs(snapshot: Snapshot) -> list[str]:
    """Return lines about the run before this one and the jobs after it."""
    parent = snapshot.job.get("parent")
    return [
        *([f"  follows {parent}"] if parent else []),
        *(
            f"  then {name}: {after['state']}  {after.get('to') or after.get('run_dir')}"
            for name, after in snapshot.after.items()
        ),
    ]


def _metrics(snapshot: Snapshot) -> list[str]:
    """Return the metrics of the last step; for an evaluation, the scores so far."""
    if snapshot.kind == Kind.EVAL.value:
        return score_text(snapshot.run).splitlines()
    share = f" ({snapshot.step / snapshot.max_steps:.0%})" if snapshot.max_steps else ""
    lines = [f"phase {snapshot.phase or '-'}: step {snapshot.step}/{snapshot.max_steps or '-'}{share}"]
    numbers = [
        _metric_text(name, value, snapshot)
        for name in STATUS_METRICS
        if isinstance(value := snapshot.metrics.get(name), float)
    ]
    lines += wrap("  " + "  ".join(number.replace(" ", HARD_BLANK) for number in numbers), "  ")
    scores = read_scores(snapshot.run) if snapshot.run.scores.exists() else {}
    return [*lines, "", *score_table(scores), ""] if scores else lines


def _rollouts(snapshot: Snapshot) -> str | None:
    """Return the progress of an active run, and the failed rollouts of any run."""
    progress = snapshot.rollouts
    sentences = [progress_sentence(progress)] if progress and snapshot.state.is_alive else []
    return "; ".join(sentences + failure_sentences(progress)) or None


def _metric_text(name: str, value: float, snapshot: Snapshot) -> str:
    match name:
        case "perf/throughput":
            return f"{format_count(value)} tok/s"
        case "perf/peak_memory":
            suffix = f" per {'GPU' if snapshot.accelerator == 'gpu' else 'rank'}"
        case "val/loss":
            suffix = f" (step {snapshot.metrics.get('val/step', snapshot.step)})"
        case _:
            suffix = ""
    return find_metric(name).text(value) + suffix


def _processes(snapshot: Snapshot) -> list[str]:
    """Return a table of the processes. Many are counted by role and state, and only those that exited are listed."""
    processes, lines = snapshot.processes, []
    if len(processes) > MAX_PROCESSES:
        table = make_table(column("ROLE", 18), column("STATE", 9), column("NUMBER", 8, is_number=True))
        states = [(process.get("role", "?"), process.get("state", "?")) for process in processes.values()]
        for (role, state), count in Counter(states).items():
            table.add_row(cell(role), cell(state), cell(str(count)))
        lines = render(table)
        processes = {name: process for name, process in processes.items() if process.get("state") == "exited"}
    table = make_table(
        column("PROCESS", 18),
        column("STATE", 9),
        column("RESTARTS", 8, is_number=True),
        column(" NODE", WIDTH - 38),
        has_header=not lines,
    )
    for name, process in list(processes.items())[:MAX_PROCESSES]:
        restarts = str(process.get("incarnation", 0))
        table.add_row(cell(name), cell(process.get("state", "?")), cell(restarts), cell(_node_text(process)))
    return lines + (render(table) if processes else [])


def _node_text(process: Mapping[str, Any]) -> str:
    """Return the nodes of a process, and its URL or how it exited."""
    hosts = process.get("hosts") or []
    nodes = ",".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} … {hosts[-1]} ({len(hosts)} nodes)"
    has_ended = process.get("state") in ("exited", "ended")
    return " " + "  ".join(filter(None, (nodes, process.get("exit" if has_ended else "url"))))


def _events(events: list[dict[str, Any]]) -> list[str]:
    if not events:
        return []
    now, lines = time.time(), ["", "last events"]
    for event in events[-SHOWN_EVENTS:]:
        values = (
            f"{name}={value}"
            for name, value in event.items()
            if name not in ("time", "event") and value is not None
        )
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        age = f"{format_age(now - event['time'])} ago"
        lines.append(cut(f"  {clock} {age:>8}  {event['event']:<15} {' '.join(values)}", WIDTH).rstrip())
    return lines
