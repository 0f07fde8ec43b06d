"""``primerl-hpc doctor``"""

from __future__ import annotations

import dataclasses

import click

from primerl_hpc.cli.options import json_option, load_chosen_profile, print_json, profile_option


@click.command("doctor", epilog="Example:  primerl-hpc doctor --profile h100x64 --partition debug")
@profile_option
@json_option
def command(profile_name: str | None, as_json: bool) -> int:
    """Look whether runs of this profile can be submitted from here; queue nothing."""
    from primerl_hpc.common import env
    from primerl_hpc.common.errors import ExitCode
    from primerl_hpc.launch.doctor import examine

    profile = load_chosen_profile(profile_name or env.default_profile() or "local").profile
    findings = []
    for finding in examine(profile):
        findings.append(finding)
        if not as_json:
            mark = click.style("ok  ", fg="green") if finding.is_ok else click.style("FAIL", fg="red")
            click.echo(f"{mark} {finding.what:<16} {finding.said}")
            if not finding.is_ok and finding.mend:
                click.echo(f"     {'':<16} mend: {finding.mend}")
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    return ExitCode.DONE if all(finding.is_ok for finding in findings) else ExitCode.CONFIG
