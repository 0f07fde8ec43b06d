"""``primerl-hpc resume``: continue a run from its last complete checkpoint."""

from __future__ import annotations

from typing import Any

import click

from primerl_hpc.cli.options import (
    FOLLOWED_CODES,
    SUBMIT_CODES,
    chain_options,
    follow_option,
    job_changes,
    job_options,
    json_option,
    live_code_option,
    make_epilog,
    print_json,
    requested_jobs,
)
from primerl_hpc.cli.values import CHANGEABLE_KEY, RUN

EPILOG = make_epilog(
    "resume my-run --follow",
    "resume my-run --time 12:00:00 --partition long",
    "resume my-run --set max_steps=400 --set optimizer.lr=5e-7",
    "resume my-run --step 200",
    "resume my-run --new-code",
    codes=SUBMIT_CODES,
    more=FOLLOWED_CODES,
)


@click.command("resume", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--step",
    type=click.IntRange(min=1),
    help="Continue after the checkpoint of this step. What came later is moved to superseded/, nothing is deleted.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    type=CHANGEABLE_KEY,
    metavar="KEY=VALUE",
    help="Change max_steps, the optimizer's lr, weight_decay or max_norm, the scheduler, or the interval of "
    "checkpoints; repeatable.",
)
@job_options
@follow_option
@click.option(
    "--new-code",
    is_flag=True,
    help="Copy the present code into the run directory and run it. [default: the code of the last copy]",
)
@live_code_option
@chain_options
@json_option
def command(
    run: str,
    step: int | None,
    overrides: tuple[str, ...],
    follow: bool,
    new_code: bool,
    is_live: bool,
    as_json: bool,
    **jobs: Any,
) -> int:
    """Continue RUN from its last complete checkpoint, or from that of an earlier step.

    The attempt executes the code that was copied when RUN was submitted.
    """
    from primerl_hpc.launch.planning.advice import refresh
    from primerl_hpc.launch.resume.changes import change_recipe
    from primerl_hpc.launch.resume.reserve import reserve_next_attempt
    from primerl_hpc.launch.resume.rewind import check_step, rewind
    from primerl_hpc.launch.submit import change_job, check_next_attempt, fork_hint, resume_run
    from primerl_hpc.observe.follow import follow_run
    from primerl_hpc.offline.code.keep import CodeChoice
    from primerl_hpc.plan.plan import load_plan
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    if new_code and is_live:
        raise click.UsageError(
            "--new-code copies the present code, --live-code runs it without a copy: use one"
        )
    code = CodeChoice.NEW if new_code else CodeChoice.LIVE if is_live else CodeChoice.KEPT
    after = found.latest_checkpoint() or 0 if step is None else step
    chain, changes = requested_jobs(jobs), job_changes()
    check_next_attempt(found, chain, changes)
    with reserve_next_attempt(found):
        refresh(found)
        if step is not None:
            check_step(found, step)
        lines = change_recipe(found, overrides, after, hint=fork_hint(found)) if overrides else []
        superseded = None if step is None else rewind(found, load_plan(found).kind, step).folder
        if changes:
            change_job(found, changes)
        is_changed = step is not None or bool(overrides)
        submitted = resume_run(found, chain, code, is_changed=is_changed)
    ids = {"run": found.root.name, "run_dir": str(found.root), "job_id": submitted.job_id}
    if as_json:
        print_json(
            {**ids, "step": after or None, "superseded": None if superseded is None else str(superseded)}
        )
    else:
        for line in lines:
            click.echo(line)
        if superseded is not None:
            click.echo(f"moved what came after step {step} to {superseded}")
        click.echo(f"run {found.root.name} · job {submitted.job_id} · continues {found.resume_point()}")
    if follow:
        return follow_run(found, quiet=as_json, from_end=True)
    return 0
