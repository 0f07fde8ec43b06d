"""Optimizers, gradient clipping, and their state by name for checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.recipe.training_schema import AdamW as AdamWConfig
from primerl_hpc.recipe.training_schema import Muon as MuonConfig
from primerl_hpc.recipe.training_schema import SignSGD as SignSGDConfig
from primerl_hpc.trainer.muon import Muon, local


class Optimizers:
    """Optimizers of disjoint parameters, stepped as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


class SignSGD(torch.optim.Optimizer):
    """W ← (1 − ηλ) W − η sign(G) (arXiv 1802.04434): no state beside the gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            weights = [local(parameter) for parameter in trained]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_sign([local(parameter.grad) for parameter in trained])
            torch._foreach_add_(weights, signs, alpha=-group["lr"])


STATE_KINDS = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    Muon: ("momentum_buffer",),
    SignSGD: (),
}
"""The tensors that each keeps per parameter, shaped like it."""


def build_optimizer(hf: nn.Module, recipe: Recipe) -> Optimizers:
    config = recipe.optimizer
    trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
    if isinstance(config, AdamWConfig):
        return Optimizers(_adamw(trained, config))
    if isinstance(config, MuonConfig):
        matrices = matrix_parameters(hf)
        rest = [parameter for parameter in trained if parameter not in matrices]
        muon = Muon(
            [parameter for parameter in trained if parameter in matrices],
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            dtype=getattr(torch, recipe.trainer.param_dtype),
        )
        return Optimizers(muon, _adamw(rest, config)) if rest else Optimizers(muon)
    if isinstance(config, SignSGDConfig):
        return Optimizers(SignSGD(trained, lr=config.lr, weight_decay=config.weight_decay))
    return Optimizers(
        torch.optim.SGD(
            trained,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
            foreach=True,  # torch has no fused SGD for sharded tensors
        )
    )


def _adamw(parameters: list[nn.Parameter], config: AdamWConfig | MuonConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def matrix_parameters(hf: nn.Module) -> set[nn.Parameter]:
    """Matrices that map hidden states to hidden states: neither embeddings nor head, fused experts included."""
    tables = {module.weight for module in hf.modules() if isinstance(module, nn.Embedding)}
    tables.add(hf.get_output_embeddings().weight)
    return {
        parameter
        for name, parameter in hf.named_parameters()
        if parameter not in tables and (parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name))
    }


def set_lr(optimizer: Optimizers, lr: float) -> None:
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
        groups[key].append(local(grad))
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
    torch._foreach_mul_([local(grad) for grad in grads], factor)


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


# -- state by name -------------------------------------------------------------------------------------------------------


def state_tensors(optimizer: Optimizers, names: dict[nn.Parameter, str]) -> dict[str, Tensor]:
    """``optim.<kind>.<parameter>`` → state tensor shaped like the parameter, e.g. ``optim.exp_avg.lm_head.weight``."""
    return {
        f"optim.{kind}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and kind != "step"
    }


def state_kinds(optimizer: Optimizers) -> list[str]:
    kinds = {kind for state in optimizer.state.values() for kind, value in state.items() if value is not None}
    return sorted(kinds - {"step"})


def num_updates(optimizer: Optimizers) -> int:
    """Updates made so far as the optimizer counts them (skipped steps are none); 0 where it does not count."""
    for state in optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def make_state(optimizer: Optimizers, kinds: list[str], updates: int) -> None:
    """Empty state of those of ``kinds`` that each part keeps, for a checkpoint to be read into."""
    for part in optimizer.parts:
        own = [kind for kind in STATE_KINDS[type(part)] if kind in kinds]
        for group in part.param_groups:
            for parameter in group["params"]:
                state = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in own}
                if isinstance(part, torch.optim.AdamW) and own:
                    state["step"] = torch.tensor(float(updates), device=parameter.device, dtype=torch.float32)
                part.state[parameter] = state
