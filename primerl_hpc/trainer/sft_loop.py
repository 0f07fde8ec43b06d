"""The supervised loop: packed demonstrations in, the last step's weights out as ``weights/step_{max_steps}``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.sft import SFT, SFTData
from primerl_hpc.recipe.sft.tables import ConcatenatedRows, Rows, blocks_of, is_on_hub, open_rows
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.checkpoint.checkpoint import is_due, load_checkpoint, prune_checkpoints
from primerl_hpc.trainer.checkpoint.saver import Saver
from primerl_hpc.trainer.control import (
    Requests,
    StepFiles,
    clear_checkpoint_request,
    is_goal_reached,
    read_requests,
    report_start,
)
from primerl_hpc.trainer.parallel.mesh import local_rank_zero_first
from primerl_hpc.trainer.perf import StepProfiler
from primerl_hpc.trainer.setup import World, all_gather_bytes, broadcast_from_rank0
from primerl_hpc.trainer.sft.checks import RowChecks
from primerl_hpc.trainer.sft.identity import check_same, describe
from primerl_hpc.trainer.sft.stream import SFTStream, all_rows, make_row
from primerl_hpc.trainer.sft.tokens import Peers, Samples, SFTSample, Tokenizer, pack_samples, unpack_samples
from primerl_hpc.trainer.train_step import Trainer, build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.trainer.weights.filesystem import has_full_version, publish_policy
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch
from primerl_hpc.transport.rollouts.pictures import Pictures

SIDES = ("trainer",)
LOG_INTERVAL_S = 2.0  # tiny models make many steps per second; at most one console line per interval

log = logging.getLogger("primerl_hpc.trainer")


def train_sft(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    """Train to ``max_steps``. Returns (``done`` or ``stopped``, last finished step)."""
    recipe = phase.recipe
    assert recipe.sft is not None  # validated with the recipe
    trainer = build_trainer(recipe, phase.model_path, world, watchdog)
    trainer.profiler = StepProfiler(run, world.rank)
    text_tokenizer = load_tokenizer(recipe, trainer.folder)
    sources = [open_source(source, world) for source in recipe.sft.sources]
    stream = SFTStream(
        make_tokenizer(ConcatenatedRows(sources), text_tokenizer, trainer),
        recipe.sft,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
        sizes=tuple(len(rows) for rows in sources),
        blocks=tuple(blocks_of(rows) for rows in sources),
    )
    data = data_of_all_ranks(sources, recipe.sft, world)
    validation = validation_rows(text_tokenizer, trainer)
    start = broadcast_from_rank0(run.latest_checkpoint() if world.is_leader else None) or 0
    if start:
        progress = load_checkpoint(run, trainer, start)
        if change := check_same(
            progress.get("data"),
            data,
            [source.path for source in recipe.sft.sources],
            accepted=recipe.checkpoint.accept_changed_data,
        ):
            log.warning("continuing at the same position of changed data: %s", change)
        stream.restore(progress)
        log.info("resumed from checkpoint %d", start)
    report_start(run, world)
    with Saver(run, trainer, SIDES) as saver, StepFiles() as files:
        outcome, step = train_steps(run, trainer, stream, validation, Outputs(saver, files, data), start)
        if outcome == "done" or is_goal_reached(run, world):
            watchdog.heartbeat("writing the last weights")
            publish(run, trainer, step)
    if world.is_leader:
        prune_checkpoints(run, recipe.checkpoint)
    return outcome, step


def train_steps(
    run: RunDir,
    trainer: Trainer,
    stream: SFTStream,
    validation: Callable[[], list[MicroBatch]] | None,
    outputs: Outputs,
    start: int,
) -> tuple[str, int]:
    """Train steps ``start`` + 1 to ``max_steps`` on the stream's batches; validate and save on schedule."""
    recipe, world, watchdog = trainer.recipe, trainer.world, trainer.watchdog
    assert recipe.sft is not None
    reporter, saver = Reporter(run, recipe.steps, world, outputs.files), outputs.saver
    before: dict[str, float] = {}
    evaluated = recipe.evaluation.versions_of_training(recipe.steps) if recipe.evaluation is not None else []
    if 0 in evaluated and recipe.lora is not None and not start:
        publish(run, trainer, 0)  # engines know adapters only by name
    schedule = recipe.sft.validation
    if validation is not None and schedule is not None and schedule.at_start and not start:
        before["val/initial_loss"], _ = trainer.evaluate(validation())
    for step in range(start + 1, recipe.steps + 1):
        started = time.perf_counter()
        watchdog.heartbeat(f"step {step}, reading its rows")
        batch = stream.next_batch()
        rows = own_rows(batch.rows, stream.tokenizer, world)
        load_s = time.perf_counter() - started
        result = trainer.train_step(step, rows, [])
        loss = result.metrics["loss/mean"]
        metrics = result.metrics | {
            "loss/perplexity": math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf,
            "progress/epoch": stream.epoch,
            "progress/num_samples": batch.num_samples,
            "progress/total_samples": stream.position,
            "progress/num_tokens": trainer.num_tokens,
            "time/load_data": load_s,
            **batch.metrics,
            **before,
        }
        before = {}
        metrics = {name: value for name, value in metrics.items() if not name.startswith("mismatch_kl/")}
        if validation is not None and schedule is not None and step % schedule.interval == 0:
            metrics["val/loss"], _ = trainer.evaluate(validation())
        is_kept = recipe.weights.interval and step % recipe.weights.interval == 0
        if is_kept or step in evaluated:
            watchdog.heartbeat(f"step {step}, writing its weights")
            publish(run, trainer, step)  # before its checkpoint: a resume from there does not write them
        request = read_requests(
            run, world, outputs.files, has_failed=saver.has_failed, profiler=trainer.profiler
        )
        metrics |= outputs.save(run, step, stream.progress, request)
        reporter.report_rows(stream, is_last=step == recipe.steps)
        reporter.write(step, metrics | saver.metrics | {"time/step": time.perf_counter() - started})
        if request == Requests.STOP and step < recipe.steps:
            return "stopped", step
    return "done", recipe.steps


