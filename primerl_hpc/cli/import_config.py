"""``primerl-hpc import-config``: write a recipe from a configuration of prime-rl."""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json
from primerl_hpc.common.errors import ExitCode

EPILOG = make_epilog(
    "import-config rl.toml --out my.yaml",
    "import-config base.toml rl.toml --json",
    codes=(ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
    more="78 also means that the recipe needs changes before it can be submitted.",
)


@click.command("import-config", epilog=EPILOG)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the recipe here. [default: standard output]"
)
@json_option
def command(files: tuple[Path, ...], out: Path | None, as_json: bool) -> int:
    """Convert prime-rl's rl.toml to a recipe. If several FILEs are given, later ones take precedence.

    Keys without a counterpart, and keys that belong to the command line or the cluster profile, are listed in comments
    of the recipe. docs/migration.md has tables for prime-rl, verl and NeMo-RL.
    """
    from primerl_hpc.common.document import Document, dump_yaml
    from primerl_hpc.common.errors import ConfigError, OccupiedError
    from primerl_hpc.common.files import create_exclusive
    from primerl_hpc.common.safety.printable import one_line
    from primerl_hpc.launch.new_recipe.prime_rl import convert, read_toml
    from primerl_hpc.recipe.load import validate_recipe

    found = convert(read_toml(files), name=files[-1].stem)
    lists = {
        "no counterpart": found.unknown,
        "set elsewhere": [f"{key}: {where}" for key, where in found.elsewhere.items()],
        "conflict": found.conflicts,
    }
    head = [f"Converted from {', '.join(path.name for path in files)} of prime-rl."]
    head += [f"{label}: {entry}" for label, entries in lists.items() for entry in entries]
    # a key of the file may contain line breaks, and lines of a recipe
    text = "".join(f"# {one_line(line)}\n" for line in head) + dump_yaml(found.values)
    problem = None
    try:
        validate_recipe(Document(found.values, {"": files[-1].name}))
    except ConfigError as error:
        problem = " ".join(str(error).removeprefix("error: ").split())
    if out is not None and not create_exclusive(out, text):
        raise OccupiedError("the file exists already", location=str(out), hint="choose another --out")
    if as_json:
        print_json({"recipe": found.values, **lists, "problem": problem, "origins": found.origins})
    elif out is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {out}: {len(found.origins)} keys; {len(found.unknown)} without a counterpart")
        for line in head[1:]:
            click.echo(f"    {line}", err=True)
    if problem is not None:
        click.echo(f"error: the recipe needs changes: {problem}", err=True)
        return ExitCode.CONFIG
    return ExitCode.DONE
