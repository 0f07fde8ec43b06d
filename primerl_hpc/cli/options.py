"""Options, arguments and helpers that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from primerl_hpc.cli.values import PROFILE, PROFILE_KEY, RECIPE, RECIPE_KEY, RUN
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.log import show_warnings

_CHANGES = "primerl_hpc.profile_overrides"
_VARIANT = "primerl_hpc.profile_variant"
_REFUSES_CODE = "primerl_hpc.no_custom_code"
_JOB_OPTIONS = ("partition", "account", "qos", "time", "reservation")
"""Keys of ``scheduler`` that often differ between runs; each has its own flag, named as in sbatch."""
EXIT_MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "usage error",
    ExitCode.DATA: "invalid data",
    ExitCode.NOT_FOUND: "not found",
    ExitCode.UNAVAILABLE: "scheduler unavailable",
    ExitCode.OCCUPIED: "occupied or owned by another user",
    ExitCode.STOPPED: "stopped, state saved",
    ExitCode.PREEMPTED: "preempted before a save",
    ExitCode.CONFIG: "invalid configuration",
    ExitCode.NO_CONTINUE: "cannot continue",
    ExitCode.BAD_NODE: "bad node excluded",
}
"""Short meaning of each exit code, for help texts."""
RUN_CODES = (ExitCode.NOT_FOUND, ExitCode.OCCUPIED)
"""Exit codes of commands that read a run."""
SUBMIT_CODES = (
    ExitCode.DATA,
    ExitCode.NOT_FOUND,
    ExitCode.UNAVAILABLE,
    ExitCode.OCCUPIED,
    ExitCode.CONFIG,
)
"""Exit codes of commands that submit a run."""
FOLLOWED_CODES = "With --follow: the exit code of the run, see `primerl-hpc --help`."
"""Sentence about the exit codes of commands with ``--follow``."""


def make_epilog(*examples: str, codes: tuple[ExitCode, ...] = (), more: str = "") -> str:
    """Return the end of a command's help: examples, then its exit codes.

    ``examples``: command lines without ``primerl-hpc``. ``codes``: exit codes in addition to 0, 1 and 2. ``more``: a
    sentence about further codes.
    """
    heading = "Example:" if len(examples) == 1 else "Examples:"
    lines = ["\b", heading, *(f"  primerl-hpc {example}" for example in examples), ""]
    known = sorted({ExitCode.DONE, ExitCode.FAILED, ExitCode.USAGE, *codes})
    meanings = ", ".join(f"{int(code)} {EXIT_MEANINGS[code]}" for code in known)
    return "\n".join([*lines, f"Exit codes: {meanings}.{f' {more}' if more else ''}"])


def _note_change(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Collect a change such as ``scheduler.time=60`` for `job_changes`; the flags override ``--profile-set``."""
    if value == "":
        raise click.BadParameter("must not be empty")
    if not value:
        return
    changes = ctx.meta.setdefault(_CHANGES, [])
    if param.name == "profile_set":
        changes[:0] = value
    elif param.name == "allow_shared_parent":
        changes.append("allow_shared_parent=true")
    else:
        changes.append(f"scheduler.{param.name}={value}")


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--profile-set k=v`` and flags of common keys such as ``--time``; `job_changes` returns their values."""
    for name in reversed(_JOB_OPTIONS):
        flag = click.option(
            f"--{name}",
            callback=_note_change,
            expose_value=False,
            help=f"Override scheduler.{name} of the profile.",
        )
        function = flag(function)
    change = click.option(
        *("--profile-set", "profile_set"),
        multiple=True,
        type=PROFILE_KEY,
        metavar="KEY=VALUE",
        callback=_note_change,
        expose_value=False,
        help="Override a key of the profile; repeatable.",
    )
    return change(function)


def job_changes() -> list[str]:
    """Return the profile changes of this command line as ``key=value``; later ones take precedence."""
    return list(click.get_current_context().meta.get(_CHANGES, ()))


choose_profile = click.option(
    "--profile",
    "-p",
    "profile_name",
    type=PROFILE,
    help="Use this cluster profile, a name or a file. [env: PRIMERL_PROFILE]",
)


def _note_variant(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    ctx.meta[_VARIANT] = value


choose_variant = click.option(
    "--variant",
    callback=_note_variant,
    expose_value=False,
    help="Use this variant of the profile, e.g. debug; `primerl-hpc doctor` lists them.",
)


def profile_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--profile P``, ``--variant V`` and the `job_options`."""
    return choose_profile(choose_variant(job_options(function)))


set_option = click.option(
    "--set",
    "overrides",
    type=RECIPE_KEY,
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the recipe; repeatable.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON document.")


def _note_no_code(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_REFUSES_CODE] = value


no_custom_code_option = click.option(
    "--no-custom-code",
    is_flag=True,
    callback=_note_no_code,
    expose_value=False,
    help="Refuse a recipe that names custom code: packages, import paths, trust_remote_code.",
)


def check_custom_code(recipe: Any) -> None:
    """Raise ConfigError if the recipe names custom code and ``--no-custom-code`` was given."""
    from primerl_hpc.recipe.custom_code import refuse_custom_code

    if click.get_current_context().meta.get(_REFUSES_CODE):
        refuse_custom_code(recipe)


def refuse_options(names: Collection[str | None], why: str) -> None:
    """Raise UsageError if one of the options was given on the command line, where it would have no effect."""
    context = click.get_current_context()
    for option in context.command.params:
        source = option.name in names and context.get_parameter_source(str(option.name))
        if source == ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option.opts[0]} {why}")