@dataclass
class Outputs:
    """Writes the files of a step without waiting for a filesystem that does not respond."""

    saver: Saver
    files: StepFiles
    data: list[dict[str, Any]]
    """Identity of the data, see `describe`."""
    is_postponed: bool = False

    def save(self, run: RunDir, step: int, progress: dict[str, Any], request: Requests) -> dict[str, float]:
        """Save a checkpoint if one is due, and delete old ones. Returns the time that a save took.

        A scheduled save is postponed while the filesystem has not accepted the last one.
        """
        saver, world, config = self.saver, self.saver.trainer.world, self.saver.config
        timings: dict[str, float] = {}
        max_steps = saver.trainer.recipe.steps
        self.is_postponed |= is_due(config, step, max_steps)
        if request == Requests.NONE and self.is_postponed and step < max_steps and saver.is_late():
            return timings
        if request != Requests.NONE or self.is_postponed:
            self.is_postponed = False
            saver.trainer.watchdog.heartbeat(f"step {step}, saving")
            started = time.perf_counter()
            saver.save(step, progress | {"data": self.data}, in_background=request.can_wait)
            timings["time/save_ckpt"] = time.perf_counter() - started
            if request == Requests.CHECKPOINT:
                clear_checkpoint_request(run, world)
        if world.is_leader:
            self.files.write(lambda: prune_checkpoints(run, config))
        return timings


def publish(run: RunDir, trainer: Trainer, step: int) -> None:
    """Write the current weights as ``weights/step_<step>``, unless an earlier attempt wrote them."""
    if not has_full_version(run, step, trainer.world):
        publish_policy(run, trainer, step)


def open_source(config: SFTData, world: World) -> Rows:
    """Open rows; those on the hub are fetched by one rank of each node first."""
    with local_rank_zero_first(world) if is_on_hub(config) else nullcontext():
        return open_rows(config)


