"""Options that several commands share, spelled once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError

_CHANGES = "primerl_hpc.profile_overrides"
_JOB_OPTIONS = ("partition", "account", "qos", "time", "reservation")
"""Keys of ``scheduler`` that differ from run to run and so have a flag of their own, named as sbatch names it."""


def _note_change(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Collects ``scheduler.time=60`` for `load_chosen_profile`; the flags stand above ``--profile-set``."""
    if value == "":
        raise click.BadParameter("must not be empty")
    if not value:
        return
    changes = ctx.meta.setdefault(_CHANGES, [])
    if param.name == "profile_set":
        changes[:0] = value
    else:
        changes.append(f"scheduler.{param.name}={value}")


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--profile-set k=v`` and the flags of the most usual keys, e.g. ``--time``; `job_changes` has what they said."""
    for name in reversed(_JOB_OPTIONS):
        flag = click.option(
            f"--{name}", callback=_note_change, expose_value=False, help=f"scheduler.{name} of the profile."
        )
        function = flag(function)
    change = click.option(
        *("--profile-set", "profile_set"),
        multiple=True,
        metavar="KEY=VALUE",
        callback=_note_change,
        expose_value=False,
        help="Override a key of the profile; repeatable.",
    )
    return change(function)


def job_changes() -> list[str]:
    """The changes of this command line in the profile, as ``key=value``; later ones win."""
    return list(click.get_current_context().meta.get(_CHANGES, ()))


choose_profile = click.option(
    "--profile", "-p", "profile_name", help="Cluster profile: a name or a file. [env: PRIMERL_PROFILE]"
)


def profile_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--profile P`` and the `job_options`."""
    return choose_profile(job_options(function))


set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe; repeatable."
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)


def lines_option(default: int, about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--lines N``, ``-n N``"""
    return click.option(
        *("--lines", "-n"),
        type=click.IntRange(min=1),
        default=default,
        metavar="N",
        show_default=True,
        help=about,
    )


def chain_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """``--chain N`` and ``--until-done``"""
    chain = click.option(
        "--chain",
        "links",
        type=click.IntRange(min=1),
        default=1,
        metavar="N",
        help="Queue N jobs in a row; each goes on where the walltime ended the one before.",
    )
    until_done = click.option(
        "--until-done", is_flag=True, help="At its walltime a job queues the next one, until the run is done."
    )
    return chain(until_done(function))


run_argument = click.argument("run", required=False)


def recipe_and_profile(function: Callable[..., Any]) -> Callable[..., Any]:
    """``RECIPE --profile P --set k=v``"""
    return click.argument("recipe")(profile_option(set_option(function)))


def load_both(recipe: str, profile_name: str | None, overrides: tuple[str, ...]) -> tuple[Any, Any]:
    """The loaded recipe and profile. Raises ConfigError, NotFoundError."""
    from primerl_hpc.recipe.load import load_recipe

    name = profile_name or env.default_profile()
    if name is None:
        from primerl_hpc.common.assets import list_assets

        known = ", ".join(each.removesuffix(".yaml") for each in list_assets("cluster_profiles"))
        raise ConfigError("no cluster profile was given", mend=f"use --profile with one of: {known}")
    loaded = load_recipe(recipe, overrides=list(overrides))
    return loaded, for_recipe(load_chosen_profile(name), loaded)


def load_chosen_profile(name: str) -> Any:
    """The profile with what this command line changes in it. Raises ConfigError, NotFoundError."""
    from primerl_hpc.cluster.load import load_profile

    return load_profile(name, overrides=job_changes())


def for_recipe(profile: Any, loaded: Any) -> Any:
    """The profile as it is, but without GPUs for a recipe that starts no engines."""
    if not loaded.recipe.is_external:
        return profile
    from primerl_hpc.launch.evaluate import without_gpus

    return without_gpus(profile, job_changes())


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, ensure_ascii=False))
