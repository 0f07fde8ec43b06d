"""Worker extension for expert parallelism on CPUs, which vLLM's CPU build does not support.

vLLM imports this module in every worker before it creates the model. No other module may import it, because the import
patches vLLM.
"""

from __future__ import annotations

from primerl_hpc.inference import vllm_compat
from primerl_hpc.inference.worker.extension import WeightUpdate

vllm_compat.patch_cpu_expert_parallelism()


class CPUWeightUpdate(WeightUpdate):
    """`WeightUpdate` in a patched process."""
