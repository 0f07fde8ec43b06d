"""``primerl-hpc doctor``: check a cluster before a run."""

from __future__ import annotations

import itertools

import click

from primerl_hpc.cli.options import (
    json_option,
    load_chosen_profile,
    make_epilog,
    print_json,
    profile_option,
    refuse_options,
)
from primerl_hpc.cli.values import RECIPE
from primerl_hpc.common.errors import ExitCode

EPILOG = make_epilog(
    "doctor --profile h100x64",
    "doctor --profile h100x64 --recipe my.yaml",
    "doctor --profile h100x64 --partition debug --nodes 4",
    "doctor --profile h100x64 --nodes 16 --bandwidth",
    "doctor --mismatch /models/Qwen3-0.6B",
    codes=(ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.CONFIG),
    more="78 also means that a check failed, with --mismatch that a KL exceeds 0.02.",
)
_OF_PROFILES = ("profile_name", "nodes", "has_bandwidth", "recipe")


@click.command("doctor", epilog=EPILOG)
@profile_option
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Also check GPUs, run directory, versions and network on this many nodes, in a job of seconds.",
)
@click.option(
    "--bandwidth",
    "has_bandwidth",
    is_flag=True,
    help="With --nodes: also measure file reads and all-reduce between pairs of nodes, in less than 30 s.",
)
@click.option("--recipe", type=RECIPE, help="Also check the packages of the environments of this recipe.")
@click.option(
    "--mismatch",
    "model",
    metavar="MODEL",
    help="Instead, measure by how much vLLM and the trainer differ for this model folder or hub id: mismatch KL of "
    "1,536 sampled tokens for each data type of this machine's first device.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="With --mismatch: measure this type only; repeatable.",
)
@json_option
def command(
    profile_name: str | None,
    nodes: int | None,
    has_bandwidth: bool,
    recipe: str | None,
    model: str | None,
    dtypes: tuple[str, ...],
    as_json: bool,
) -> int:
    """Check that runs of this profile can be submitted from here. Without --nodes, nothing is queued."""
    from primerl_hpc.common import env
    from primerl_hpc.common.log import hang
    from primerl_hpc.launch.doctor.cluster import examine
    from primerl_hpc.launch.doctor.machine import examine_machine
    from primerl_hpc.launch.doctor.nodes import examine_nodes
    from primerl_hpc.launch.prefetch.packages import examine_packages

    if model is not None:
        refuse_options(_OF_PROFILES, "checks a profile, and --mismatch measures on this machine")
        return _measure_mismatch(model, dtypes, as_json)
    if dtypes:
        raise click.UsageError("--dtype belongs to --mismatch MODEL")
    if has_bandwidth and (nodes is None or nodes < 2):
        raise click.UsageError("--bandwidth compares nodes: add --nodes N, at least 2")
    profile = load_chosen_profile(profile_name or env.default_profile() or "local").profile
    findings = []
    node_findings = examine_nodes(profile, nodes, has_bandwidth=has_bandwidth) if nodes else ()
    packages = examine_packages(recipe, profile) if recipe is not None else ()
    for finding in itertools.chain(examine(profile), examine_machine(profile), packages, node_findings):
        findings.append(finding)
        if not as_json:
            mark = click.style("ok  ", fg="green") if finding.is_ok else click.style("FAIL", fg="red")
            click.echo(f"{mark} {finding.check:<23} {hang(finding.message, 29)}")
            if not finding.is_ok and finding.hint:
                click.echo(f"     {'':<23} {hang(f'hint: {finding.hint}', 29)}")
            if finding.details:
                click.echo(finding.details)
    if as_json:
        print_json([{"what": item.check, "is_ok": item.is_ok, **item.as_json()} for item in findings])
    return ExitCode.DONE if all(finding.is_ok for finding in findings) else ExitCode.CONFIG


def _measure_mismatch(model: str, dtypes: tuple[str, ...], as_json: bool) -> int:
    """Print the mismatch KL of each data type."""
    from primerl_hpc.common.log import notice
    from primerl_hpc.launch.doctor.mismatch import LIMIT, is_close, measure_mismatch

    found = measure_mismatch(model, dtypes, report=notice)
    if as_json:
        print_json(found.as_json())
    else:
        for row in found.rows:
            mark = click.style("ok  ", fg="green") if is_close(row) else click.style("FAIL", fg="red")
            figures = (
                f"mismatch KL {row['mismatch_kl']:.1e} (largest of a token {row['mismatch_kl_max']:.1e})"
            )
            click.echo(f"{mark} {row['dtype']:<23} {figures}")
        if not all(map(is_close, found.rows)):
            hint = "compare another type, and see docs/models.md for the family"
            click.echo(f"     {'':<23} above {LIMIT}, the two compute different distributions; {hint}")
    return ExitCode.DONE if all(map(is_close, found.rows)) else ExitCode.CONFIG
