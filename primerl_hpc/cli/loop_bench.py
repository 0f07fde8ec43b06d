"""``--bench`` of ``inference``, ``orchestrator`` and ``submit``: options, and the result as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import job_changes, load_both, print_json

if TYPE_CHECKING:
    from primerl_hpc.launch.bench.target import BenchTarget

CONCURRENCY = "1,8,32"
"""Levels of ``inference --bench`` if the command line names none."""
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
"""Lengths of its requests, within what the context admits."""
_RATES = {
    "rollouts_per_s": "rollouts/s",
    "sampled_tokens_per_s": "sampled tokens/s",
    "packed_tokens_per_s": "tokens/s in batches",
    "trainer_tokens_per_s": "tokens/s of the trainer's steps",
}
_SHARES = {
    "trainer_waits": "trainer waits for a batch",
    "orchestrator_waits": "orchestrator waits for the policy",
    "kv_use": "KV cache in use",
    "engines_idle": "engines without requests",
    "errored_rollouts": "errored rollouts",
}
_SECONDS = {
    "step": "step",
    "rollout": "rollout",
    "wait_for_batch": "wait for a batch",
    "wait_for_policy": "wait for the policy",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "weights": "weights for engines",
    "weight_update": "weight update",
    "engines_paused": "engines paused",
    "pack": "packing",
}
_wandb_option = click.option(
    "--wandb", metavar="PROJECT", help="With --bench: also send the result to this W&B project."
)
_STEP_OPTIONS = (
    click.option(
        "--steps",
        default=8,
        show_default=True,
        type=click.IntRange(min=1),
        help="With --bench: measure this many steps.",
    ),
    click.option(
        "--warm-up",
        default=2,
        show_default=True,
        type=click.IntRange(min=0),
        help="With --bench: run this many steps before measuring.",
    ),
    click.option(
        "--prompt-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --bench: about this many tokens per synthetic prompt. [default: what the recipe expects]",
    ),
    click.option(
        "--output-tokens",
        type=click.IntRange(min=1),
        metavar="N",
        help="With --bench: tokens per synthetic completion. [default: rollouts.sampling.max_tokens]",
    ),
    _wandb_option,
)
OWN_OPTIONS = ("steps", "warm_up", "prompt_tokens", "output_tokens", "wandb", "synthetic")
OWN_OPTIONS += ("concurrency", "rate", "requests")
"""Options that need ``--bench``."""


def bench_flag(about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--bench", "is_bench", is_flag=True, help=about)


def loop_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a benchmark of steps."""
    for decorate in reversed(_STEP_OPTIONS):
        function = decorate(function)
    return function


def synthetic_option(function: Callable[..., Any]) -> Callable[..., Any]:
    about = "With --bench: synthetic rollouts instead of the recipe's environments."
    return click.option("--synthetic", is_flag=True, help=about)(function)


