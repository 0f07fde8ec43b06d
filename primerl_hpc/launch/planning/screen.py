"""Text of a forecast: the screen of `primerl-hpc plan`, the tree of ``--why``, and tables of other layouts."""

from __future__ import annotations

from collections.abc import Iterator

from primerl_hpc.common.log import fold
from primerl_hpc.launch.planning.alternatives import Alternative, ScalingRow
from primerl_hpc.launch.planning.forecast import PlanForecast
from primerl_hpc.observe.text import WIDTH, wrap
from primerl_hpc.plan.assess.colocated import takes_turns
from primerl_hpc.plan.assess.prediction import Prediction
from primerl_hpc.plan.predict.figure import Figure
from primerl_hpc.slurm.budget import Budget

GIB = 2**30
MEMORIES = {"trainer": "memory.trainer", "engine": "memory.engine", "prefill": "memory.prefill"}
BOTTLENECKS = {
    "engines": "the engines are the bottleneck",
    "trainer": "the trainer is the bottleneck",
    "both": "engines and trainer are balanced",
    "prefill engines": "the prefill engines are the bottleneck",
    "weight updates": "weight updates are the bottleneck",
}


def forecast_lines(forecast: PlanForecast, budget: Budget | None = None) -> list[str]:
    """Return the lines of the screen, each of at most `WIDTH` columns."""
    prediction, case = forecast.prediction, forecast.case
    if prediction is None or case is None:
        reason = f"no prediction: {forecast.reason}" + (f"; {forecast.hint}" if forecast.hint else "")
        return [*fold(reason, WIDTH).splitlines(), *_table(_budget_rows(budget))]
    gpus = dict.fromkeys([case.trainer_gpu.name, case.engine_gpu.name])
    size = _parameters(case.shape.total)
    lines = wrap(f"predicted for {case.shape.name} ({size} parameters) on {' and '.join(gpus)}", "  ")
    for misfit in prediction.misfits:
        lines += wrap(f"  does not fit: {misfit}", " " * 4)
    rows = _rows(prediction, has_turns=takes_turns(case))
    lines += [*_table(rows), *_table(_budget_rows(budget))]
    absent = sorted({reason for name, reason in prediction.absent.items() if name != "time.step"})
    sentences = [*(f"not predicted: {reason}" for reason in absent), *prediction.assumptions]
    return lines + [line for sentence in sentences for line in wrap(f"  {sentence}", " " * 4)]


def _table(rows: Iterator[tuple[str, str]]) -> list[str]:
    return [line for label, text in rows for line in wrap(f"  {label:<11} {text}", " " * 14)]


def _parameters(number: float) -> str:
    return f"{number / 1e12:.3g} T" if number >= 1e12 else f"{number / 1e9:.3g} B"


def _rows(prediction: Prediction, *, has_turns: bool) -> Iterator[tuple[str, str]]:
    figures = prediction.figures
    memory = [
        f"{role} {figures[name].value / GIB:.1f} of {prediction.limits[name] / GIB:.1f}"
        for role, name in MEMORIES.items()
        if name in figures
    ]
    if memory:
        yield "memory", f"{'fits: ' if prediction.fits else ''}{', '.join(memory)} GiB a GPU"
    if (tokens := figures.get("kv.tokens")) is not None and prediction.fits:
        concurrency = figures.get("kv.concurrency")
        more = f", {concurrency.value:,.0f} rollouts of mean context" if concurrency is not None else ""
        yield "KV cache", f"{tokens.value:,.0f} tokens an engine{more}"
    if (prompt := figures.get("time.prefill")) is not None:
        transfer = figures["time.kv_transfer"]
        yield "prefill", f"{prompt.value:.2g} s a prompt, {transfer.value:.2g} s until its KV cache is moved"
    if (step := figures.get("time.step")) is not None:
        why = BOTTLENECKS.get(prediction.bottleneck or "", "")
        if has_turns and prediction.bottleneck in ("engines", "trainer"):
            why = f"the turn of the {prediction.bottleneck} takes longer"
        yield "step", f"{with_interval(step)}" + (f"; {why}" if why else "")
    if (idle := figures.get("idle.trainer")) is not None:
        engines, stale = figures["idle.engines"], figures["staleness.mean"]
        prefill = figures.get("idle.prefill")
        more = f", prefill {prefill.value:.0%}" if prefill is not None else ""
        shares = f"trainer {idle.value:.0%}, engines {engines.value:.0%}{more}"
        yield "idle", f"{shares}; staleness {stale.value:.1f} on average"
    if (rate := figures.get("rate.tokens")) is not None:
        yield "throughput", f"{rate.value:,.0f} generated tokens/s ({rate.low:,.0f} to {rate.high:,.0f})"
    if (hours := figures.get("run.gpu_hours")) is not None:
        duration = figures["run.duration"]
        low, value, high = (_gpu_hours(number) for number in (hours.low, hours.value, hours.high))
        yield "run", f"{hours_text(duration.value)}, {value} GPU-hours ({low} to {high})"
    if (size := figures.get("checkpoint.size")) is not None:
        write = figures.get("time.checkpoint")
        more = f", {_seconds(write.value)} s to write" if write is not None else ""
        yield "checkpoint", f"{size.value / GIB:,.1f} GiB{more}"


