"""Common start and end of all roles: read RUN_DIR PHASE NAME, load the plan, set up logging, return the exit code.

    def main(argv: list[str]) -> int:
        return start_role("router", argv, serve)          # serve(role: RoleProcess) -> None

A PrimerlError is printed to stderr in one line, and its exit code is returned.
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
from primerl_hpc.common.log import change_logging, dump_stacks_on_signal, setup_logging
from primerl_hpc.common.names import Role
from primerl_hpc.common.node.transformers_folders import read_models_once
from primerl_hpc.common.package import check_package
from primerl_hpc.plan.plan import PhasePlan, Plan, load_plan
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.access.ownership import check_own
from primerl_hpc.run.rundir import RunDir

OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""vLLM and verifiers create millions of permanent objects: Python's default of 700 costs a sixth of the start."""


@dataclass(frozen=True)
class RoleProcess:
    run: RunDir
    """The run directory of the phase."""
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
    read_models_once(may_write=role != Role.ENV_SERVER)  # it keeps no files
    logger = setup_logging(role)
    dump_stacks_on_signal()
    try:
        check_own(RunDir(Path(run_dir)))
        check_package(env.package())
        plan = load_plan(RunDir(Path(run_dir)))
        phase = plan.phase(phase_name)
        role_of_process = phase.process(process).role  # raises NotFoundError with the existing names
        log = phase.recipe.log
        change_logging(log.level_of(role_of_process), verifiers=log.verifiers, is_json=log.format == "json")
        serve(RoleProcess(RunDir(Path(run_dir)).phase(phase_name), plan, phase, process, logger))
    except PrimerlError as error:
        if env.is_debug():
            logger.exception("%s failed", process)
        print(f"{process}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return ExitCode.DONE
