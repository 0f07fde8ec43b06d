"""Environment variables that a vLLM engine needs from before its first import; the planner puts them into its process.

They are vLLM's and OpenMP's own, hence here and not in ``common/env.py``, which holds ours.
"""

from __future__ import annotations

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # CUDA forbids fork once the parent has used it; on CPUs inference/vllm_compat.py forks all the same
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

_CPU = {
    # default binding reserves a core and pins every engine to the same CPU 0; unbound and with more than one
    # OpenMP thread per worker, the workers' threads spin against each other (10,000 → 240 tokens/s)
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # an engine of one rank computes in the engine core's own process: one start less, and its memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # without it the first request with log-probabilities compiles a kernel with g++: 18 s, and needs a compiler
    "TORCH_COMPILE_DISABLE": "1",
}


def engine_env(accelerator: str) -> dict[str, str]:
    """Variables for engines on ``accelerator`` (``cpu`` or ``gpu``), in a fixed order."""
    return {**_ALWAYS, **(_CPU if accelerator == "cpu" else {})}
