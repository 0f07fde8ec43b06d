"""The words of the project as values: kinds of run, roles, phases, states, and what a valid name is."""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    RL = "rl"
    SFT = "sft"
    EVAL = "eval"
    INFERENCE = "inference"


class Role(StrEnum):
    """One kind of process. A process of a role is named ``<role>-<index>``, e.g. ``inference-0``."""

    INFERENCE = "inference"  # one vLLM replica
    PREFILL = "prefill"  # one vLLM replica of the policy that reads prompts for the others
    ROUTER = "router"
    TEACHER = "teacher"  # one vLLM replica of a frozen model that the policy learns from
    JUDGE = "judge"  # one of a frozen model that environments ask for rewards
    ENV_SERVER = "env_server"  # serves an environment of the recipe
    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"  # one torchrun group of an RL run
    SFT = "sft"  # one torchrun group of supervised fine-tuning
    EVALUATOR = "evaluator"
    TRACKER = "tracker"  # sends metrics to an experiment tracker


class RunState(StrEnum):
    """What `status` shows. The supervisor writes it; SLURM fills in what happens before and after."""

    SUBMITTED = "submitted"
    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    STOPPED = "stopped"  # saved on request; `resume` continues
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        return self in {RunState.DONE, RunState.STOPPED, RunState.FAILED, RunState.CANCELLED}

    @property
    def is_alive(self) -> bool:
        """An attempt goes on; between two of them the run waits, or has not been started."""
        return self in {RunState.STARTING, RunState.RUNNING, RunState.STOPPING}


MAIN_PHASE = "main"
WARMUP_PHASE = "warmup"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_valid_name(text: str) -> bool:
    """A run or environment name: letters, digits, ``.``, ``_``, ``-``; starts with a letter or digit; at most 100."""
    return _NAME.fullmatch(text) is not None


def process_name(role: Role, index: int) -> str:
    return f"{role.value}-{index}"
