"""Optimizers, gradient clipping, and their state by name for checkpoints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import AdamW as AdamWConfig
from primerl_hpc.recipe.schema.training import Muon as MuonConfig
from primerl_hpc.recipe.schema.training import SignSGD as SignSGDConfig
from primerl_hpc.trainer.host_slabs import HostSlabs
from primerl_hpc.trainer.model.families import head_weight
from primerl_hpc.trainer.model.projections import find_projections
from primerl_hpc.trainer.optim.muon import MuonOptimizer
from primerl_hpc.trainer.parallel.mesh import to_local


class Optimizers:
    """Optimizers of disjoint parameters, stepped as one.

    ``on_host``: their state is in host memory between steps and moves to the device part by part.
    """

    def __init__(self, *parts: torch.optim.Optimizer, on_host: bool = False) -> None:
        self.parts, self.on_host = parts, on_host
        self.host = HostState(is_pinned=torch.cuda.is_available())

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict]:
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        if self.on_host:
            self.host.step(self.parts)
            return
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)


class SignSGDOptimizer(torch.optim.Optimizer):
    """W ← (1 − ηλ) W − η sign(G) (arXiv 1802.04434): no state besides the gradient."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            weights = [to_local(parameter) for parameter in trained]
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_sign([to_local(parameter.grad) for parameter in trained])
            torch._foreach_add_(weights, signs, alpha=-group["lr"])


STATE_KINDS = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    MuonOptimizer: ("momentum_buffer",),
    SignSGDOptimizer: (),
}
"""Tensors that each optimizer keeps per parameter, shaped like it."""


OFFLOAD_BYTES = 1 << 30
"""Float32 state of an offloaded optimizer that is on the device at a time: that of two parts."""


