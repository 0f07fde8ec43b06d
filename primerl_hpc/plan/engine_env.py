"""Environment variables that must be set before a vLLM engine is imported; the planner adds them to its process.

They belong to vLLM and OpenMP; ``common/env.py`` has the variables of this project.
"""

from __future__ import annotations

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # CUDA cannot be used in a forked child; on CPUs inference/vllm_compat.py uses fork nevertheless
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}

_CPU = {
    # the default binding reserves a core and pins all engines to the same CPU 0; without binding, more than one
    # OpenMP thread per worker makes the threads spin against each other (10,000 → 240 tokens/s)
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # an engine of one rank runs the model in the engine core's process, which saves a process start and its memory
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # otherwise the first request with log-probabilities compiles a kernel with g++, which takes 18 s
    "TORCH_COMPILE_DISABLE": "1",
}


def engine_env(accelerator: str) -> dict[str, str]:
    """Return the variables for engines on ``accelerator`` (``cpu`` or ``gpu``), in a fixed order."""
    return {**_ALWAYS, **(_CPU if accelerator == "cpu" else {})}