def data_of_all_ranks(sources: list[Rows], config: SFT, world: World) -> list[dict[str, Any]]:
    """Return the identity of the data, as the first rank reads it. Collective.

    Raises DataError on a rank that has another number of rows: the ranks would form different batches.
    """
    data = broadcast_from_rank0(describe(sources) if world.is_leader else None)
    for source, rows, expected in zip(config.sources, sources, data, strict=True):
        if len(rows) != expected["rows"]:
            raise DataError(
                f"rank {world.rank} finds {len(rows):,} rows, rank 0 finds {expected['rows']:,}",
                location=source.path,
                hint="do not change the data while a run starts, and use a path that all nodes share",
            )
    return data


def load_tokenizer(recipe: Recipe, folder: Path):
    from transformers import AutoTokenizer

    source = recipe.model.tokenizer or str(folder)
    return AutoTokenizer.from_pretrained(source, trust_remote_code=recipe.model.trust_remote_code)


def make_tokenizer(rows: Rows, text_tokenizer, trainer: Trainer) -> Tokenizer:
    recipe, world = trainer.recipe, trainer.world

    def gather(own: list[SFTSample]) -> list[list[SFTSample]]:
        return [unpack_samples(data) for data in all_gather_bytes(pack_samples(own))]

    assert recipe.sft is not None
    tokenizer = Tokenizer(
        rows,
        make_renderer(recipe.model, text_tokenizer),
        recipe.sft.loss_mask,
        recipe.seq_len,
        Peers(world.rank, world.size, gather),
        lambda kwargs: make_renderer(recipe.model, text_tokenizer, kwargs),
        RowChecks(trainer.vocab_size, recipe.sft.ignored_keys),
    )
    if trainer.policy.vision is not None:
        model = recipe.model
        tokenizer.pictures = Pictures(model.name, trust_remote_code=model.trust_remote_code)
    return tokenizer


def own_rows(rows: list[list[SFTSample]], samples: Samples, world: World) -> list[MicroBatch]:
    """Return this rank's share of a step's rows."""
    return [make_row(row, samples.pictures_of) for row in rows[world.data_rank :: world.data_size]]


def validation_rows(text_tokenizer, trainer: Trainer) -> Callable[[], list[MicroBatch]] | None:
    """Return a function that makes this rank's rows of the validation set; None without one."""
    recipe, world = trainer.recipe, trainer.world
    assert recipe.sft is not None
    if recipe.sft.validation is None:
        return None
    rows = open_source(recipe.sft.validation.data, world)
    tokenizer = make_tokenizer(rows, text_tokenizer, trainer)
    packed, row_counts = all_rows(tokenizer, recipe.seq_len, recipe.sft.validation.data.path)
    if world.is_leader and (summary := row_counts.summary(f"{len(rows):,} validation rows")):
        log.warning("%s", summary)
    return lambda: own_rows(packed, tokenizer, world)


class Reporter:
    """Writes the metrics of every step to the file and a console line at intervals; on rank 0 only."""

    def __init__(self, run: RunDir, max_steps: int, world: World, files: StepFiles) -> None:
        self.writer = MetricsWriter(run.metrics("sft")) if world.is_leader else None
        self.files = files
        self.max_steps, self.last_line = max_steps, -math.inf
        self.has_reported_rows = False

    def report_rows(self, stream: SFTStream, *, is_last: bool) -> None:
        """Log truncated and skipped rows once, when the first appear, and again at the end of the run."""
        if self.writer is None or (self.has_reported_rows and not is_last):
            return
        if summary := stream.row_counts.summary(
            f"{stream.position:,} rows {'in total' if is_last else 'so far'}"
        ):
            self.has_reported_rows = True
            log.warning("%s", summary)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self.writer is None:
            return
        row = self.writer.row(step, metrics)
        self.files.write(lambda: self.writer and self.writer.append(row))
        if time.monotonic() - self.last_line < LOG_INTERVAL_S and step < self.max_steps:
            return
        self.last_line = time.monotonic()
        log.info(
            "step %d/%d | %.3f s | loss %.4f | perplexity %.3f | grad norm %.4f | lr %.2e | %.0f tok/s%s",
            step,
            self.max_steps,
            metrics["time/step"],
            metrics["loss/mean"],
            metrics["loss/perplexity"],
            metrics["optim/grad_norm"],
            metrics["optim/lr"],
            metrics["perf/throughput"],
            f" | val {metrics['val/loss']:.4f}" if "val/loss" in metrics else "",
        )
