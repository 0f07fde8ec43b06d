"""``primerl-hpc bundle``: pack a Python environment into one file that nodes unpack."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json
from primerl_hpc.cli.values import RECIPE
from primerl_hpc.common.errors import ConfigError, ExitCode, NotFoundError, OccupiedError, PrimerlError

EPILOG = make_epilog(
    "bundle /shared/me/env-1.tar.zst",
    "bundle /shared/me/env-1.tar.zst --recipe my.yaml",
    "bundle /shared/me/vllm.tar.gz --python ~/vllm/bin/python --json",
    codes=(ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
)
_ENDINGS = ("tar.zst", "tar.gz", "squashfs")


@click.command("bundle", epilog=EPILOG)
@click.argument("target")
@click.option(
    "--python", "python", help="Interpreter of the environment; default: the one that runs this command."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(_ENDINGS),
    help="Format; default: by the ending of TARGET, or tar.zst if zstd is installed here.",
)
@click.option(
    "--recipe",
    type=RECIPE,
    help="First install the packages of the environments of this recipe (environments.*.package).",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@click.option(
    "--try/--no-try", "tries", default=True, help="Unpack the bundle here and start its Python (default)."
)
@json_option
def command(
    target: str,
    python: str | None,
    kind: str | None,
    recipe: str | None,
    force: bool,
    tries: bool,
    as_json: bool,
) -> int:
    """Pack a Python environment into TARGET, one file on a shared filesystem.

    With `software.bundle` in the cluster profile, every node of a job unpacks it once into its scratch folder, and all
    processes import from there. The environment may be a virtual environment, with its interpreter, or a Conda
    environment. TARGET.json contains its checksum and versions.
    """
    from primerl_hpc.offline.bundle.build import build, try_bundle
    from primerl_hpc.offline.bundle.environment import inspect_environment
    from primerl_hpc.offline.bundle.formats import choose_format

    path = Path(target).expanduser().absolute()
    if path.is_dir():
        raise ConfigError(f"{path} is a folder", hint=f"name a file: {path}/env.tar.zst")
    if path.exists() and not force:
        raise OccupiedError(
            f"{path} exists",
            hint="jobs in the queue may need it: choose another name, or --force to replace it",
        )
    chosen = choose_format(kind, path.name)
    interpreter = str(Path(python).expanduser()) if python else sys.executable
    packages = _install_packages(recipe, interpreter, quiet=as_json) if recipe is not None else []
    environment = inspect_environment(interpreter)
    made = build(environment, path, chosen)
    seconds = round(try_bundle(path), 1) if tries else None
    if as_json:
        facts = {"bundle": str(path), **made.model_dump(mode="json"), "unpacked_in_s": seconds}
        print_json({**facts, "environment_packages": packages})
        return ExitCode.DONE
    for name, folder in sorted(made.outside.items()):
        if name != "primerl-hpc":  # every run has its own copy of this package
            click.echo(
                f"warning: {name} is installed in editable mode, so that its code in {folder} is not in the bundle",
                err=True,
            )
    size = f"{made.size_bytes / 2**30:.2f} GiB, {made.unpacked_bytes / 2**30:.2f} GiB unpacked"
    click.echo(f"{path}: Python {made.python} for {made.arch}, {made.num_files} files, {size}")
    if seconds is not None:
        click.echo(f"it was unpacked here in {seconds:g} s, and its Python starts")
    click.echo(f"use it: software: {{bundle: {path}}} in the cluster profile")
    return ExitCode.DONE


def _install_packages(recipe: str, python: str, *, quiet: bool) -> list[dict[str, Any]]:
    """Install the packages of the recipe's environments; return their versions. Raises NotFoundError."""
    from primerl_hpc.offline.prefetch.needs import environments_of
    from primerl_hpc.offline.prefetch.packages import RECORDED, ask_python
    from primerl_hpc.recipe.load import load_recipe

    environments = environments_of(load_recipe(recipe).recipe)
    names = dict.fromkeys(item.package for item in environments if item.package is not None)
    records: list[dict[str, Any]] = []
    for name in names:
        try:
            found = ask_python(python, name, {}, install=True)
            if found["state"] != "present":
                raise NotFoundError(found["detail"])
        except PrimerlError as error:
            cause = f"package {name} is not in the bundle: {error.cause}"
            raise NotFoundError(cause, location=recipe, hint=error.hint) from error
        records.append({key: found.get(key) for key in RECORDED})
        if not quiet:
            click.echo(f"package {found['package']} of an environment is installed")
    return records
