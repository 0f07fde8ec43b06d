"""``primerl-hpc samples``: show rollouts of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

if TYPE_CHECKING:
    from primerl_hpc.observe.report.samples import SampleOrder

EPILOG = make_epilog(
    "samples my-run",
    "samples my-run --worst -n 3 --full",
    "samples my-run --eval --env held-out --json",
    codes=RUN_CODES,
)


@click.command("samples", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option("--env", metavar="NAME", help="Select one environment.")
@click.option("--best", "order", flag_value="best", help="Show recent rollouts with the highest reward.")
@click.option("--worst", "order", flag_value="worst", help="Show recent rollouts with the lowest reward.")
@click.option("--eval", "is_eval", is_flag=True, help="Show rollouts of evaluations instead of training.")
@click.option(
    "--count", "-n", type=click.IntRange(min=1), default=8, show_default=True, help="Show this many rollouts."
)
@click.option(
    "--full",
    is_flag=True,
    help="Show every message with its role and tool calls, instead of one line each for prompt and completion.",
)
@json_option
def command(
    run: str, env: str | None, order: SampleOrder | None, is_eval: bool, count: int, full: bool, as_json: bool
) -> None:
    """Show the last rollouts of RUN: prompt, completion, reward, advantage, policy version.

    VERSION is the policy version of the first token and, if weights changed during the rollout, of the last token.
    """
    from primerl_hpc.observe.report.samples import pick_samples, sample_text
    from primerl_hpc.run.registry import find_run

    rows = pick_samples(
        find_run(run), count, split="eval" if is_eval else None, env=env, order=order or "last"
    )
    if as_json:
        print_json(rows)
    else:
        click.echo(sample_text(rows, is_full=full))
