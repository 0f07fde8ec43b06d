"""``primerl-hpc eval``"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from primerl_hpc.cli.options import for_recipe, json_option, print_json, profile_option, set_option

EPILOG = """\b
Examples:
  primerl-hpc eval my-run --follow
  primerl-hpc eval my-run --steps 10,20,30 --no-eval-base --samples 4
  primerl-hpc eval my-run --watch --every 50 -p h100x64 --partition debug
  primerl-hpc eval reverse_text/tiny -p local --model /models/my-qwen3
  primerl-hpc eval eval.yaml -p local --base-url https://api.example.com/v1 \\
      --model big-model --key-variable EXAMPLE_KEY
  primerl-hpc eval eval.yaml -p local --weights-dir /runs/old/weights
"""


class Steps(click.ParamType):
    """``all`` or ``10,20,30``"""

    name = "steps"

    def convert(self, value: Any, param: Any, ctx: Any) -> Literal["all"] | tuple[int, ...]:
        if isinstance(value, tuple) or value == "all":
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is neither all nor a list like 10,20,30", param, ctx)
        return tuple(int(word) for word in words)


@click.command("eval", epilog=EPILOG)
@click.argument("target", metavar="RECIPE|RUN")
@profile_option
@set_option
@click.option(
    "--env",
    "environments",
    multiple=True,
    metavar="NAME",
    help="Environments only, or others by id; repeatable.",
)
@click.option("--samples", type=click.IntRange(min=1), metavar="K", help="Rollouts per task.")
@click.option(
    "--num-tasks", type=click.IntRange(min=1), metavar="N", help="The first N tasks of each environment."
)
@click.option(
    "--model", metavar="NAME", help="Another model: hub id or folder; at --base-url, its name there."
)
@click.option(
    "--base-url", metavar="URL", help="An OpenAI-compatible server to ask (…/v1); no engines are started."
)
@click.option("--key-variable", metavar="VAR", help="Variable that holds its key. [default: OPENAI_API_KEY]")
@click.option(
    "--weights-dir", type=click.Path(path_type=Path), help="Folder of step_N. [default: weights of RUN]"
)
@click.option("--steps", type=Steps(), help="all, or 10,20,30.  [default: all]")
@click.option(
    "--every", type=click.IntRange(min=1), metavar="N", help="Of all steps, multiples of N and the last."
)
@click.option("--no-eval-base", is_flag=True, help="Leave the base model out.")
@click.option(
    "--replicas", type=click.IntRange(min=1), metavar="N", help="Engines. [default: the recipe's layout]"
)
@click.option("--watch", is_flag=True, help="Go on with new weights until the run that makes them ends.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Where results go. [default: <RUN>-evaluation, or runs/<name>-<n>]",
)
@click.option(
    "--dry-run", is_flag=True, help="Check everything and show the plan; with --run-dir also prepare it."
)
@click.option("--follow", "-f", is_flag=True, help="Show progress until it ends; ^C leaves it running.")
@json_option
def command(
    target: str,
    profile_name: str | None,
    overrides: tuple[str, ...],
    environments: tuple[str, ...],
    samples: int | None,
    num_tasks: int | None,
    model: str | None,
    base_url: str | None,
    key_variable: str | None,
    weights_dir: Path | None,
    steps: Literal["all"] | tuple[int, ...] | None,
    every: int | None,
    no_eval_base: bool,
    replicas: int | None,
    watch: bool,
    run_dir: Path | None,
    dry_run: bool,
    follow: bool,
    as_json: bool,
) -> int:
    """Score models on environments: the recipe's model, one behind a URL, or the weights of a run.

    One set of engines is updated from version to version. Run it again in the same directory and only what is missing is
    run. Nothing leaves the machine but requests to --base-url.
    """
    from primerl_hpc.common.rundir import RunDir
    from primerl_hpc.launch.evaluate import (
        EvalRequest,
        find_source,
        load_evaluation,
        submit_evaluation,
    )

    source = find_source(target)
    request = EvalRequest(
        environments=environments,
        samples=samples,
        num_tasks=num_tasks,
        model=model,
        base_url=base_url,
        key_variable=key_variable,
        weights=weights_dir,
        steps=steps,
        every=every,
        base=False if no_eval_base else None,
        watch=watch or None,
        replicas=replicas,
    )
    loaded = load_evaluation(source, request, overrides)
    profile = for_recipe(_profile(source, profile_name), loaded)
    beside = source.evaluation.root if isinstance(source, RunDir) and model is None else None
    if dry_run:
        return _dry_run(loaded, profile, run_dir, beside, as_json)
    run_dir = run_dir or beside
    is_new = run_dir is None or not RunDir(run_dir).plan.is_file()
    submitted = submit_evaluation(loaded, profile, run_dir)
    if submitted is None:
        return _show_scores(RunDir(Path(run_dir or ".").resolve()), as_json)
    root = submitted.run.root
    if as_json:
        print_json({"run": root.name, "run_dir": str(root), "job_id": submitted.job_id})
    else:
        click.echo(f"evaluation {root.name} · job {submitted.job_id} ({submitted.plan.scheduler})")
    if follow:
        from primerl_hpc.observe.follow import follow_run

        return follow_run(submitted.run, quiet=as_json, from_end=not is_new)
    if not as_json:
        click.echo(f"its scores:  primerl-hpc scores {root.name}")
    return 0


def _profile(source: Any, name: str | None) -> Any:
    """The profile that was named, or that the run was submitted with."""
    from primerl_hpc.cli.options import load_chosen_profile
    from primerl_hpc.common import env
    from primerl_hpc.common.rundir import RunDir

    default = str(source.profile) if isinstance(source, RunDir) else env.default_profile()
    if (chosen := name or default) is not None:
        return load_chosen_profile(chosen)
    raise click.UsageError("a recipe needs --profile: where is it to run?")


def _dry_run(loaded: Any, profile: Any, run_dir: Path | None, default: Path | None, as_json: bool) -> int:
    """``default``: where results go when no ``run_dir`` was given; None: under the runs folder."""
    from primerl_hpc.cli.plan import show_plan
    from primerl_hpc.launch.evaluate import check_evaluation, prepare_evaluation

    if run_dir is not None:
        _, plan = prepare_evaluation(loaded, profile, run_dir)
    else:
        plan = check_evaluation(loaded, profile, default)
    if as_json:
        print_json({"plan": plan.model_dump(mode="json")})
    else:
        show_plan(plan)
    return 0


def _show_scores(run: Any, as_json: bool) -> int:
    from primerl_hpc.common.scores import read_scores
    from primerl_hpc.observe.scores import score_text

    if as_json:
        print_json(
            {"run": run.root.name, "run_dir": str(run.root), "scores": list(read_scores(run).values())}
        )
        return 0
    click.echo("nothing is missing:\n")
    click.echo(score_text(run))
    return 0
