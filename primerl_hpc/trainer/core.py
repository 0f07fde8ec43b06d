"""What rl and sft share: one optimizer step over packed rows.

    core = build_core(recipe, model_path, world, watchdog)
    result = core.train_step(step=3, rows=rows, env_names=["reverse-text"])

Supervised tokens are rows whose ``ce_weights`` are 1: to the core there is one kind of step.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.trainer.batch import make_batch, stack_rows
from primerl_hpc.trainer.losses import component_counts, step_loss, try_loss
from primerl_hpc.trainer.losses.custom import check_metrics
from primerl_hpc.trainer.metrics import Tally, means, metric_names, tally_tokens
from primerl_hpc.trainer.model import (
    Policy,
    build_policy,
    is_small,
    model_folder,
    reshard,
    set_gradient_sync,
    tokenizer_folder,
)
from primerl_hpc.trainer.optim import (
    Optimizers,
    build_optimizer,
    clip_factor,
    gradient_norm,
    scale_gradients,
    set_lr,
)
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.perf import FlopCounter, peak_flops, peak_memory_gib, synchronize
from primerl_hpc.trainer.schedules import lr_factor
from primerl_hpc.trainer.setup import seed_step
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.rollouts import MicroBatch, empty_row

log = logging.getLogger("primerl_hpc.trainer")


class BadPolicyError(RoleError):
    """Loss or gradients are not finite again and again: going on would repeat it."""

    exit_code = ExitCode.NO_CONTINUE


@dataclass
class StepResult:
    metrics: dict[str, float]
    num_tokens: int  # of all ranks, without pads
    flops: float  # of all ranks, see `FlopCounter`
    is_skipped: bool


@dataclass
class Core:
    recipe: Recipe
    world: World
    model_path: str  # the base model's: hub id or folder
    folder: Path  # where it lies
    tokenizer_folder: Path | None  # the tokenizer's, if it is another
    policy: Policy
    optimizer: Optimizers
    flops: FlopCounter
    watchdog: Watchdog
    num_tokens: int = 0  # trained on so far
    skipped_steps: int = 0  # in a row
    schedule_start: int = 0  # the step after which the learning rate's schedule began
    small: bool = True
    loss_metrics: tuple[str, ...] = ()  # of the recipe's loss
    names: dict = field(default_factory=dict)  # parameter → HF name

    def train_step(self, step: int, rows: list[MicroBatch], env_names: list[str]) -> StepResult:
        """Forward and backward over this rank's ``rows``, clip, update. Collective.

        A step whose loss or gradient norm is not finite on any rank is skipped by all. Raises BadPolicyError after
        ``trainer.max_skipped_steps`` of them in a row.
        """
        config = self.recipe
        seed_step(config.seed, step, self.world.rank)
        self._collect_garbage(step)
        started = time.perf_counter()
        counts, tokens, flops, num_forwards = self._step_totals(rows)
        names = [*metric_names(env_names), *self.loss_metrics]
        tally = Tally(names, self.world.device, is_counted=self.world.is_counted)
        groups = stack_rows(rows, config.seq_len)
        groups += [[empty_row()]] * (num_forwards - len(groups))
        for index, group in enumerate(groups):
            self.watchdog.beat(f"step {step}, micro-batch {index + 1} of {num_forwards}")
            set_gradient_sync(self.policy, is_last=index == num_forwards - 1, small=self.small)
            self._forward_backward(group, counts, tally, env_names)
        norm = gradient_norm(self.policy.parameters())
        reduced = tally.reduce()
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
        self._count_skipped(step, is_finite, loss, norm_value)
        self.num_tokens += tokens
        metrics = {
            "loss/mean": loss,
            "loss/nan_count": reduced["loss/nan_count"][0],
            **means(reduced),
            **self.policy.routing.take_metrics(),
            "optim/grad_norm": norm_value,
            "optim/lr": lr,
            "optim/skipped": 0.0 if is_finite else 1.0,
            "time/forward_backward": trained - started,
            "time/optimizer": ended - trained,
            **self._perf(tokens, flops, ended - started),
        }
        return StepResult(metrics, tokens, flops, not is_finite)

    @torch.no_grad()
    def evaluate(self, rows: list[MicroBatch]) -> tuple[float, int]:
        """Mean cross-entropy over the ce tokens of all ranks' rows, and their number. Collective."""
        counts, _, _, num_forwards = self._step_totals(rows)
        tally = Tally(metric_names([]), self.world.device, is_counted=self.world.is_counted)
        groups = stack_rows(rows, self.recipe.seq_len)
        self.policy.eval()
        for group in groups + [[empty_row()]] * (num_forwards - len(groups)):
            self.watchdog.beat("evaluation")
            batch = make_batch(group, self.world.device)
            logprobs, _ = self.policy(
                batch.input_ids, batch.position_ids, batch.predictors, batch.targets, batch.temperatures
            )
            _, extra = step_loss(batch, logprobs, counts, self.recipe.loss)
            if "loss/ce" in extra:  # not of a row that is there for the collectives alone
                tally.add("loss/ce", *extra["loss/ce"])
        self.policy.train()
        self.policy.routing.forget()
        reshard(self.policy)
        total, count = tally.reduce()["loss/ce"]
        return total / max(count, 1), int(count)

    def _step_totals(self, rows: list[MicroBatch]) -> tuple[torch.Tensor, int, float, int]:
        """Counts [4] of `component_counts`, tokens and FLOP of all ranks, and the largest number of forwards of any."""
        sums = torch.tensor(
            [*component_counts(rows), sum(row.num_tokens for row in rows), self.flops(rows)],
            dtype=torch.float64,
        )
        sums *= self.world.is_counted
        forwards = torch.tensor([len(stack_rows(rows, self.recipe.seq_len))])
        dist.all_reduce(sums)
        dist.all_reduce(forwards, op=dist.ReduceOp.MAX)
        counts = sums[:4].to(self.world.device, torch.float32)
        return counts, int(sums[4]), float(sums[5]), max(1, int(forwards))

    def _forward_backward(
        self, rows: list[MicroBatch], counts: torch.Tensor, tally: Tally, env_names: list[str]
    ) -> None:
        batch = make_batch(rows, self.world.device)
        logprobs, entropies = self.policy(
            batch.input_ids,
            batch.position_ids,
            batch.predictors,
            batch.targets,
            batch.temperatures,
            batch.routed_experts,
            batch.images,
        )
        loss, extra = step_loss(batch, logprobs, counts, self.recipe.loss)
        loss.backward()  # each rank's part of a sum: gradients are summed over ranks too
        tally.add("loss/total", loss.detach(), 1)
        tally.add("loss/nan_count", ~loss.detach().isfinite(), 1)
        check_metrics(self.recipe.loss, extra, tally.names)
        for name, (total, count) in extra.items():
            tally.add(name, total, count)
        tally_tokens(tally, batch, logprobs.detach(), entropies, env_names)

    def _update(self, norm: torch.Tensor, lr: float) -> None:
        factor = clip_factor(norm, self.recipe.optimizer.max_norm)
        if factor is not None:
            scale_gradients(self.policy.parameters(), factor)
        set_lr(self.optimizer, lr)
        self.optimizer.step()

    def _count_skipped(self, step: int, is_finite: bool, loss: float, norm: float) -> None:
        if is_finite:
            self.skipped_steps = 0
            return
        self.skipped_steps += 1
        log.warning(
            "step %d skipped: loss %s, gradient norm %s (%d in a row)", step, loss, norm, self.skipped_steps
        )
        if self.skipped_steps >= self.recipe.trainer.max_skipped_steps:
            raise BadPolicyError(
                f"loss or gradients were not finite in {self.skipped_steps} steps in a row, the last one {step}",
                mend="lower optimizer.lr, or resume from an older checkpoint",
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
        """All ranks at the same step, instead of each at its own bad moment."""
        if step % self.recipe.trainer.gc_interval == 0:
            gc.collect()


def build_core(
    recipe: Recipe, model_path: str, world: World, watchdog: Watchdog, *, may_be_random: bool = False
) -> Core:
    """``may_be_random``: a model folder without weights is given random ones, instead of being refused."""
    gc.disable()
    loss_metrics = try_loss(recipe.loss)
    folder = model_folder(model_path, world)
    policy = build_policy(recipe, folder, world, may_be_random=may_be_random)
    optimizer = build_optimizer(policy.hf, recipe)
    names = {parameter: name for name, parameter in policy.hf.named_parameters() if parameter.requires_grad}
    core = Core(
        recipe,
        world,
        model_path,
        folder,
        tokenizer_folder(recipe.model, world),
        policy,
        optimizer,
        FlopCounter(policy),
        watchdog,
        small=is_small(policy),
        loss_metrics=loss_metrics,
        names=names,
    )
    size = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    gc.freeze()  # what was built stays: collections need not walk it
    log.info(
        "%s: %.2f M parameters, %.2f M of them trained, on %d ranks (%s)",
        folder,
        size / 1e6,
        trained / 1e6,
        world.size,
        world.device.type,
    )
    return core
