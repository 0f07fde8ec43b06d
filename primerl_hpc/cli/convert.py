"""``primerl-hpc convert``: write a quantized model as a bfloat16 folder."""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, make_epilog, print_json
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.log import notice

EPILOG = make_epilog(
    "convert deepseek-ai/DeepSeek-V3 --to /models/DeepSeek-V3-bf16",
    "convert /models/gpt-oss-20b --to /models/gpt-oss-20b-bf16 --json",
    codes=(ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
)


@click.command("convert", epilog=EPILOG)
@click.argument("model")
@click.option(
    "--to",
    required=True,
    type=click.Path(path_type=Path),
    help="Create this folder; an existing one is not overwritten.",
)
@json_option
def command(model: str, to: Path, as_json: bool) -> None:
    """Write MODEL (a folder or hub id) with bfloat16 weights into a new folder.

    Reads FP8, MXFP4 and compressed-tensors checkpoints. A run with engines trains such a model from the new folder;
    engines can quantize it again while they load it (inference.extra_args: {quantization: fp8_per_tensor}).
    """
    from primerl_hpc.export.convert import convert_model

    shown = 0

    def show(num_bytes: int, total: int) -> None:
        nonlocal shown
        percent = 100 * num_bytes // max(total, 1)
        if percent // 10 > shown // 10:
            notice(f"{percent} % of {total / 2**30:,.1f} GiB written")
            shown = percent

    done = convert_model(model, to, on_progress=show)
    if as_json:
        print_json(
            {
                "model": model,
                "quantization": done.method,
                "folder": str(done.folder),
                "tensors": done.num_tensors,
                "bytes": done.num_bytes,
            }
        )
    else:
        click.echo(f"{model} ({done.method}) → {done.folder}")
        click.echo(f"    {done.num_tensors} tensors in bfloat16, {done.num_bytes / 2**30:,.2f} GiB")
