"""``primerl-hpc prefetch``: fetch what a run needs from the internet, so that its nodes need no network."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import json_option, load_both, make_epilog, print_json, recipe_and_profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.safety.terminal import raw, without_control

if TYPE_CHECKING:
    from primerl_hpc.offline.prefetch.needs import Need
    from primerl_hpc.offline.prefetch.prefetch import Item

EPILOG = make_epilog(
    "prefetch my.yaml -p h100x64",
    "prefetch my.yaml -p h100x64 --check --json",
    codes=(ExitCode.NOT_FOUND, ExitCode.CONFIG),
)
GIB = 2**30


@click.command("prefetch", epilog=EPILOG)
@recipe_and_profile
@click.option("--check", "only_look", is_flag=True, help="Only look: fetch and write nothing.")
@json_option
def command(
    recipe: str, profile_name: str | None, overrides: tuple[str, ...], only_look: bool, as_json: bool
) -> int:
    """Fetch the models, tokenizers, datasets, tasks and container images of RECIPE into the caches that its run reads.

    Run it on a login node. Complete files are kept, so an interrupted command continues where it was. Exits with 66 if
    something is missing.
    """
    from primerl_hpc.offline.prefetch.needs import needs_of
    from primerl_hpc.offline.prefetch.prefetch import inspect, prefetch

    loaded, profile = load_both(recipe, profile_name, overrides)
    needs = needs_of(loaded.recipe, profile.profile)
    items: list[Item] = []
    found = (
        iter(inspect(needs, profile.profile, loads_tasks=True))
        if only_look
        else prefetch(needs, profile.profile, _show_progress)
    )
    for item in found:
        items.append(item)
        if not as_json:
            _show(item)
    is_complete = all(item.found.is_complete or _is_left_to_nodes(item) for item in items)
    if as_json:
        print_json({"complete": is_complete, "items": [item.as_json() for item in items]})
    elif not items:
        click.echo("nothing to fetch: models, data and software of this recipe are local")
    elif is_complete:
        click.echo("complete: the run needs no network for these")
    return ExitCode.DONE if is_complete else ExitCode.NOT_FOUND


def _is_left_to_nodes(item: Item) -> bool:
    """True if only the site's tools or a container can tell, and nothing has failed."""
    return item.found.state.value == "unknown" and not item.fault


def _show(item: Item) -> None:
    size = f"{item.found.num_bytes / GIB:,.1f} GiB  " if item.found.num_bytes else ""
    click.echo(
        f"{item.need.kind.value:<12}{item.need.label}  {item.found.state.value}  {size}{item.found.detail}"
    )
    if item.fault:
        click.echo(f"{'':<12}{item.fault}{f'; {item.hint}' if item.hint else ''}", err=True)
    elif item.hint:
        click.echo(f"{'':<12}{item.hint}", err=True)


def _show_progress(need: Need, num_bytes: int, total: int) -> None:
    share = 100 * num_bytes / total if total else 100
    text = f"{without_control(need.name)}: {num_bytes / GIB:,.1f} of {total / GIB:,.1f} GiB ({share:.0f} %)"
    if sys.stderr.isatty():
        click.echo(f"\r{text}\x1b[K", file=raw(sys.stderr), nl=num_bytes >= total)
    else:
        click.echo(text, err=True)
