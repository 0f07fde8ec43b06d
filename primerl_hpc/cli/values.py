"""Types of arguments and options that complete their values in a shell (`completion`).

They accept any text: whether a run or a key exists is checked by the command. Errors while names are collected are
ignored, because a completion has no place for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from primerl_hpc.common.errors import PrimerlError


class Names(click.ParamType[str]):
    """A text with known values, which ``names`` returns."""

    name = "text"

    def __init__(self, names: Callable[[click.Context], Iterable[str]], *, has_paths: bool = False) -> None:
        """``has_paths``: a path of a file is also accepted."""
        self.names, self.has_paths = names, has_paths

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        try:
            found = [name for name in self.names(ctx) if name.startswith(incomplete)]
        except (OSError, PrimerlError):
            found = []
        items = [CompletionItem(name) for name in found]
        return items if items or not self.has_paths else [CompletionItem(incomplete, type="file")]


def _runs(ctx: click.Context) -> Iterable[str]:
    from primerl_hpc.run.registry import registered_runs

    return dict.fromkeys(run.name for run in registered_runs())


def _processes(ctx: click.Context) -> Iterable[str]:
    """Return roles and processes of the run that was typed before."""
    from primerl_hpc.observe.log_files import JOB, LogFiles
    from primerl_hpc.run.registry import find_run

    processes = LogFiles(find_run(ctx.params.get("run"))).processes
    return (*dict.fromkeys(process["role"] for process in processes.values()), *processes, JOB)


def _assets(kind: str) -> Callable[[click.Context], Iterable[str]]:
    def names(ctx: click.Context) -> Iterable[str]:
        from primerl_hpc.common.assets import list_assets

        return (name.removesuffix(".yaml") for name in list_assets(kind))

    return names


def _recipe_keys(ctx: click.Context) -> Iterable[str]:
    from primerl_hpc.common.validate import all_paths
    from primerl_hpc.recipe.schema.recipe import Recipe

    return (f"{path}=" for path in all_paths(Recipe))


def _changeable_keys(ctx: click.Context) -> Iterable[str]:
    from primerl_hpc.launch.resume.changes import is_changeable

    return (key for key in _recipe_keys(ctx) if is_changeable(key.removesuffix("=")))


def _profile_keys(ctx: click.Context) -> Iterable[str]:
    from primerl_hpc.cluster.schema import Profile
    from primerl_hpc.common.validate import all_paths

    return (f"{path}=" for path in all_paths(Profile))


def _keys(ctx: click.Context) -> Iterable[str]:
    found = _profile_keys(ctx) if ctx.params.get("what") == "profile" else _recipe_keys(ctx)
    return (key.removesuffix("=") for key in found)


RUN = Names(_runs, has_paths=True)
PROCESS = Names(_processes)
RECIPE = Names(_assets("recipes"), has_paths=True)
PROFILE = Names(_assets("cluster_profiles"), has_paths=True)
RECIPE_KEY = Names(_recipe_keys)
"""``KEY=VALUE`` of ``--set``."""
CHANGEABLE_KEY = Names(_changeable_keys)
"""``KEY=VALUE`` of ``resume --set``."""
PROFILE_KEY = Names(_profile_keys)
KEY = Names(_keys)
"""Argument of `explain`."""
