"""The supervised loop: packed demonstrations in, the last step's weights out as ``weights/step_{max_steps}``."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from primerl_hpc.common.metrics import MetricsWriter
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import PhasePlan
from primerl_hpc.recipe.renderer import make_renderer
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.recipe.sft_schema import SFTData
from primerl_hpc.recipe.sft_tables import Chain, Rows, is_on_hub, open_rows
from primerl_hpc.trainer.checkpoint import is_due, load_checkpoint, prune_checkpoints
from primerl_hpc.trainer.control import Requests, grant_checkpoint, read_requests
from primerl_hpc.trainer.core import Core, build_core
from primerl_hpc.trainer.export import is_whole_there, publish_policy
from primerl_hpc.trainer.parallel.mesh import one_of_each_node_first
from primerl_hpc.trainer.saver import Saver
from primerl_hpc.trainer.setup import World, from_leader
from primerl_hpc.trainer.sft_data import SFTStream, all_rows
from primerl_hpc.trainer.sft_tokens import Peers, Tokenizer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.rollouts import MicroBatch

SIDES = ("trainer",)
LOG_INTERVAL_S = 2.0  # tiny models make many steps a second: one console line this often

log = logging.getLogger("primerl_hpc.trainer")


def train_sft(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    """Train to ``max_steps``. Returns (``done`` or ``stopped``, last finished step)."""
    recipe = phase.recipe
    assert recipe.sft is not None  # validated with the recipe
    core = build_core(recipe, phase.model_path, world, watchdog)
    text_tokenizer = load_tokenizer(recipe, core.folder)
    sources = [open_source(source, world) for source in recipe.sft.sources]
    stream = SFTStream(
        make_tokenizer(Chain(sources), text_tokenizer, recipe, world),
        recipe.sft,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
        sizes=tuple(len(rows) for rows in sources),
    )
    validation = validation_rows(recipe, text_tokenizer, world)
    start = from_leader(run.latest_checkpoint() if world.is_leader else None) or 0
    if start:
        stream.position = load_checkpoint(run, core, start).get("position", 0)
        log.info("resumed from checkpoint %d", start)
    with Saver(run, core, SIDES) as saver:
        outcome, step = train_steps(run, core, stream, validation, saver, start)
        if outcome == "done":
            watchdog.beat("writing the last weights")
            publish(run, core, recipe.steps)
    if world.is_leader:
        prune_checkpoints(run, recipe.checkpoint)
    return outcome, step


def train_steps(
    run: RunDir,
    core: Core,
    stream: SFTStream,
    validation: list[MicroBatch] | None,
    saver: Saver,
    start: int,
) -> tuple[str, int]:
    """Steps ``start`` + 1 to ``max_steps`` on what the stream gives next, validated and saved when it is due."""
    recipe, world, watchdog = core.recipe, core.world, core.watchdog
    assert recipe.sft is not None
    reporter = Reporter(run, recipe.steps, world)
    before: dict[str, float] = {}
    if validation is not None and recipe.sft.validation.at_start and not start:
        before["val/initial_loss"], _ = core.evaluate(validation[world.data_rank :: world.data_size])
    for step in range(start + 1, recipe.steps + 1):
        started = time.perf_counter()
        watchdog.beat(f"step {step}, reading its rows")
        batch = stream.next_batch()
        load_s = time.perf_counter() - started
        result = core.train_step(step, batch.rows[world.data_rank :: world.data_size], [])
        loss = result.metrics["loss/mean"]
        metrics = result.metrics | {
            "loss/perplexity": math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.inf,
            "progress/epoch": stream.epoch,
            "progress/num_samples": batch.num_samples,
            "progress/total_samples": stream.position,
            "progress/num_tokens": core.num_tokens,
            "time/load_data": load_s,
            **batch.metrics,
            **before,
        }
        before = {}
        metrics.pop("mismatch_kl/all/mean", None)
        if validation is not None and step % recipe.sft.validation.interval == 0:
            metrics["val/loss"], _ = core.evaluate(validation[world.data_rank :: world.data_size])
        if recipe.weights.interval and step % recipe.weights.interval == 0:
            watchdog.beat(f"step {step}, writing its weights")
            publish(run, core, step)  # before its checkpoint: a life that begins there does not write them
        request = read_requests(run, world, has_failed=saver.has_failed)
        if request != Requests.NONE or is_due(recipe.checkpoint, step, recipe.steps):
            watchdog.beat(f"step {step}, saving")
            save_started = time.perf_counter()
            saver.save(step, {"position": stream.position}, in_background=request.can_wait)
            metrics["time/save_ckpt"] = time.perf_counter() - save_started
            if request == Requests.CHECKPOINT:
                grant_checkpoint(run, world)
        if world.is_leader:
            prune_checkpoints(run, recipe.checkpoint)
        reporter.write(step, metrics | saver.metrics | {"time/step": time.perf_counter() - started})
        if request == Requests.STOP and step < recipe.steps:
            return "stopped", step
    return "done", recipe.steps


def publish(run: RunDir, core: Core, step: int) -> None:
    """The weights as they are, as ``weights/step_<step>``, unless an earlier life wrote them."""
    if not is_whole_there(run, step, core.world):
        publish_policy(run, core, step)


def open_source(config: SFTData, world: World) -> Rows:
    """`open_rows`, of the hub by one rank of each node before the others."""
    with one_of_each_node_first(world) if is_on_hub(config) else nullcontext():
        return open_rows(config)


def load_tokenizer(recipe: Recipe, folder: Path):
    from transformers import AutoTokenizer

    source = recipe.model.tokenizer or str(folder)
    return AutoTokenizer.from_pretrained(source, trust_remote_code=recipe.model.trust_remote_code)


def make_tokenizer(rows: Rows, text_tokenizer, recipe: Recipe, world: World) -> Tokenizer:
    def gather(mine: list) -> list[list]:
        everyone: list = [None] * world.size
        dist.all_gather_object(everyone, mine)
        return everyone

    assert recipe.sft is not None
    return Tokenizer(
        rows,
        make_renderer(recipe.model, text_tokenizer),
        recipe.sft.loss_mask,
        recipe.seq_len,
        Peers(world.rank, world.size, gather),
        lambda kwargs: make_renderer(recipe.model, text_tokenizer, kwargs),
    )


def validation_rows(recipe: Recipe, text_tokenizer, world: World) -> list[MicroBatch] | None:
    assert recipe.sft is not None
    if recipe.sft.validation is None:
        return None
    rows = open_source(recipe.sft.validation.data, world)
    return all_rows(make_tokenizer(rows, text_tokenizer, recipe, world), recipe.seq_len)


class Reporter:
    """Metrics of every step into the file, a console line now and then; rank 0 alone."""

    def __init__(self, run: RunDir, max_steps: int, world: World) -> None:
        self.writer = MetricsWriter(run.metrics("sft")) if world.is_leader else None
        self.max_steps, self.last_line = max_steps, -math.inf

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if self.writer is None:
            return
        self.writer.write(step, metrics)
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
