"""Engines and trainer on the same GPUs (``layout.colocated``): what each may use of a GPU, and what a turn costs.

In mode ``sleep`` the two are not in memory together, so each is checked by itself, in addition to what the other
keeps on the GPU: a sleeping engine keeps its CUDA context and graphs, a waiting trainer its CUDA context. In mode
``share`` each has its part, and the sum of the parts is the GPU.
"""

from __future__ import annotations

from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice
from primerl_hpc.plan.assess.parts import Parts
from primerl_hpc.plan.predict.figure import Figure, add, estimate, exact, multiply
from primerl_hpc.plan.predict.memory_trainer import CONTEXT_BYTES
from primerl_hpc.plan.predict.timing.time_trainer import PCIE_SHARE

STATES = ("memory.trainer.weights", "memory.trainer.optimizer")
"""Figures of the tensors that a waiting trainer keeps in host memory."""


def takes_turns(case: Case) -> bool:
    return case.recipe.layout.takes_turns


def runs_together(case: Case) -> bool:
    """True if engines and trainer compute on the same GPUs at the same time."""
    return case.recipe.layout.colocated is not None and not takes_turns(case)


def trainer_limit(parts: Parts, choice: LayoutChoice) -> float:
    """Return the bytes of a GPU that the trainer may use."""
    case, memory = parts.case, float(parts.case.trainer_gpu.memory_bytes)
    if runs_together(case):
        return memory * (1 - case.recipe.engine_memory_share)
    return memory - (parts.asleep(choice).value if takes_turns(case) else 0.0)


def engine_limit(case: Case) -> float:
    """Return the bytes of a GPU that an engine may use."""
    memory = case.engine_gpu.memory_bytes
    limit = memory * case.recipe.engine_memory_share
    return min(limit, memory - CONTEXT_BYTES) if takes_turns(case) else limit


def waiting_states(parts: Parts, choice: LayoutChoice) -> Figure:
    """Return the host memory of a node for the states of waiting ranks."""
    ranks = exact("trainer.ranks_per_node", float(choice.ranks_per_node), "1", "ranks of a node")
    return multiply("memory.host.waiting_states", "B", [_states_of_rank(parts, choice), ranks])


def hand_over(parts: Parts, choice: LayoutChoice) -> Figure:
    """Return the time in which a rank moves its states to the GPU and back, once for each step."""
    case = parts.case
    moved = _states_of_rank(parts, choice)
    seconds = 2 * moved.value / (case.trainer_gpu.pcie_bytes_per_s * PCIE_SHARE)
    return estimate(
        "time.hand_over",
        seconds,
        1.5,
        "s",
        "2 × weights and optimizer state of a rank / host link",
        {moved.name: moved, "pcie_bytes_per_s": case.trainer_gpu.pcie_bytes_per_s, "share": PCIE_SHARE},
    )


def _states_of_rank(parts: Parts, choice: LayoutChoice) -> Figure:
    memory = parts.trainer_memory(choice)
    found = [figure for name in STATES if (figure := memory.find(name)) is not None]
    return add("memory.trainer.states", "B", found)
