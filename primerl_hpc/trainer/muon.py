"""Muon (arXiv 2502.16982) for sharded models: momentum of a matrix, orthogonalised by Newton–Schulz.

    B ← μ B + (1−μ) G;   O = NS₅((1−μ) G + μ B);   W ← (1 − ηλ) W − 0.2 η √max(rows, columns) O

The factor gives updates the root mean square of AdamW's, so that rates and decay made for AdamW serve here too.
Orthogonalising needs whole matrices, of which a rank holds some rows: see `orthogonalise_rows`. Fused experts
[E, rows, columns] are E matrices, and a rank that holds whole experts needs nobody.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from primerl_hpc.trainer.parallel.mesh import local

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


class Muon(torch.optim.Optimizer):
    """``dtype`` is that of Newton–Schulz, and of what ranks exchange for it."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        super().__init__(
            parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Collective over the ranks that share a matrix."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            updates = [self._advance_momentum(parameter, group) for parameter in trained]
            for parameter, update in orthogonalise(trained, updates, self.dtype):
                rate = 0.2 * group["lr"] * math.sqrt(max(parameter.shape[-2:]))
                weights = local(parameter)
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(update.to(weights), alpha=-rate)  # gathered, it lies where the mesh does

    def _advance_momentum(self, parameter: nn.Parameter, group: dict) -> Tensor:
        """What this rank holds of the update before orthogonalisation."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        gradient, momentum = local(parameter.grad), local(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def newton_schulz(matrices: Tensor) -> Tensor:
    """[..., rows, columns] → U Vᵀ of each matrix's singular value decomposition, roughly: singular values in 0.7 to 1.2."""
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


def orthogonalise(
    parameters: list[nn.Parameter], updates: list[Tensor], dtype: torch.dtype
) -> Iterable[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its orthogonalised update; both local, like ``updates``. Collective."""
    shared: dict[tuple, list[int]] = defaultdict(list)  # matrices cut alike, worked on together
    for index, (parameter, update) in enumerate(zip(parameters, updates, strict=True)):
        cut = matrix_cuts(parameter)
        if not cut:
            yield parameter, newton_schulz(update.to(dtype)) if update.numel() else update
        elif parameter.ndim == 2 and len(cut) == 1 and parameter.placements[cut[0]] == Shard(0):
            shared[parameter.device_mesh, cut[0], parameter.shape].append(index)
        else:
            yield parameter, _orthogonalise_gathered(parameter, update, dtype)
    for (mesh, dim, shape), indices in shared.items():
        group = mesh.get_group(dim)
        for start in range(0, len(indices), group.size()):
            chosen = indices[start : start + group.size()]
            parts = orthogonalise_rows([updates[index].to(dtype) for index in chosen], shape, group)
            yield from zip([parameters[index] for index in chosen], parts, strict=True)


def matrix_cuts(parameter: nn.Parameter) -> list[int]:
    """Mesh dims over which the rows or columns of the parameter's matrices are cut."""
    if not isinstance(parameter, DTensor):
        return []
    first = parameter.ndim - 2
    return [
        dim
        for dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard) and placement.dim >= first and parameter.device_mesh.size(dim) > 1
    ]


def orthogonalise_rows(parts: list[Tensor], shape: torch.Size, group: dist.ProcessGroup) -> list[Tensor]:
    """Rows of up to W matrices [R, C] of one shape, cut over W ranks → the same rows, orthogonalised. Collective.

    Rank j gets all rows of matrix j: every matrix is worked on once, every element travels once each way.
    """
    num_rows, num_columns = shape
    size = group.size()
    chunk = -(-num_rows // size)  # as FSDP cuts: the last ranks hold fewer rows, or none
    rows = [max(0, min(chunk, num_rows - rank * chunk)) for rank in range(size)]
    has_one = group.rank() < len(parts)
    sent = [part.numel() for part in parts] + [0] * (size - len(parts))
    received = [each * num_columns if has_one else 0 for each in rows]
    outbox = torch.cat([part.reshape(-1) for part in parts])
    inbox = outbox.new_empty(sum(received))
    dist.all_to_all_single(inbox, outbox, received, sent, group=group)
    if has_one:
        inbox = newton_schulz(inbox.view(num_rows, num_columns)).reshape(-1)
    dist.all_to_all_single(outbox, inbox, sent, received, group=group)
    return [piece.view(-1, num_columns) for piece in outbox.split(sent)[: len(parts)]]


def _orthogonalise_gathered(parameter: nn.Parameter, update: Tensor, dtype: torch.dtype) -> Tensor:
    """For every other way of cutting: all ranks gather the matrices and keep their piece of the result."""
    mesh, placements = parameter.device_mesh, parameter.placements
    cuts = matrix_cuts(parameter)
    whole = [Replicate() if dim in cuts else placement for dim, placement in enumerate(placements)]
    piece = DTensor.from_local(
        update.to(dtype), mesh, placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
    gathered = piece.redistribute(placements=whole)
    result = gathered.to_local()
    result = newton_schulz(result) if result.numel() else result
    back = DTensor.from_local(
        result, mesh, whole, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
    return back.redistribute(placements=placements).to_local()
