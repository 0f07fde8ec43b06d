"""``primerl-hpc samples``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import json_option, print_json

EPILOG = """\b
Examples:
  primerl-hpc samples my-run
  primerl-hpc samples my-run --worst -n 3 --full
  primerl-hpc samples my-run --eval --env held-out --json
"""


@click.command("samples", epilog=EPILOG)
@click.argument("run")
@click.option("--env", metavar="NAME", help="Of one environment only.")
@click.option(
    "--best", "order", flag_value="best", help="The highest rewards of late, not the newest rollouts."
)
@click.option("--worst", "order", flag_value="worst", help="The lowest.")
@click.option("--eval", "is_eval", is_flag=True, help="Of evaluations, not of training.")
@click.option("--count", "-n", type=click.IntRange(min=1), default=8, show_default=True, help="How many.")
@click.option("--full", is_flag=True, help="Whole texts, not a line of each.")
@json_option
def command(
    run: str, env: str | None, order: str | None, is_eval: bool, count: int, full: bool, as_json: bool
) -> None:
    """The last rollouts of RUN: prompt, completion, reward, advantage, policy version.

    VERSION is that of the first and, where the weights changed on the way, of the last token.
    """
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.samples import pick_samples, sample_text

    rows = pick_samples(
        find_run(run),
        count,
        split="eval" if is_eval else None,
        env=env,
        order=order or "last",  # type: ignore[arg-type]
    )
    if as_json:
        print_json(rows)
    else:
        click.echo(sample_text(rows, is_full=full))
