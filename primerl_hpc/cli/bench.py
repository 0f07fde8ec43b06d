"""``primerl-hpc trainer|sft --bench``: how fast the trainer is, on made-up data."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from primerl_hpc.cli.options import (
    job_changes,
    json_option,
    load_both,
    print_json,
    profile_option,
    set_option,
)
from primerl_hpc.observe.text import shown

BENCHED = ("trainer", "sft")
_RATES = {
    "tokens_per_s": "tokens/s, whole steps",
    "tokens_per_s_per_rank": "  per rank",
    "tokens_per_s_training": "tokens/s, training alone",
    "tokens_per_s_training_per_rank": "  per rank",
    "mfu": "MFU (true head_dim, causal)",
    "mfu_prime_rl": "MFU (prime-rl's formula)",
}
_SECONDS = {
    "step": "step",
    "data": "  data",
    "forward_backward": "  forward and backward",
    "optimizer": "  optimizer",
    "weights": "  weights for engines",
    "step_with_save": "step with a save",
    "save": "  of it, save",
}


def bench_options(command: click.Command) -> click.Command:
    """``--bench`` and what belongs to it."""
    decorators: tuple[Callable[..., Any], ...] = (
        click.option(
            *("--bench", "is_bench"),
            is_flag=True,
            help="Measure on made-up data; touches no run. Over several nodes as a job, which is waited for.",
        ),
        profile_option,
        set_option,
        click.option(
            "--lengths",
            metavar="N|A-B|N,N,…",
            help="Tokens of the samples: all alike, uniform, or in turn. [default: seq_len]",
        ),
        click.option("--steps", default=8, show_default=True, type=click.IntRange(min=1), help="To count."),
        click.option(
            "--warm-up", default=2, show_default=True, type=click.IntRange(min=0), help="Before them."
        ),
        click.option("--save-every", type=click.IntRange(min=1), metavar="K", help="Also save checkpoints."),
        click.option("--trace", type=click.Path(path_type=Path), metavar="DIR", help="Trace one more step."),
        click.option(
            "--peak-tflops", type=click.FloatRange(min=0, min_open=True), help="Of one device, for MFU."
        ),
        json_option,
    )
    for decorate in decorators:
        command = decorate(command)
    return command


def run_bench(
    name: str,
    word: str,
    index: int,
    phase_name: str | None,
    *,
    profile_name: str | None,
    overrides: tuple[str, ...],
    lengths: str | None,
    steps: int,
    warm_up: int,
    save_every: int | None,
    trace: Path | None,
    peak_tflops: float | None,
    as_json: bool,
) -> None:
    from primerl_hpc.common.errors import NotFoundError
    from primerl_hpc.common.names import Kind, Role, process_name
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.launch.bench import bench_recipe, bench_run
    from primerl_hpc.plan.types import load_plan

    def ask(seq_len: int) -> Any:
        return make_request(
            lengths=lengths or str(seq_len),
            warmup=warm_up,
            steps=steps,
            save_every=save_every,
            trace=str(trace.absolute()) if trace else None,
            peak_tflops=peak_tflops,
        )

    role = Role(name)
    try:
        run = None if Path(word).is_file() else find_run(word)
    except NotFoundError:
        run = None
    if run is not None:
        if overrides or profile_name:
            raise click.UsageError("a prepared run has its recipe and profile: leave --set and --profile out")
        phase = load_plan(run).phase_of(role, phase_name)
        process = phase.process(process_name(role, index))
        result = bench_run(run, phase.name, process.name, ask(phase.recipe.seq_len), job_changes())
    else:
        loaded, profile = load_both(word, profile_name, overrides)
        kind = Kind.SFT if role == Role.SFT else Kind.RL
        result = bench_recipe(loaded, profile, kind, ask(loaded.recipe.seq_len))
    if as_json:
        print_json(result)
    else:
        click.echo("\n".join(table(result)))


def make_request(**values: Any) -> Any:
    """Raises UsageError for lengths that are of no known form."""
    from pydantic import ValidationError

    from primerl_hpc.plan.bench import BenchRequest

    try:
        return BenchRequest(**values)
    except ValidationError as error:
        raise click.UsageError(
            f"--lengths: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None


def table(result: dict[str, Any]) -> list[str]:
    """Lines of at most 80 columns, but for the path of a folder that lies elsewhere."""
    request, versions = result["request"], result["versions"]
    heading = [
        f"{result['loop']} · {result['model']}, {_si(result['parameters'])} parameters ({result['weights']})",
        f"{result['ranks']} × {result['device']} · torch {versions['torch']}, "
        f"transformers {versions['transformers']}",
        f"{request['steps']} steps after {request['warmup']} to warm up · seq_len {result['seq_len']:,}, "
        f"samples of {request['lengths']} tokens",
    ]
    lines = [part for line in heading for part in textwrap.wrap(line, 80)]
    lines += ["", f"{'':<30}{'median':>12}{'lowest':>12}{'highest':>12}"]
    for name, label in _RATES.items():
        if name in result["rates"]:
            lines.append(_line(label, result["rates"][name], _percent if "mfu" in name else _count))
    lines.append("")
    for name, label in _SECONDS.items():
        if name in result["seconds"]:
            lines.append(_line(label, result["seconds"][name], _seconds))
    lines += ["", *_notes(result)]
    return lines


def _notes(result: dict[str, Any]) -> list[str]:
    memory = ", ".join(f"{name} {value:.2f}" for name, value in result["peak_memory_gib"].items())
    lines = [f"peak memory of a rank in GiB: {memory}"]
    if result["collectives_s"] is not None:
        lines.append("collectives of the traced step, rank 0, computing beside them or not:")
        lines += [f"  {name:<16} {value:.3f} s" for name, value in result["collectives_s"].items()]
        lines.append(f"traces: {shown(Path(result['request']['trace']))}")
    if result["peak_tflops"] is None:
        speed = result["tflops_per_rank"]["median"]
        lines.append(f"{speed:.3g} TFLOP/s per rank; no MFU: the peak is not known (--peak-tflops)")
    else:
        lines.append(f"MFU of {result['peak_tflops']:,.4g} TFLOP/s per device, by tokens/s of training alone")
    return lines


def _line(label: str, spread: dict[str, float], show: Callable[[float], str]) -> str:
    return f"{label:<30}" + "".join(f"{show(spread[key]):>12}" for key in ("median", "min", "max"))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _si(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
