"""Parameters that hold several projections: gate and up in one tensor; query, key and value; parts of latent attention.

An optimizer that works on matrices treats each projection as a separate matrix, so that a family that stores them fused
is trained like one that stores them separately.

    find_projections(hf)[mlp.gate_up_proj.weight].split(update)      # (gate, up), views of update
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from primerl_hpc.trainer.model.families import FUSED_LINEARS, fused_sizes, head_rows
from primerl_hpc.trainer.parallel.expert import expert_modules


@dataclass(frozen=True)
class Projections:
    """How the projections lie along ``dim`` (-2 or -1) of a matrix, or of every matrix of a stack."""

    sizes: tuple[int, ...] = ()
    """Rows (or columns) of each projection, in order; empty: a single projection."""
    is_interleaved: bool = False
    """Rows (or columns) of the projections alternate; ``sizes`` are equal."""
    dim: int = -2
    groups: int = 1
    """Number of times that rows of all projections follow each other, as for each head."""

    def split(self, matrices: Tensor) -> tuple[Tensor, ...]:
        """Return views of each projection: [..., rows, columns], or [..., groups, rows, columns] for several groups."""
        if not self.sizes:
            return (matrices,)
        if self.groups > 1:
            return matrices.unflatten(-2, (self.groups, sum(self.sizes))).split(self.sizes, -2)
        if not self.is_interleaved:
            return matrices.split(self.sizes, self.dim)
        count = len(self.sizes)
        if self.dim == -2:
            return tuple(matrices[..., start::count, :] for start in range(count))
        return tuple(matrices[..., start::count] for start in range(count))

    def joined(self, view: Tensor) -> Tensor:
        """Return a view of `split` as matrices [..., rows, columns]: the rows of all groups, in order."""
        return view.flatten(-3, -2) if self.groups > 1 else view


SINGLE = Projections()


def find_projections(hf: nn.Module) -> dict[Tensor, Projections]:
    """Return the parameters of ``hf`` that hold several projections; any other parameter is a single one.

    Known are the ``gate_up_proj`` of fused experts, the linear layers `FUSED_LINEARS`, and those with `head_rows`; in
    their adapters, B.
    """
    found: dict[Tensor, Projections] = {}
    for module in expert_modules(hf):
        if module.has_gate:
            weight = module.gate_up_proj
            dim = -1 if module.is_transposed else -2
            half = weight.shape[dim] // 2
            sizes, is_interleaved = (half, half), not module.is_concatenated
            found[weight] = Projections(sizes, is_interleaved, dim)
            if (adapter := getattr(module, "gate_up_proj_lora_B", None)) is not None:
                found[adapter] = Projections(sizes, is_interleaved)
    for parent in hf.modules():
        for name, linear in parent.named_children():
            if not isinstance(linear, nn.Linear):
                continue
            if name in FUSED_LINEARS:
                projections = Projections(fused_sizes(parent, name, linear.out_features))
            else:
                groups, sizes = head_rows(parent, name, linear.out_features)
                projections = Projections(sizes, groups=groups)
            for parameter in (linear.weight, getattr(linear, "lora_B", None)):
                if parameter is not None and projections.sizes:
                    found[parameter] = projections
    return found


__all__ = ["SINGLE", "Projections", "find_projections"]
