"""Activation checkpointing, activation offload and CPU offload.

Recomputing a block needs its input. With ``activation_offload`` that input is copied to host memory as soon as the
block has run, and fetched while the following block runs backward: about two of all the inputs are on the GPU at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.training import TrainerConfig
from primerl_hpc.trainer.host_slabs import HostSlabs
from primerl_hpc.trainer.model.families import DecoderBlock


def apply_activation_checkpointing(
    hf: PreTrainedModel,
    blocks: list[DecoderBlock],
    config: TrainerConfig,
    *,
    has_dropout: bool = False,
    is_compiled: bool = False,
) -> None:
    """Wrap every n-th block, or its named modules, as ``config`` requests. Call before compile and FSDP.

    ``has_dropout``: recomputation needs the random numbers of the forward; otherwise the state of the generators is
    not saved. ``is_compiled``: the blocks are compiled later. Raises ConfigError if a module to recompute is in no
    block.
    """
    if config.activation_checkpointing == "none":
        return
    chosen = blocks[:: config.activation_checkpointing_every]
    options = {"use_reentrant": False, "preserve_rng_state": has_dropout}
    if config.activation_checkpointing == "full":
        if is_compiled:
            # A compiled block is one operation, so there is nothing to skip after the last saved tensor; and torch 2.11
            # fails to skip it while memory history is recorded (pytorch/pytorch#179536).
            options["early_stop"] = False
        hf.gradient_checkpointing_enable(options)
        if config.activation_offload:
            traffic = HostTraffic(options)
            for block in chosen:
                block._gradient_checkpointing_func = partial(traffic.run, is_first=block is blocks[0])
        for block in set(blocks) - set(chosen):
            block.gradient_checkpointing = False
        return
    for name in config.activation_checkpointing:
        found = [
            (block, module)
            for block in blocks
            for path, module in block.named_modules()
            if path == name or path.endswith(f".{name}")
        ]
        if not found:
            known = sorted({path.rsplit(".", 1)[-1] for path, _ in blocks[0].named_modules() if path})
            raise ConfigError(
                f"trainer.activation_checkpointing names {name}, which no block of {type(hf).__name__} has",
                hint=f"its blocks have {', '.join(known)}",
            )
        for module in (module for block, module in found if block in chosen):
            module.forward = partial(checkpoint, module.forward, **options)


def materialize(policy: nn.Module, config: TrainerConfig, device: torch.device) -> None:
    """Allocate memory for a model built on the meta device: shards where they are kept, buffers where they are used."""
    policy.to_empty(device="cpu" if config.cpu_offload else device)
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def init_buffers(hf: PreTrainedModel) -> None:
    """Fill buffers that are in no file (rotary frequencies, scales) by the model's own initializer.

    It may also fill parameters of those modules with random values; loading overwrites them afterwards.
    """
    for module in hf.modules():
        if module._non_persistent_buffers_set:
            hf._init_weights(module)


class HostTraffic:
    """Copies to and from the host concurrently with computation, on a separate stream.

    ``options``: of torch's `checkpoint`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self.slabs = HostSlabs(is_pinned=self.stream is not None)
        self._last: HeldInput | None = None

    def run(self, function: Callable[..., Any], hidden: Tensor, *rest: Any, is_first: bool) -> Any:
        """Return ``function(hidden, *rest)``, recomputed in backward from a copy of ``hidden`` on the host."""
        if not torch.is_grad_enabled():
            return function(hidden, *rest)
        if is_first:  # the copies of the previous micro-batch have been fetched, on the same stream
            self.slabs.release()
        held = HeldInput(self, hidden, None if is_first else self._last)
        self._last = held
        return checkpoint(lambda: function(held.take(), *rest), **self.options)

    def to_host(self, value: Tensor) -> Tensor:
        host = self.slabs.take(value.shape, value.dtype)
        if self.stream is None or not value.is_cuda:
            return host.copy_(value.detach())
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host.copy_(value.detach(), non_blocking=True)
        value.record_stream(self.stream)
        return host

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, torch.Event | None]:
        if self.stream is None or device.type != "cuda":
            return host.clone(), None  # as on a GPU, what backward keeps is no part of a slab
        with torch.cuda.stream(self.stream):
            return host.to(device, non_blocking=True), self.stream.record_event()


class HeldInput:
    """A block's input: the tensor itself on the first `take` (forward), then its copy from the host (backward)."""

    def __init__(self, traffic: HostTraffic, hidden: Tensor, previous: HeldInput | None) -> None:
        self.traffic, self.previous = traffic, previous
        self.device, self.needs_grad = hidden.device, hidden.requires_grad
        self._hidden: Tensor | None = hidden
        self._host: Tensor | None = None
        self._fetched: tuple[Tensor, torch.Event | None] | None = None

    def take(self) -> Tensor:
        if (hidden := self._hidden) is not None:
            self._hidden = None
            self._host = self.traffic.to_host(hidden)
            return hidden
        self.fetch()
        assert self._fetched is not None
        value, arrived = self._fetched
        if arrived is not None:
            torch.cuda.current_stream().wait_event(arrived)
            value.record_stream(torch.cuda.current_stream())
        self._fetched = None
        if self.previous is not None:
            self.previous.fetch()  # the previous block is next in backward
            self.previous = None
        return value.requires_grad_(self.needs_grad)

    def fetch(self) -> None:
        if self._fetched is None and self._host is not None:
            self._fetched = self.traffic.to_device(self._host, self.device)
            self._host = None
