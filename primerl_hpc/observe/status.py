"""``status``: all runs as a table, or one run in depth; the same screen again and again with ``--watch``."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.plot import format_count, format_duration
from primerl_hpc.observe.snapshot import Snapshot

_COLORS = {
    RunState.RUNNING: "green",
    RunState.DONE: "cyan",
    RunState.FAILED: "red",
    RunState.STOPPED: "yellow",
    RunState.CANCELLED: "yellow",
}


def table(snapshots: list[Snapshot]) -> str:
    """One line a run, 80 columns."""
    if not snapshots:
        return "no runs yet; start one with primerl-hpc submit"
    lines = [f"{'RUN':<30} {'STATE':<10} {'PHASE':<8} {'STEP':>11} {'REWARD':>7} {'LEFT':>9}"]
    for each in snapshots:
        reward = each.metrics.get("reward/mean")
        left = format_duration(each.seconds_left) if each.seconds_left is not None else "-"
        lines.append(
            f"{_cut(each.name, 30):<30} {_colored(each.state, 10)} {each.phase or '-':<8} "
            f"{f'{each.step}/{each.max_steps}':>11} {f'{reward:.3f}' if reward is not None else '-':>7} {left:>9}"
        )
    return "\n".join(lines)


def depth(snapshot: Snapshot) -> str:
    """One run: state, numbers, processes, last events."""
    m = snapshot.metrics
    lines = [
        f"{snapshot.name}  {_colored(snapshot.state)}  {snapshot.kind}, attempt {snapshot.attempt}",
        f"  {snapshot.run.root}",
    ]
    if snapshot.message:
        lines.append(f"  {snapshot.message}")
    if snapshot.job:
        lines.append(f"  job {snapshot.job.get('job_id')} ({snapshot.job.get('scheduler')})")
    left = f", {format_duration(snapshot.seconds_left)} left" if snapshot.seconds_left is not None else ""
    lines.append(f"\nphase {snapshot.phase or '-'}: step {snapshot.step}/{snapshot.max_steps}{left}")
    shown = [
        ("reward", "reward/mean", "{:.3f}"),
        ("loss", "loss/mean", "{:+.4f}"),
        ("mismatch KL", "mismatch_kl/all/mean", "{:.1e}"),
        ("entropy", "entropy/all/mean", "{:.3f}"),
        ("age max", "off_policy/max", "{:.0f}"),
        ("s/step", "time/step", "{:.2f}"),
    ]
    numbers = [
        f"{label} {form.format(m[key])}" for label, key, form in shown if isinstance(m.get(key), float | int)
    ]
    if "perf/throughput" in m:
        numbers.append(f"{format_count(m['perf/throughput'])} tok/s")
    if numbers:
        lines.append("  " + "  ".join(numbers))
    lines.append(f"\n{'PROCESS':<18} {'STATE':<10} {'RESTARTS':>8}  WHERE")
    for name, process in snapshot.processes.items():
        where = process.get("exit") or process.get("url") or ""
        lines.append(
            f"{name:<18} {process.get('state', '?'):<10} {process.get('incarnation', 0):>8}  {where}"
        )
    lines.append("\nlast events")
    for event in list(read_jsonl(snapshot.run.events))[-6:]:
        rest = "  ".join(f"{k}={v}" for k, v in event.items() if k not in ("time", "event") and v is not None)
        lines.append(
            f"  {time.strftime('%H:%M:%S', time.localtime(event['time']))}  {event['event']:<18} {rest}"[:110]
        )
    return "\n".join(lines)


def watch(draw: Callable[[], str], interval_s: float) -> None:
    """Redraw until ^C."""
    try:
        while True:
            screen = draw()
            click.clear()
            click.echo(screen)
            time.sleep(interval_s)
    except KeyboardInterrupt:
        click.echo()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _colored(state: RunState, width: int = 0) -> str:
    return click.style(f"{state.value:<{width}}", fg=_COLORS.get(state))
