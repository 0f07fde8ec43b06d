"""``report``: a run on one page to keep or to send: curves, evaluations, attempts, hours, faults, recipe and versions.

One HTML file without scripts or links to anything outside. Everything in it comes from the run directory, so it can be
made of a run that is long over, on any machine that sees its files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.depth import OneRun
from primerl_hpc.observe.diagnose import Diagnosis, tell
from primerl_hpc.observe.plot import format_duration
from primerl_hpc.observe.svg import Points, chart
from primerl_hpc.observe.usage import Attempt

LAST_EVENTS = 100
_CHARTS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("reward of the training rollouts", "orchestrator", {"mean": "reward/mean"}),
    ("loss", "trainer", {"loss": "loss/mean"}),
    ("mismatch KL between trainer and engine", "trainer", {"KL": "mismatch_kl/all/mean"}),
    ("entropy", "trainer", {"entropy": "entropy/all/mean"}),
    ("gradient norm", "trainer", {"norm": "optim/grad_norm"}),
    (
        "seconds a step",
        "trainer",
        {
            "step": "time/step",
            "waiting for a batch": "time/wait_for_batch",
            "forward, backward": "time/forward_backward",
        },
    ),
    ("trainer tokens/s", "trainer", {"tokens/s": "perf/throughput"}),
    ("engine tokens/s", "orchestrator", {"tokens/s": "inference/tokens_per_s"}),
    (
        "completion tokens",
        "orchestrator",
        {"mean": "completion_tokens/mean", "90 %": "completion_tokens/p90"},
    ),
    ("age of rollouts in steps", "orchestrator", {"mean": "off_policy/mean", "max": "off_policy/max"}),
    ("supervised loss", "sft", {"loss": "loss/mean", "validation": "val/loss"}),
)
_STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin: 2rem 0 .5rem } table { border-collapse: collapse } td, th { text-align: left; padding: .15rem .9rem .15rem 0;
vertical-align: top } th { font-weight: 600 } pre { overflow-x: auto; padding: .7rem; border: 1px solid #8884; border-radius: 4px; font-size: 12.5px }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: .5rem 1.5rem } figure { margin: 0; max-width: 40rem }
figcaption { font-size: 13px } svg { width: 100% } svg text { font-size: 11px; fill: currentColor } .dim { opacity: .7 }
"""


def make_report(view: OneRun, found: Diagnosis) -> str:
    """``view`` has been looked at. Text of one HTML page."""
    run, snapshot = view.run, view.snapshot
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    sections = [
        f"<h1>{escape(snapshot.name)}</h1>",
        f'<p class="dim">{escape(snapshot.kind)}, {escape(snapshot.state.value)} at step {snapshot.step} of '
        f"{snapshot.max_steps}; report of {made}</p>",
        _facts(view),
        _section("Curves", f'<div class="charts">{"".join(_charts(run))}</div>'),
        _section("Evaluations", _evaluations(run)),
        _section("Attempts", _attempts(view.attempts)),
        _section("Diagnosis", _pre(tell(found, 30))),
        _section("Recipe", _pre(_read(run, "recipe"))),
        _section("Cluster profile", _pre(_read(run, "profile"))),
        _section("Versions", _versions(run)),
        _section(f"Last {LAST_EVENTS} events", _events(view.events)),
    ]
    title = f"<title>{escape(snapshot.name)}</title>"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{title}<style>{_STYLE}</style></head>'
    return f"{head}<body>{''.join(sections)}</body></html>\n"


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _pre(text: str) -> str:
    return f"<pre>{escape(text)}</pre>" if text.strip() else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _facts(view: OneRun) -> str:
    snapshot = view.snapshot
    rows: list[tuple[str, object]] = [("run directory", snapshot.run.root)]
    if snapshot.job:
        rows.append(("job", f"{snapshot.job.get('job_id')} ({snapshot.job.get('scheduler')})"))
    rows.append(("nodes", f"{snapshot.num_nodes} × {snapshot.accelerators_per_node} {snapshot.accelerator}"))
    if view.usage:
        rows.append(("used", view.usage.sentence))
    if snapshot.bottleneck:
        rows.append(("bottleneck", snapshot.bottleneck.sentence))
    if snapshot.forecast:
        rows.append(("time", snapshot.forecast.sentence))
    return _table(("", ""), rows)


def _charts(run: RunDir) -> list[str]:
    rows = {role: read_steps(run.metrics(role)) for role in ("orchestrator", "trainer", "sft")}
    return [
        chart(title, {label: _points(rows[role], name) for label, name in names.items()})
        for title, role, names in _CHARTS
    ]


def _points(rows: dict[int, dict[str, Any]], name: str) -> Points:
    """Without steps at which it was not measured, or not a number."""
    values = [(step, row[name]) for step, row in rows.items() if isinstance(row.get(name), float | int)]
    return [(step, float(value)) for step, value in values if math.isfinite(value)]


def _evaluations(run: RunDir) -> str:
    rows = read_steps(run.metrics("eval"))
    names = sorted({name for row in rows.values() for name in row if name.startswith("eval/")})
    rewards = {name.split("/")[1]: _points(rows, name) for name in names if name.endswith("/reward/mean")}
    shown = [name for name in names if name.endswith(("/reward/mean", "avg@1")) or "/pass@" in name]
    table = _table(
        ("policy version", *(name.removeprefix("eval/") for name in shown)),
        ((f"v{version}", *(_cell(row.get(name)) for name in shown)) for version, row in rows.items()),
    )
    return chart("held-out reward by policy version", rewards) + table


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value if value is not None else "-")


def _attempts(attempts: list[Attempt]) -> str:
    return _table(
        ("attempt", "job", "started", "lasted", "goes on after"),
        (
            (
                each.number,
                each.job or "-",
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.start)),
                format_duration((each.end if each.end is not None else time.time()) - each.start),
                f"step {each.resumed_from}" if each.resumed_from else "the beginning",
            )
            for each in attempts
        ),
    )


def _read(run: RunDir, name: str) -> str:
    try:
        return {"recipe": run.recipe, "profile": run.profile}[name].read_text()
    except OSError:
        return ""


def _versions(run: RunDir) -> str:
    known = read_json_or_none(run.provenance) or {}
    code = known.get("code") or {}
    commit = f"{code.get('commit', '?')[:12]}{', with changes' if code.get('dirty') else ''}" if code else "-"
    rows = [
        ("primerl-hpc", known.get("primerl_hpc", "?")),
        ("commit", commit),
        ("python", known.get("python", "?")),
    ]
    return _table(("", ""), [*rows, *sorted((known.get("packages") or {}).items())]) if known else ""


def _events(events: list[dict[str, Any]]) -> str:
    return _table(
        ("time", "event", ""),
        (
            (
                time.strftime("%m-%d %H:%M:%S", time.localtime(event["time"])),
                event["event"],
                "  ".join(
                    f"{k}={v}" for k, v in event.items() if k not in ("time", "event") and v is not None
                ),
            )
            for event in events[-LAST_EVENTS:]
        ),
    )
