"""Optimizers, gradient clipping, and their state by name for checkpoints."""

from __future__ import annotations

import math
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
from primerl_hpc.trainer.muon import Muon
from primerl_hpc.trainer.parallel.mesh import local


class Optimizers:
    """Optimizers of disjoint parameters, stepped as one.

    ``on_host``: their state lies in host memory between steps and visits the device part by part.
    """

    def __init__(self, *parts: torch.optim.Optimizer, on_host: bool = False) -> None:
        self.parts, self.on_host = parts, on_host

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            if self.on_host:
                move_state(part, to_host=False)
            part.step()
            if self.on_host:
                move_state(part, to_host=True)

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


OFFLOAD_BYTES = 1 << 30
"""State of one part of an offloaded optimizer, float32: what of it is on the device at a time."""


def build_optimizer(hf: nn.Module, recipe: Recipe) -> Optimizers:
    trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
    if not recipe.trainer.optimizer_offload:
        return Optimizers(*build_parts(hf, trained, recipe))
    portions = portions_of(trained, OFFLOAD_BYTES)
    parts = [part for portion in portions for part in build_parts(hf, portion, recipe)]
    return Optimizers(*parts, on_host=True)


def portions_of(parameters: list[nn.Parameter], num_bytes: int) -> list[list[nn.Parameter]]:
    """Runs of parameters whose two float32 moments fill about ``num_bytes`` on this rank."""
    portions: list[list[nn.Parameter]] = [[]]
    filled = 0
    for parameter in parameters:
        size = 8 * parameter.numel() // num_parts(parameter)  # not the local count: all ranks must cut alike
        if portions[-1] and filled + size > num_bytes:
            portions.append([])
            filled = 0
        portions[-1].append(parameter)
        filled += size
    return portions


def num_parts(parameter: nn.Parameter) -> int:
    """Into how many it is cut; copies are none."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Shard))


def move_state(part: torch.optim.Optimizer, *, to_host: bool) -> None:
    """The state's tensors to pinned host memory, or back to the device of their parameter."""
    for parameter, state in part.state.items():
        device = torch.device("cpu") if to_host else local(parameter).device
        for kind in STATE_KINDS[type(part)]:
            value = state.get(kind)
            if value is None or local(value).device == device:
                continue
            moved = torch.empty_like(local(value), device=device, pin_memory=to_host)
            moved.copy_(local(value), non_blocking=True)
            is_sharded = isinstance(value, DTensor)
            state[kind] = DTensor(moved, value._spec, requires_grad=False) if is_sharded else moved
    if to_host and torch.cuda.is_available():
        torch.cuda.synchronize()  # the host reads what was copied when a checkpoint is saved


def build_parts(hf: nn.Module, trained: list[nn.Parameter], recipe: Recipe) -> list[torch.optim.Optimizer]:
    config = recipe.optimizer
    if isinstance(config, AdamWConfig):
        return [_adamw(trained, config)]
    if isinstance(config, MuonConfig):
        matrices = matrix_parameters(hf)
        chosen = [parameter for parameter in trained if parameter in matrices]
        rest = [parameter for parameter in trained if parameter not in matrices]
        parts: list[torch.optim.Optimizer] = []
        if chosen:
            parts.append(
                Muon(
                    chosen,
                    lr=config.lr,
                    momentum=config.momentum,
                    nesterov=config.nesterov,
                    weight_decay=config.weight_decay,
                    dtype=getattr(torch, recipe.trainer.param_dtype),
                )
            )
        return [*parts, _adamw(rest, config)] if rest else parts
    if isinstance(config, SignSGDConfig):
        return [SignSGD(trained, lr=config.lr, weight_decay=config.weight_decay)]
    return [
        torch.optim.SGD(
            trained,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov and config.momentum > 0,
            weight_decay=config.weight_decay,
            foreach=True,  # torch has no fused SGD for sharded tensors
        )
    ]


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
    """Matrices that map hidden states to hidden states: neither embeddings nor head, fused experts included.

    Biases of fused experts are vectors, one per expert.
    """
    tables = {module.weight for module in hf.modules() if isinstance(module, nn.Embedding)}
    tables.add(hf.get_output_embeddings().weight)
    return {
        parameter
        for name, parameter in hf.named_parameters()
        if parameter not in tables
        and not name.endswith("bias")
        and (parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name))
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
    """Empty state of those of ``kinds`` that each part keeps, where it lies between steps, for a checkpoint to be read into."""
    for part in optimizer.parts:
        own = [kind for kind in STATE_KINDS[type(part)] if kind in kinds]
        for group in part.param_groups:
            for parameter in group["params"]:
                state = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in own}
                if isinstance(part, torch.optim.AdamW) and own:
                    state["step"] = torch.tensor(float(updates), device=parameter.device, dtype=torch.float32)
                part.state[parameter] = state
        if optimizer.on_host:
            move_state(part, to_host=True)