def build_optimizer(hf: PreTrainedModel, recipe: Recipe) -> Optimizers:
    """Return the recipe's optimizer for the trained parameters of ``hf``."""
    trained = [parameter for parameter in hf.parameters() if parameter.requires_grad]
    if not recipe.trainer.optimizer_offload:
        return Optimizers(*build_optimizers(hf, trained, recipe))
    chunks = chunk_by_bytes(trained, OFFLOAD_BYTES // 2)
    parts = [part for chunk in chunks for part in build_optimizers(hf, chunk, recipe)]
    return Optimizers(*parts, on_host=True)


def chunk_by_bytes(parameters: list[nn.Parameter], num_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters into runs whose two float32 moments fill about ``num_bytes`` on this rank."""
    chunks: list[list[nn.Parameter]] = [[]]
    filled = 0
    for parameter in parameters:
        # not the local count: all ranks must split alike
        size = 8 * parameter.numel() // num_shards(parameter)
        if chunks[-1] and filled + size > num_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(parameter)
        filled += size
    return chunks


def num_shards(parameter: nn.Parameter) -> int:
    """Return the number of shards of a parameter; copies do not count."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if isinstance(placement, Shard))


class HostState:
    """The host memory of offloaded optimizers: each tensor of their state has its place there from the first step.

    On a GPU the state of one part arrives while that of the part before is updated and copied back, on streams of
    their own. ``is_pinned``: there is a GPU.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self.slabs = HostSlabs(is_pinned=is_pinned)
        self.streams = (torch.cuda.Stream(), torch.cuda.Stream()) if is_pinned else None
        """For copies to the device and to the host."""
        self._places: dict[tuple[Tensor, str], Tensor] = {}

    def step(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        """Step the parts. At most two parts have their state on the device."""
        arrived, left = self._fetch(parts[0]), None
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            _wait_on_host(left)  # so that the memory of the part before is free
            next_arrived = None if following is None else self._fetch(following)
            if arrived is not None:
                torch.cuda.current_stream().wait_event(arrived)
            part.step()
            arrived, left = next_arrived, self._send(part)
        _wait_on_host(left)  # saving a checkpoint reads the copies on the host

    def to_host(self, part: torch.optim.Optimizer) -> None:
        """Move the state's tensors to their places."""
        _wait_on_host(self._send(part))

    def _send(self, part: torch.optim.Optimizer) -> torch.Event | None:
        """Start copies of the state's tensors to their places. Returns the event of their end."""
        stream = None if self.streams is None else self.streams[1]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        for parameter, kind, value in kept_tensors(part):
            local = to_local(value)
            if (parameter, kind) not in self._places:
                self._places[parameter, kind] = self.slabs.take(local.shape, local.dtype)
            place = self._places[parameter, kind]
            if local.untyped_storage()._cdata == place.untyped_storage()._cdata:
                continue
            if stream is None:
                place.copy_(local)
            else:
                with torch.cuda.stream(stream):
                    place.copy_(local, non_blocking=True)
                local.record_stream(stream)
            part.state[parameter][kind] = like(value, place)
        return None if stream is None else stream.record_event()

    def _fetch(self, part: torch.optim.Optimizer) -> torch.Event | None:
        """Start copies of the state's tensors to the device of their parameter. Returns the event of their end."""
        kept = kept_tensors(part)
        if self.streams is None:
            for parameter, kind, value in kept:
                part.state[parameter][kind] = like(value, to_local(value).to(to_local(parameter).device))
            return None
        stream = self.streams[0]
        # allocated here, and not on the other stream, whose free memory the next forward could not use
        targets = [torch.empty_like(to_local(value), device=to_local(key).device) for key, _, value in kept]
        stream.wait_stream(torch.cuda.current_stream())
        for (parameter, kind, value), target in zip(kept, targets, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(to_local(value), non_blocking=True)
            part.state[parameter][kind] = like(value, target)
        return stream.record_event()


def _wait_on_host(event: torch.Event | None) -> None:
    if event is not None:
        event.synchronize()


def kept_tensors(part: torch.optim.Optimizer) -> list[tuple[Tensor, str, Tensor]]:
    """Return each tensor of `STATE_KINDS` in the state with its parameter and kind."""
    return [
        (parameter, kind, value)
        for parameter, state in part.state.items()
        for kind in STATE_KINDS[type(part)]
        if (value := state.get(kind)) is not None
    ]


def like(value: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as this rank's part of a tensor that is sharded like ``value``."""
    return DTensor(local, value._spec, requires_grad=False) if isinstance(value, DTensor) else local


def build_optimizers(
    hf: PreTrainedModel, trained: list[nn.Parameter], recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """Return torch optimizers for the ``trained`` parameters; Muon leaves embeddings, head and vectors to AdamW."""
    config = recipe.optimizer
    if isinstance(config, AdamWConfig):
        return [_adamw(trained, config)]
    if isinstance(config, MuonConfig):
        matrices = matrix_parameters(hf)
        chosen = [parameter for parameter in trained if parameter in matrices]
        rest = [parameter for parameter in trained if parameter not in matrices]
        parts: list[torch.optim.Optimizer] = []
        if chosen:
            muon = MuonOptimizer(
                chosen,
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                # float16 cannot represent a small momentum
                dtype=torch.float32 if recipe.trainer.param_dtype == "float32" else torch.bfloat16,
                projections=find_projections(hf),
            )
            if torch.cuda.is_available():  # matrix products on the host would take minutes
                muon.device = torch.device("cuda", torch.cuda.current_device())
            parts.append(muon)
        return [*parts, _adamw(rest, config)] if rest else parts
    if isinstance(config, SignSGDConfig):
        return [SignSGDOptimizer(trained, lr=config.lr, weight_decay=config.weight_decay)]
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


def matrix_parameters(hf: PreTrainedModel) -> set[nn.Parameter]:
    """Return the matrices that map hidden states to hidden states: fused experts, but neither embeddings nor head.

    Biases of fused experts are vectors, one per expert.
    """
    tables = {module.weight for module in hf.modules() if isinstance(module, nn.Embedding)}
    tables.add(head_weight(hf))
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
    """Return the L2 norm of all gradients, the same scalar on every rank.

    Gradients on different meshes (experts) are summed per mesh: torch's own function refuses to mix them.
    """
    groups: dict[tuple, list[Tensor]] = defaultdict(list)
    device = None
    for parameter in parameters:
        if (grad := parameter.grad) is None:
            continue
        device = grad.device
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else (None, ())
        groups[key].append(to_local(grad))
    total = torch.zeros((), device=device, dtype=torch.float32)
    for (mesh, placements), grads in groups.items():
        squares = torch.stack(torch._foreach_norm(grads)).float().square().sum()
        for dim, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dist.all_reduce(squares, group=mesh.get_group(dim))
        total = total + squares
    return total.sqrt()


@torch.no_grad()
def zero_gradients(parameters: Iterable[nn.Parameter], world_size: int) -> Tensor:
    """Return float64 [elements of gradients that are exactly 0, all elements] of this rank.

    Elements that several ranks hold are divided among them, so that sums over ranks count each once.
    """
    counts = torch.zeros(2, dtype=torch.float64)
    for parameter in parameters:
        if (grad := parameter.grad) is None:
            continue
        shards = 1
        if isinstance(grad, DTensor):
            sizes = zip(grad.device_mesh.shape, grad.placements, strict=True)
            shards = math.prod(size for size, placement in sizes if isinstance(placement, Shard))
        local = to_local(grad)
        counts = counts.to(local.device)
        zeros = local.numel() - torch.count_nonzero(local)
        counts += torch.stack([zeros, torch.full_like(zeros, local.numel())]) * (shards / world_size)
    return counts


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_([to_local(grad) for grad in grads], factor)


def clip_factor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """Return the factor that clips gradients to ``max_norm``; None without a bound."""
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)


# -- state by name ---------------------------------------------------------------------------------


def state_tensors(optimizer: Optimizers, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """Map ``optim.<kind>.<parameter>`` to state tensors shaped like it, e.g. ``optim.exp_avg.lm_head.weight``."""
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
    """Return the updates that the optimizer has counted (without skipped steps); 0 if it does not count."""
    for state in optimizer.state.values():
        if "step" in state:
            return int(state["step"])
    return 0


def make_state(optimizer: Optimizers, kinds: list[str], updates: int) -> None:
    """Create zero state of ``kinds``, where it is kept between steps, for a checkpoint to be read into."""
    for part in optimizer.parts:
        part_kinds = [kind for kind in STATE_KINDS[type(part)] if kind in kinds]
        for group in part.param_groups:
            for parameter in group["params"]:
                state = {kind: torch.zeros_like(parameter, requires_grad=False) for kind in part_kinds}
                if isinstance(part, torch.optim.AdamW) and part_kinds:
                    state["step"] = torch.tensor(float(updates), device=parameter.device, dtype=torch.float32)
                part.state[parameter] = state
        if optimizer.on_host:
            optimizer.host.to_host(part)
