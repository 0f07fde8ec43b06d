"""``report``: one HTML page of a run: curves, evaluations, attempts, usage, failures, recipe and versions.

The page has no scripts or external links. Its content comes from the run directory, so it can be written long after the
end of the run, on any machine that can read the directory. The layout is in templates/report.html.j2.
"""

from __future__ import annotations

import math
import time
from typing import Any

import jinja2

from primerl_hpc.common.assets import find_asset
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.node.start_phases import phases_sentence
from primerl_hpc.common.safety.secret_values import mask
from primerl_hpc.observe.diagnose.diagnose import Diagnosis, render_diagnosis
from primerl_hpc.observe.metric_catalog import MetricFile, find_metric
from primerl_hpc.observe.report.svg import Points, chart
from primerl_hpc.observe.status.one_run import OneRun
from primerl_hpc.observe.status.predicted import table_rows
from primerl_hpc.observe.text import format_duration
from primerl_hpc.run.ledger.attempts import Attempt
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir

TEMPLATE = "report.html.j2"
MAX_EVENTS = 100
MAX_LOG_LINES = 30
CHARTS: tuple[tuple[str, MetricFile, dict[str, str]], ...] = (
    ("reward of the training rollouts", "orchestrator", {"mean": "reward/mean"}),
    ("loss", "trainer", {"loss": "loss/mean"}),
    ("mismatch KL between trainer and engine", "trainer", {"KL": "mismatch_kl/all/mean"}),
    ("entropy", "trainer", {"entropy": "entropy/all/mean"}),
    ("gradient norm", "trainer", {"norm": "optim/grad_norm"}),
    (
        "time per step",
        "trainer",
        {
            "step": "time/step",
            "waiting for a batch": "time/wait_for_batch",
            "forward, backward": "time/forward_backward",
        },
    ),
    ("throughput of the trainer", "trainer", {"tokens/s": "perf/throughput"}),
    ("throughput of the engines", "orchestrator", {"tokens/s": "inference/tokens_per_s"}),
    (
        "completion length",
        "orchestrator",
        {"mean": "completion_tokens/mean", "90 %": "completion_tokens/p90"},
    ),
    ("staleness of rollouts", "orchestrator", {"mean": "off_policy/mean", "max": "off_policy/max"}),
    ("supervised loss", "sft", {"loss": "loss/mean", "validation": "val/loss"}),
)


def make_report(view: OneRun, found: Diagnosis) -> str:
    """Return the HTML page. ``view`` must have been refreshed."""
    run = view.run
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_secrets,
    )
    source = find_asset("templates", TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        snapshot=view.snapshot,
        created=time.strftime("%Y-%m-%d %H:%M", time.localtime()),
        facts=_facts(view),
        predicted=table_rows(view.snapshot.comparisons),
        charts=_charts(run),
        evaluations=_evaluations(run),
        attempts=_attempts(view.attempts),
        starts=starts_of(view.events),
        diagnosis=render_diagnosis(found, MAX_LOG_LINES),
        recipe=_read(run, "recipe"),
        profile=_read(run, "profile"),
        versions=_versions(run),
        events=_events(view.events),
        num_events=MAX_EVENTS,
    )


