"""Environment variables of each process: profile, then recipe, then what the role itself needs; later ones win
but for what a user wrote."""

from __future__ import annotations

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.names import Role
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.recipe.schema import Recipe

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def process_env(role: Role, recipe: Recipe, profile: Profile) -> dict[str, str]:
    """Variables for one process, sorted by name; a user's own (profile.env, recipe.env) override the defaults."""
    values = dict(_QUIET)
    if profile.offline:
        values.update(_OFFLINE)
    if role in (Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE):
        values.update(engine_env(profile.accelerator))
    if role in (Role.TRAINER, Role.SFT) and profile.accelerator == "gpu":
        values["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if (interface := profile.network.interface) is not None:
        names = (env.INTERFACE, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        values.update(dict.fromkeys(names, interface))
    values.update(profile.network.env)
    values.update(profile.env)
    values.update(profile.software.of_role(role).env)
    values.update(recipe.env)
    return dict(sorted(values.items()))