def load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a benchmark of engines."""
    lengths = "N|A-B|N,N,…"
    for decorate in reversed(
        (
            click.option("--prompt-tokens", metavar=lengths, help="With --bench: tokens per prompt."),
            click.option("--output-tokens", metavar=lengths, help="With --bench: tokens per response."),
            click.option(
                "--concurrency",
                metavar="N,N,…",
                help="With --bench: measure with this many requests in flight (closed loop). "
                f"[default without --rate: {CONCURRENCY}]",
            ),
            click.option(
                "--rate",
                metavar="R,R,…",
                help="With --bench: measure with this many requests per second (open loop, random arrivals).",
            ),
            click.option(
                "--requests",
                type=click.IntRange(min=1),
                metavar="N",
                help="With --bench: requests per level.",
            ),
            _wandb_option,
        )
    ):
        function = decorate(function)
    return function


def bench_target(
    name: str, target: str, profile_name: str | None, overrides: tuple[str, ...], *, may_be_run: bool = True
) -> BenchTarget:
    """Return what ``primerl-hpc NAME --bench TARGET`` measures. Raises UsageError, ConfigError, NotFoundError."""
    from primerl_hpc.common.errors import NotFoundError
    from primerl_hpc.launch.bench.target import BenchTarget, target_of_run
    from primerl_hpc.run.registry import find_run

    try:
        run = find_run(target) if may_be_run and not Path(target).is_file() else None
    except NotFoundError:
        run = None
    if run is None:
        loaded, profile = load_both(target, profile_name, overrides)
        return BenchTarget(loaded, profile, profile.profile.runs_folder())
    if overrides or profile_name:
        raise click.UsageError(
            f"{name}: a prepared run already has a recipe and a profile; remove --set and --profile"
        )
    return target_of_run(run, job_changes())


def run_load_bench(target: BenchTarget, options: dict[str, Any], *, as_json: bool) -> None:
    """Measure engines and print the result."""
    from primerl_hpc.launch.bench.loop import bench_engines

    limit = target.loaded.recipe.max_model_len
    output = options["output_tokens"] or str(min(OUTPUT_TOKENS, max(1, limit // 4)))
    prompt = options["prompt_tokens"] or str(min(PROMPT_TOKENS, max(1, limit // 2)))
    concurrency = options["concurrency"] or ("" if options["rate"] else CONCURRENCY)
    request = _request(
        "LoadRequest",
        prompt_tokens=prompt,
        output_tokens=output,
        concurrency=_numbers("--concurrency", concurrency, int),
        rates=_numbers("--rate", options["rate"] or "", float),
        requests=options["requests"],
    )
    _run("inference", target, lambda: bench_engines(target, request), load_table, options["wandb"], as_json)


def run_loop_bench(name: str, target: BenchTarget, options: dict[str, Any], *, as_json: bool) -> None:
    """Measure the orchestrator, or with ``name`` submit the complete loop, and print the result."""
    from primerl_hpc.launch.bench.loop import bench_loop

    has_trainer = name == "submit"
    lengths = {key: options[key] for key in ("prompt_tokens", "output_tokens")}
    is_synthetic = has_trainer or options["synthetic"]
    if not is_synthetic and any(lengths.values()):
        raise click.UsageError("--prompt-tokens and --output-tokens need --synthetic")
    request = _request(
        "LoopRequest",
        has_trainer=has_trainer,
        is_synthetic=is_synthetic,
        warmup=options["warm_up"],
        steps=options["steps"],
        **lengths,
    )
    _run(name, target, lambda: bench_loop(target, request), loop_table, options["wandb"], as_json)


def _run(
    name: str,
    target: BenchTarget,
    measure: Callable[[], dict[str, Any]],
    table: Callable[[dict[str, Any]], list[str]],
    wandb: str | None,
    as_json: bool,
) -> None:
    from primerl_hpc.tracking.bench_result import check_wandb, send_result

    if wandb is not None:
        check_wandb()
    result = {"bench": name, **measure()}
    if as_json:
        print_json(result)
    else:
        click.echo("\n".join(table(result)))
    if wandb is not None:  # after the output: a refusal must not lose the result
        send_result(wandb, f"{target.loaded.recipe.name}-{name}-bench", result)


def _request(kind: str, **values: Any) -> Any:
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


def _heading(result: dict[str, Any], *more: str) -> list[str]:
    lines = [
        f"{result['bench']} · {result['model']}",
        f"profile {result['profile']} ({result['accelerator']})",
    ]
    return [part for line in (*lines, *more) for part in textwrap.wrap(line, 80)]


def load_table(result: dict[str, Any]) -> list[str]:
    """Return the levels as lines of at most 80 columns, except for long paths."""
    request = result["request"]
    lines = _heading(
        result,
        f"{result['engines']} engines, vLLM {result['versions']['vllm']}; prompts of {request['prompt_tokens']}, "
        f"responses of {request['output_tokens']} tokens",
    )
    lines += ["", "                          out       TTFT ms        ITL ms      KV    failed"]
    lines.append("load            req/s  tokens/s  median    p99  median    p99   max")
    for level in result["levels"]:
        is_open = level["loop"] == "open"
        load = f"{level['rate']:g}/s" if is_open else f"{level['concurrency']} in flight"
        if "duration_s" not in level:
            lines.append(f"{load:<14} all {level['failed']} requests failed: {level['error']}")
            continue
        lines.append(
            f"{load:<14}{level['requests_per_s']:>7.1f}{level['output_tokens_per_s']:>10,.0f}"
            f"{_pair(level['ttft_s'])}{_pair(level['itl_s'])}{level['kv_use']['max']:>6.0%}"
            f"{level['failed']:>5} of {level['requests']}"
        )
    return lines


def _pair(spread: dict[str, float] | None) -> str:
    if spread is None:
        return f"{'-':>8}{'-':>7}"
    return f"{1e3 * spread['median']:>8.1f}{1e3 * spread['p99']:>7.1f}"


def loop_table(result: dict[str, Any]) -> list[str]:
    """Return the figures of a loop as lines of at most 80 columns, except for long paths."""
    request = result["request"]
    rollouts = "synthetic rollouts" if request["is_synthetic"] else "the recipe's environments"
    steps = f"{request['steps']} steps after {request['warmup']} warm-up steps · {rollouts}"
    lines = _heading(result, steps if request["has_trainer"] else f"{steps} · no trainer")
    lines.append("")
    lines += [
        f"{label:<40}{result['rates'][key]:>12,.1f}"
        for key, label in _RATES.items()
        if key in result["rates"]
    ]
    shares = {**result["shares"], **result["means"]}
    lines += [f"{label:<40}{100 * shares[key]:>10.1f} %" for key, label in _SHARES.items() if key in shares]
    for role, durations in result["seconds"].items():
        lines += ["", f"{role:<40}{'median':>12}{'lowest':>12}{'highest':>12}"]
        for key, label in _SECONDS.items():
            if key in durations:
                values = (f"{durations[key][name]:>10.3f} s" for name in ("median", "min", "max"))
                lines.append(f"  {label:<38}{''.join(values)}")
    return lines
