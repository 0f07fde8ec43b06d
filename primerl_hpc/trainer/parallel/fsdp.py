"""FSDP2: which weights are gathered together, when gradients are reduced, where shards are kept.

apply_fsdp(policy, blocks, experts, recipe.trainer, world)       # on the meta device
set_gradient_sync(policy, is_last=True, small=True)              # before each forward
reshard(policy)                                                  # after a forward without backward
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.training import TrainerConfig
from primerl_hpc.trainer.parallel.expert import expert_modules
from primerl_hpc.trainer.parallel.mesh import World

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

PARAM_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

SMALL_BYTES = 2 << 30
"""Bound of a small model. Up to this size of all float32 gradients, they stay unsharded until the last micro-batch and
are reduced once. Up to this size of all float32 weights, these are one group, gathered once per step
(`TrainerConfig.reshard_after_forward`)."""


def apply_fsdp(
    policy: nn.Module,
    blocks: Sequence[nn.Module],
    experts: DeviceMesh | None,
    config: TrainerConfig,
    world: World,
) -> None:
    """Shard the policy: one group of weights per block, one for the rest, and with ``experts`` (their mesh) one per
    block's experts.

    Blocks of a small model are part of the rest: the memory that separate groups save is not worth many short gathers.
    Matrices that tensor parallelism has divided are groups of their own within these, see `divided_placement`.
    """
    precision = precision_policy(config, config.param_dtype)
    offload, reshards = offload_policy(config), config.reshard_after_forward in (True, "auto")
    is_one_group = config.reshard_after_forward == "auto" and are_small(policy.parameters())
    placement = divided_placement(world)
    groups: list[list[FSDPModule]] = []
    for block in blocks:
        inner = []
        if experts is not None:
            inner = expert_modules(block)
            mesh = experts["replicate", "expert_shard"] if world.replicate > 1 else experts["expert_shard"]
            for module in inner:
                shard_experts(module, mesh, precision, offload, reshard=reshards)
        if not is_one_group:
            fully_shard(
                block,
                mesh=world.mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshards,
                shard_placement_fn=placement,
            )
        if group := fsdp_part([block, *inner]):
            groups.append(group)
    fully_shard(
        policy, mesh=world.mesh, mp_policy=precision, offload_policy=offload, shard_placement_fn=placement
    )
    # with one rank torch would divide by 1, with a copy
    for module in fsdp_modules(policy) if world.size > 1 else ():
        # Sum, not mean: losses are parts of a sum, and experts' gradients are sums over more ranks than reduce them.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if experts is not None:
        # Waiting for the all-to-all's sizes would delay gathers that are issued only when their block begins.
        for group, following in pairwise(groups):
            group[0].set_modules_to_forward_prefetch(following)
            following[0].set_modules_to_backward_prefetch(group)


def precision_policy(config: TrainerConfig, param_dtype: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=PARAM_DTYPES[param_dtype],
        reduce_dtype=PARAM_DTYPES[config.reduce_dtype],
        cast_forward_inputs=False,  # temperatures stay float32; hidden states follow the weights anyway
    )


def shard_float32(modules: Sequence[nn.Module], config: TrainerConfig, world: World) -> None:
    """Shard the modules that compute in float32, before `apply_fsdp`, as one group.

    It stays gathered from forward to backward: it is small, except for the head, which the last group would keep too.
    """
    if modules:
        fully_shard(
            list(modules),
            mesh=world.mesh,
            mp_policy=precision_policy(config, "float32"),
            offload_policy=offload_policy(config),
            reshard_after_forward=False,
            shard_placement_fn=divided_placement(world),
        )


def gather_float32(modules: Sequence[nn.Module]) -> None:
    """Gather the group of modules that compute in float32. The head's own forward, which would do it, is not called."""
    for module in modules[:1]:
        assert isinstance(module, FSDPModule)
        module.unshard()


