"""The worker extension of engines that spread experts over CPUs, which vLLM's CPU build does not know by itself.

vLLM imports this module in every worker before the model is made. Nothing else may import it: it changes vLLM's kernels.
"""

from __future__ import annotations

from primerl_hpc.inference import vllm_compat
from primerl_hpc.inference.extension import WeightUpdate

vllm_compat.teach_cpu_expert_parallelism()


class CPUWeightUpdate(WeightUpdate):
    """The same methods."""
