"""On-policy self-distillation: as opd, but who scores is the live policy after it has read a demonstration of the task.

Where the log-probabilities come from: `orchestrator.self_teacher`.
"""

from __future__ import annotations

from primerl_hpc.orchestrator.algorithms.opd import Opd

ALGORITHM = Opd
