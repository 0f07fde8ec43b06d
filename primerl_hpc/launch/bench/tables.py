"""Results of ``primerl-hpc bench`` as tables: trainer, engines under load, and loop."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from primerl_hpc.observe.text import display_path

_TRAINER_RATES = {
    "tokens_per_s": "tokens/s, full steps",
    "tokens_per_s_per_rank": "  per rank",
    "tokens_per_s_training": "tokens/s, training only",
    "tokens_per_s_training_per_rank": "  per rank",
    "mfu": "MFU (true head_dim, causal)",
    "mfu_prime_rl": "MFU (prime-rl's formula)",
}
_TRAINER_SECONDS = {
    "step": "step",
    "data": "  data",
    "forward_backward": "  forward and backward",
    "optimizer": "  optimizer",
    "weights": "  weights for engines",
    "step_with_save": "step with a save",
    "save": "  of which save",
}
_LOOP_RATES = {
    "rollouts_per_s": "rollouts/s",
    "sampled_tokens_per_s": "sampled tokens/s",
    "packed_tokens_per_s": "tokens/s in batches",
    "trainer_tokens_per_s": "tokens/s of the trainer's steps",
}
_LOOP_SHARES = {
    "trainer_waits": "trainer waits for a batch",
    "orchestrator_waits": "orchestrator waits for the policy",
    "kv_use": "KV cache in use",
    "engines_idle": "engines without requests",
    "errored_rollouts": "errored rollouts",
}
_LOOP_SECONDS = {
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


def trainer_table(result: dict[str, Any]) -> list[str]:
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
    for name, label in _TRAINER_RATES.items():
        if name in result["rates"]:
            lines.append(_line(label, result["rates"][name], _percent if "mfu" in name else _count))
    lines.append("")
    for name, label in _TRAINER_SECONDS.items():
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
        for key, label in _LOOP_RATES.items()
        if key in result["rates"]
    ]
    shares = {**result["shares"], **result["means"]}
    lines += [
        f"{label:<40}{100 * shares[key]:>10.1f} %" for key, label in _LOOP_SHARES.items() if key in shares
    ]
    for role, durations in result["seconds"].items():
        lines += ["", f"{role:<40}{'median':>12}{'lowest':>12}{'highest':>12}"]
        for key, label in _LOOP_SECONDS.items():
            if key in durations:
                values = (f"{durations[key][name]:>10.3f} s" for name in ("median", "min", "max"))
                lines.append(f"  {label:<38}{''.join(values)}")
    return lines
