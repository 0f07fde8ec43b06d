"""``primerl-hpc doctor``"""

from __future__ import annotations

import dataclasses
import itertools

import click

from primerl_hpc.cli.options import json_option, load_chosen_profile, print_json, profile_option

EPILOG = """\b
Examples:
  primerl-hpc doctor --profile h100x64
  primerl-hpc doctor --profile h100x64 --partition debug --nodes 4
"""


@click.command("doctor", epilog=EPILOG)
@profile_option
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Also have this many nodes look at themselves (GPUs, run directory, versions, network): a job of seconds.",
)
@json_option
def command(profile_name: str | None, nodes: int | None, as_json: bool) -> int:
    """Look whether runs of this profile can be submitted from here; without --nodes nothing is queued."""
    from primerl_hpc.common import env
    from primerl_hpc.common.errors import ExitCode
    from primerl_hpc.launch.doctor import examine
    from primerl_hpc.launch.doctor_nodes import examine_nodes

    profile = load_chosen_profile(profile_name or env.default_profile() or "local").profile
    findings = []
    of_nodes = examine_nodes(profile, nodes) if nodes else ()
    for finding in itertools.chain(examine(profile), of_nodes):
        findings.append(finding)
        if not as_json:
            mark = click.style("ok  ", fg="green") if finding.is_ok else click.style("FAIL", fg="red")
            click.echo(f"{mark} {finding.what:<23} {finding.said}")
            if not finding.is_ok and finding.mend:
                click.echo(f"     {'':<23} mend: {finding.mend}")
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    return ExitCode.DONE if all(finding.is_ok for finding in findings) else ExitCode.CONFIG