def lines_option(default: int, about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--lines N``, ``-n N``."""
    return click.option(
        *("--lines", "-n"),
        type=click.IntRange(min=1),
        default=default,
        metavar="N",
        show_default=True,
        help=about,
    )


def chain_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--chain N``, ``--until-done``, ``--here`` and ``--budget``; `requested_jobs` returns their values."""
    chain = click.option(
        "--chain",
        "links",
        type=click.IntRange(min=1),
        default=1,
        metavar="N",
        help="Queue N jobs; each continues where the walltime ended the previous one.",
    )
    until_done = click.option(
        "--until-done",
        is_flag=True,
        help="Let each job queue the next one before its walltime ends, until the run is done.",
    )
    here = click.option(
        "--here",
        "is_here",
        is_flag=True,
        help="Start in the allocation of this shell (salloc), without sbatch. It must have enough nodes.",
    )
    budget = click.option(
        "--budget",
        metavar="HOURS",
        help="Save and stop before all attempts together exceed this many hours: 500GPUh or 60nodeh.",
    )
    return chain(until_done(here(budget(function))))


def requested_jobs(options: dict[str, Any]) -> Any:
    """Remove the values of `chain_options` from ``options``; return them as a `ChainRequest`."""
    from primerl_hpc.launch.compose import ChainRequest

    names = ("links", "until_done", "is_here", "budget")
    return ChainRequest(*(options.pop(name) for name in names))


def run_dir_option(about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--run-dir D``."""
    return click.option("--run-dir", type=click.Path(path_type=Path), help=about)


shared_parent_option = click.option(
    "--allow-shared-parent",
    is_flag=True,
    callback=_note_change,
    expose_value=False,
    help="Accept a run directory below a folder that other users can write. They could replace it and run code as you.",
)
live_code_option = click.option(
    "--live-code",
    "is_live",
    is_flag=True,
    help="Run this installation or checkout as it is when the job starts, not a copy of it in the run directory.",
)
dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    help="Check everything and show the plan, but start nothing; with --run-dir also prepare that directory. The exit "
    "code is that of a submission.",
)
follow_option = click.option(
    "--follow", "-f", is_flag=True, help="Show progress until the run ends; ^C stops only the display."
)
index_option = click.option(
    "--index",
    type=click.IntRange(min=0),
    default=0,
    metavar="I",
    show_default=True,
    help="Select this process of the role.",
)
phase_option = click.option(
    "--phase", help="Select this phase of the plan. [default: the one with this role]"
)
run_argument = click.argument("run", type=RUN, required=False)


def recipe_and_profile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``RECIPE --profile P --set k=v``."""
    return click.argument("recipe", type=RECIPE)(profile_option(set_option(function)))


def load_both(recipe: str, profile_name: str | None, overrides: tuple[str, ...]) -> tuple[Any, Any]:
    """Load the recipe and the profile. Warnings about the recipe are printed to stderr.

    Raises ConfigError, NotFoundError.
    """
    from primerl_hpc.plan.env import cache_variables
    from primerl_hpc.recipe.load import load_recipe
    from primerl_hpc.recipe.schema.cross_checks import deprecation_warnings

    name = profile_name or env.default_profile()
    if name is None:
        from primerl_hpc.common.assets import list_assets

        known = ", ".join(file.removesuffix(".yaml") for file in list_assets("cluster_profiles"))
        raise ConfigError("no cluster profile was given", hint=f"use --profile with one of: {known}")
    loaded = load_recipe(recipe, overrides=list(overrides))
    show_warnings((*loaded.warnings, *deprecation_warnings(loaded.recipe)))
    profile = for_recipe(load_chosen_profile(name), loaded)
    env.set_variables(cache_variables(profile.profile))  # datasets of the recipe are opened in this process
    return loaded, profile


def load_chosen_profile(name: str) -> Any:
    """Load the profile and apply the changes of this command line. Raises ConfigError, NotFoundError."""
    from primerl_hpc.cluster.load import load_profile

    variant = click.get_current_context().meta.get(_VARIANT)
    loaded = load_profile(name, overrides=job_changes(), variant=variant)
    show_warnings(loaded.warnings)
    return loaded


def for_recipe(profile: Any, loaded: Any) -> Any:
    """Return the profile, without GPUs if the recipe starts no engines."""
    if not loaded.recipe.is_external:
        return profile
    from primerl_hpc.launch.evaluate import without_gpus

    return without_gpus(profile, job_changes())


def print_json(value: Any) -> None:
    """Print one JSON document to stdout."""
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))


def confirm(question: str) -> bool:
    """Ask on stderr. Raises UsageError if there is no terminal and no answer, and click.Abort on ^C."""
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        click.echo(err=True)
        raise click.UsageError("no answer, because there is no terminal; add --yes to delete") from None
