"""Load the experts of a layer together, instead of one by one through vLLM's loaders.

    experts = StackedExperts()
    with experts.observing():
        worker.reload_weights(weights_iterator=experts.through(weights))

For each tensor of an expert, vLLM 0.31 searches the parameter, runs the parameter's ``weight_loader`` on the meta
device to count elements, and runs it again to copy: 0.13 ms on a CPU core, of which 0.01 ms is the copy. A version of
Qwen3-30B-A3B has 18,432 of these tensors.

The loader places the tensors of all experts of a layer equally, up to the expert's index. So the first expert of a
layer takes vLLM's path, and the copies that the loader makes are observed. The tensors of the other experts are held
until the layer's last one arrives or they fill `MAX_HELD_BYTES`, and then passed to the same parameter in one call,
which copies them to the places that the loader would have chosen: the same rows and columns for tensor parallelism, the
same local experts for expert parallelism, where tensors of other ranks' experts are not passed on. Tensors that do not
match the observed one, and layers whose loader does anything but one copy of a view, take vLLM's path.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MAX_HELD_BYTES = 1 << 30
"""Storages of held tensors: two buckets of a broadcast. A bucket stays in memory as long as one of its tensors is held,
also if the other tensors are experts of other ranks."""
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")


class CopyObserver(TorchDispatchMode):
    """Records target and source of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.copies.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


@dataclass
class LoaderCall:
    """A call of a parameter's loader, with the copies that it made."""

    loader: Any
    arguments: dict[str, Any]
    copies: list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StridedView:
    """A part of a tensor. ``offset``: in elements, from the start of that tensor or of an expert's part."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class HeldExperts:
    """Tensors of several experts with the same place in their parts of one parameter. Passed to its loader."""

    target: StridedView
    source: StridedView
    tensors: dict[int, Tensor] = field(default_factory=dict)
    """By local index of the expert."""

    def copy_to(self, parameter: Tensor) -> None:
        """Copy into ``parameter`` [experts, …]. On the meta device, let vLLM count the number of elements."""
        if parameter.is_meta:
            counted = torch.empty(len(self.tensors) * math.prod(self.target.size), device="meta")
            counted.copy_(torch.empty_like(counted))
            return
        size, stride = (len(parameter), *self.target.size), (parameter.stride(0), *self.target.stride)
        places = parameter.data.as_strided(size, stride, parameter.storage_offset() + self.target.offset)
        places = places.unbind()
        view = self.source
        torch._foreach_copy_(
            [places[index] for index in self.tensors],
            [
                tensor.as_strided(view.size, view.stride, tensor.storage_offset() + view.offset)
                for tensor in self.tensors.values()
            ],
        )


@dataclass
class ExpertSlot:
    """Where the loader of a layer copies the tensors with one name of all its experts, for example ``up_proj``."""

    layer: Any
    parameter: str
    arguments: dict[str, Any]
    """Arguments of the loader for the observed expert, other than parameter and tensor."""
    like: Tensor
    """The observed expert's tensor, on the meta device."""
    device: torch.device
    local_index: list[int]
    """Local index of each expert; -1 for experts of other ranks."""
    held: HeldExperts | None
    """None until an expert of this rank was observed."""

    def hold(self, expert: int, tensor: Tensor) -> bool:
        """Hold an expert's tensor, or ignore it if another rank has the expert. False if vLLM must load it."""
        if (
            expert >= len(self.local_index)
            or tensor.shape != self.like.shape
            or tensor.dtype != self.like.dtype
            or tensor.device != self.device
            or not tensor.is_contiguous()
        ):
            return False
        index = self.local_index[expert]
        if index >= 0 and self.held is not None:
            self.held.tensors[index] = tensor
        return index < 0 or self.held is not None

    def load(self) -> None:
        """Pass the held tensors to the parameter's loader, which vLLM has wrapped to count them first."""
        held = self.held
        if held is None or not held.tensors:
            return
        self.held = HeldExperts(held.target, held.source)
        parameter = getattr(self.layer, self.parameter)
        parameter.weight_loader(param=parameter, loaded_weight=held, **self.arguments)


