"""Environment variables of each process.

Layers, each of which overrides those before it: defaults of the role; ``network.env``, ``env`` and
``software.roles.<role>.env`` of the profile; ``env`` and ``env_by_role.<role>`` of the recipe. PYTHONPATH is joined
instead, with the folders of the last layer first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Literal

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.site_schema import SharedCache
from primerl_hpc.common import env
from primerl_hpc.common.names import Role
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.plan.plan import PhasePlan, ProcessPlan
from primerl_hpc.recipe.schema.recipe import Recipe

_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


_HARMLESS = tuple(
    """
    PATH HOME USER LOGNAME SHELL TERM HOSTNAME TZ LANG LANGUAGE LC_* TMPDIR LD_LIBRARY_PATH PYTHON*
    VIRTUAL_ENV CONDA_PREFIX XDG_* SSL_CERT_FILE SSL_CERT_DIR *_PROXY *_proxy OMP_* MKL_*
    CUDA_VISIBLE_DEVICES MODULEPATH LOADEDMODULES PRIMERL_* HF_HOME HF_HUB_* HF_DATASETS_*
    TRANSFORMERS_* TOKENIZERS_PARALLELISM SLURM_JOB_ID SLURM_NODEID SLURM_PROCID SLURM_STEP_ID
    SLURMD_NODENAME
    """.split()
)
"""Variables of the submitter's environment that are passed to environment servers."""
_POLICY_LOADERS = (Role.INFERENCE, Role.PREFILL, Role.TRAINER, Role.SFT)
"""Roles that load the policy's base model."""
Value = str | dict[Literal["from"], str]


def process_env(role: Role, recipe: Recipe, profile: Profile) -> dict[str, str]:
    """Return the variables of a process, sorted by name. Those of profile and recipe override the defaults."""
    return {name: value for name, value in _variables(role, recipe, profile) if isinstance(value, str)}


def inherited_env(role: Role, recipe: Recipe, profile: Profile) -> dict[str, str]:
    """Return the variables inherited from the submitter's environment: name in the process → name of the submitter."""
    values = _variables(role, recipe, profile)
    return {name: value["from"] for name, value in values if not isinstance(value, str)}


def kept_env(role: Role, recipe: Recipe) -> tuple[str, ...] | None:
    """Return names or patterns of the variables that are passed to a process in addition to its own; None: all but
    secrets.

    Environment servers run code that a model controls, so they must not see the tokens of the submitter or of SLURM.
    """
    return (*_HARMLESS, *_server_keys(recipe)) if role == Role.ENV_SERVER else None


def secret_env(role: Role, recipe: Recipe, profile: Profile) -> tuple[str, ...]:
    """Return the variables with secrets that a process gets by their names: keys of the servers that it queries, and
    what ``submit_env.keep`` of the profile names, except for environment servers."""
    named: set[str] = set()
    if role in (Role.ORCHESTRATOR, Role.EVALUATOR, Role.ENV_SERVER):
        named.update(_server_keys(recipe))
    if role != Role.ENV_SERVER:
        keep = profile.scheduler.submit_env.keep
        named.update(name for name in keep if "*" not in name and "?" not in name)
    if role == Role.TRACKER:
        named.update(recipe.tracking.key_variables)
    return tuple(sorted(named))


def _server_keys(recipe: Recipe) -> list[str]:
    """Return the variables with keys of teacher, judge and evaluated model, where other servers serve them."""
    servers = (recipe.teacher, recipe.judge, recipe.evaluation.external if recipe.evaluation else None)
    return sorted({server.key_variable for server in servers if server is not None and server.key_variable})


