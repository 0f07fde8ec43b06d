"""``status RUN``: one run in depth on one screen: numbers, bottleneck, forecast, hours, processes, last events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact
from primerl_hpc.observe.plot import format_count
from primerl_hpc.observe.reasons import explain_reason
from primerl_hpc.observe.scores import score_text
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import Snapshot, take_snapshot
from primerl_hpc.observe.table import colored
from primerl_hpc.observe.text import HARD_BLANK, WIDTH, cut, format_age, labelled, wrap
from primerl_hpc.observe.usage import Accounting, Attempt, Usage, attempts_of, last_signs, own_usage

LAST_EVENTS = 20
"""In JSON; on the screen, which should fit into 24 lines, `SHOWN_EVENTS`."""
SHOWN_EVENTS = 4
MOST_LINES = 12
"""More processes than this are told by role."""
_METRICS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss/mean", "{:+.4f}"),
    ("mismatch KL", "mismatch_kl/all/mean", "{:.1e}"),
    ("entropy", "entropy/all/mean", "{:.3f}"),
    ("age max", "off_policy/max", "{:.0f}"),
    ("s/step", "time/step", "{:.2f}"),
)


class OneRun:
    """A `View` of one run."""

    def __init__(self, run: RunDir, jobs: JobWatcher, accounting: Accounting) -> None:
        self.run, self.jobs, self.accounting = run, jobs, accounting
        self.snapshot: Snapshot
        self.fact: JobFact | None = None
        self.usage: Usage | None = None
        self.events: list[dict[str, Any]] = []
        self.attempts: list[Attempt] = []
        self._seen: tuple[object, dict[int, float]] = None, {}

    def look(self) -> None:
        facts = self.jobs.facts_of([self.run])
        self.snapshot = take_snapshot(self.run, facts)
        self.fact = facts.get(str(self.snapshot.job.get("job_id")))
        self.events = list(read_jsonl(self.run.events))
        self.attempts = self._attempts()
        self.usage = self._usage()

    def _attempts(self) -> list[Attempt]:
        """Rows are read when an attempt begins or ends, not at every look."""
        attempt, is_alive = self.snapshot.attempt, self.snapshot.state.is_alive
        if self._seen[0] != (attempt, is_alive):
            self._seen = (attempt, is_alive), last_signs(self.run, attempt)
        return attempts_of(self.events, is_running=is_alive, seen=self._seen[1])

    def _usage(self) -> Usage | None:
        snapshot, attempts = self.snapshot, self.attempts
        gpus = snapshot.accelerators_per_node if snapshot.accelerator == "gpu" else 0
        if snapshot.job.get("scheduler") == "slurm":
            usage = self.accounting.usage(attempts, gpus, snapshot.job.get("engines_job_id"))
            if usage is not None:
                return usage
        return own_usage(attempts, snapshot.num_nodes, gpus, time.time()) if attempts else None

    def mark(self) -> object:
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
            f"{snapshot.name}  {colored(snapshot.state)}  {snapshot.kind}, {_where(snapshot)}",
            f"  {snapshot.run.root}",
        ]
        for words in (snapshot.message, trouble and f"as the run's own files say: {trouble}"):
            lines += wrap(f"  {words}", "  ") if words else []
        lines += _relatives(snapshot)
        lines += ["", *_numbers(snapshot)]
        reason = explain_reason(self.fact.reason) if self.fact and self.fact.is_waiting else None
        for label, words in (
            ("waits for", reason.words if reason else None),
            ("bottleneck", snapshot.bottleneck.sentence if snapshot.bottleneck else None),
            ("time", snapshot.forecast.sentence if snapshot.forecast else None),
            ("used", self.usage.sentence if self.usage else None),
            ("restarts", ", ".join(f"{name} ×{count}" for name, count in snapshot.restarts.items())),
        ):
            lines += labelled(label, words, 12)
        if snapshot.processes:
            lines += ["", *_processes(snapshot)]
        return "\n".join([*lines, *_events(self.events)])


def _where(snapshot: Snapshot) -> str:
    job = snapshot.job
    attempt = f"attempt {snapshot.attempt}" if snapshot.attempt else "not started"
    place = f", {job['place']}" if "place" in job else ""
    engines = f", engines in job {job['engines_job_id']}" if "engines_job_id" in job else ""
    return f"{attempt}, job {job.get('job_id')} ({job.get('scheduler')}){engines}{place}" if job else attempt


def _relatives(snapshot: Snapshot) -> list[str]:
    """The run before this one, and what comes after it."""
    parent = snapshot.job.get("parent")
    return [
        *([f"  comes after {parent}"] if parent else []),
        *(
            f"  then {name}: {each['state']}  {each.get('to') or each.get('run_dir')}"
            for name, each in snapshot.after.items()
        ),
    ]


def _numbers(snapshot: Snapshot) -> list[str]:
    """The last step's; of an evaluation the scores that it has so far."""
    if snapshot.kind == Kind.EVAL.value:
        return score_text(snapshot.run).splitlines()
    metrics = snapshot.metrics
    share = f" ({snapshot.step / snapshot.max_steps:.0%})" if snapshot.max_steps else ""
    lines = [f"phase {snapshot.phase or '-'}: step {snapshot.step}/{snapshot.max_steps or '-'}{share}"]
    numbers = [f"{label} {form.format(value)}" for label, form, value in _known(metrics)]
    if isinstance(speed := metrics.get("perf/throughput"), float):
        numbers.append(f"{format_count(speed)} tok/s")
    memory = metrics.get("perf/peak_memory")
    if isinstance(memory, float):
        kind = "GPU" if snapshot.accelerator == "gpu" else "rank"
        numbers.append(f"trainer peak {memory:.1f} GiB a {kind}")
    if isinstance(cache := metrics.get("inference/kv_usage/max"), float):
        numbers.append(f"KV cache {cache:.0%}")
    if isinstance(idle := metrics.get("inference/idle"), float):
        numbers.append(f"engines idle {idle:.0%}")
    if isinstance(update_s := metrics.get("time/weight_update"), float):
        numbers.append(f"update {update_s:.2f} s")
    return lines + (wrap("  " + "  ".join(number.replace(" ", HARD_BLANK) for number in numbers), "  "))


