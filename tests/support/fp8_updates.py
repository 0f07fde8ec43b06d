"""vLLM's workers that quantize to FP8 while they load, updated or started from the new weights. One process runs all:

    python -m tests.support.fp8_updates FOLDER        # writes SCHEME-updated.json and SCHEME-fresh.json of `SCHEMES`

CPUs without AMX tiles have no FP8 kernels, so the kernels and the operator that quantizes with a given scale are
stand-ins, which `on_a_cpu` installs. Loading, scales, blocks and channels are vLLM's own code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.expert_updates import digests, make_worker
from tests.support.served_updates import make_model

SCHEMES = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
OMITTED = "model.layers.1.self_attn.o_proj.weight"


class LinearKernel:
    """Stand-in for a kernel that takes the quantized weights as they are, as those of GPUs do."""

    input_quant_key = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing."""


def scaled_fp8_quant(
    value: Any, scale: Any = None, use_per_token_if_dynamic: bool = False
) -> tuple[Any, Any]:
    """Stand-in for vLLM's CUDA operators: divide by the scale, or by that of each row, and round."""
    import torch

    if scale is None:
        assert use_per_token_if_dynamic
        scale = value.abs().amax(1, keepdim=True).float() / 448
    return (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@contextmanager
def on_a_cpu() -> Iterator[None]:
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization.online import fp8

    backend = (oracle.Fp8MoeBackend.TRITON, object)
    with ExitStack() as stack:
        for place, name, value in (
            (fp8, "init_fp8_linear_kernel", lambda **_: LinearKernel()),
            (fp8, "select_fp8_moe_backend", lambda **_: backend),
            (fp8, "expose_input_quant_key", lambda *_: None),
            (fp8.ops, "scaled_fp8_quant", scaled_fp8_quant),
            (oracle, "make_fp8_moe_kernel", lambda **_: object()),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield


def compared(scheme: str, folder: Path) -> dict[str, Any]:
    """Return checksums of a worker after its start and after each update, and the error of an incomplete one."""
    import torch

    from primerl_hpc.inference.checkpoint import read_headers
    from primerl_hpc.inference.worker.extension import stream_tensors
    from primerl_hpc.inference.worker.reload import reload_weights

    def update(version: str, omitted: str = "") -> str:
        stream = stream_tensors(read_headers(folder / version))
        try:
            reload_weights(worker, (entry for entry in stream if entry[0] != omitted))
        except Exception as error:  # noqa: BLE001 (what it is, is the result)
            return f"{type(error).__name__}: {error}"
        return ""

    found: dict[str, Any] = {}
    worker = make_worker("one rank", folder / "1", 0, quantization=scheme)
    found["started"] = digests(worker)
    quantized = [p for p in worker.model_runner.get_model().parameters() if p.dtype == torch.float8_e4m3fn]
    found["quantized"] = len(quantized)
    found["errors"] = [update("2")]
    found["updated"] = digests(worker)
    found["errors"].append(update("1"))
    found["back"] = digests(worker)
    found["omitted"] = update("2", OMITTED)
    return found


def fresh(scheme: str, folder: Path) -> dict[str, Any]:
    """Return checksums of a worker that starts from the weights of the update."""
    return {"fresh": digests(make_worker("one rank", folder / "2", 0, quantization=scheme))}


def main(folder: Path) -> int:
    from vllm.model_executor.models import registry
    from vllm.v1.worker import cpu_worker  # noqa: F401  imported once for all workers

    # vLLM inspects each architecture in a separate process, which imports everything again
    registry._run_in_subprocess = lambda inspect: inspect()
    for seed in (1, 2):
        make_model(folder / str(seed), "qwen3_moe", seed)
    failed = 0
    for scheme in SCHEMES:
        for name, run in (("updated", compared), ("fresh", fresh)):
            if (child := os.fork()) == 0:
                try:
                    with on_a_cpu():
                        line = json.dumps(run(scheme, folder))
                    (folder / f"{scheme}-{name}.json").write_text(line)
                    os._exit(0)
                except BaseException:  # noqa: BLE001 (the process ends here)
                    traceback.print_exc()
                    os._exit(1)
            failed += os.waitpid(child, 0)[1] != 0
    for segment in Path("/dev/shm").glob(f"{folder.name}-*"):
        segment.unlink(missing_ok=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
