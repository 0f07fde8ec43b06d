"""What every role does first and last: read RUN_DIR PHASE NAME, load the plan, log, and end with the right code.

    def main(argv: list[str]) -> int:
        return start_role("router", argv, serve)          # serve(role: Role) -> None

A PrimerlError is one sentence on stderr and the process ends with the error's exit code.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.log import dump_stacks_on_signal, setup_logging
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import PhasePlan, Plan, load_plan
from primerl_hpc.recipe.schema import Recipe

OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""vLLM and verifiers make millions of objects at import that stay: collecting every 700, as Python does, is a sixth of a start."""


@dataclass(frozen=True)
class RoleProcess:
    run: RunDir
    """The run directory, seen from the phase."""
    plan: Plan
    phase: PhasePlan
    process: str
    """``<role>-<index>``"""
    logger: logging.Logger

    @property
    def recipe(self) -> Recipe:
        return self.phase.recipe

    @property
    def index(self) -> int:
        return int(self.process.rsplit("-", 1)[1])


def start_role(role: str, argv: list[str], serve: Callable[[RoleProcess], None]) -> int:
    """Run ``serve`` and return the process's exit code."""
    if len(argv) != 3:
        print(f"usage: python -m primerl_hpc.roles.{role} RUN_DIR PHASE NAME", file=sys.stderr)
        return ExitCode.USAGE
    run_dir, phase_name, process = argv
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    logger = setup_logging(role)
    dump_stacks_on_signal()
    try:
        plan = load_plan(RunDir(Path(run_dir)))
        phase = plan.phase(phase_name)
        phase.process(process)  # NotFoundError names those that exist
        serve(RoleProcess(RunDir(Path(run_dir)).phase(phase_name), plan, phase, process, logger))
    except PrimerlError as error:
        if env.is_debug():
            logger.exception("%s failed", process)
        print(f"{process}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return ExitCode.DONE