def _budget_rows(budget: Budget | None) -> Iterator[tuple[str, str]]:
    if budget is not None:
        left, limit = budget.remaining_hours, budget.limit_hours
        yield "budget", f"{left:,.0f} of {limit:,.0f} GPU-hours left for {budget.holder}"


def budget_warning(forecast: PlanForecast, budget: Budget | None) -> str:
    """Return a sentence if the run may need more GPU-hours than are left; empty otherwise."""
    hours = forecast.prediction.figures.get("run.gpu_hours") if forecast.prediction is not None else None
    if budget is None or hours is None or hours.high <= budget.remaining_hours:
        return ""
    verb = "needs" if hours.value > budget.remaining_hours else "may need"
    number = hours.value if hours.value > budget.remaining_hours else hours.high
    return (
        f"the run {verb} {number:,.0f} GPU-hours, {budget.remaining_hours:,.0f} are left for {budget.holder}: "
        "SLURM holds or ends jobs of an account without budget; lower max_steps or use another account"
    )


def with_interval(figure: Figure) -> str:
    """Return the value of a duration with its 80 % interval."""
    return f"{_seconds(figure.value)} s ({_seconds(figure.low)} to {_seconds(figure.high)})"


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def hours_text(seconds: float) -> str:
    """Return a duration in minutes, hours or days."""
    hours = seconds / 3600
    if hours < 1:
        return f"{seconds / 60:.1f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} days"


def _gpu_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def format_value(figure: Figure) -> str:
    """Return value, interval and unit."""
    unit = "" if figure.unit == "1" else f" {figure.unit}"
    value, low, high = figure.value, figure.low, figure.high
    if figure.unit == "B":
        value, low, high, unit = value / GIB, low / GIB, high / GIB, " GiB"
    if low == high:
        return f"{value:,.4g}{unit}"
    return f"{value:,.4g}{unit} ({low:,.4g} to {high:,.4g})"


def why_lines(figure: Figure, depth: int = 0, above: str = "") -> list[str]:
    """Return the tree of a figure: value, formula, source, then its inputs. ``above``: source of the figure above,
    which is not repeated.
    """
    pad = "  " * depth
    source = f"source: {figure.source} ({figure.tier.name.lower()})" if figure.source else ""
    lines = wrap(f"{pad}{figure.name} = {format_value(figure)}", pad + " " * 4)
    for text in (f"= {figure.formula}", source if source != above else ""):
        lines += wrap(f"{pad}  {text}", pad + " " * 6) if text else []
    for name, value in figure.inputs.items():
        if isinstance(value, Figure):
            lines += why_lines(value, depth + 1, source)
        else:
            lines += wrap(f"{pad}  {name} = {_input(value)}", pad + " " * 6)
    return lines


def _input(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) else f"{value:,.6g}"


def compare_lines(alternatives: list[Alternative]) -> list[str]:
    """Return a table of layouts, best first, and why the others lost."""
    lines = [f"{'step s':>7}  {'trainer idle':>12}  {'GPUs':>5}  layout"]
    for alternative in alternatives:
        prediction = alternative.prediction
        step, run = prediction.figures["time.step"].value, prediction.run
        idle = f"{run.trainer_idle:.0%}" if run is not None else "-"
        row = f"{step:>7.1f}  {idle:>12}  {prediction.choice.gpus:>5}  {prediction.choice}"
        lines += wrap(row, " " * 32)
        lines.append(f"{'':>30}{alternative.reason}")
    return lines


def scaling_lines(rows: list[ScalingRow]) -> list[str]:
    """Return the table of ``--nodes``."""
    lines = [f"{'nodes':>5}  {'step s':>7}  {'tokens/s':>9}  {'hours':>6}  {'GPU-hours':>9}  layout"]
    for row in rows:
        if row.prediction is None:
            lines += wrap(f"{row.nodes:>5}  {row.reason}", " " * 7)
            continue
        figures = row.prediction.figures
        step, hours = figures["time.step"].value, figures.get("run.gpu_hours")
        duration = figures.get("run.duration")
        numbers = (
            f"{row.nodes:>5}  {step:>7.1f}  {row.tokens_per_s:>9,.0f}  "
            f"{duration.value / 3600 if duration else 0:>6.1f}  {hours.value if hours else 0:>9,.0f}"
        )
        layout = str(row.prediction.choice)
        is_short = len(numbers) + 2 + len(layout) <= WIDTH
        lines += [f"{numbers}  {layout}"] if is_short else [numbers, *wrap(" " * 7 + layout, " " * 9)]
    return lines
