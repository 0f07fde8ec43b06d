"""``primerl-hpc bench``: measure the parts of a recipe or of a prepared run, in a temporary run that then ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from primerl_hpc.cli.options import (
    SUBMIT_CODES,
    check_custom_code,
    index_option,
    job_changes,
    json_option,
    load_both,
    make_epilog,
    no_custom_code_option,
    phase_option,
    print_json,
    profile_option,
    set_option,
    shared_parent_option,
)
from primerl_hpc.cli.values import RUN

if TYPE_CHECKING:
    from primerl_hpc.launch.bench.target import BenchTarget
    from primerl_hpc.run.rundir import RunDir

RANKS, ENGINES, ROLLOUTS, LOOP = ("trainer", "sft"), "inference", "orchestrator", "loop"
PARTS = (*RANKS, ENGINES, ROLLOUTS, LOOP)
_STEPS = (*RANKS, ROLLOUTS, LOOP)
_TOKENS = (ENGINES, ROLLOUTS, LOOP)
CONCURRENCY = "1,8,32"
"""Levels of load if the command line names none."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""Lengths of requests to engines, within what the context admits."""
EPILOG = make_epilog(
    "bench sft my.yaml -p local --lengths 512-4096",
    "bench trainer runs/my-run-001 --peak-tflops 165",
    "bench inference my.yaml -p h100x64 --concurrency 1,8,64 --json",
    "bench orchestrator my.yaml -p h100x64 --steps 10",
    "bench loop my.yaml -p h100x64 --output-tokens 2048",
    codes=SUBMIT_CODES,
)


class PartOption(click.Option):
    """An option for some of the parts; its help begins with their names."""

    def __init__(self, *words: Any, parts: tuple[str, ...], **settings: Any) -> None:
        text = f"{', '.join(parts)}: {settings.pop('help')}"
        super().__init__(*words, help=text, **settings)
        self.parts = parts


def _option(name: str, parts: tuple[str, ...], text: str, **settings: Any) -> Callable[..., Any]:
    return click.option(name, cls=PartOption, parts=parts, help=text, **settings)


_POSITIVE = click.IntRange(min=1)
_LENGTHS = "N|A-B|N,N,…"
_PART_OPTIONS = (
    _option("--steps", _STEPS, "measure this many steps.", type=_POSITIVE, default=8, show_default=True),
    _option(
        "--warm-up",
        _STEPS,
        "run this many steps before measuring.",
        type=click.IntRange(min=0),
        default=2,
        show_default=True,
    ),
    _option(
        "--lengths",
        RANKS,
        "tokens of samples: constant, in a range, or a list. [default: seq_len]",
        metavar=_LENGTHS,
    ),
    _option("--save-every", RANKS, "save a checkpoint every K steps.", type=_POSITIVE, metavar="K"),
    _option(
        "--trace",
        RANKS,
        "write a profiler trace of one more step to DIR.",
        type=click.Path(path_type=Path),
        metavar="DIR",
    ),
    _option(
        "--peak-tflops",
        RANKS,
        "the peak TFLOP/s per device, for MFU.",
        type=click.FloatRange(min=0, min_open=True),
    ),
    _option(
        "--prompt-tokens", _TOKENS, "tokens per synthetic prompt; of a loop, one number.", metavar=_LENGTHS
    ),
    _option(
        "--output-tokens", _TOKENS, "tokens per synthetic reply; of a loop, one number.", metavar=_LENGTHS
    ),
    _option(
        "--concurrency",
        (ENGINES,),
        f"requests in flight (closed loop). [default without --rate: {CONCURRENCY}]",
        metavar="N,N,…",
    ),
    _option("--rate", (ENGINES,), "requests per second (open loop, random arrivals).", metavar="R,R,…"),
    _option("--requests", (ENGINES,), "requests per level.", type=_POSITIVE, metavar="N"),
    _option(
        "--synthetic", (ROLLOUTS,), "synthetic rollouts instead of the recipe's environments.", is_flag=True
    ),
    _option("--wandb", _TOKENS, "also send the result to this W&B project.", metavar="PROJECT"),
)


def part_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed(_PART_OPTIONS):
        function = decorate(function)
    return function


@click.command("bench", epilog=EPILOG)
@click.argument("part", type=click.Choice([*PARTS, "submit"]), metavar="|".join(PARTS))
@click.argument("target", type=RUN, metavar="RECIPE|RUN")
@profile_option
@set_option
@no_custom_code_option
@shared_parent_option
@index_option
@phase_option
@part_options
@json_option
def command(part: str, target: str, as_json: bool, **how: Any) -> None:
    """Measure one part of RECIPE, or of a prepared RUN with its layout, without changing a run.

    trainer and sft: the ranks of the trainer on synthetic rows. inference: the engines under load. orchestrator:
    rollouts without a trainer. loop: everything, on synthetic rollouts. On several nodes, this submits a job and waits
    for it.
    """
    from primerl_hpc.launch.bench.tables import trainer_table
    from primerl_hpc.tracking.bench_result import check_wandb, send_result

    _refuse_options_of_other_parts(LOOP if part == "submit" else part)
    if how["wandb"] is not None:
        check_wandb()
    if part in RANKS:
        name, result, lines = "", _measure_trainer(part, target, how), trainer_table
    else:
        name, result, lines = _measure_run(part, target, how)
        result = {"bench": part, **result}
    if as_json:
        print_json(result)
    else:
        click.echo("\n".join(lines(result)))
    if how["wandb"] is not None:  # after the output: a refusal must not lose the result
        send_result(how["wandb"], f"{name}-{part}-bench", result)


