"""Print the summary of a finished run: reward curve, held-out rewards, paths of results, next commands."""

from __future__ import annotations

import math
from typing import Any

import click

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.diagnose.advice import advise
from primerl_hpc.observe.diagnose.known_faults import recognize_fault
from primerl_hpc.observe.plot import text_plot
from primerl_hpc.observe.table import score_text
from primerl_hpc.observe.text import display_path, format_count, format_duration
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.registry import word_for
from primerl_hpc.run.rundir import RunDir


def print_summary(run: RunDir, state: RunState, message: str | None, seconds: float) -> None:
    """Print the summary, or the failure of a failed run. ``seconds``: for how long the run was followed."""
    click.echo()
    if state == RunState.FAILED:
        _print_failure(run, message)
        return
    batches, steps = read_steps(run.metrics("orchestrator")), read_steps(run.metrics("trainer"))
    rewards = {
        step: row["reward/mean"]
        for step, row in batches.items()
        if math.isfinite(row.get("reward/mean", math.nan))
    }
    if rewards:
        click.echo("reward of the training rollouts")
        click.echo(text_plot(list(rewards), list(rewards.values())))
        click.echo()
    if run.scores.exists():
        click.echo(score_text(run) + "\n")
    else:
        for line in _evaluations(run):
            click.echo(line)
    trained = steps or read_steps(run.metrics("sft"))
    if steps:
        last = list(steps.values())[-3:]
        kl = sum(row.get("mismatch_kl/all/mean", 0.0) for row in last) / len(last)
        click.echo(f"mismatch KL     {kl:.2e} (mean of the last {len(last)} steps)")
    if trained:
        speed = [row["perf/throughput"] for row in trained.values() if "perf/throughput" in row]
        mean = format_count(sum(speed) / max(1, len(speed)))
        click.echo(
            f"steps           {max(trained)}, {mean} tokens/s in the trainer, {format_duration(seconds)} in total"
        )
    _print_paths(run, state, "trainer" if steps else "sft" if trained else "")


def _evaluations(run: RunDir) -> list[str]:
    """Return one line per environment: ``held-out  v0 0.571 → v60 0.963``."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for version, row in read_steps(run.metrics("eval")).items():
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith("/reward/mean"):
                curves.setdefault(name.split("/")[1], []).append((version, value))
    return [
        f"{name:<15} " + " → ".join(f"v{version} {value:.3f}" for version, value in _thin(points))
        for name, points in curves.items()
    ]


def _thin(points: list[tuple[int, float]], most: int = 5) -> list[tuple[int, float]]:
    if len(points) <= most:
        return points
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _print_paths(run: RunDir, state: RunState, trainer: str) -> None:
    versions = run.stable_weights()
    if versions:
        click.echo(f"weights         {display_path(run.weights_step(versions[-1]))}")
    if run.scores.exists():
        click.echo(f"scores          {display_path(run.scores)}")
        click.echo(f"rollouts        {display_path(run.traces('eval'))}")
    click.echo(f"logs            {display_path(run.latest_logs)}")
    click.echo(f"metrics         {display_path(run.root / 'metrics')}")
    name = word_for(run)
    if state in (RunState.STOPPED, RunState.CANCELLED):
        _print_next(advise(run, state, None, None)[2].removeprefix("primerl-hpc "))
    elif run.scores.exists():
        _print_next(f"scores {name} --svg scores.svg")
    else:
        _print_next(f"status {name}", f"logs {name} {trainer}".rstrip())


def _print_failure(run: RunDir, message: str | None) -> None:
    failure: dict[str, Any] = read_json_or_none(run.failure) or {}
    name, reported = word_for(run), str(failure.get("message") or message)
    if failure:
        rank = f", rank {failure['rank']}" if failure.get("rank") is not None else ""
        ended = failure.get("signal") or f"exit code {failure.get('exit_code')}"
        click.echo(f"first failure: {failure['process']} on {failure['node']}{rank}: {ended}")
        click.echo(f"    {failure.get('message')}")
        click.echo(f"    log: {failure.get('log')}")
    else:
        click.echo(f"failed: {message}")
    known = recognize_fault(reported, failure.get("last_lines", ()))
    can_retry, _, command = advise(run, RunState.FAILED, failure, known)
    _print_next(f"diagnose {name}", *([command.removeprefix("primerl-hpc ")] if can_retry else []))


def _print_next(*commands: str) -> None:
    """Print one command per line, because names of runs may be long."""
    label = "next:"
    click.echo()
    for command in commands:
        click.echo(f"{label}  primerl-hpc {command}")
        label = " " * len(label)
