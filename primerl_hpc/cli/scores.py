"""``primerl-hpc scores``: show the scores of evaluations."""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN

EPILOG = make_epilog("scores my-run-evaluation", "scores my-run --svg held-out.svg", codes=RUN_CODES)


@click.command("scores", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option("--svg", type=click.Path(path_type=Path), help="Also write the curves to this SVG file.")
@json_option
def command(run: str, svg: Path | None, as_json: bool) -> None:
    """Show the scores of RUN, an evaluation or a training run with evaluations.

    Each row is an environment and policy version: mean reward (AVG@K for K samples per task), probability that at least
    one of K samples solves a task (PASS@K) and that all do (PASS^K), tasks, failed rollouts, mean completion tokens.
    """
    from primerl_hpc.observe.report.scores import write_figure
    from primerl_hpc.observe.table import score_text
    from primerl_hpc.run.registry import find_run
    from primerl_hpc.run.scores import read_scores

    found = find_run(run)
    scores = read_scores(found)
    if svg is not None and scores:
        write_figure(found, svg)
    if as_json:
        files = {"scores": str(found.scores), "rollouts": str(found.traces("eval"))}
        print_json({"run": found.root.name, "scores": list(scores.values()), "files": files})
        return
    click.echo(score_text(found))
