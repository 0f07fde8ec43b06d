"""Models that offline nodes would look for in vain: those of the hub that lie in no cache here.

uncached_models(plan, profile)      # ["Qwen/Qwen3-0.6B"]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.plan.types import Plan
from primerl_hpc.recipe.hub import is_hub_id


def uncached_models(plan: Plan, profile: Profile) -> list[str]:
    """Where setup lines or a container may say where the cache is, nobody can know before: then none."""
    software = (profile.software.default, *profile.software.roles.values())
    if not profile.offline or profile.software.setup or any(each.container.image for each in software):
        return []
    found: dict[str, None] = {}
    for phase in plan.phases:
        names = [phase.model_path, *(each.model.name for each in phase.recipe.served_models.values())]
        if phase.recipe.is_external or not phase.processes:
            continue
        folder = cache_folder(phase.processes[0].env)
        found |= {
            name: None
            for name in names
            if is_hub_id(name) and not (folder / f"models--{name.replace('/', '--')}").is_dir()
        }
    return list(found)


def cache_folder(variables: Mapping[str, str]) -> Path:
    """Where ``huggingface_hub`` looks in a process with ``variables`` on top of this environment."""

    def value(name: str) -> str | None:
        return variables.get(name) or env.variable(name)

    home = value("HF_HOME") or f"{value('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(value("HF_HUB_CACHE") or f"{home}/hub").expanduser()
