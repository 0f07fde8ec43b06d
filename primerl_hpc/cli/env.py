"""``primerl-hpc env``: check or install environments before a run."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, make_epilog, parse_arguments, print_json
from primerl_hpc.common.errors import ExitCode

CODES = (ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.CONFIG)


@click.group("env", epilog=make_epilog("env check reverse-text", codes=CODES))
def command() -> None:
    """Check an environment, or install one."""


@command.command(
    "check",
    epilog=make_epilog(
        "env check alphabet-sort --arg turns=2",
        "env check alphabet-sort --url http://host:8000/v1 --model qwen3",
        codes=CODES,
    ),
)
@click.argument("environment_id", metavar="ID")
@click.option(
    "--arg",
    "args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Pass an argument to the environment's taskset; repeatable.",
)
@click.option("--url", help="Also run the first task on this OpenAI-compatible server (…/v1).")
@click.option("--model", default="", help="Request this model from --url.")
@click.option(
    "--key-variable",
    default="OPENAI_API_KEY",
    show_default=True,
    help="Read the server's API key from this environment variable.",
)
@click.option("--max-tokens", type=int, default=512, show_default=True, help="Limit the reply of one turn.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=120.0,
    show_default=True,
    help="Limit the rollout to this many seconds.",
)
@click.option("--target", help="Import from this folder of env install --target first.")
@json_option
def check(
    environment_id: str,
    args: tuple[str, ...],
    url: str | None,
    model: str,
    key_variable: str,
    max_tokens: int,
    timeout_s: float,
    target: str | None,
    as_json: bool,
) -> None:
    """Load environment ID and its tasks, and run one task on --url. Fails if there is no reward."""
    from primerl_hpc.common.errors import PrimerlError
    from primerl_hpc.envs.check import check_environment
    from primerl_hpc.envs.install import importable, shadowed_packages
    from primerl_hpc.recipe.schema.rollout import Environment

    with importable(target):
        shadowed = shadowed_packages(target) if target is not None else []
        try:
            report = check_environment(
                Environment(id=environment_id, args=parse_arguments(args, "--arg")),
                url=url,
                model=model,
                key_variable=key_variable,
                max_tokens=max_tokens,
                timeout_s=timeout_s,
            )
        except PrimerlError as error:
            # Shadowed packages are the likely cause.
            error.hint = "; ".join(filter(None, (error.hint, *shadowed)))
            raise
    report.warnings += shadowed
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    click.echo(f"{report.environment}: {report.num_tasks}{' or more' if report.has_more else ''} tasks")
    click.echo(f"  package     {report.location}")
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
    short_help="Install PACKAGE with pip, without changing other packages.",
    epilog=make_epilog(
        "env install owner/name@0.1.3",
        "env install ./my-environment --target /shared/envs -- --pre",
        codes=CODES,
    ),
)
@click.argument("package")
@click.option(
    "--index",
    help="Index of packages owner/name. [env: PRIMERL_ENV_INDEX] [default: https://hub.primeintellect.ai]",
)
@json_option
@click.option(
    "--target",
    help="Install into this folder instead of this Python. Add it to the recipe: env: {PYTHONPATH: FOLDER}.",
)
@click.argument("pip_arguments", nargs=-1)
def install(
    package: str, index: str | None, as_json: bool, target: str | None, pip_arguments: tuple[str, ...]
) -> None:
    """Install PACKAGE with pip: owner/name or owner/name@version of the Environments Hub, a folder, a git URL, or a
    name on the package index.

    A package of the hub is pinned by its checksum, and must use verifiers.v1. Arguments after -- are passed to pip.
    Packages that primerl-hpc needs keep their versions; with --target, packages that this Python already has are not
    installed again.
    """
    from primerl_hpc.envs.hub import install_from_hub
    from primerl_hpc.envs.install import install_package
    from primerl_hpc.recipe.hub import parse_package

    hub = parse_package(package) if not Path(package).exists() else None
    if hub is None and index is not None:
        raise click.UsageError("--index is for packages of the form owner/name or owner/name@version")
    pin = None
    if hub is None:
        installed = install_package(package, target=target, pip_arguments=pip_arguments)
    else:
        done = install_from_hub(hub, index, target=target, pip_arguments=pip_arguments)
        installed, pin = done.installed, done.pin
    if as_json:
        facts = {"name": installed.name, "added": list(installed.added), "target": target}
        if pin is not None:
            facts |= {"package": str(pin.package), "url": pin.url, "sha256": pin.sha256}
        print_json(facts)
        return
    where = f" into {target}" if target else ""
    added = f", with {', '.join(installed.added)}" if installed.added else ""
    click.echo(f"installed {installed.name}{where}{added}")
    if pin is not None:
        click.echo(f"    {pin.url}")
        click.echo(f"    sha256 {pin.sha256}")
        click.echo(f"in a recipe:  id: {pin.package.name}, package: {pin.package}")
    option = f" --target {shlex.quote(target)}" if target else ""
    click.echo(f"try it with: primerl-hpc env check {shlex.quote(installed.name)}{option}")
