"""``primerl-hpc render``"""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, load_both, print_json, recipe_and_profile


@click.command("render", epilog="Example:  primerl-hpc render my.yaml -p h100x64 --out scripts/")
@recipe_and_profile
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the scripts. [default: print]"
)
@json_option
def command(
    recipe: str, profile_name: str | None, overrides: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Write the batch scripts of RECIPE, and nothing else: the run's, its elastic engines', its export's."""
    from primerl_hpc.common.errors import OccupiedError
    from primerl_hpc.common.files import write_text
    from primerl_hpc.launch.after import make_scripts
    from primerl_hpc.launch.prepare import preview

    loaded, profile = load_both(recipe, profile_name, overrides)
    scripts = make_scripts(preview(loaded, profile), profile)
    paths = {name: out / name for name in scripts} if out else {}
    for name, path in paths.items():
        if path.exists() and path.read_bytes() != scripts[name].encode():
            raise OccupiedError(
                "a different script is there already", place=str(path), mend="choose another --out"
            )
    for name, path in paths.items():
        write_text(path, scripts[name], mode=0o755)
    if as_json:
        path = paths.get("job.sbatch")
        print_json({"script": scripts["job.sbatch"], "path": str(path) if path else None, "scripts": scripts})
    elif paths:
        click.echo("\n".join(map(str, paths.values())))
    elif len(scripts) == 1:
        click.echo(scripts["job.sbatch"], nl=False)
    else:
        click.echo("\n".join(f"==> {name} <==\n{script}" for name, script in scripts.items()), nl=False)
