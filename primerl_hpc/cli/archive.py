"""``primerl-hpc archive``: write a run into one tar file with checksums, and verify it."""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.safety.printable import one_line

EPILOG = make_epilog(
    "archive my-run --to /archive/my-run.tar --without rollouts",
    "archive --verify /archive/my-run.tar",
    codes=(*RUN_CODES, ExitCode.DATA),
)


@click.command("archive", epilog=EPILOG)
@click.argument("run", type=RUN, required=False)
@click.option("--to", type=click.Path(path_type=Path), help="The file to write. [default: ./<run>.tar]")
@click.option("--without", multiple=True, metavar="FOLDER", help="Leave this folder out, e.g. weights.")
@click.option("--verify", type=click.Path(path_type=Path, exists=True), help="Check an archive instead.")
@json_option
def command(
    run: str | None, to: Path | None, without: tuple[str, ...], verify: Path | None, as_json: bool
) -> int:
    """Write the directory of RUN into a tar file with a SHA-256 of every file. Nothing is deleted.

    The run's secret keys are left out. RUN must not be running or queued.
    """
    from primerl_hpc.launch.storage import archive
    from primerl_hpc.launch.storage.usage import format_bytes
    from primerl_hpc.run.registry import find_run

    if (run is None) == (verify is None):
        raise click.UsageError("name a RUN, or an archive with --verify")
    if verify is not None:
        damaged = archive.verify(verify)
        if as_json:
            print_json({"archive": str(verify), "damaged": damaged})
        else:
            click.echo("\n".join(f"damaged: {one_line(name)}" for name in damaged) or f"{verify} is intact")
        return ExitCode.DATA if damaged else ExitCode.DONE
    found = find_run(run)
    target = to or Path(f"{found.root.name}.tar")
    amount = archive.archive_run(found, target, without=without)
    if as_json:
        facts = {"bytes": amount.size_bytes, "files": amount.num_files}
        print_json({"run": found.root.name, "archive": str(target), **facts})
    else:
        click.echo(f"wrote {target}: {amount.num_files:,} files, {format_bytes(amount.size_bytes)}")
        click.echo(f"check it:  primerl-hpc archive --verify {target}")
    return ExitCode.DONE
