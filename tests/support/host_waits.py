"""Operations that make the host wait for a GPU, found without one, and the waits that a training step is allowed.

with HostWaits() as waits:
    trainer.train_step(1, rows, [])
waits.found                   # ["item at _train_step", …]
waits.not_allowed()           # those that are not in ALLOWED
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "equal": "equal",
    "is_nonzero": "bool",
}

PER_STEP = {
    "_train_step": "loss and norm, which decide if the step is skipped",
    "reduce": "sums of the metrics of all ranks, and their maxima",
    "take_metrics": "load of the experts",
}
"""Functions that may wait for the device once per step (`reduce` twice), whatever the number of micro-batches."""
ON_HOST = {
    "_step_totals": "counts that are made on the host and summed by gloo",
    "_single_tensor_adamw": "counters of updates, which torch's fused kernels keep on the device",
}
"""Functions that read tensors which are on the host also when the trainer has a GPU."""
PER_DISPATCH = {
    "read_sizes": "rows that each rank sends and receives: the sizes of an all-to-all are host numbers"
}
"""Functions that may wait once per layer of experts and pass: forward, and its recomputation."""
ALLOWED = PER_STEP | ON_HOST | PER_DISPATCH


class HostWaits(TorchDispatchMode):
    """Records operations on tensors whose result a host would have to wait for if they were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __enter__(self) -> HostWaits:
        def tolist(value: Tensor) -> Any:  # a read of a complete tensor is no operation of torch on a CPU
            if "flash_kernels" not in sys._getframe(1).f_code.co_filename:  # kernels of a GPU read no sizes
                self.found.append(f"tolist at {place()}")
            return TensorBase.tolist(value)

        Tensor.tolist = tolist
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        delattr(Tensor, "tolist")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := wait_of(func, args, kwargs or {})) is not None:
            self.found.append(f"{name} at {place()}")
        return func(*args, **(kwargs or {}))

    def count(self) -> Counter[str]:
        """Return the number of waits of each function, without reads of tensors that are always on the host."""
        functions = [entry.rpartition(" at ")[2] for entry in self.found]
        return Counter(function for function in functions if function not in ON_HOST)

    def not_allowed(self) -> list[str]:
        return [entry for entry in self.found if entry.rpartition(" at ")[2] not in ALLOWED]


def place() -> str:
    """Return the innermost function of the package in the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "primerl_hpc" in path.parts and "site-packages" not in path.parts:
            return frame.f_code.co_name
        frame = frame.f_back
    return "elsewhere"


def wait_of(func: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return the name of an operation that waits for the device of its arguments; None for all others.

    A copy from a GPU to the host waits unless it is ``non_blocking``.
    """
    name = func._schema.name.removeprefix("aten::")
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return f"{name} by a mask"
    if name in WAITS:
        return WAITS[name]
    if name == "_to_copy" and args[0].is_cuda and not kwargs.get("non_blocking"):
        device = kwargs.get("device")
        return "copy to the host" if device is not None and device.type == "cpu" else None
    if name == "copy_" and args[1].is_cuda and not args[0].is_cuda:
        is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        return None if is_async else "copy to the host"
    return None
