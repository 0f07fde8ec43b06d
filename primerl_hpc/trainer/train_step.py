"""The training step shared by rl and sft: one optimizer step over packed rows.

    trainer = build_trainer(recipe, model_path, world, watchdog)
    result = trainer.train_step(step=3, rows=rows, env_names=["reverse-text"])

Supervised tokens are rows whose ``ce_weights`` are 1: the trainer knows only one kind of step.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.model_families import family_of
from primerl_hpc.recipe.schedules import lr_factor
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.batch import check_token_ids, make_batch, stack_rows
from primerl_hpc.trainer.losses import component_counts, step_loss, try_loss
from primerl_hpc.trainer.losses.custom import check_metrics
from primerl_hpc.trainer.metrics import MetricSums, add_token_metrics, means, metric_names
from primerl_hpc.trainer.model.comparison import compare
from primerl_hpc.trainer.model.policy import (
    Policy,
    build_policy,
    model_folder,
    tokenizer_folder,
)
from primerl_hpc.trainer.optim.loss_scale import LossScale
from primerl_hpc.trainer.optim.optimizers import (
    Optimizers,
    build_optimizer,
    clip_factor,
    gradient_norm,
    scale_gradients,
    set_lr,
    zero_gradients,
)
from primerl_hpc.trainer.parallel.fsdp import is_small, reshard, set_gradient_sync
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.perf import FlopCounter, StepProfiler, peak_flops, peak_memory_gib, synchronize
from primerl_hpc.trainer.setup import seed_step
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.base_models.staging import local_copy
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch, empty_row

log = logging.getLogger("primerl_hpc.trainer")


class BadPolicyError(RoleError):
    """Loss or gradients are repeatedly not finite: a restart would repeat it."""

    exit_code = ExitCode.NO_CONTINUE


@dataclass
class StepResult:
    metrics: dict[str, float]
    num_tokens: int  # of all ranks, without padding
    flops: float  # of all ranks, see `FlopCounter`
    is_skipped: bool


@dataclass
class Trainer:
    recipe: Recipe
    world: World
    model_path: str  # of the base model: hub id or folder
    folder: Path  # of the base model, on this node
    tokenizer_folder: Path | None  # of the tokenizer, if it is not the model's
    policy: Policy
    optimizer: Optimizers
    flops: FlopCounter
    watchdog: Watchdog
    num_tokens: int = 0  # trained so far
    skipped_steps: int = 0  # consecutive
    schedule_start: int = 0  # step after which the learning rate's schedule starts
    profiler: StepProfiler | None = None
    loss_scale: LossScale | None = None  # with float16
    small: bool = True
    loss_metrics: tuple[str, ...] = ()  # metric names of the recipe's loss
    names: dict = field(default_factory=dict)  # parameter → HF name

    @property
    def vocab_size(self) -> int:
        """Number of embeddings of the model."""
        return int(self.policy.hf.config.get_text_config().vocab_size)

    def train_step(self, step: int, rows: list[MicroBatch], env_names: list[str]) -> StepResult:
        """Run forward and backward over this rank's ``rows``, clip, update. Collective.

        All ranks skip a step whose loss or gradient norm is not finite on any rank. Raises BadPolicyError after
        ``trainer.max_skipped_steps`` consecutive skipped steps, and if float16 gradients overflow at the smallest scale
        of the loss.
        """
        with nullcontext() if self.profiler is None else self.profiler.step():
            return self._train_step(step, rows, env_names)

    def _train_step(self, step: int, rows: list[MicroBatch], env_names: list[str]) -> StepResult:
        config = self.recipe
        seed_step(config.seed, step, self.world.rank)
        self._collect_garbage(step)
        started = time.perf_counter()
        counts, tokens, flops, num_forwards = self._step_totals(rows)
        names = [*metric_names(env_names), *self.loss_metrics]
        sums = MetricSums(names, self.world.device, is_counted=self.world.is_counted)
        groups = stack_rows(rows, config.seq_len, self.world.device)
        groups += [[empty_row()]] * (num_forwards - len(groups))
        for index, group in enumerate(groups):
            self.watchdog.heartbeat(f"step {step}, micro-batch {index + 1} of {num_forwards}")
            set_gradient_sync(self.policy, is_last=index == num_forwards - 1, small=self.small)
            self._forward_backward(group, counts, sums, env_names)
        norm = gradient_norm(self.policy.parameters())
        reduced = sums.reduce(zero_gradients(self.policy.parameters(), self.world.size))
        norm = norm if self.loss_scale is None else norm / self.loss_scale.value
        loss, norm_value = reduced["loss/total"][0], norm.item()  # waits for the device
        trained = time.perf_counter()
        start = self.schedule_start
        lr = config.optimizer.lr * lr_factor(config.scheduler, step - start, config.steps - start)
        is_finite = math.isfinite(loss) and math.isfinite(norm_value)
        if is_finite:
            self._update(norm, lr)
        self.optimizer.zero_grad()
        synchronize(self.world.device)
        ended = time.perf_counter()
        scale = {} if self.loss_scale is None else {"optim/loss_scale": self.loss_scale.value}
        self._count_skipped(step, is_finite, loss, norm_value)
        self.num_tokens += tokens
        metrics = {
            "loss/mean": loss,
            "loss/nan_count": reduced["loss/nan_count"][0],
            **means(reduced),
            **self.policy.routing.take_metrics(config.trainer.router_bias_rate if is_finite else 0.0),
            "optim/grad_norm": norm_value,
            "optim/lr": lr,
            "optim/skipped": 0.0 if is_finite else 1.0,
            **scale,
            "time/forward_backward": trained - started,
            "time/optimizer": ended - trained,
            **self._perf(tokens, flops, ended - started),
        }
        return StepResult(metrics, tokens, flops, not is_finite)

    @torch.no_grad()
    def evaluate(self, rows: list[MicroBatch]) -> tuple[float, int]:
        """Return the mean cross-entropy over the ce tokens of all ranks' rows, and their number. Collective."""
        counts, _, _, num_forwards = self._step_totals(rows)
        sums = MetricSums(metric_names([]), self.world.device, is_counted=self.world.is_counted)
        groups = stack_rows(rows, self.recipe.seq_len, self.world.device)
        self.policy.eval()
        for group in groups + [[empty_row()]] * (num_forwards - len(groups)):
            self.watchdog.heartbeat("evaluation")
            batch = make_batch(group, self.world.device)
            logprobs, _ = self.policy(batch)
            _, extra = step_loss(batch, logprobs, counts, self.recipe.loss)
            if "loss/ce" in extra:  # absent in empty rows, which only match the collectives of other ranks
                sums.add("loss/ce", *extra["loss/ce"])
        self.policy.train()
        self.policy.routing.reset()
        reshard(self.policy)
        total, count = sums.reduce()["loss/ce"]
        return total / max(count, 1), int(count)

    def _step_totals(self, rows: list[MicroBatch]) -> tuple[torch.Tensor, int, float, int]:
        """Return counts [4] of `component_counts`, tokens and FLOP of all ranks, and the largest number of forwards.

        Raises DataError for a token id that the model has no embedding for.
        """
        check_token_ids(rows, self.vocab_size)
        sums = torch.tensor(
            [*component_counts(rows), sum(row.num_tokens for row in rows), self.flops(rows)],
            dtype=torch.float64,
        )
        sums *= self.world.is_counted
        forwards = torch.tensor([len(stack_rows(rows, self.recipe.seq_len, self.world.device))])
        dist.all_reduce(sums)
        dist.all_reduce(forwards, op=dist.ReduceOp.MAX)
        counts = sums[:4].to(self.world.device, torch.float32)
        return counts, int(sums[4]), float(sums[5]), max(1, int(forwards))

    def _forward_backward(
        self, rows: list[MicroBatch], counts: torch.Tensor, sums: MetricSums, env_names: list[str]
    ) -> None:
        batch = make_batch(rows, self.world.device)
        logprobs, entropies = self.policy(batch)
        loss, extra = step_loss(batch, logprobs, counts, self.recipe.loss)
        scaled = loss if self.loss_scale is None else loss * self.loss_scale.value
        scaled.backward()  # the loss is a part of a sum over ranks, so gradients are summed over ranks
        sums.add("loss/total", loss.detach(), 1)
        sums.add("loss/nan_count", ~loss.detach().isfinite(), 1)
        check_metrics(self.recipe.loss, extra, sums.names)
        for name, (total, count) in extra.items():
            sums.add(name, total, count)
        add_token_metrics(sums, batch, logprobs.detach(), entropies, env_names)

    def _update(self, norm: torch.Tensor, lr: float) -> None:
        factor = clip_factor(norm, self.recipe.optimizer.max_norm)
        if self.loss_scale is not None:
            factor = (torch.ones_like(norm) if factor is None else factor) / self.loss_scale.value
        if factor is not None:
            scale_gradients(self.policy.parameters(), factor)
        set_lr(self.optimizer, lr)
        self.optimizer.step()

    def _count_skipped(self, step: int, is_finite: bool, loss: float, norm: float) -> None:
        """Count consecutive skipped steps, and adapt the scale of the loss.

        An overflow of scaled gradients is not counted. A loss that is not finite is: no scale would change it.
        """
        is_overflow = not is_finite and math.isfinite(loss) and self.loss_scale is not None
        if self.loss_scale is not None and (is_finite or is_overflow):
            self._update_loss_scale(self.loss_scale, step, is_overflow=is_overflow)
        if is_finite:
            self.skipped_steps = 0
        if is_finite or is_overflow:
            return
        self.skipped_steps += 1
        log.warning(
            "step %d skipped: loss %s, gradient norm %s (%d consecutive)",
            step,
            loss,
            norm,
            self.skipped_steps,
        )
        if self.skipped_steps >= self.recipe.trainer.max_skipped_steps:
            raise BadPolicyError(
                f"loss or gradients were not finite in {self.skipped_steps} consecutive steps, the "
                f"last one {step}",
                hint="lower optimizer.lr, or resume from an older checkpoint",
            )

    def _update_loss_scale(self, scale: LossScale, step: int, *, is_overflow: bool) -> None:
        if is_overflow and not scale.can_shrink:
            raise BadPolicyError(
                f"gradients of step {step} overflow float16 although the scale of the loss is only {scale.value:g}",
                hint="set trainer.param_dtype to bfloat16, or lower optimizer.lr and resume from an older checkpoint",
            )
        scale.update(is_overflow=is_overflow)
        if is_overflow:
            log.warning(
                "step %d skipped: gradients overflow float16; loss scale %g from here", step, scale.value
            )

    def _perf(self, tokens: int, flops: float, duration_s: float) -> dict[str, float]:
        speed = {
            "perf/throughput": tokens / duration_s,
            "perf/throughput_per_gpu": tokens / duration_s / self.world.size,
            "perf/peak_memory": peak_memory_gib(self.world.device),
        }
        if (peak := peak_flops(self.world.device)) is not None:
            speed["perf/mfu"] = flops / duration_s / (peak * self.world.size)
        return speed

    def _collect_garbage(self, step: int) -> None:
        """Collect garbage on all ranks at the same step, so that ranks do not wait for each other's collections."""
        if step % self.recipe.trainer.gc_interval == 0:
            gc.collect()


