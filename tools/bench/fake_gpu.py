"""A GPU for FakeTensorMode on a machine without one: tensors of device ``cuda`` have shapes, but no memory.

    import fake_gpu
    fake_gpu.load()                           # before anything imports torch
    fake_gpu.install(on_wait)

`load` compiles fake_gpu.cpp (two seconds, with g++) and loads it before torch, whose CPU build has no CUDA device
otherwise. `install` replaces what FSDP, DTensor and the trainer call of `torch.cuda`: streams, events and properties of
an H100. The process can compute nothing on real tensors of that device, and must trace only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
KERNELS: Any = None
"""Registrations of operators, which end with their library."""
DEVICE: Any = None
"""The loaded library of the device."""
NAME, CAPABILITY, MEMORY_BYTES = "NVIDIA H100 80GB HBM3", (9, 0), 80 << 30


def load() -> None:
    """Compile and load the device once, then import torch. Exits without a compiler, or if torch is loaded already."""
    global DEVICE
    if DEVICE is not None:
        return
    if "torch" in sys.modules:
        sys.exit("the GPU that does not exist must be loaded before torch")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("torch is not installed; install the extra trainer")
    torch_folder = Path(spec.origin).parent
    libraries = [torch_folder / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]
    for library in libraries:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as folder:
        device = Path(folder, "device.so")
        command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", f"-I{torch_folder / 'include'}", SOURCE]
        try:
            subprocess.run([*command, *libraries, "-o", device], check=True)
        except FileNotFoundError:
            sys.exit("g++ is required to trace a GPU without one")
        DEVICE = ctypes.CDLL(str(device), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401  with the device


class FakeEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> FakeEvent:
        return self

    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True


class FakeStream:
    """The only stream: nothing runs, so there is nothing to wait for."""

    stream_id = device_index = cuda_stream = 0
    device_type = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def wait_event(self, *_: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def synchronize(self) -> None: ...
    def is_capturing(self) -> bool:
        return False

    def query(self) -> bool:
        return True

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class FakeProperties:
    name, total_memory, multi_processor_count = NAME, MEMORY_BYTES, 132
    major, minor = CAPABILITY
    warp_size, gcnArchName, L2_cache_size = 32, "", 50 << 20


def install(on_wait: Callable[[], None]) -> None:
    """Replace `torch.cuda` and `torch.accelerator`. ``on_wait`` is called for each ``synchronize``."""
    import torch

    global KERNELS
    KERNELS = torch.library.Library("aten", "IMPL")
    stream = FakeStream()

    def synchronize(*_: Any, **__: Any) -> None:
        on_wait()

    def returns(value: Any) -> Any:
        return lambda *_, **__: value

    def unmanaged(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext()

    replaced: dict[str, Any] = dict.fromkeys(
        ("_lazy_init", "set_device", "set_stream", "empty_cache", "manual_seed", "manual_seed_all"),
        returns(None),
    )
    replaced |= dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), returns(True))
    replaced |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated"), returns(0))
    replaced |= dict.fromkeys(("current_stream", "default_stream"), returns(stream))
    replaced |= dict.fromkeys(("stream", "device"), unmanaged)
    replaced |= {
        "device_count": returns(8),
        "current_device": returns(0),
        "get_device_capability": returns(CAPABILITY),
        "get_device_name": returns(NAME),
        "get_device_properties": returns(FakeProperties()),
        "is_current_stream_capturing": returns(False),
        "get_rng_state": returns(torch.zeros(16, dtype=torch.uint8)),
        "set_rng_state": returns(None),
        "synchronize": synchronize,
        "Stream": FakeStream,
        "Event": FakeEvent,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    accelerator = {
        "current_stream": returns(stream),
        "synchronize": synchronize,
        "current_device_index": returns(0),
        "set_device_index": returns(None),
        "device_count": returns(8),
        "is_available": returns(True),
    }
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, value)
    # without a kernel for CUDA this operator would run as several, each with a result in memory
    KERNELS.impl("silu_backward", returns(None), "CUDA")
    torch.Tensor.record_stream = returns(None)
    torch.Stream, torch.Event = FakeStream, FakeEvent  # pyright: ignore[reportAttributeAccessIssue]
