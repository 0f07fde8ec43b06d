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


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Keep the value of an option that functions of this module read, so that no command passes it on."""
    if value == "":
        raise click.BadParameter("must not be empty")
    ctx.meta[f"{__name__}.{param.name}"] = value


def _remembered(name: str) -> Any:
    return click.get_current_context().meta.get(f"{__name__}.{name}")


def _own_option(*words: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option whose value is `_remembered`."""
    return click.option(*words, callback=_remember, expose_value=False, **settings)


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--profile-set k=v`` and flags of common keys such as ``--time``; `job_changes` returns their values."""
    for name in reversed(_JOB_OPTIONS):
        function = _own_option(f"--{name}", help=f"Override scheduler.{name} of the profile.")(function)
    about = "Override a key of the profile; repeatable."
    return _own_option("--profile-set", multiple=True, type=PROFILE_KEY, metavar="KEY=VALUE", help=about)(
        function
    )


def job_changes() -> list[str]:
    """Return the profile changes of this command line as ``key=value``; later ones take precedence."""
    flags = [f"scheduler.{name}={value}" for name in _JOB_OPTIONS if (value := _remembered(name))]
    shared = ["allow_shared_parent=true"] if _remembered("allow_shared_parent") else []
    return [*(_remembered("profile_set") or ()), *flags, *shared]


choose_profile = click.option(
    *("--profile", "-p", "profile_name"),
    type=PROFILE,
    help="Use this cluster profile, a name or a file. [env: PRIMERL_PROFILE]",
)
choose_variant = _own_option(
    "--variant", help="Use this variant of the profile, e.g. debug; `primerl-hpc doctor` lists them."
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


no_custom_code_option = _own_option(
    "--no-custom-code",
    is_flag=True,
    help="Refuse a recipe that names custom code: packages, import paths, trust_remote_code.",
)


def check_custom_code(recipe: Any) -> None:
    """Raise ConfigError if the recipe names custom code and ``--no-custom-code`` was given."""
    from primerl_hpc.recipe.custom_code import refuse_custom_code

    if _remembered("no_custom_code"):
        refuse_custom_code(recipe)


def check_environments(recipe: Any) -> None:
    """Raise ConfigError for custom code that is refused, and for tools or judges without what they need."""
    from primerl_hpc.envs.judges import check_judges
    from primerl_hpc.envs.tools import check_tools

    check_custom_code(recipe)
    check_tools(recipe)
    check_judges(recipe)


def parse_arguments(words: tuple[str, ...], option: str) -> dict[str, Any]:
    """Return the arguments of an environment: ``turns=2`` is {"turns": 2}, values are YAML. Raises BadParameter."""
    from primerl_hpc.common.document import from_override

    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise click.BadParameter(f"{word!r} does not have the form KEY=VALUE", param_hint=option)
        found |= from_override(key, value, option).values
    return found


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


shared_parent_option = _own_option(
    "--allow-shared-parent",
    is_flag=True,
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

    loaded = load_profile(name, overrides=job_changes(), variant=_remembered("variant"))
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
