"""``primerl-hpc eval``: evaluate a model, or the weights of a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

import click

from primerl_hpc.cli.options import (
    FOLLOWED_CODES,
    SUBMIT_CODES,
    check_environments,
    dry_run_option,
    follow_option,
    for_recipe,
    json_option,
    live_code_option,
    make_epilog,
    no_custom_code_option,
    print_json,
    profile_option,
    run_dir_option,
    set_option,
    shared_parent_option,
)
from primerl_hpc.common.log import show_warnings

EPILOG = make_epilog(
    "eval my-run --follow",
    "eval my-run --steps 10,20,30 --no-eval-base --samples 4",
    "eval my-run --watch --every 50 -p h100x64 --partition debug",
    "eval reverse_text/tiny -p local --model /models/my-qwen3",
    "eval eval.yaml -p local --base-url https://api.example.com/v1 \\\n"
    "      --model big-model --key-variable EXAMPLE_KEY",
    "eval eval.yaml -p local --weights-dir /runs/old/weights",
    codes=SUBMIT_CODES,
    more=FOLLOWED_CODES,
)


class StepsType(click.ParamType):
    """The value of ``--steps``: ``all``, or a list such as ``10,20,30``."""

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
@no_custom_code_option
@click.option(
    "--env",
    "environments",
    multiple=True,
    metavar="NAME[,NAME]",
    callback=lambda _context, _option, words: tuple(name for word in words for name in word.split(",")),
    help="Evaluate on these environments of the recipe, or by id; repeatable.",
)
@click.option("--samples", type=click.IntRange(min=1), metavar="K", help="Generate K rollouts per task.")
@click.option(
    "--num-tasks", type=click.IntRange(min=1), metavar="N", help="Use the first N tasks of each environment."
)
@click.option(
    "--model", metavar="NAME", help="Evaluate another model: a hub id or folder, or its name on --base-url."
)
@click.option(
    "--base-url",
    metavar="URL",
    help="Send requests to this OpenAI-compatible server (…/v1); start no engines.",
)
@click.option(
    "--key-variable",
    metavar="VAR",
    help="Read the API key of --base-url from this variable. [default: OPENAI_API_KEY]",
)
@click.option(
    "--weights-dir",
    "weights",
    type=click.Path(path_type=Path),
    help="Evaluate the versions in this folder of step_N. [default: weights of RUN]",
)
@click.option(
    "--steps", type=StepsType(), help="Evaluate these steps: all, or a list such as 10,20,30. [default: all]"
)
@click.option(
    "--every", type=click.IntRange(min=1), metavar="N", help="Evaluate every Nth step and the last one."
)
@click.option(
    *("--no-eval-base", "base"),
    is_flag=True,
    flag_value=False,
    default=None,
    help="Do not evaluate the base model.",
)
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N engines. [default: the recipe's layout]",
)
@click.option(
    "--watch",
    is_flag=True,
    flag_value=True,
    default=None,
    help="Continue with new weights until the run that writes them ends.",
)
@run_dir_option("Write results to this directory. [default: <RUN>-evaluation, or runs/<name>-<n>]")
@dry_run_option
@live_code_option
@shared_parent_option
@follow_option
@json_option
def command(
    target: str,
    profile_name: str | None,
    overrides: tuple[str, ...],
    run_dir: Path | None,
    dry_run: bool,
    is_live: bool,
    follow: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Evaluate a recipe's model, a model behind a URL, or the weights of a run on environments.

    One set of engines loads the policy versions one after another. Repeated in the same directory, the command runs
    only the evaluations that are missing. Only requests to --base-url leave the machine.
    """
    from primerl_hpc.launch.evaluate import EvalRequest, find_source, load_evaluation

    source = find_source(target)
    request, default_dir = _choose_default_dir(source, EvalRequest(**settings), run_dir)
    loaded = load_evaluation(source, request, overrides)
    show_warnings(loaded.warnings)
    check_environments(loaded.recipe)
    profile = for_recipe(_profile(source, profile_name), loaded)
    if dry_run:
        return _dry_run(loaded, profile, run_dir, default_dir, is_live=is_live, as_json=as_json)
    run_dir = run_dir or default_dir
    return _submit(loaded, profile, run_dir, is_live=is_live, follow=follow, as_json=as_json)


def _choose_default_dir(source: Any, request: Any, run_dir: Path | None) -> tuple[Any, Path | None]:
    """Return the request for what is missing, and where its results are written without ``run_dir``.

    None: in the runs folder, because no run is evaluated.
    """
    from primerl_hpc.launch.evaluate import default_run_dir
    from primerl_hpc.run.rundir import RunDir

    if not isinstance(source, RunDir) or request.model is not None:
        return request, None
    request, place = default_run_dir(source, request) if run_dir is None else (request, source.evaluation)
    if place.root != source.evaluation.root:
        names = ", ".join(request.environments)
        finished = source.evaluation.root.name
        click.echo(f"{finished} is finished and stays unchanged; {names}: {place.root}", err=True)
    return request, place.root


def _submit(
    loaded: Any, profile: Any, run_dir: Path | None, *, is_live: bool, follow: bool, as_json: bool
) -> int:
    """Submit the evaluation, or show its scores if none is missing. Returns the exit code."""
    from primerl_hpc.launch.evaluate import submit_evaluation
    from primerl_hpc.run.rundir import RunDir

    is_new = run_dir is None or not RunDir(run_dir).plan.is_file()
    submitted = submit_evaluation(loaded, profile, run_dir, is_live=is_live)
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
        click.echo(f"show its scores:  primerl-hpc scores {shlex.quote(root.name)}")
    return 0


def _profile(source: Any, name: str | None) -> Any:
    """Load the given profile, or the one with which the run was submitted."""
    from primerl_hpc.cli.options import load_chosen_profile
    from primerl_hpc.common import env
    from primerl_hpc.run.rundir import RunDir

    default = str(source.profile) if isinstance(source, RunDir) else env.default_profile()
    if (chosen := name or default) is not None:
        return load_chosen_profile(chosen)
    raise click.UsageError("a recipe needs --profile, the cluster profile to run on")


def _dry_run(
    loaded: Any, profile: Any, run_dir: Path | None, default: Path | None, *, is_live: bool, as_json: bool
) -> int:
    """Show the plan.

    ``default``: where results are written without ``run_dir``; None: in the runs folder.
    """
    from primerl_hpc.cli.plan import show_plan
    from primerl_hpc.launch.evaluate import check_evaluation, prepare_evaluation

    if run_dir is not None:
        _, plan = prepare_evaluation(loaded, profile, run_dir, is_live=is_live)
    else:
        plan = check_evaluation(loaded, profile, default)
    if as_json:
        print_json({"plan": plan.model_dump(mode="json")})
    else:
        show_plan(plan)
    return 0


def _show_scores(run: Any, as_json: bool) -> int:
    """Show the scores of an evaluation that is complete."""
    from primerl_hpc.observe.table import score_text
    from primerl_hpc.run.scores import read_scores

    if as_json:
        print_json(
            {"run": run.root.name, "run_dir": str(run.root), "scores": list(read_scores(run).values())}
        )
        return 0
    click.echo("the evaluation is complete:\n")
    click.echo(score_text(run))
    return 0