def _known(metrics: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    return [
        (label, form, metrics[key]) for label, key, form in _METRICS if isinstance(metrics.get(key), float)
    ]


def _processes(snapshot: Snapshot) -> list[str]:
    """A line each; of many, a line per role and state, and those that are not well."""
    lines = [f"{'PROCESS':<18} {'STATE':<9} {'RESTARTS':>8}  WHERE"]
    processes = snapshot.processes
    if len(processes) > MOST_LINES:
        counts = Counter((each.get("role", "?"), each.get("state", "?")) for each in processes.values())
        lines = [f"{'ROLE':<18} {'STATE':<9} {'NUMBER':>8}"]
        lines += [f"{role:<18} {state:<9} {count:>8}" for (role, state), count in counts.items()]
        processes = {name: each for name, each in processes.items() if each.get("state") == "exited"}
    for name, process in list(processes.items())[:MOST_LINES]:
        hosts = process.get("hosts") or []
        where = ",".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} … {hosts[-1]} ({len(hosts)} nodes)"
        has_ended = process.get("state") in ("exited", "ended")
        where = "  ".join(filter(None, (where, process.get("exit" if has_ended else "url"))))
        head = f"{name:<18} {process.get('state', '?'):<9} {process.get('incarnation', 0):>8}  "
        lines.append(head + cut(where, WIDTH - len(head)))
    return lines


def _events(events: list[dict[str, Any]]) -> list[str]:
    now, lines = time.time(), ["", "last events"] if events else []
    for event in events[-SHOWN_EVENTS:]:
        rest = "  ".join(f"{k}={v}" for k, v in event.items() if k not in ("time", "event") and v is not None)
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        age = f"{format_age(now - event['time'])} ago"
        lines.append(cut(f"  {clock} {age:>8}  {event['event']:<15} {rest}", WIDTH).rstrip())
    return lines
