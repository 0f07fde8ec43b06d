"""Expert parallelism: each rank holds E/ep complete experts; tokens are sent to them.

It attaches to transformers' experts interface, which every family with fused experts calls as
``experts(hidden [N, H], top_k_index [N, k], top_k_weights [N, k])``. Expert tensors [E, …] become DTensors sharded in
dim 0 over the ``expert`` axis; `fsdp.shard_experts` then shards another dim over ``expert_shard``, so that a checkpoint
contains plain chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.parallel.dispatch import (
    ExpertDispatcher,
    Received,
    TorchDispatcher,
    nothing,
    sum_rows,
)
from primerl_hpc.trainer.parallel.fused_experts import FusedExperts, has_fused_experts
from primerl_hpc.trainer.parallel.lora_experts import make_pairs, run_sorted

EXPERTS_NAME = "primerl_expert_parallel"


def expert_modules(hf: nn.Module) -> list[FusedExperts]:
    """Return the fused experts: modules of the experts interface, whose decorator sets these attributes."""
    return [module for module in hf.modules() if has_fused_experts(module)]


def num_experts(hf: nn.Module) -> int:
    """Return the experts of each fused layer; 0 for a dense model."""
    return min((module.num_experts for module in expert_modules(hf)), default=0)


def distribute_experts(hf: PreTrainedModel, mesh: DeviceMesh, backend: str) -> None:
    """Shard the experts of a model on the meta device over ``mesh`` ("expert") and route their calls through it."""
    dispatchers: dict[int, ExpertDispatcher] = {}  # by number of local experts: one, unless layers differ
    for module in expert_modules(hf):
        num_local = module.num_experts // mesh.size()
        if num_local not in dispatchers:
            dispatchers[num_local] = make_dispatcher(backend, mesh, num_local)
        module.dispatcher = dispatchers[num_local]
        for name, value in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(value.data, mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(sharded, requires_grad=value.requires_grad))
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, forward_experts)
    hf.set_experts_implementation(EXPERTS_NAME)


def make_dispatcher(backend: str, mesh: DeviceMesh, num_local: int) -> ExpertDispatcher:
    if backend == "torch":
        return TorchDispatcher(mesh.get_group(), num_local)
    from primerl_hpc.trainer.parallel.deepep import DeepEPDispatcher

    return DeepEPDispatcher(mesh.get_group(), num_local)


@torch.compiler.disable  # the number of tokens for each rank depends on the data
def forward_experts(module: FusedExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts' output: the function of the experts interface. [N, H], [N, k], [N, k] → [N, H]."""
    start_shared = getattr(module, "start_shared", nothing)
    received = module.dispatcher.dispatch(hidden, index, weights, start_shared)
    return module.dispatcher.combine(run_pairs(LocalExperts(module), received), received)


def run_pairs(experts: Any, received: Received) -> Tensor:
    """Return the output of this rank's experts for the received tokens, [M, H].

    Few of a token's k experts are here. Pairs of a token and an expert become separate rows, each with one expert, so
    that nothing is computed for the others. They are sorted once: pairs of other ranks' experts come last.
    """
    ids, order = received.index.flatten().sort()
    ids, order = (found[: max(1, received.num_pairs)] for found in (ids, order))
    token = order // received.index.shape[1]
    pairs = make_pairs(ids, experts.num_experts, has_absent=received.num_pairs == 0)
    rows = run_sorted(experts, received.hidden[token], pairs)
    return sum_rows(rows, token, len(received.hidden), received.weights.flatten()[order])


class LocalExperts:
    """This rank's experts as the fused module that transformers' own functions expect."""

    _is_expert_parallel = True
    """Read by transformers from 5.19 on: rows may have an expert id beyond the last one, which belongs to no expert."""

    def __init__(self, module: FusedExperts) -> None:
        self._module = module
        self.num_experts = module.dispatcher.num_local

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


# -- shared experts --------------------------------------------------------------------------------


def may_overlap_shared(recipe: Recipe) -> bool:
    """True if shared experts may run before the routed ones: they are not recomputed or compiled apart from their
    block, draw no random numbers and take part in no collective."""
    recomputed = recipe.trainer.activation_checkpointing
    names = () if isinstance(recomputed, str) else {name.rpartition(".")[2] for name in recomputed}
    return not (
        {"experts", "shared_experts"} & set(names)
        or recipe.trainer.compile is True
        or recipe.keeps_dropout
        or (recipe.lora is not None and recipe.lora.dropout > 0)
        or recipe.layout.trainer.tensor_parallel != 1
    )


def overlap_shared_experts(hf: nn.Module) -> int:
    """Compute shared experts while tokens are sent to the routed ones. Returns the number of layers.

    Call after `distribute_experts`, and before modules are recomputed. Of families that call ``shared_experts`` after
    ``experts``, as DeepSeek-V3 does.
    """
    found = [
        SharedOverlap(block, experts, shared)
        for block in hf.modules()
        if isinstance(shared := getattr(block, "shared_experts", None), nn.Module)
        and isinstance(experts := getattr(block, "experts", None), nn.Module)
        and has_fused_experts(experts)
    ]
    return len(found)


class SharedOverlap:
    """Issues the shared experts of a block while the block's tokens are sent to the routed experts.

    On a GPU the kernels go to the current stream, and only the messages run on another one: FSDP reads and frees
    gradients on the current stream without waiting for others. Results have the same bits as without this class,
    because both orders sum the gradients of the block's input as (shared + routed) + router.
    """

    def __init__(self, block: nn.Module, experts: FusedExperts, shared: nn.Module) -> None:
        self._run_block, self._run_shared = block.forward, shared.forward
        block.forward, shared.forward, experts.start_shared = self.run_block, self.take, self.start
        self._hidden: Tensor | None = None
        self._output: Tensor | None = None

    def run_block(self, hidden: Tensor, *args: Any, **more: Any) -> Any:
        self._hidden = hidden
        try:
            return self._run_block(hidden, *args, **more)
        finally:
            self._hidden = self._output = None

    def start(self) -> None:
        """Run the shared experts with the block's input."""
        if self._hidden is not None:
            self._output = self._run_shared(self._hidden)

    def take(self, hidden: Tensor) -> Tensor:
        """Return the output for ``hidden``; that of `start`, if it was for the same tensor."""
        output, self._output = self._output, None
        return self._run_shared(hidden) if output is None or hidden is not self._hidden else output