def _variables(role: Role, recipe: Recipe, profile: Profile) -> list[tuple[str, Value]]:
    values: dict[str, Value] = dict(_QUIET)
    if profile.offline:
        values.update(_OFFLINE)
    is_trainer = role in (Role.TRAINER, Role.SFT)
    is_engine = role in (Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE)
    if is_engine:
        values.update(engine_env(profile.accelerator))
        if level := recipe.log.roles.get(role):
            values["VLLM_LOGGING_LEVEL"] = level.upper()
    if is_trainer:
        # torch appends its C++ stack to each warning of a store whose peer has exited; errors are still logged
        values["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    if is_trainer and profile.accelerator == "gpu":
        values["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if (is_trainer or is_engine) and profile.accelerator == "gpu":
        # the plan's numbers mean the same GPU to every process, also on nodes with unlike GPUs
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    values.update(cache_variables(profile))
    if (is_trainer or is_engine) and isinstance(profile.cache, SharedCache) and profile.cache.keep_compiled:
        store = {"folder": f"{profile.cache_path}/compile", "max_gib": profile.cache.compiled_gib}
        values[env.COMPILE_STORE] = json.dumps(store)
    values.update(network_variables(profile))
    if (scratch := profile.scratch_folder) is not None:
        values[env.SCRATCH] = scratch.path
    layers = (profile.network.env, profile.env, profile.software.of_role(role).env, recipe.env)
    for layer in (*layers, recipe.env_of_role(role)):
        path = env.join_pythonpath(_text(layer, env.PYTHONPATH), _text(values, env.PYTHONPATH))
        values.update(layer)
        values.update({env.PYTHONPATH: path} if path else {})
    return sorted(values.items())


def readers_env(phase: PhasePlan, num_hosts: int) -> PhasePlan:
    """Return the phase in which each engine and trainer knows the nodes that load its base model.

    ``PRIMERL_STAGE_MODELS`` is ``{"nodes": […], "own": […], "hosts": N}``: indices of the plan's nodes, those of the
    process itself (none of an elastic engine), and the largest number of hosts of the run.
    """

    @cache
    def readers(role: Role) -> list[int]:
        roles = (role,) if role in (Role.TEACHER, Role.JUDGE) else _POLICY_LOADERS
        return sorted(
            {node for process in phase.processes if process.role in roles for node in process.nodes}
        )

    def with_readers(process: ProcessPlan, own: tuple[int, ...]) -> ProcessPlan:
        if process.role not in (*_POLICY_LOADERS, Role.TEACHER, Role.JUDGE):
            return process
        value = json.dumps({"nodes": readers(process.role), "own": own, "hosts": num_hosts})
        return process.model_copy(update={"env": {**process.env, env.STAGE_MODELS: value}})

    changes = {
        "processes": tuple(with_readers(process, process.nodes) for process in phase.processes),
        "elastic": tuple(with_readers(process, ()) for process in phase.elastic),
    }
    return phase.model_copy(update=changes)


def cache_variables(profile: Profile) -> dict[str, str]:
    """Return the variables by which the Hugging Face libraries use the profile's cache; its own ``HF_HOME`` stays.

    The token and the modules of custom code stay in the home folder.
    """
    if profile.cache_path is None:
        return {}
    return {
        "HF_HUB_CACHE": f"{profile.cache_path}/hub",
        "HF_DATASETS_CACHE": f"{profile.cache_path}/datasets",
    }


def network_variables(profile: Profile) -> dict[str, str]:
    """Return the variables of interfaces and proxy; ``no_proxy`` is completed at run time, with the job's hosts."""
    network = profile.network
    values: dict[str, str] = {}
    if network.interface is not None:
        names = (env.INTERFACE, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        values.update(dict.fromkeys(names, network.interface))
    if network.interfaces:
        values["NCCL_SOCKET_IFNAME"] = ",".join(network.interfaces)
    if network.host_suffix is not None:
        values[env.HOST_SUFFIX] = network.host_suffix
    if (proxy := network.proxy) is not None:
        addresses = {"http_proxy": proxy.http, "https_proxy": proxy.https or proxy.http}
        for name, address in addresses.items():
            if address is not None:
                values[name] = values[name.upper()] = address
    return values


def _text(values: Mapping[str, Value], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) else None
