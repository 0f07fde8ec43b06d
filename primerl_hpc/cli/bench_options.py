"""``primerl-hpc trainer|sft --bench``: measure the trainer's speed on synthetic data."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
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
from primerl_hpc.observe.text import display_path

BENCHED = ("trainer", "sft")
_RATES = {
    "tokens_per_s": "tokens/s, full steps",
    "tokens_per_s_per_rank": "  per rank",
    "tokens_per_s_training": "tokens/s, training only",
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
    "save": "  of which save",
}


def bench_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--bench`` and its options."""
    decorators: tuple[Callable[..., Any], ...] = (
        click.option(
            *("--bench", "is_bench"),
            is_flag=True,
            help="Measure the speed on synthetic data without changing a run. On several nodes, submit a job "
            "and wait for it.",
        ),
        profile_option,
        set_option,
        click.option(
            "--lengths",
            metavar="N|A-B|N,N,…",
            help="Set the lengths of samples in tokens: constant, uniform in a range, or a repeated list. "
            "[default: seq_len]",
        ),
        click.option(
            "--steps",
            default=8,
            show_default=True,
            type=click.IntRange(min=1),
            help="Measure this many steps.",
        ),
        click.option(
            "--warm-up",
            default=2,
            show_default=True,
            type=click.IntRange(min=0),
            help="Run this many warm-up steps before measuring.",
        ),
        click.option(
            "--save-every", type=click.IntRange(min=1), metavar="K", help="Save a checkpoint every K steps."
        ),
        click.option(
            "--trace",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Write a profiler trace of one more step to DIR.",
        ),
        click.option(
            "--peak-tflops",
            type=click.FloatRange(min=0, min_open=True),
            help="Set the peak TFLOP/s per device, for MFU.",
        ),
        json_option,
    )
    for decorate in decorators:
        command = decorate(command)
    return command


@dataclass(frozen=True)
class BenchOptions:
    """Values of the options that `bench_options` adds, without ``--bench`` itself."""

    profile_name: str | None
    overrides: tuple[str, ...]
    lengths: str | None
    steps: int
    warm_up: int
    save_every: int | None
    trace: Path | None
    peak_tflops: float | None
    as_json: bool

    def request(self, seq_len: int) -> Any:
        """Return the `BenchRequest` for a recipe with this ``seq_len``."""
        return make_request(
            lengths=self.lengths or str(seq_len),
            warmup=self.warm_up,
            steps=self.steps,
            save_every=self.save_every,
            trace=str(self.trace.absolute()) if self.trace else None,
            peak_tflops=self.peak_tflops,
        )


def run_bench(name: str, target: str, index: int, phase_name: str | None, options: BenchOptions) -> None:
    """Measure the role ``name`` of the run or recipe ``target``, and print the result."""
    from primerl_hpc.common.errors import NotFoundError
    from primerl_hpc.common.names import Kind, Role, process_name
    from primerl_hpc.launch.bench.local import bench_recipe, bench_run
    from primerl_hpc.plan.plan import load_plan
    from primerl_hpc.run.registry import find_run

    role = Role(name)
    try:
        run = None if Path(target).is_file() else find_run(target)
    except NotFoundError:
        run = None
    if run is not None:
        if options.overrides or options.profile_name:
            raise click.UsageError(
                "a prepared run already has a recipe and a profile; remove --set and --profile"
            )
        phase = load_plan(run).phase_of(role, phase_name)
        process = phase.process(process_name(role, index))
        request = options.request(phase.recipe.seq_len)
        result = bench_run(run, phase.name, process.name, request, job_changes())
    else:
        loaded, profile = load_both(target, options.profile_name, options.overrides)
        kind = Kind.SFT if role == Role.SFT else Kind.RL
        result = bench_recipe(loaded, profile, kind, options.request(loaded.recipe.seq_len))
    if options.as_json:
        print_json(result)
    else:
        click.echo("\n".join(table(result)))


def make_request(**values: Any) -> Any:
    """Return the `BenchRequest` of the options. Raises UsageError for invalid lengths."""
    from pydantic import ValidationError

    from primerl_hpc.plan.bench_plans import BenchRequest

    try:
        return BenchRequest(**values)
    except ValidationError as error:
        raise click.UsageError(
            f"--lengths: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from None


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as lines of at most 80 columns, except for long paths."""
    request, versions = result["request"], result["versions"]
    heading = [
        f"{result['loop']} · {result['model']}, {_si(result['parameters'])} parameters ({result['weights']})",
        f"{result['ranks']} × {result['device']} · torch {versions['torch']}, "
        f"transformers {versions['transformers']}",
        f"{request['steps']} steps after {request['warmup']} warm-up steps · seq_len {result['seq_len']:,}, "
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
    lines = [f"peak memory per rank in GiB: {memory}"]
    if result["collectives_s"] is not None:
        lines.append("collectives of the traced step on rank 0, overlapped with computation or not:")
        lines += [f"  {name:<16} {value:.3f} s" for name, value in result["collectives_s"].items()]
        lines.append(f"traces: {display_path(Path(result['request']['trace']))}")
    if result["peak_tflops"] is None:
        speed = result["tflops_per_rank"]["median"]
        lines.append(f"{speed:.3g} TFLOP/s per rank; no MFU: unknown peak, set --peak-tflops")
    else:
        lines.append(
            f"MFU relative to {result['peak_tflops']:,.4g} TFLOP/s per device, from tokens/s of training only"
        )
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
