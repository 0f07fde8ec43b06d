"""``primerl-hpc profile``: trace steps of a running trainer, or iterations of running engines."""

from __future__ import annotations

import sys
import time

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode

MAX_STEPS, MAX_ITERATIONS = 20, 500

EPILOG = make_epilog(
    "profile my-run --steps 3",
    "profile my-run --ranks 0,8 --no-wait",
    "profile my-run --engines inference-0,inference-3 --steps 50",
    codes=(*RUN_CODES, ExitCode.UNAVAILABLE),
    more="1 also means that a trace is missing or short: the run ended, or an engine had no requests.",
)


def _parse_ranks(ctx: click.Context, param: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else sorted({int(word) for word in value.split(",")})
    except ValueError:
        raise click.BadParameter("separate the numbers by commas, such as 0,8") from None


@click.command("profile", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=MAX_ITERATIONS),
    default=3,
    show_default=True,
    help=f"Trace N steps of the trainer (at most {MAX_STEPS}), or N iterations of engines.",
)
@click.option(
    "--ranks",
    metavar="R,…",
    callback=_parse_ranks,
    help="Trace these ranks of the trainer.  [default: 0, without --engines]",
)
@click.option(
    "--engines",
    metavar="NAME,…",
    help="Trace these engines: inference-0, or all of a role (inference, prefill, teacher, judge).",
)
@click.option("--no-wait", is_flag=True, help="Return before the trainer's traces are written.")
@json_option
def command(
    run: str, steps: int, ranks: list[int] | None, engines: str | None, no_wait: bool, as_json: bool
) -> int:
    """Trace the next steps of the trainer of RUN, or of its engines, with torch's profiler: times of operators and
    kernels, memory.

    The traces, profiles/<id>/rank_<r>.json.gz and profiles/<engine>/*.pt.trace.json.gz in the run directory, open in
    Perfetto or chrome://tracing. The run continues meanwhile, slightly slower.
    """
    from primerl_hpc.observe.chat import exec_on_router_node, router_node_command
    from primerl_hpc.observe.inside.engine_traces import find_engines, trace_engines
    from primerl_hpc.observe.inside.profiles import missing_traces, request_profile
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    ranks = [0] if ranks is None and engines is None else ranks or []
    if ranks and steps > MAX_STEPS:
        raise click.BadParameter(f"at most {MAX_STEPS} steps of the trainer", param_hint="--steps")
    chosen = find_engines(found, engines.split(",")) if engines else {}
    if chosen and (there := router_node_command(found, sys.argv[1:], is_terminal=False)) is not None:
        exec_on_router_node(there)
    traces = request_profile(found, steps=steps, ranks=ranks) if ranks else []
    served = trace_engines(found, chosen, steps=steps)
    missing = traces
    while traces and not no_wait and (missing := missing_traces(found, traces)) is not None and missing:
        time.sleep(0.5)
    paths = [*map(str, traces), *(str(path) for trace in served for path in trace.files)]
    problems = {trace.engine: trace.problem for trace in served if trace.problem}
    if as_json:
        is_complete = missing == [] and not problems
        counts = {trace.engine: trace.iterations for trace in served}
        result = {"run": found.root.name, "steps": steps, "traces": paths, "is_complete": is_complete}
        print_json({**result, "iterations": counts, "problems": problems})
    else:
        click.echo("\n".join(paths))
    for engine, problem in problems.items():
        click.echo(f"error: {engine}: {problem}", err=True)
    if missing is None:
        click.echo("error: the run ended before the traces were complete", err=True)
    return ExitCode.FAILED if missing is None or problems else ExitCode.DONE
