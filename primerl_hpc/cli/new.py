"""``primerl-hpc new``: write a commented recipe for a model and a number of GPUs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import (
    json_option,
    load_chosen_profile,
    make_epilog,
    parse_arguments,
    print_json,
    profile_option,
)
from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError

if TYPE_CHECKING:
    from primerl_hpc.launch.new_recipe.draft import Draft
    from primerl_hpc.launch.new_recipe.request import RecipeRequest

EPILOG = make_epilog(
    "new my.yaml",
    "new my.yaml --model Qwen/Qwen3-4B --env reverse-text -p h200x8",
    "new my.yaml --kind sft --model Qwen/Qwen3-4B --data rows.jsonl",
    codes=(ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
)
QUESTIONS = {
    "model": "Model (hub id or folder)",
    "env": "Environment (id, such as math-problems or reverse-text)",
    "data": "SFT rows (a file, a folder or a hub id)",
    "teacher": "Teacher (hub id or folder)",
    "profile": "Cluster profile",
}


@click.command("new", epilog=EPILOG)
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--kind",
    type=click.Choice(["rl", "sft", "distillation", "evaluation"]),
    help="What the run does. [default: rl]",
)
@click.option("--model", help="Hub id or folder of the model.")
@click.option("--env", "environment", metavar="ID", help="Id of the environment; not for sft.")
@click.option(
    "--env-arg",
    "environment_args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the environment; repeatable.",
)
@click.option("--data", metavar="ROWS", help="sft: a file, a folder or a hub id.")
@click.option("--teacher", metavar="MODEL", help="distillation: hub id or folder of the teacher.")
@click.option(
    "--method",
    type=click.Choice(["opd", "sft_distill"]),
    default="opd",
    show_default=True,
    help="distillation: on-policy, or on the teacher's replies.",
)
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="[default: all GPUs of the profile]")
@click.option("--lora", "lora_rank", type=click.IntRange(min=1), metavar="RANK", help="Train adapters.")
@click.option("--name", help="Name of the run. [default: from environment and model]")
@click.option(
    "--seq-len", type=click.IntRange(min=1), metavar="N", help="Tokens of a sample. [default: 4096]"
)
@click.option("--max-steps", type=click.IntRange(min=1), default=200, metavar="N", show_default=True)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@profile_option
@json_option
def command(path: Path, force: bool, as_json: bool, **answers: Any) -> None:
    """Write a commented recipe to PATH, with the layout that the planner predicts to be the fastest.

    In a terminal, asks for the values that are not given.
    """
    from primerl_hpc.launch.new_recipe.draft import occupied, write_draft

    if path.exists() and not force:
        raise occupied(path)
    draft = _ask_for_draft(path, answers) if _is_interactive(as_json) else _draft_of_options(path, answers)
    warnings = _check_by_planning(draft, as_json)
    write_draft(draft, path, is_forced=force)
    _report(draft, path, warnings, as_json)


def _is_interactive(as_json: bool) -> bool:
    return not as_json and sys.stdin.isatty() and sys.stdout.isatty()


def _draft_of_options(path: Path, answers: dict[str, Any]) -> Draft:
    """Raise UsageError naming every missing option; other errors as in `make_draft`."""
    from primerl_hpc.launch.new_recipe.draft import make_draft

    if missing := _missing(answers):
        options = ", ".join(f"--{name}" for name in missing)
        raise click.UsageError(
            f"missing {options}: standard input is not a terminal, so nothing can be asked."
        )
    return make_draft(_request(answers), str(path))


def _missing(answers: dict[str, Any]) -> list[str]:
    from primerl_hpc.launch.new_recipe.request import NEEDS

    given = {**answers, "env": answers["environment"], "profile": _profile_name(answers)}
    return [name for name in NEEDS[answers["kind"] or "rl"] if not given[name]]


def _profile_name(answers: dict[str, Any]) -> str | None:
    return answers["profile_name"] or env.default_profile()


def _request(answers: dict[str, Any]) -> RecipeRequest:
    """Raise ConfigError, NotFoundError."""
    from primerl_hpc.launch.new_recipe.request import RecipeRequest

    kind = answers["kind"] or "rl"
    more = ("environment", "data", "teacher", "method", "gpus", "name", "seq_len", "max_steps", "lora_rank")
    return RecipeRequest(
        kind=kind,
        model=answers["model"],
        profile=load_chosen_profile(str(_profile_name(answers))),
        environment_args=parse_arguments(answers["environment_args"], "--env-arg"),
        **{name: answers[name] for name in more},
    )


# -- questions -------------------------------------------------------------------------------------


def _ask_for_draft(path: Path, answers: dict[str, Any]) -> Draft:
    """Ask for what is missing, and again for a value with which no recipe can be written."""
    from primerl_hpc.launch.new_recipe.draft import make_draft

    asked: set[str] = set()
    _ask_kind(answers)
    for name in _missing(answers):
        asked.add(name)
        _ask(name, answers)
    if answers["gpus"] is None and (asked or answers["profile_name"] is None):
        asked.add("gpus")
        _ask_gpus(answers)
    while True:
        try:
            return make_draft(_request(answers), str(path))
        except PrimerlError as error:
            if "gpus" not in asked:
                raise
            click.echo(f"error: {error}", err=True)
            _ask_gpus(answers)


def _ask_kind(answers: dict[str, Any]) -> None:
    from primerl_hpc.launch.new_recipe.request import KINDS

    if answers["kind"] is None:
        answers["kind"] = click.prompt("Kind", type=click.Choice(KINDS), default="rl")


def _ask(name: str, answers: dict[str, Any]) -> None:
    key = {"env": "environment", "profile": "profile_name"}.get(name, name)
    check = {"model": _check_model, "teacher": _check_model, "profile": _check_profile}.get(name)
    answers[key] = _ask_until_valid(QUESTIONS[name], check)


def _ask_until_valid(question: str, check: Callable[[str], None] | None) -> str:
    while True:
        answer = str(click.prompt(question)).strip()
        try:
            if check is not None:
                check(answer)
        except PrimerlError as error:
            click.echo(f"error: {error}", err=True)
        else:
            return answer


def _check_model(name: str) -> None:
    from primerl_hpc.checks.recipe.model_config import find_config

    find_config(name, {})


def _check_profile(name: str) -> None:
    load_chosen_profile(name)


def _ask_gpus(answers: dict[str, Any]) -> None:
    profile = load_chosen_profile(str(_profile_name(answers))).profile
    if profile.node.gpus:
        most = profile.nodes * profile.node.gpus
        answers["gpus"] = click.prompt("GPUs", type=click.IntRange(min=1), default=most)


# -- result ----------------------------------------------------------------------------------------


def _check_by_planning(draft: Draft, as_json: bool) -> list[str]:
    """Plan the recipe on its profile, and print the plan. Returns the warnings. Raises ConfigError if it does not fit.

    What is only missing on this machine, such as the weights, is a warning.
    """
    from primerl_hpc.cli.plan import show_forecast, show_plan
    from primerl_hpc.launch.planning.forecast import refuse_misfit
    from primerl_hpc.launch.preview import preview

    plan, forecast, warnings = preview(draft.loaded, draft.request.profile)
    refuse_misfit(forecast)
    if not as_json:
        show_plan(plan)
        show_forecast(forecast)
    return warnings


def _report(draft: Draft, path: Path, warnings: list[str], as_json: bool) -> None:
    profile = draft.request.profile_name
    if not as_json:
        click.echo(
            f"\nwrote {path}; next:  primerl-hpc submit {shlex.quote(str(path))} -p {profile} --dry-run"
        )
        return
    sized = draft.sized
    layout = asdict(sized.choice) if sized is not None else None
    figures = sized.prediction.figures if sized is not None else {}
    print_json(
        {
            "path": str(path),
            "recipe": draft.loaded.recipe.model_dump(mode="json", exclude_unset=True),
            "profile": profile,
            "gpus": sized.gpus if sized is not None else None,
            "layout": layout,
            "figures": {name: figure.value for name, figure in figures.items()},
            "warnings": warnings,
        }
    )
