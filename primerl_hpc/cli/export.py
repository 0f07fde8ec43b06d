"""``primerl-hpc export``"""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, print_json

EPILOG = """\b
Examples:
  primerl-hpc export my-run --to /models/my-run
  primerl-hpc export my-run --to best --step 40 --link
  primerl-hpc export my-lora-run --to /models/my-run --merge
"""


@click.command("export", epilog=EPILOG)
@click.argument("run")
@click.option(
    "--to", required=True, type=click.Path(path_type=Path), help="Folder to make; nothing is overwritten."
)
@click.option("--step", type=click.IntRange(min=0), help="Policy version. [default: the last complete one]")
@click.option("--link", is_flag=True, help="Hard links in place of copies; on the same filesystem only.")
@click.option(
    "--merge", is_flag=True, help="Of an adapter and its base model make one model; for runs with lora."
)
@json_option
def command(run: str, to: Path, step: int | None, link: bool, merge: bool, as_json: bool) -> None:
    """Make a model folder of a policy version of RUN: safetensors, config, tokenizer, chat template.

    transformers, vLLM and the model hub take it as it is. Checksums are compared on the way. A run with lora gives an
    adapter in PEFT's format, or with --merge a model.
    """
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.launch.export import export_model

    found = find_run(run)
    done = export_model(found, to, step=step, link=link, merge=merge)
    if as_json:
        print_json(
            {
                "run": found.root.name,
                "step": done.step,
                "folder": str(done.folder),
                "files": done.num_files,
                "bytes": done.num_bytes,
            }
        )
    else:
        click.echo(f"policy version {done.step} of {found.root.name} → {done.folder}")
        click.echo(f"    {done.num_files} files, {done.num_bytes / 2**20:,.1f} MiB, checksums agree")
