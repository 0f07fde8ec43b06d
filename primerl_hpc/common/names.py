"""Enumerations of the project (kinds of run, roles, phases, states), the rule for valid names, and plurals."""

from __future__ import annotations

import re
from enum import StrEnum


class Kind(StrEnum):
    RL = "rl"
    SFT = "sft"
    EVAL = "eval"
    INFERENCE = "inference"


class Role(StrEnum):
    """Kind of process. A process of a role is named ``<role>-<index>``, e.g. ``inference-0``."""

    INFERENCE = "inference"  # one vLLM replica
    PREFILL = "prefill"  # one vLLM replica of the policy that only prefills prompts
    ROUTER = "router"
    TEACHER = "teacher"  # one vLLM replica of the frozen teacher model
    JUDGE = "judge"  # one vLLM replica of a frozen model that environments query for rewards
    ENV_SERVER = "env_server"  # serves an environment of the recipe
    ORCHESTRATOR = "orchestrator"
    TRAINER = "trainer"  # one torchrun group of an RL run
    SFT = "sft"  # one torchrun group of supervised fine-tuning
    EVALUATOR = "evaluator"
    TRACKER = "tracker"  # sends metrics to an experiment tracker


class RunState(StrEnum):
    """State shown by `status`. The supervisor writes it; before and after an attempt it is derived from SLURM."""

    SUBMITTED = "submitted"
    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    STOPPED = "stopped"  # saved on request; continue with `resume`
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"

    @property
    def is_final(self) -> bool:
        return self in {RunState.DONE, RunState.STOPPED, RunState.FAILED, RunState.CANCELLED}

    @property
    def is_alive(self) -> bool:
        """True while an attempt is running."""
        return self in {RunState.STARTING, RunState.RUNNING, RunState.STOPPING}


MAIN_PHASE = "main"
WARMUP_PHASE = "warmup"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_valid_name(text: str) -> bool:
    """True for 1 to 100 letters, digits, ``.``, ``_`` or ``-`` that start with a letter or digit."""
    return _NAME.fullmatch(text) is not None


def process_name(role: Role, index: int) -> str:
    return f"{role.value}-{index}"


def counted(number: int, noun: str) -> str:
    """Return ``1 engine`` or ``2 engines``, for nouns whose plural ends with s."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
