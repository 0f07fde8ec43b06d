"""On-policy self-distillation: like opd, but the scores come from the live policy, given a demonstration of the task.

`orchestrator.rollouts.self_teacher` computes the log-probabilities.
"""

from __future__ import annotations

from primerl_hpc.orchestrator.algorithms.opd import Opd

ALGORITHM = Opd
