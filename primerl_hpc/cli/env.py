"""``primerl-hpc env``: environments, before a run."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import click

from primerl_hpc.cli.options import json_option, print_json


@click.group("env", epilog="Example:  primerl-hpc env check reverse-text")
def command() -> None:
    """Try an environment out, or install one."""


@command.command(
    "check",
    epilog="Example:  primerl-hpc env check alphabet-sort --arg turns=2 --url http://localhost:8000/v1 --model qwen3",
)
@click.argument("environment_id", metavar="ID")
@click.option(
    "--arg", "args", multiple=True, metavar="KEY=VALUE", help="Argument of its taskset; repeatable."
)
@click.option("--url", help="An OpenAI-compatible server (…/v1): also run the first task there.")
@click.option("--model", default="", help="Model to ask for at --url.")
@click.option(
    "--key-variable",
    default="OPENAI_API_KEY",
    show_default=True,
    help="Variable that holds the server's key.",
)
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Longest reply of one turn.")
@click.option(
    "--timeout", "timeout_s", type=float, default=120.0, show_default=True, help="Seconds for the rollout."
)
@json_option
def check(
    environment_id: str,
    args: tuple[str, ...],
    url: str | None,
    model: str,
    key_variable: str,
    max_tokens: int,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Load environment ID and its tasks, and run one task where --url says; fails when there is no reward."""
    from primerl_hpc.envs.check import check_environment
    from primerl_hpc.recipe.rollout_schema import Environment

    report = check_environment(
        Environment(id=environment_id, args=_arguments(args)),
        url=url,
        model=model,
        key_variable=key_variable,
        max_tokens=max_tokens,
        timeout_s=timeout_s,
    )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    click.echo(f"{report.environment}: {report.num_tasks}{' or more' if report.has_more else ''} tasks")
    click.echo(f"  agents      {', '.join(report.agents)}")
    click.echo(f"  first task  {report.first_task}")
    for trace in (report.rollout or {"traces": []})["traces"]:
        rewards = ", ".join(f"{name} {value:g}" for name, value in trace["rewards"].items())
        click.echo(f"  {trace['agent']:<10}  {rewards} after {trace['turns']} turns ({trace['stop']})")
        for message in trace["messages"]:
            click.echo(f"    {message['role']:<10}{message['content']}")
    for warning in report.warnings:
        click.echo(f"  note        {warning}")


@command.command(
    "install",
    epilog="Example:  primerl-hpc env install ./my-environment --target /shared/envs -- --no-deps",
)
@click.argument("package")
@click.option(
    "--target",
    help="Install into this folder instead of this Python; name it in the recipe: env: {PYTHONPATH: FOLDER}.",
)
@click.argument("pip_arguments", nargs=-1)
def install(package: str, target: str | None, pip_arguments: tuple[str, ...]) -> None:
    """Install PACKAGE (a folder, a git URL, a name at the package index) by pip; more arguments of pip after ``--``."""
    from primerl_hpc.common.errors import ConfigError

    into = ["--target", target] if target else []
    words = [sys.executable, "-m", "pip", "install", *into, *pip_arguments, package]
    if subprocess.run(words, check=False).returncode:
        raise ConfigError(f"pip could not install {package}", mend="its words are above")
    click.echo("installed; try it out with: primerl-hpc env check ID")


def _arguments(words: tuple[str, ...]) -> dict[str, Any]:
    """``turns=2`` → {"turns": 2}; values are YAML. Raises click's UsageError."""
    from primerl_hpc.common.yamldoc import parse_value

    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise click.UsageError(f"--arg {word}: write KEY=VALUE")
        found[key] = parse_value(value)
    return found
