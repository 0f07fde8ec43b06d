"""``primerl-hpc export``: export a policy version as a model folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode

EPILOG = make_epilog(
    "export my-run --to /models/my-run",
    "export my-run --to best --step 40 --link",
    "export my-lora-run --to /models/my-run --merge",
    "export my-run --to /models/my-run --push my-name/my-model",
    codes=(ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
)


@click.command("export", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--to",
    required=True,
    type=click.Path(path_type=Path),
    help="Create this folder; an existing one is not overwritten.",
)
@click.option(
    "--step", type=click.IntRange(min=0), help="Export this policy version. [default: the last complete one]"
)
@click.option("--link", is_flag=True, help="Create hard links instead of copies; needs the same filesystem.")
@click.option("--merge", is_flag=True, help="Merge the adapter of a run with lora into its base model.")
@click.option(
    "--push",
    metavar="OWNER/NAME",
    help="Also upload the folder to this repository of the Hugging Face hub; a new one is private.",
)
@click.option("--public", is_flag=True, help="With --push: create a public repository.")
@json_option
def command(
    run: str,
    to: Path,
    step: int | None,
    link: bool,
    merge: bool,
    push: str | None,
    public: bool,
    as_json: bool,
) -> None:
    """Export a policy version of RUN as a model folder: safetensors, config, tokenizer, chat template.

    transformers, vLLM and the Hugging Face Hub can load the folder; nothing is uploaded without --push. Checksums
    are verified while copying. A run with lora is exported as an adapter in PEFT format, or as a model with
    --merge.
    """
    from primerl_hpc.export.export import export_model
    from primerl_hpc.export.push import check_push, push_folder
    from primerl_hpc.run.registry import find_run

    if public and push is None:
        raise click.UsageError("--public needs --push")
    found = find_run(run)
    if push is not None:
        check_push(push)
    done = export_model(found, to, step=step, link=link, merge=merge)
    pushed = None
    if push is not None:
        click.echo(f"uploading {done.folder} to {push}", err=True)
        pushed = push_folder(done, push, run=found.root.name, public=public)
    if as_json:
        upload = None if pushed is None else dataclasses.asdict(pushed)
        print_json(
            {
                "run": found.root.name,
                "step": done.step,
                "folder": str(done.folder),
                "files": done.num_files,
                "bytes": done.num_bytes,
                "copied_tensors": done.num_copied,
                "pushed": upload,
            }
        )
    else:
        click.echo(f"policy version {done.step} of {found.root.name} → {done.folder}")
        click.echo(f"    {done.num_files} files, {done.num_bytes / 2**20:,.1f} MiB, checksums agree")
        if done.num_copied:
            click.echo(f"    {done.num_copied} tensors that were not trained are those of the base model")
        if pushed is not None:
            click.echo(f"    {pushed.url}, commit {pushed.commit[:12]}")
