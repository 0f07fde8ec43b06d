"""The checks of nodes before an attempt, as part of the plan: preflight, sums over the network, binding to CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from primerl_hpc.cluster.directives import gpu_vendor, srun_args
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.software_schema import RoleSoftware
from primerl_hpc.common import env
from primerl_hpc.common.names import Role
from primerl_hpc.plan.components import gpus_to_check
from primerl_hpc.plan.container import in_container, with_cache
from primerl_hpc.plan.env import network_variables
from primerl_hpc.plan.plan import (
    BindingPlan,
    ComponentPlan,
    OnExit,
    PhasePlan,
    PreflightPlan,
    ProcessPlan,
    SumsPlan,
)

TRAINERS = (Role.TRAINER, Role.SFT)


def phases_preflight(
    phases: tuple[PhasePlan, ...], profile: Profile, python: str, components: tuple[ComponentPlan, ...]
) -> PreflightPlan | None:
    """Return the checks of a plan's nodes; None if the profile disables them."""
    if not profile.preflight.enabled:
        return None
    roles = dict.fromkeys(process.role for phase in phases for process in phase.processes)
    software = [profile.software.of_role(role) for role in roles]
    num_nodes = sum(len(component.nodes) for component in components)
    wants = preflight_plan(profile, software, python, num_nodes=num_nodes)
    gpus = tuple(gpus_to_check(component, profile) for component in components)
    by_component = gpus if len(gpus) > 1 else ()
    trainers = [process for phase in phases for process in phase.processes if process.role in TRAINERS]
    sums = sums_plan(profile, trainers[-1]) if trainers else None
    # the map of CPUs in `node` does not describe nodes of other types
    binding = wants.binding if all(component.node_type is None for component in components) else None
    contained = [process for phase in phases for process in phase.processes if process.container == "command"]
    containers = dict.fromkeys(process.argv[: process.argv.index("-m")] for process in contained)
    changes = {
        "containers": tuple(containers),
        "gpus": max(gpus),
        "component_gpus": by_component,
        "sums": sums,
        "binding": binding,
        "bandwidth": bandwidth_plan(profile, trainers),
    }
    return wants.model_copy(update=changes)


def preflight_plan(
    profile: Profile, software: Sequence[RoleSoftware], python: str, *, num_nodes: int
) -> PreflightPlan:
    """Return the checks of nodes that run ``software``; ``python`` is the default interpreter."""
    outside = [environment for environment in software if environment.container.kind == "none"]
    pythons = dict.fromkeys(environment.python or python for environment in outside)
    is_rdma_on = profile.network.env.get("NCCL_IB_DISABLE", "0") == "0"
    scratch = profile.scratch_folder
    return PreflightPlan(
        pythons=tuple(pythons),
        gpus=profile.node.gpus,
        vendor=gpu_vendor(profile.node),
        arch=profile.node.arch,
        scratch=None if scratch is None else scratch.path,
        scratch_kind=None if scratch is None else scratch.kind,
        scratch_gib=None if scratch is None else scratch.size_gib,
        plugin=profile.network.plugin if num_nodes > 1 else "none",
        plugin_env=_plugin_env(profile),
        binding=binding_plan(profile.node),
        host_suffix=profile.network.host_suffix,
        proxy=proxy.https or proxy.http if (proxy := profile.network.proxy) is not None else None,
        srun_args=srun_args(profile.scheduler),
        uses_rdma=profile.node.gpus > 0 and num_nodes > 1 and is_rdma_on,
        interface=profile.network.interface,
        **profile.preflight.model_dump(exclude={"enabled", "sums", "bandwidth"}),
    )


def sums_of_profile(
    profile: Profile, folder: str, python: str, *, num_nodes: int, is_due: bool | None = None
) -> SumsPlan | None:
    """Return the check of sums on ``num_nodes`` nodes without a run; ``folder`` is mounted into a container.

    None if there is nothing to check. ``is_due``: replaces ``preflight.sums`` of the profile.
    """
    software = profile.software.of_role(Role.TRAINER)
    layers = (profile.network.env, profile.env, software.env)
    variables = {name: value for layer in layers for name, value in layer.items() if isinstance(value, str)}
    prefix, container_args = in_container(
        with_cache(software.container, profile.cache_path), profile.node, folder, variables
    )
    trainer = ProcessPlan(
        name="trainer-0",
        role=Role.TRAINER,
        index=0,
        nodes=tuple(range(num_nodes)),
        accelerators=tuple(range(profile.node.gpus or 1)),
        argv=(*prefix, software.python or python, "-m", "-"),
        srun_args=container_args,
        env=network_variables(profile) | variables,
        on_exit=OnExit.ENDS_PHASE,
        log="",
    )
    return sums_plan(profile, trainer, is_due)


def sums_plan(profile: Profile, trainer: ProcessPlan, is_due: bool | None = None) -> SumsPlan | None:
    """Return the check of sums with the trainer's nodes, software and variables; None if there is nothing to check."""
    wanted = profile.preflight.sums
    if is_due is None:
        has_network = profile.accelerator == "gpu" and len(trainer.nodes) > 1
        is_due = has_network if wanted == "auto" else wanted == "always"
    if not is_due or profile.scheduler.type == "local":
        return None
    return SumsPlan(
        argv=trainer.argv[: trainer.argv.index("-m")],
        srun_args=trainer.srun_args,
        env={name: value for name, value in trainer.env.items() if name not in (env.BINDING, env.SCRATCH)},
        nodes=trainer.nodes,
        accelerator=profile.accelerator,
        ranks_per_node=len(trainer.accelerators) if profile.accelerator == "gpu" else 1,
        timeout_s=profile.preflight.sums_timeout_s,
    )


def bandwidth_plan(profile: Profile, trainers: Sequence[ProcessPlan]) -> SumsPlan | None:
    """Return the measurement of bandwidth, with nodes, software and variables of the last trainer; None: not due."""
    if profile.preflight.bandwidth == "never" or not trainers:
        return None
    return sums_plan(profile, trainers[-1], is_due=True)


def binding_plan(node: Node) -> BindingPlan | None:
    """Return the map of CPUs for ranks and engines; None if processes are not bound.

    Nodes without GPUs are bound only by a map of the profile: they have no topology to read.
    """
    if node.binding == "none" or (not node.gpus and node.cpus_of_gpu is None):
        return None
    return BindingPlan(cpus=node.cpus_of_gpu, numa=node.numa_of_gpu, num_accelerators=node.accelerators)


def _plugin_env(profile: Profile) -> dict[str, str]:
    """Return the variables by which NCCL of a trainer finds its network plugin."""
    names = ("LD_LIBRARY_PATH", "NCCL_NET_PLUGIN", "NCCL_NET")
    software = profile.software.of_role(Role.TRAINER)
    layers = (profile.network.env, profile.env, software.env)
    return {
        name: value
        for layer in layers
        for name, value in layer.items()
        if name in names and isinstance(value, str)
    }
