"""Optimizers, gradient clipping, and their state by name for checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from primerl_hpc.recipe.training_schema import AdamW, Optimizer


def build_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if isinstance(config, AdamW):
        return torch.optim.AdamW(
            trained,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        trained,
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov and config.momentum > 0,
        weight_decay=config.weight_decay,
        foreach=True,  # torch has no fused SGD for sharded tensors
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients, the same scalar on every rank.

    Gradients on different meshes (experts) are summed per mesh: torch's own function refuses to mix them.
    """
    groups: dict[tuple, list[Tensor]] = defaultdict(list)
    device = None
    for parameter in parameters:
        if (grad := parameter.grad) is None:
            continue
        device = grad.device
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else (None, ())
        groups[key].append(grad.to_local() if isinstance(grad, DTensor) else grad)
    total = torch.zeros((), device=device, dtype=torch.float32)
    for (mesh, placements), grads in groups.items():
        squares = torch.stack(torch._foreach_norm(grads)).float().square().sum()
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total = total + squares
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], factor)


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


# -- state by name -------------------------------------------------------------------------------------------------------


def state_tensors(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """``optim.<kind>.<parameter>`` → state tensor shaped like the parameter, e.g. ``optim.exp_avg.lm_head.weight``."""
    return {
        f"optim.{kind}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and kind != "step"
    }


def state_kinds(optimizer: torch.optim.Optimizer) -> list[str]:
    kinds = {kind for state in optimizer.state.values() for kind, value in state.items() if value is not None}
    return sorted(kinds - {"step"})


def num_updates(optimizer: torch.optim.Optimizer) -> int:
    """Updates made so far as the optimizer counts them (skipped steps are none); 0 where it does not count."""
    for state in optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def make_state(optimizer: torch.optim.Optimizer, kinds: list[str], updates: int) -> None:
    """Empty state of the given kinds, for a checkpoint to be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in kinds}
            if isinstance(optimizer, torch.optim.AdamW) and kinds:
                state["step"] = torch.tensor(float(updates), device=parameter.device, dtype=torch.float32)
            optimizer.state[parameter] = state