def _without_secrets(value: Any) -> Any:
    """Mask every value of the page, because reports are sent to others."""
    return mask(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _facts(view: OneRun) -> list[tuple[str, object]]:
    snapshot = view.snapshot
    rows: list[tuple[str, object]] = [("run directory", snapshot.run.root)]
    if snapshot.job:
        rows.append(("job", f"{snapshot.job.get('job_id')} ({snapshot.job.get('scheduler')})"))
    kinds = [
        f"{count} × {number} {snapshot.accelerator}" if number else f"{count} of the CPU partition"
        for count, number in snapshot.nodes_of_kinds
    ]
    rows.append(("nodes", ", ".join(kinds)))
    if view.usage:
        rows.append(("used", view.usage.sentence))
    if snapshot.bottleneck:
        rows.append(("bottleneck", snapshot.bottleneck.sentence))
    if snapshot.split_sentence:
        rows.append(("split of the nodes", snapshot.split_sentence))
    if snapshot.forecast:
        rows.append(("time", snapshot.forecast.sentence))
    return rows


def starts_of(events: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return (attempt, process, total, phases) of every start of a process that reported its phases."""
    attempt, rows = 0, []
    for event in events:
        if event["event"] == "attempt_started":
            attempt = event.get("attempt", attempt + 1)
        elif event["event"] == "role_ready" and event.get("phases"):
            total = f"{event['after_s']:.0f} s"
            rows.append((attempt, event["process"], total, phases_sentence(event["phases"])))
    return rows


def _charts(run: RunDir) -> list[str]:
    """Return the figures for which the run has data."""
    rows = {role: read_steps(run.metrics(role)) for role in ("orchestrator", "trainer", "sft")}
    figures = (
        chart(
            _with_unit(title, file, names),
            {label: _points(rows[file], name) for label, name in names.items()},
        )
        for title, file, names in CHARTS
    )
    return [figure for figure in figures if figure]


def _with_unit(title: str, file: MetricFile, names: dict[str, str]) -> str:
    """Append the unit of the metrics to the title, unless the title contains it."""
    unit = find_metric(next(iter(names.values())), file).unit
    return f"{title} ({unit})" if unit and unit not in title else title


def _points(rows: dict[int, dict[str, Any]], name: str) -> Points:
    """Return (step, value) of a metric, without steps that lack it or at which it is not finite."""
    values = [(step, row[name]) for step, row in rows.items() if isinstance(row.get(name), float | int)]
    return [(step, float(value)) for step, value in values if math.isfinite(value)]


def _evaluations(run: RunDir) -> dict[str, Any]:
    rows = read_steps(run.metrics("eval"))
    names = sorted({name for row in rows.values() for name in row if name.startswith("eval/")})
    rewards = {name.split("/")[1]: _points(rows, name) for name in names if name.endswith("/reward/mean")}
    columns = [name for name in names if name.endswith(("/reward/mean", "avg@1")) or "/pass@" in name]
    figure = chart("held-out reward by policy version", rewards)
    return {
        "chart": figure,
        "header": ["policy version", *(name.removeprefix("eval/") for name in columns)],
        "rows": [
            [f"v{version}", *(_value_text(row.get(name)) for name in columns)]
            for version, row in rows.items()
        ],
    }


def _value_text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "-")


def _attempts(attempts: list[Attempt]) -> list[tuple[object, ...]]:
    return [
        (
            attempt.number,
            attempt.job or "-",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.start)),
            format_duration((attempt.end if attempt.end is not None else time.time()) - attempt.start),
            f"step {attempt.resumed_from}" if attempt.resumed_from else "-",
        )
        for attempt in attempts
    ]


def _read(run: RunDir, name: str) -> str:
    """Return the text of the recipe or profile; "" if it cannot be read."""
    try:
        return {"recipe": run.recipe, "profile": run.profile}[name].read_text()
    except OSError:
        return ""


def _versions(run: RunDir) -> list[tuple[str, object]]:
    provenance = read_json_or_none(run.provenance)
    if not provenance:
        return []
    code = provenance.get("code") or {}
    commit = f"{code.get('commit', '?')[:12]}{', with changes' if code.get('dirty') else ''}" if code else "-"
    return [
        ("primerl-hpc", provenance.get("primerl_hpc", "?")),
        ("commit", commit),
        ("python", provenance.get("python", "?")),
        *sorted((provenance.get("packages") or {}).items()),
    ]


def _events(events: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [
        (
            time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"])),
            event["event"],
            "  ".join(
                f"{name}={value}"
                for name, value in event.items()
                if name not in ("time", "event") and value is not None
            ),
        )
        for event in events[-MAX_EVENTS:]
    ]
