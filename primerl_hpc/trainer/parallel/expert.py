"""Expert parallelism: each rank holds E/ep whole experts; tokens travel to them.

It attaches to transformers' experts interface, which every family with fused experts calls as
``experts(hidden [N, H], top_k_index [N, k], top_k_weights [N, k])``. Expert tensors [E, …] become DTensors cut in dim 0 over the
``expert`` axis; FSDP then cuts another dim over ``expert_shard``, so a checkpoint sees plain chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.lora_experts import forward_adapted_experts, has_adapters
from primerl_hpc.trainer.parallel.dispatch import Dispatcher, Received, TorchDispatcher, sum_rows

EXPERTS_NAME = "primerl_expert_parallel"


def expert_modules(hf: nn.Module) -> list[nn.Module]:
    """Fused experts: modules of the experts interface, whose decorator leaves these attributes."""
    return [
        module
        for module in hf.modules()
        if all(hasattr(module, name) for name in ("has_gate", "is_transposed", "num_experts", "down_proj"))
    ]


def num_experts(hf: nn.Module) -> int:
    """Experts of each fused layer; 0 for a dense model."""
    return min((module.num_experts for module in expert_modules(hf)), default=0)


def spread_experts(hf: nn.Module, mesh: DeviceMesh, backend: str) -> None:
    """Cut the experts of a model on the meta device over ``mesh`` ("expert") and route their calls through it."""
    dispatchers: dict[int, Dispatcher] = {}  # by local experts: one, unless layers differ
    for module in expert_modules(hf):
        num_local = module.num_experts // mesh.size()
        if num_local not in dispatchers:
            dispatchers[num_local] = make_dispatcher(backend, mesh, num_local)
        module.dispatcher = dispatchers[num_local]
        for name, value in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(value.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(cut, requires_grad=value.requires_grad))
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, forward_experts)
    hf.set_experts_implementation(EXPERTS_NAME)


def make_dispatcher(backend: str, mesh: DeviceMesh, num_local: int) -> Dispatcher:
    if backend == "torch":
        return TorchDispatcher(mesh.get_group(), num_local)
    from primerl_hpc.trainer.parallel.deepep import DeepEPDispatcher

    return DeepEPDispatcher(mesh.get_group(), num_local)


def shard_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    *,
    reshard: bool,
) -> None:
    """FSDP over the ranks that hold the same experts. ``mesh``: ([replicate,] expert_shard)."""
    ranks = mesh["expert_shard"].size() if mesh.ndim > 1 else mesh.size()

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(list(parameter.shape), ranks))

    fully_shard(
        module,
        mesh=mesh,
        mp_policy=precision,
        offload_policy=offload,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
    )


def shard_dim(shape: list[int], ranks: int) -> int:
    """The first dim after the experts' that ``ranks`` divide. Raises ConfigError when there is none."""
    for dim in range(1, len(shape)):
        if shape[dim] % ranks == 0:
            return dim
    raise ConfigError(
        f"expert weights of shape {shape} cannot be cut over {ranks} ranks: none of {shape[1:]} is a multiple of it",
        mend="raise layout.trainer.expert_parallel or layout.trainer.replicate",
    )


@torch.compiler.disable  # how many tokens go where is known only as it runs
def forward_experts(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The experts interface's function. [N, H], [N, k], [N, k] → [N, H]."""
    received = module.dispatcher.dispatch(hidden, index, weights)
    return module.dispatcher.combine(run_pairs(LocalExperts(module), received), received)


def run_pairs(experts: Any, received: Received) -> Tensor:
    """What this rank's experts make of the tokens that came, [M, H].

    Of a token's k experts few are here. Pairs of a token and an expert become rows of their own, each with one expert, so that
    nothing is made for the others.
    """
    order = received.index.flatten().argsort()[: max(1, received.num_pairs)]  # those of nobody here come last
    token = order // received.index.shape[1]
    run = forward_adapted_experts if has_adapters(experts) else grouped_mm_experts_forward
    index, weights = (each.flatten()[order, None] for each in (received.index, received.weights))
    rows = run(experts, received.hidden[token], index, weights)
    return sum_rows(rows, token, len(received.hidden))


class LocalExperts:
    """This rank's experts as the fused module that transformers' own functions expect."""

    _is_expert_parallel = True
    """Asked by transformers 5.23: a row of nobody, with an expert id beyond the last one, may come."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.num_experts = module.dispatcher.num_local

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value
