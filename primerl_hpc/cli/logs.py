"""``primerl-hpc logs``"""

from __future__ import annotations

import click


@click.command(
    "logs", epilog="Examples:  primerl-hpc logs my-run trainer -f\n\n  primerl-hpc logs my-run --rank 1"
)
@click.argument("run")
@click.argument("role", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on as lines come, until the run ends.")
@click.option("--rank", type=int, help="One rank of a trainer.")
@click.option("--attempt", type=int, help="An earlier attempt. [default: the latest]")
@click.option("--lines", "-n", default=40, show_default=True, help="Last lines of each file.")
def command(
    run: str, role: str | None, follow: bool, rank: int | None, attempt: int | None, lines: int
) -> None:
    """Print or follow the logs of RUN: of all roles, or of ROLE (trainer, inference-0, router, …)."""
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.logs import choose_logs, follow_logs, print_logs

    found = find_run(run)
    if follow:
        try:
            follow_logs(found, role, rank, attempt, lines)
        except KeyboardInterrupt:
            click.echo()
    else:
        print_logs(choose_logs(found, role, rank, attempt), lines)
