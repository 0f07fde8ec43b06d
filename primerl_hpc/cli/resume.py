"""``primerl-hpc resume``"""

from __future__ import annotations

import click

from primerl_hpc.cli.options import chain_options, job_changes, job_options, json_option, print_json

EPILOG = """\b
Examples:
  primerl-hpc resume my-run --follow
  primerl-hpc resume my-run --time 12:00:00 --partition long
"""


@click.command("resume", epilog=EPILOG)
@click.argument("run")
@job_options
@click.option("--follow", "-f", is_flag=True, help="Show progress until the run ends; ^C leaves it running.")
@chain_options
@json_option
def command(run: str, follow: bool, links: int, until_done: bool, as_json: bool) -> int:
    """Go on with RUN from its last complete checkpoint."""
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.launch.chain import ChainRequest
    from primerl_hpc.launch.submit import change_job, resume_run
    from primerl_hpc.observe.follow import follow_run

    found = find_run(run)
    step = found.latest_checkpoint()
    if changes := job_changes():
        change_job(found, changes)
    submitted = resume_run(found, ChainRequest(links, until_done))
    if as_json:
        print_json(
            {"run": found.root.name, "run_dir": str(found.root), "job_id": submitted.job_id, "step": step}
        )
    else:
        click.echo(f"run {found.root.name} · job {submitted.job_id} · goes on after step {step or 0}")
    if follow:
        return follow_run(found, quiet=as_json, from_end=True)
    return 0