def build_trainer(
    recipe: Recipe, model_path: str, world: World, watchdog: Watchdog, *, may_be_random: bool = False
) -> Trainer:
    """Build the trainer. ``may_be_random``: a model folder without weights gets random ones."""
    gc.disable()
    loss_metrics = try_loss(recipe.loss)
    folder = Path(local_copy(str(model_folder(model_path, world))))
    policy = build_policy(recipe, folder, world, may_be_random=may_be_random)
    if not family_of(policy.hf.config.model_type).is_compared and not recipe.model.accept_uncompared:
        compare(policy, recipe)
    optimizer = build_optimizer(policy.hf, recipe)
    names = {parameter: name for name, parameter in policy.hf.named_parameters() if parameter.requires_grad}
    trainer = Trainer(
        recipe,
        world,
        model_path,
        folder,
        tokenizer_folder(recipe.model, world),
        policy,
        optimizer,
        FlopCounter(policy),
        watchdog,
        loss_scale=LossScale(recipe.trainer) if recipe.trainer.param_dtype == "float16" else None,
        small=is_small(policy),
        loss_metrics=loss_metrics,
        names=names,
    )
    size = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    gc.freeze()  # these objects stay: collections need not traverse them
    log.info(
        "%s: %.2f M parameters, %.2f M of them trained, on %d ranks (%s)",
        folder,
        size / 1e6,
        trained / 1e6,
        world.size,
        world.device.type,
    )
    return trainer