def _refuse_options_of_other_parts(part: str) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        is_given = context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE
        parts = RANKS if option.name in ("index", "phase") else getattr(option, "parts", (part,))
        if is_given and part not in parts:
            raise click.UsageError(f"{option.opts[0]} is for {', '.join(parts)}, not for {part}")


def _find_run(target: str, how: dict[str, Any]) -> RunDir | None:
    """Return the run, or None for a recipe. Raises UsageError for options that a run does not take."""
    from primerl_hpc.common.errors import NotFoundError
    from primerl_hpc.run.registry import find_run

    try:
        run = None if Path(target).is_file() else find_run(target)
    except NotFoundError:
        return None
    if run is not None and (how["overrides"] or how["profile_name"]):
        raise click.UsageError(
            "a prepared run already has a recipe and a profile; remove --set and --profile"
        )
    return run


def _load(target: str, how: dict[str, Any]) -> BenchTarget:
    from primerl_hpc.launch.bench.target import BenchTarget

    loaded, profile = load_both(target, how["profile_name"], how["overrides"])
    check_custom_code(loaded.recipe)
    return BenchTarget(loaded, profile, profile.profile.runs_folder())


def _measure_trainer(part: str, target: str, how: dict[str, Any]) -> dict[str, Any]:
    from primerl_hpc.common.names import Kind, Role, process_name
    from primerl_hpc.launch.bench.local import bench_recipe, bench_run
    from primerl_hpc.plan.plan import load_plan

    def request(seq_len: int) -> Any:
        return make_request(
            "BenchRequest",
            lengths=how["lengths"] or str(seq_len),
            warmup=how["warm_up"],
            trace=str(how["trace"].absolute()) if how["trace"] else None,
            **{name: how[name] for name in ("steps", "save_every", "peak_tflops")},
        )

    role, run = Role(part), _find_run(target, how)
    if run is None:
        found = _load(target, how)
        kind = Kind.SFT if role == Role.SFT else Kind.RL
        return bench_recipe(found.loaded, found.profile, kind, request(found.loaded.recipe.seq_len))
    phase = load_plan(run).phase_of(role, how["phase"])
    process = phase.process(process_name(role, how["index"]))
    return bench_run(run, phase.name, process.name, request(phase.recipe.seq_len), job_changes())


def _measure_run(
    part: str, target: str, how: dict[str, Any]
) -> tuple[str, dict[str, Any], Callable[[dict[str, Any]], list[str]]]:
    """Return the name of the recipe, the result, and the function that makes its table."""
    from primerl_hpc.launch.bench.loop import bench_engines, bench_loop
    from primerl_hpc.launch.bench.tables import load_table, loop_table
    from primerl_hpc.launch.bench.target import target_of_run

    run = _find_run(target, how)
    found = _load(target, how) if run is None else target_of_run(run, job_changes())
    recipe = found.loaded.recipe
    if part == ENGINES:
        return recipe.name, bench_engines(found, _load_request(recipe.max_model_len, how)), load_table
    return recipe.name, bench_loop(found, _loop_request(part, how)), loop_table


def _load_request(limit: int, how: dict[str, Any]) -> Any:
    concurrency = how["concurrency"] or ("" if how["rate"] else CONCURRENCY)
    return make_request(
        "LoadRequest",
        prompt_tokens=how["prompt_tokens"] or str(min(PROMPT_TOKENS, max(1, limit // 2))),
        output_tokens=how["output_tokens"] or str(min(OUTPUT_TOKENS, max(1, limit // 4))),
        concurrency=_numbers("--concurrency", concurrency, int),
        rates=_numbers("--rate", how["rate"] or "", float),
        requests=how["requests"],
    )


def _loop_request(part: str, how: dict[str, Any]) -> Any:
    has_trainer = part != ROLLOUTS
    is_synthetic = has_trainer or how["synthetic"]
    texts = {name: how[name] for name in ("prompt_tokens", "output_tokens")}
    if not is_synthetic and any(texts.values()):
        raise click.UsageError("--prompt-tokens and --output-tokens need --synthetic")
    lengths = {name: _numbers(f"--{name.replace('_', '-')}", text or "", int) for name, text in texts.items()}
    if any(len(numbers) > 1 for numbers in lengths.values()):
        raise click.UsageError("--prompt-tokens and --output-tokens are one number each for a loop")
    return make_request(
        "LoopRequest",
        has_trainer=has_trainer,
        is_synthetic=is_synthetic,
        warmup=how["warm_up"],
        steps=how["steps"],
        **{name: numbers[0] if numbers else None for name, numbers in lengths.items()},
    )


def make_request(kind: str, **values: Any) -> Any:
    """Return a request of `plan.bench_plans`. Raises UsageError that names the option with an invalid value."""
    from pydantic import ValidationError

    from primerl_hpc.plan import bench_plans as bench

    try:
        return getattr(bench, kind)(**values)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-").replace("rates", "rate")
        raise click.UsageError(f"{option}: {first['msg'].removeprefix('Value error, ')}") from None


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    """Parse ``1,8,32``. Raises UsageError."""
    try:
        return tuple(kind(word) for word in text.split(",") if word)
    except ValueError:
        raise click.UsageError(f"{option} {text} is not a list of numbers such as 1,8,32") from None
