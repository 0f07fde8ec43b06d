"""``primerl-hpc prune``: delete what a run no longer needs."""

from __future__ import annotations

from typing import Any

import click

from primerl_hpc.cli.options import RUN_CODES, confirm, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

EPILOG = make_epilog(
    "prune my-run              shows what it would delete, and asks",
    "prune my-run --keep-weights 3 --traces --yes",
    codes=RUN_CODES,
)


@click.command("prune", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--keep-weights",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Keep the N newest policy versions, and those of checkpoints.",
)
@click.option(
    "--permanent", is_flag=True, help="Also delete versions that weights.interval or keep_best keeps."
)
@click.option("--traces", is_flag=True, help="Also delete the rollouts in traces/.")
@click.option("--superseded", is_flag=True, help="Also delete what `resume --step` moved away.")
@click.option("--old-logs", is_flag=True, help="Also delete the logs of all attempts but the last.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(run: str, yes: bool, as_json: bool, **policy: Any) -> int:
    """Delete policy versions and batches of RUN that no resume needs. RUN must not be running or queued."""
    from primerl_hpc.launch.storage.prune import PrunePolicy, choose, delete
    from primerl_hpc.launch.storage.usage import format_bytes
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    chosen = choose(found, PrunePolicy(**policy))
    names = [str(path.relative_to(found.root)) for path in chosen.paths]
    amount = f"{format_bytes(chosen.size_bytes)} in {chosen.num_files:,} files"
    if not as_json:
        for name in names:
            click.echo(f"    {name}")
    is_deleted = bool(names) and (yes or (not as_json and confirm(f"delete {amount}?")))
    if is_deleted:
        delete(chosen)
    if as_json:
        facts = {"deleted": is_deleted, "bytes": chosen.size_bytes, "files": chosen.num_files, "paths": names}
        print_json({"run": found.root.name, **facts})
    elif not names:
        click.echo("there is nothing to delete")
    else:
        click.echo(f"deleted {amount}" if is_deleted else "nothing was deleted")
    return 0
