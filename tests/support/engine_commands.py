"""The engine command lines of all shipped recipes on all shipped GPU profiles, as the planner lays them out.

for command in engine_commands():
    command.where, command.arguments
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.names import Role
from primerl_hpc.inference.engine_args import engine_args, node_args
from primerl_hpc.launch.compose import plan_run
from primerl_hpc.plan.plan import PhasePlan, Plan
from primerl_hpc.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
ENGINES = (Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE)
ADDRESS = {"host": "127.0.0.1", "port": 29_500}


@dataclass(frozen=True)
class EngineCommand:
    recipe: str
    """Folder and name, such as ``math/qwen3_4b``."""
    profile: str
    role: Role
    where: str
    """Process, and its node if it has several."""
    arguments: tuple[str, ...]


def recipe_names() -> list[str]:
    return sorted(f"{path.parent.name}/{path.stem}" for path in (ROOT / "recipes").glob("*/*.yaml"))


def gpu_profiles() -> list[str]:
    names = sorted(path.stem for path in (ROOT / "cluster_profiles").glob("*.yaml"))
    return [name for name in names if load_profile(name).profile.node.gpus]


def engine_commands(profiles: Sequence[str]) -> Iterator[EngineCommand]:
    """Yield each distinct command line once. Layouts that do not fit on a profile are left out.

    Of the nodes of an engine, the first and the last one are included; others differ from the last in their rank only.
    """
    seen: set[tuple[str, ...]] = set()
    loaded = {name: load_profile(name) for name in profiles}
    for recipe in recipe_names():
        for name, profile in loaded.items():
            try:
                path = str(ROOT / "recipes" / f"{recipe}.yaml")
                plan = plan_run(load_recipe(path), profile, missing=[]).plan
            except PrimerlError:
                continue
            for command in _commands(plan, recipe, name):
                if command.arguments not in seen:
                    seen.add(command.arguments)
                    yield command


def _commands(plan: Plan, recipe: str, profile: str) -> Iterator[EngineCommand]:
    for phase in plan.phases:
        for process in phase.processes:
            if process.role not in ENGINES:
                continue
            served = _served(phase, process.role)
            arguments = engine_args(
                served.recipe,
                model_path=served.model_path,
                accelerator=plan.accelerator,
                is_prefill=process.role == Role.PREFILL,
            )
            num_nodes = len(process.nodes)
            for node in sorted({0, num_nodes - 1}):
                more = (
                    node_args(served.recipe.layout.inference, num_nodes, node, ADDRESS)
                    if num_nodes > 1
                    else []
                )
                where = f"{process.name}, node {node}" if num_nodes > 1 else process.name
                yield EngineCommand(recipe, profile, process.role, where, (*arguments, *more))


def _served(phase: PhasePlan, role: Role) -> PhasePlan:
    """Return the phase as an engine of this role sees it, as in `primerl_hpc.inference.server`."""
    if role == Role.PREFILL:
        return phase.for_prefill()
    return phase.for_frozen(role) if role in (Role.TEACHER, Role.JUDGE) else phase
