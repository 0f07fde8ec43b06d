"""``primerl-hpc scores``"""

from __future__ import annotations

from pathlib import Path

import click

from primerl_hpc.cli.options import json_option, print_json

EPILOG = """\b
Examples:
  primerl-hpc scores my-run-evaluation
  primerl-hpc scores my-run --svg held-out.svg
"""


@click.command("scores", epilog=EPILOG)
@click.argument("run")
@click.option("--svg", type=click.Path(path_type=Path), help="Also draw the curves into this file.")
@json_option
def command(run: str, svg: Path | None, as_json: bool) -> None:
    """Scores of RUN: an evaluation's, or those that a training run made on its way.

    A row per environment and policy version: mean reward (AVG@K of K samples per task), the chance that one of K is
    solved (PASS@K) and that all are (PASS^K), tasks, failed rollouts, mean tokens of a completion.
    """
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.common.scores import read_scores
    from primerl_hpc.observe.scores import score_text, write_figure

    found = find_run(run)
    scores = read_scores(found)
    if svg is not None and scores:
        write_figure(found, svg)
    if as_json:
        files = {"scores": str(found.scores), "rollouts": str(found.traces("eval"))}
        print_json({"run": found.root.name, "scores": list(scores.values()), "files": files})
        return
    click.echo(score_text(found))
