"""``primerl-hpc render``"""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, load_both, print_json, recipe_and_profile


@click.command("render", epilog="Example:  primerl-hpc render my.yaml -p h100x64 --out scripts/")
@recipe_and_profile
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for job.sbatch. [default: print]"
)
@json_option
def command(
    recipe: str, profile_name: str | None, overrides: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Write the batch script of RECIPE, and nothing else."""
    from primerl_hpc.common.errors import OccupiedError
    from primerl_hpc.common.files import write_text
    from primerl_hpc.launch.prepare import make_script, preview

    loaded, profile = load_both(recipe, profile_name, overrides)
    plan = preview(loaded, profile)
    script = make_script(plan, profile)
    path = out / "job.sbatch" if out else None
    if path is not None:
        if path.exists() and path.read_bytes() != script.encode():
            raise OccupiedError(
                "a different script is there already", place=str(path), mend="choose another --out"
            )
        write_text(path, script, mode=0o755)
    if as_json:
        print_json({"script": script, "path": str(path) if path else None})
    else:
        click.echo(str(path) if path else script, nl=path is not None)
