"""What need not be on the GPU all the time: activations, recomputed in backward or kept on the host, and the weights.

Recomputing a block needs its input. With ``activation_offload`` that input goes to host memory as soon as the block has
run, and comes back while the block after it runs backward: of all blocks, about two inputs are on the GPU at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.utils.checkpoint import checkpoint

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.training_schema import Trainer


def save_activations(hf: nn.Module, blocks: list[nn.Module], config: Trainer) -> None:
    """Set up what ``config`` asks for. Before compile and FSDP.

    Raises ConfigError when a module to recompute is in no block.
    """
    if config.activation_checkpointing == "none":
        return
    if config.activation_checkpointing == "full":
        hf.gradient_checkpointing_enable({"use_reentrant": False})
        if config.activation_offload:
            traffic = HostTraffic()
            for block in blocks:
                block._gradient_checkpointing_func = partial(traffic.run, is_first=block is blocks[0])
        return
    for name in config.activation_checkpointing:
        found = [
            module
            for block in blocks
            for path, module in block.named_modules()
            if path == name or path.endswith(f".{name}")
        ]
        if not found:
            known = sorted({path.rsplit(".", 1)[-1] for path, _ in blocks[0].named_modules() if path})
            raise ConfigError(
                f"trainer.activation_checkpointing names {name}, which no block of {type(hf).__name__} has",
                mend=f"its blocks have {', '.join(known)}",
            )
        for module in found:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def offload_policy(config: Trainer) -> OffloadPolicy:
    """FSDP's: with ``cpu_offload`` shards, their gradients and so the optimizer live in host memory."""
    if not config.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


def allocate(policy: nn.Module, config: Trainer, device: torch.device) -> None:
    """Memory for what was built on the meta device: shards where they live, buffers where they are used."""
    policy.to_empty(device="cpu" if config.cpu_offload else device)
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)


class HostTraffic:
    """Copies to and from the host beside computation, on a stream of their own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._last: HeldInput | None = None

    def run(self, function: Callable[..., Any], hidden: Tensor, *rest: Any, is_first: bool) -> Any:
        """``function(hidden, *rest)`` of one block, recomputed in backward from a copy of ``hidden`` on the host."""
        if not torch.is_grad_enabled():
            return function(hidden, *rest)
        held = HeldInput(self, hidden, None if is_first else self._last)
        self._last = held
        return checkpoint(lambda: function(held.take(), *rest), use_reentrant=False)

    def to_host(self, value: Tensor) -> Tensor:
        if self.stream is None or not value.is_cuda:
            return value.detach().clone()
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            host.copy_(value.detach(), non_blocking=True)
        value.record_stream(self.stream)
        return host

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
        if self.stream is None or device.type != "cuda":
            return host, None
        with torch.cuda.stream(self.stream):
            return host.to(device, non_blocking=True), self.stream.record_event()


class HeldInput:
    """A block's input: itself the first time it is taken (forward), then a copy that was on the host (backward)."""

    def __init__(self, traffic: HostTraffic, hidden: Tensor, previous: HeldInput | None) -> None:
        self.traffic, self.previous = traffic, previous
        self.device, self.needs_grad = hidden.device, hidden.requires_grad
        self._hidden: Tensor | None = hidden
        self._host: Tensor | None = None
        self._fetched: tuple[Tensor, torch.cuda.Event | None] | None = None

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
            self.previous.fetch()  # the block before is next in backward
            self.previous = None
        return value.requires_grad_(self.needs_grad)

    def fetch(self) -> None:
        if self._fetched is None and self._host is not None:
            self._fetched = self.traffic.to_device(self._host, self.device)
            self._host = None