def divided_placement(world: World) -> Callable[[nn.Parameter], ShardPlacementResult | None] | None:
    """Return how FSDP shards parameters: those divided over ``tensor`` in their other dim over ``tensor_shard``.

    Their gradients are summed over the ranks with the same part, those of all others over all ranks.
    """
    if (mesh := world.tensor_mesh) is None:
        return None
    # torch before 2.13 does not have it, and only tensor parallelism needs it
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    if world.replicate > 1:
        info: FSDPMeshInfo = HSDPMeshInfo(
            mesh["replicate", "tensor_shard"], shard_mesh_dim=1, replicate_mesh_dim=0
        )
    else:
        info = FSDPMeshInfo(mesh["tensor_shard"], shard_mesh_dim=0)
    ranks = mesh["tensor_shard"].size()

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        if not isinstance(parameter, DTensor):
            return None
        (divided,) = parameter.placements
        assert isinstance(divided, Shard)
        dim = 1 - divided.dim
        if dim and parameter.shape[dim] % ranks:
            raise ConfigError(
                f"matrices of shape {list(parameter.shape)} cannot be sharded over {ranks} ranks",
                hint="raise layout.trainer.tensor_parallel or layout.trainer.replicate",
            )
        return ShardPlacementResult(Shard(dim), info)

    return placement


def shard_experts(
    module: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    *,
    reshard: bool,
) -> None:
    """Shard fused experts over the ranks that hold the same experts. ``mesh``: ([replicate,] expert_shard)."""
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
    """Return the first dim after the experts' that is a multiple of ``ranks``. Raises ConfigError if there is none."""
    for dim in range(1, len(shape)):
        if shape[dim] % ranks == 0:
            return dim
    raise ConfigError(
        f"expert weights of shape {shape} cannot be sharded over {ranks} ranks: none of "
        f"{shape[1:]} is a multiple of it",
        hint="raise layout.trainer.expert_parallel or layout.trainer.replicate",
    )


def offload_policy(config: TrainerConfig) -> OffloadPolicy:
    """Return FSDP's policy: ``cpu_offload`` keeps shards and gradients, and so the optimizer, in host memory."""
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def reshard(policy: nn.Module) -> None:
    """Free gathered weights after a forward without backward.

    Until then the model's parameters are the gathered ones, which a later save would treat as shards.
    """
    for module in fsdp_modules(policy):
        module.reshard()


def release_reduced(policy: nn.Module) -> None:
    """Free the buffer from which the last gradients of the previous micro-batch were reduced.

    It has the gradients of embedding and head in float32, and FSDP would keep it until the next reduction, which comes
    after the step's peak. Call between the last block and the head: the reduction has ended by then.
    """
    assert isinstance(policy, FSDPModule)
    state = policy._get_fsdp_state()
    device, context = state._device_handle, cast(Any, state._comm_ctx)
    has_list = hasattr(context, "reduce_scatter_states")  # torch before 2.13 keeps one state
    for reduction in context.reduce_scatter_states if has_list else [context.reduce_scatter_state]:
        if reduction is not None and reduction.event is not None and device is not None:
            device.current_stream().wait_event(reduction.event)
    if has_list:
        context.reduce_scatter_states.clear()
    else:
        context.reduce_scatter_state = None


def fsdp_modules(policy: nn.Module) -> list[FSDPModule]:
    return fsdp_part(policy.modules())


def fsdp_part(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def is_small(policy: nn.Module) -> bool:
    """True if the trained parameters are at most `SMALL_BYTES`."""
    return are_small(parameter for parameter in policy.parameters() if parameter.requires_grad)


def are_small(parameters: Iterable[nn.Parameter]) -> bool:
    """True if all of them together, in float32, are at most `SMALL_BYTES`."""
    return 4 * sum(parameter.numel() for parameter in parameters) <= SMALL_BYTES


def set_gradient_sync(policy: nn.Module, *, is_last: bool, small: bool) -> None:
    """Reduce gradients of small models once per step; scatter those of large ones in every micro-batch to save memory.

    Copies of an HSDP model are reduced once per step in either case.
    """
    assert isinstance(policy, FSDPModule)
    if small:
        policy.set_requires_gradient_sync(is_last)
    else:
        policy.set_requires_all_reduce(is_last)
    policy.set_reshard_after_backward(is_last, recurse=False)
    policy.set_is_last_backward(is_last)
