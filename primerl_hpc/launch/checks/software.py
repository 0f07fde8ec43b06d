"""Check the Python environments that a run's roles will use: packages of a local run, the renderer.

    check_software(plan, document)      # raises ConfigError; nothing is started

What cannot be checked from here (a container, an interpreter or a package that is not on this machine) is left to the
checks of the job before its first process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.launch.prepare import package_root
from primerl_hpc.plan.types import BUNDLE_PYTHON, PhasePlan, Plan, ProcessPlan
from primerl_hpc.recipe.renderer import check_auto, check_renderer, uses_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.tracking.targets import PACKAGES

TIMEOUT_S = 60.0
_TRAINER, _ENGINE = ("torch", "transformers", "safetensors", "numpy"), ("torch", "vllm")
_NEEDS: dict[Role, tuple[str, ...]] = {
    Role.TRAINER: _TRAINER,
    Role.SFT: _TRAINER,
    **dict.fromkeys((Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE), _ENGINE),
    Role.ROUTER: ("aiohttp", "uvloop"),
    Role.ENV_SERVER: ("verifiers",),
    Role.ORCHESTRATOR: ("numpy",),
}
_RENDERS = (Role.SFT, Role.TRAINER, Role.ENV_SERVER, Role.ORCHESTRATOR)
_MISSING = (
    "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)
_CHECK = (
    "import sys; from primerl_hpc.launch.checks.software import check_here; sys.exit(check_here(sys.argv[1]))"
)


def check_software(plan: Plan, document: Document) -> None:
    """Raise ConfigError for a renderer that does not exist or fit, and for packages that a local run lacks."""
    if plan.scheduler == "local":
        for phase in plan.phases:
            _check_packages(phase)
    main = plan.phases[-1]
    if uses_renderer(main.recipe):
        try:
            check_auto(main.recipe.model)
            renders = [process for process in main.processes if process.role in _RENDERS]
            _check_renderer(main.recipe.model, renders)
        except ConfigError as error:
            path = ("model", "renderer", "options" if ".options" in error.cause else "name")
            raise ConfigError(error.cause, location=document.location(path), hint=error.hint) from error


def _needs(phase: PhasePlan, process: ProcessPlan) -> tuple[str, ...]:
    if process.role != Role.TRACKER:
        return _NEEDS.get(process.role, ())
    return PACKAGES[phase.recipe.tracking.targets[process.index].partition("-")[0]]


def _check_packages(phase: PhasePlan) -> None:
    """Check the packages of all roles, with one call of each interpreter."""
    asked: dict[tuple[str, str | None], dict[str, Role]] = {}
    for process in phase.processes:
        if (python := _python_of(process)) is not None:
            wanted = asked.setdefault((python, process.env.get("PYTHONPATH")), {})
            wanted |= {name: process.role for name in _needs(phase, process) if name not in wanted}
    for (python, path), wanted in asked.items():
        try:
            done = _ask(python, [_MISSING, *wanted], path)
        except OSError as error:
            raise ConfigError(
                f"the interpreter {python} cannot be started: {error.strerror or error}",
                location="software.default.python of the profile",
            ) from error
        if done.returncode == 0 and (missing := done.stdout.split()):
            raise ConfigError(
                f"{python} has no package {missing[0]}, which role {wanted[missing[0]].value} needs",
                hint="install this package there with its extra, pip install -e '.[cpu]' or '.[gpu]' "
                "(wandb: '.[wandb]'), or set another interpreter: software.default.python of the profile",
            )


def _check_renderer(model: Model, processes: list[ProcessPlan]) -> None:
    """Check in this interpreter if it has package ``renderers``, else in that of a role that renders."""
    if importlib.util.find_spec("renderers") is not None:
        check_renderer(model)
        return
    pythons = [python for process in processes if (python := _python_of(process)) is not None]
    if not pythons or pythons[0] == sys.executable:
        return
    try:
        done = _ask(pythons[0], [_CHECK, model.model_dump_json()], package_root())
        report = json.loads(done.stdout or "null")
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return  # that interpreter is not on this machine
    if report is not None:
        raise ConfigError(report["cause"], hint=report["hint"])


def check_here(model_json: str) -> int:
    """Entry point in another interpreter: print the error of `check_renderer` as JSON, nothing without one."""
    try:
        check_renderer(Model.model_validate_json(model_json))
    except ConfigError as error:
        print(json.dumps({"cause": error.cause, "hint": error.hint}))
    return 0


def _python_of(process: ProcessPlan) -> str | None:
    """Return the interpreter of a process; None if it is inside a container, or not on this machine."""
    if process.container != "none":
        return None
    return sys.executable if process.argv[0] == BUNDLE_PYTHON else process.argv[0]


def _ask(python: str, code: list[str], path: str | None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [python, "-P", "-c", *code],  # do not import modules of the working directory
        cwd=Path("/"),
        env={**os.environ, **({"PYTHONPATH": paths} if paths else {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
