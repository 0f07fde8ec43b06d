"""Check the Python environments that a run's roles will use: packages of a local run, the renderer.

    check_software(plan, document, interpreters)      # raises ConfigError; no role is started

What cannot be checked from here (a container, an interpreter or a package that is not on this machine) is left to the
checks of the job before its first process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from typing import Any

from primerl_hpc.common.document import Document
from primerl_hpc.common.env import PYTHONPATH
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.interpreters import InterpreterError, Interpreters, UsualAnswer, ask
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import BUNDLE_PYTHON, PhasePlan, Plan, ProcessPlan
from primerl_hpc.recipe.renderer import check_auto, check_renderer, uses_renderer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.tracking.targets import PACKAGES

_MISSING_MODULES = "primerl_hpc.common.answers:missing_modules"
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


def check_software(plan: Plan, document: Document, interpreters: Interpreters) -> None:
    """Raise ConfigError for a renderer that does not exist or fit, and for packages that a local run lacks."""
    if plan.scheduler == "local":
        _check_packages(plan, interpreters)
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


def _check_packages(plan: Plan, interpreters: Interpreters) -> None:
    """Check the packages of all roles, with one question to each interpreter."""
    asked: dict[tuple[str, str], dict[str, Role]] = {}
    processes = [(phase, process) for phase in plan.phases for process in phase.processes]
    for phase, process in processes:
        if (python := _python_of(process)) is not None:
            wanted = asked.setdefault((python, process.env.get(PYTHONPATH, "")), {})
            wanted |= {name: process.role for name in _needs(phase, process) if name not in wanted}
    for (python, path), wanted in asked.items():
        question = (python, {PYTHONPATH: path}, _MISSING_MODULES, list(wanted))
        try:
            missing = interpreters.ask_unless_unchanged(*question, UsualAnswer([]), by_source=True)
        except InterpreterError as error:
            raise ConfigError(error.cause, location="software.default.python of the profile") from error
        if missing:
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
    with contextlib.suppress(InterpreterError):  # that interpreter is not on this machine
        ask(pythons[0], {}, "primerl_hpc.checks.recipe.software:check_here", model.model_dump(mode="json"))


def check_here(model: dict[str, Any]) -> None:
    """Call `check_renderer`, in the interpreter of a role."""
    check_renderer(Model.model_validate(model))


def _python_of(process: ProcessPlan) -> str | None:
    """Return the interpreter of a process; None if it is inside a container, or not on this machine."""
    if process.container != "none":
        return None
    return sys.executable if process.argv[0] == BUNDLE_PYTHON else process.argv[0]