class StackedExperts:
    """Experts of one load."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str], ExpertSlot] = {}
        self._pending: dict[tuple[str, str], ExpertSlot] = {}  # with held tensors
        self._held_storages: dict[int, int] = {}  # address → bytes
        self._calls: list[LoaderCall] | None = None
        self._replaced: list[tuple[Any, Any]] = []

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe vLLM's loaders in the block."""
        from vllm.model_executor.model_loader.reload import layerwise

        plain = layerwise.get_numel_loaded

        def observed(loader: Any, args: Any) -> tuple[int, Any]:
            if self._calls is None:
                return plain(loader, args)
            with CopyObserver() as observer:
                result = plain(loader, args)
            self._calls.append(LoaderCall(loader, dict(args.arguments), observer.copies))
            return result

        layerwise.get_numel_loaded = observed
        try:
            yield
        finally:
            layerwise.get_numel_loaded = plain
            for parameter, loader in self._replaced:
                parameter.weight_loader = loader

    def through(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass through what vLLM must load itself, and load the rest."""
        last_prefix = None
        for name, tensor in weights:
            match = _EXPERT.fullmatch(name)
            prefix = match[1] if match else None
            if prefix != last_prefix:
                self._load_pending()
                last_prefix = prefix
            if match is None:
                yield name, tensor
                continue
            key = match[1], match[3]
            slot = self._slots.get(key)
            if slot is not None and slot.hold(int(match[2]), tensor):
                self._pending[key] = slot
                storage = tensor.untyped_storage()
                self._held_storages[storage.data_ptr()] = storage.nbytes()
                if sum(self._held_storages.values()) > MAX_HELD_BYTES:
                    self._load_pending()
                continue
            self._calls = [] if slot is None or slot.held is None else None
            yield name, tensor
            calls, self._calls = self._calls, None
            if calls and (found := _slot_of(calls, int(match[2]), tensor)) is not None:
                if found.held is not None:
                    self._accept_held(found)
                self._slots[key] = found
        self._load_pending()

    def _load_pending(self) -> None:
        pending, self._pending, self._held_storages = self._pending, {}, {}
        for slot in pending.values():
            slot.load()

    def _accept_held(self, slot: ExpertSlot) -> None:
        """Replace the loader of the slot's parameter by one that also takes `HeldExperts`."""
        from vllm.model_executor.model_loader.reload import layerwise

        parameter = getattr(slot.layer, slot.parameter)
        original = layerwise._get_original_loader(parameter)
        if not hasattr(original, "__self__"):  # replaced already, for the other half of the parameter
            return

        @functools.wraps(original)
        def loader(param: Any, loaded_weight: Any, *args: Any, **more: Any) -> Any:
            if isinstance(loaded_weight, HeldExperts):
                return loaded_weight.copy_to(param)
            return original(param, loaded_weight, *args, **more)

        self._replaced.append((parameter, parameter.weight_loader))
        parameter.weight_loader = loader
        parameter.weight_loader = layerwise.make_online_process_loader(slot.layer, slot.parameter)


def _slot_of(calls: list[LoaderCall], expert: int, tensor: Tensor) -> ExpertSlot | None:
    """Return where the observed expert's tensor was copied; None if the other experts cannot be placed like it."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    if len(calls) != 1 or len(calls[0].copies) > 1:  # parts of a fused tensor, or an expert with copies
        return None
    (call,) = calls
    arguments = dict(call.arguments)
    parameter, _ = arguments.pop("param", None), arguments.pop("loaded_weight", None)
    layer = getattr(getattr(call.loader, "__wrapped__", call.loader), "__self__", None)
    if not isinstance(layer, RoutedExperts) or not _is_unquantized(layer):
        return None
    names = [name for name, value in layer._parameters.items() if value is parameter]
    local_index = _local_indices(layer)
    if arguments.get("expert_id") != expert or not names or not tensor.is_contiguous():
        return None
    held = _place_of(call, parameter, tensor, local_index[expert]) if local_index[expert] >= 0 else None
    if (held is None) != (not call.copies):
        return None
    like = torch.empty_like(tensor, device="meta")
    return ExpertSlot(layer, names[0], arguments, like, tensor.device, local_index, held)


def _place_of(call: LoaderCall, parameter: Tensor, tensor: Tensor, local_index: int) -> HeldExperts | None:
    """Return which part of the tensor was copied where; None if it was not one copy of a view into a view."""
    if len(call.copies) != 1:
        return None
    ((target, source),) = call.copies
    if (
        parameter.dim() != 3
        or not _is_view(target, parameter)
        or not _is_view(source, tensor)
        or not target.is_contiguous()
        or target.shape != source.shape
    ):
        return None
    start = parameter.storage_offset() + local_index * parameter.stride(0)
    offset = int(target.storage_offset() - start)
    if not 0 <= offset <= parameter.stride(0) - target.numel():
        return None
    return HeldExperts(
        StridedView(tuple(target.shape), target.stride(), offset),
        StridedView(
            tuple(source.shape), source.stride(), int(source.storage_offset() - tensor.storage_offset())
        ),
    )


def _is_unquantized(layer: Any) -> bool:
    return type(layer.quant_method).__name__.startswith("Unquantized")


def _is_view(view: Tensor, base: Tensor) -> bool:
    return view.untyped_storage()._cdata == base.untyped_storage()._cdata


def _local_indices(layer: Any) -> list[int]:
    """Return the local index of each expert of a layer; -1 for experts of other ranks."""
    found = layer.expert_map_manager.expert_map
    return list(range(layer.global_num_experts)) if found is None else found.tolist()
