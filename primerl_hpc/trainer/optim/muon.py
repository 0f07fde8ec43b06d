"""Muon (arXiv 2502.16982) for sharded models: momentum of a matrix, orthogonalized by Newton–Schulz.

    B ← μ B + (1−μ) G;   O = NS₅((1−μ) G + μ B);   W ← (1 − ηλ) W − 0.2 η √max(rows, columns) O

The factor gives updates the root mean square of AdamW's, so that learning rates and decay for AdamW apply here too.
Orthogonalization needs full matrices, of which a rank holds some rows: see `orthogonalize_rows`. Fused experts
[E, rows, columns] are E matrices, and a rank that holds complete experts needs no communication. A parameter that holds
several projections (gate and up; query, key and value) is updated projection by projection: see `projections`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from primerl_hpc.trainer.model.projections import SINGLE, Projections
from primerl_hpc.trainer.parallel.mesh import to_local

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


class MuonOptimizer(torch.optim.Optimizer):
    """``dtype``: type of Newton–Schulz and of the data that ranks exchange for it.

    ``projections``: projections of the parameters that hold several.
    """

    device: torch.device | None = None
    """Where matrices are multiplied, also those that are kept on the host. None: where they are."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        dtype: torch.dtype,
        projections: Mapping[Tensor, Projections] | None = None,
    ) -> None:
        self.projections = projections or {}
        self.dtype = dtype
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update the parameters. Collective over the ranks that share a matrix."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            update_of = partial(self._advance_momentum, group)
            for parameter, update in orthogonalize(trained, update_of, self.projections):
                rate = 0.2 * group["lr"] * math.sqrt(max(parameter.shape[-2:]))
                weights = to_local(parameter)
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(update.to(weights), alpha=-rate)

    def _advance_momentum(self, group: dict, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of the update before orthogonalization, as exchanged between ranks."""
        assert parameter.grad is not None  # `step` skips parameters without a gradient
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        gradient, momentum = to_local(parameter.grad), to_local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return update.to(update.device if self.device is None else self.device, self.dtype)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return about U Vᵀ of the singular value decomposition of matrices [..., rows, columns].

    The singular values of the result are between 0.7 and 1.2.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    x = wide.reshape(-1, *wide.shape[-2:])
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)


def orthogonal_update(matrices: Tensor, projections: Projections) -> Tensor:
    """Return `newton_schulz` of each projection in [..., rows, columns], scaled for the factor of the full matrix.

    `MuonOptimizer.step` multiplies by √max(rows, columns) of the full matrix; a smaller projection gets the share
    √(its own max / the full matrix's max).
    """
    if projections is SINGLE:
        return newton_schulz(matrices)
    largest = max(matrices.shape[-2:])
    out = torch.empty_like(matrices)
    for view, into in zip(projections.split(matrices), projections.split(out), strict=True):
        part = projections.joined(view)
        into.copy_((newton_schulz(part) * math.sqrt(max(part.shape[-2:]) / largest)).view_as(into))
    return out


def orthogonalize(
    parameters: list[nn.Parameter],
    update_of: Callable[[nn.Parameter], Tensor],
    projections: Mapping[Tensor, Projections],
) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter with its orthogonalized update; both local. Collective.

    ``update_of`` is called once for each, when the update is needed: all updates at once would be as large as the
    gradients.
    """
    split = [projections.get(parameter, SINGLE) for parameter in parameters]
    shared: dict[tuple, list[int]] = defaultdict(list)  # matrices sharded alike, processed together
    for index, parameter in enumerate(parameters):
        dims = matrix_shard_dims(parameter)
        if not dims or not isinstance(parameter, DTensor):
            update = update_of(parameter)
            yield parameter, orthogonal_update(update, split[index]) if update.numel() else update
        elif parameter.ndim == 2 and len(dims) == 1 and parameter.placements[dims[0]] == Shard(0):
            shared[parameter.device_mesh, dims[0], parameter.shape].append(index)
        else:
            yield parameter, _orthogonalize_gathered(parameter, update_of(parameter), split[index])
    for (mesh, dim, shape), indices in shared.items():
        group = mesh.get_group(dim)
        for start in range(0, len(indices), group.size()):
            chosen = indices[start : start + group.size()]
            parts = orthogonalize_rows(
                [update_of(parameters[index]) for index in chosen],
                [split[index] for index in chosen],
                shape,
                group,
            )
            yield from zip([parameters[index] for index in chosen], parts, strict=True)


def matrix_shard_dims(parameter: Tensor) -> list[int]:
    """Return the mesh dims over which the rows or columns of the parameter's matrices are sharded."""
    if not isinstance(parameter, DTensor):
        return []
    first = parameter.ndim - 2
    return [
        dim
        for dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard) and placement.dim >= first and parameter.device_mesh.size(dim) > 1
    ]


def orthogonalize_rows(
    parts: list[Tensor], projections: list[Projections], shape: torch.Size, group: dist.ProcessGroup
) -> list[Tensor]:
    """Orthogonalize up to W matrices [R, C] of one shape, sharded by rows over W ranks. Collective.

    Returns the same rows.

    Rank j receives all rows of matrix j: every matrix is processed once, every element is sent once each way.
    """
    num_rows, num_columns = shape
    size = group.size()
    chunk = -(-num_rows // size)  # like FSDP: the last ranks hold fewer rows, or none
    rows = [max(0, min(chunk, num_rows - rank * chunk)) for rank in range(size)]
    has_one = group.rank() < len(parts)
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    received = [count * num_columns if has_one else 0 for count in rows]
    outbox = torch.cat([part.reshape(-1) for part in parts])
    inbox = outbox.new_empty(sum(received))
    dist.all_to_all_single(inbox, outbox, received, sent, group=group)
    if has_one:
        inbox = orthogonal_update(inbox.view(num_rows, num_columns), projections[group.rank()]).reshape(-1)
    dist.all_to_all_single(outbox, inbox, sent, received, group=group)
    return [piece.view(-1, num_columns) for piece in outbox.split(sent)[: len(parts)]]


def _orthogonalize_gathered(parameter: DTensor, update: Tensor, projections: Projections) -> Tensor:
    """Handle every other sharding: all ranks gather the matrices and keep their part of the result."""
    mesh, placements = parameter.device_mesh, parameter.placements
    sharded_dims = matrix_shard_dims(parameter)
    gathered_placements = [
        Replicate() if dim in sharded_dims else placement for dim, placement in enumerate(placements)
    ]
    piece = DTensor.from_local(
        update, mesh, placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
    gathered = piece.redistribute(placements=gathered_placements)
    result = gathered.to_local()
    result = orthogonal_update(result, projections) if result.numel() else result
    back = DTensor.from_local(
        result, mesh, gathered_placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
    return back.redistribute(placements=placements).to_local()
