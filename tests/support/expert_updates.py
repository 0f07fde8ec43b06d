"""vLLM's workers with a mixture, updated by this package and by vLLM alone. One process runs all layouts:

python -m tests.support.expert_updates FOLDER        # writes LAYOUT-RANK.json for each layout of `LAYOUTS`
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.served_updates import make_model, reload_warnings

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tensor parallelism": {"tensor_parallel_size": 2},
    "expert parallelism": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
FAMILY = "qwen3_moe"
OMITTED = "model.layers.1.mlp.experts.3.up_proj.weight"
"""Rank 0 has this expert in all layouts."""


def digests(worker: Any) -> dict[str, str]:
    """Return a checksum of each parameter of the served model, in the layout of the CPU's kernels."""
    import torch

    return {
        name: hashlib.sha256(value.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in worker.model_runner.get_model().named_parameters()
    }


def reload_by_vllm(worker: Any, folder: Path) -> dict[str, str]:
    from primerl_hpc.inference.worker import reload

    reload._forget_cpu_moe_kernels(worker.model_runner.get_model())
    worker.reload_weights(weights_path=str(folder))
    return digests(worker)


def reload_by_package(worker: Any, stream: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    """Return checksums, the number of tensors that vLLM's loaders got one by one, and the error, if there is one."""
    from vllm.model_executor.model_loader.reload import layerwise

    from primerl_hpc.inference.worker.reload import reload_weights

    plain, calls, error = layerwise.get_numel_loaded, [], ""

    def counted(loader: Any, args: Any) -> Any:
        calls.append(1)
        return plain(loader, args)

    layerwise.get_numel_loaded = counted
    try:
        reload_weights(worker, stream)
    except Exception as found:  # noqa: BLE001 (what it is, is the result)
        error = f"{type(found).__name__}: {found}"
    finally:
        layerwise.get_numel_loaded = plain
    return {"digests": digests(worker), "calls": len(calls), "error": error}


def store_name(layout: str) -> str:
    """Return the suffix of the file in which ranks meet, after which vLLM names its shared memory."""
    return layout.replace(" ", "-")


def make_worker(layout: str, folder: Path, rank: int, **options: Any) -> Any:
    """Return vLLM's own worker for CPUs with the model in ``folder``. ``options``: more engine arguments."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.cpu_worker import CPUWorker

    config = EngineArgs(
        str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64,
        kv_cache_memory_bytes=16 << 20, **LAYOUTS[layout], **options,
    ).create_engine_config()  # fmt: skip
    place = f"file://{folder.parent}/{folder.parent.name}-{folder.name}-{store_name(layout)}"
    with set_current_vllm_config(config):
        worker = CPUWorker(config, rank, rank, place, is_driver_worker=rank == 0)
        worker.init_device()
        worker.load_model()
    return worker


def compared(layout: str, folder: Path, rank: int) -> dict[str, Any]:
    from primerl_hpc.inference.checkpoint import read_headers
    from primerl_hpc.inference.worker import stacked_experts
    from primerl_hpc.inference.worker.extension import stream_tensors

    first, second = folder / "1", folder / "2"
    worker = make_worker(layout, first, rank)
    found: dict[str, Any] = {"layout": layout, "rank": rank, "started": digests(worker)}
    with reload_warnings() as found["warnings"]:
        found["updated"] = reload_by_package(worker, stream_tensors(read_headers(second)))
    found["back"] = reload_by_vllm(worker, first)
    with reload_warnings() as found["warnings_by_vllm"]:
        found["by_vllm"] = reload_by_vllm(worker, second)
    whole, stacked_experts.MAX_HELD_BYTES = stacked_experts.MAX_HELD_BYTES, 0
    copies = ((name, tensor.clone()) for name, tensor in stream_tensors(read_headers(first)))
    found["in_parts"] = reload_by_package(worker, copies)
    stacked_experts.MAX_HELD_BYTES = whole
    tensors = stream_tensors(read_headers(first))
    others = (entry for entry in tensors if entry[0] != OMITTED)
    with reload_warnings() as found["warnings_omitted"]:
        found["omitted"] = reload_by_package(worker, others)["error"]
    return found


def main(folder: Path) -> int:
    for seed in (1, 2):
        make_model(folder / str(seed), FAMILY, seed)
    from vllm.model_executor.models import registry
    from vllm.v1.worker import cpu_worker  # noqa: F401  imported once for all ranks

    # vLLM inspects each architecture in a separate process, which imports everything again
    registry._run_in_subprocess = lambda inspect: inspect()
    failed = 0
    for layout, options in LAYOUTS.items():
        children = []
        for rank in range(options.get("tensor_parallel_size", 1)):
            if (child := os.fork()) == 0:
                try:
                    line = json.dumps(compared(layout, folder, rank))
                    Path(folder, f"{layout}-{rank}.json").write_text(line)
                    os._exit(0)
                except BaseException:  # noqa: BLE001 (the process ends here)
                    traceback.print_exc()
                    os._exit(1)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
        for segment in Path("/dev/shm").glob(f"{folder.name}-1-{store_name(layout)}*"):
            segment.unlink(missing_ok=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
