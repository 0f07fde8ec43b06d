"""The planner, a sequence of passes: settle → check → split → environment servers → degrees → phases → processes.

    plan = compile_plan(recipe, profile, run_dir="/scratch/runs/x", python="/venv/bin/python")

Everything read from disk (the recipe's absolute paths, the interpreter) is passed as an argument.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import PurePosixPath

from primerl_hpc.cluster.directives import srun_args
from primerl_hpc.cluster.limits import check_elastic, check_limits
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.software_schema import STEP_KINDS
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE, WARMUP_PHASE, Kind, Role, process_name
from primerl_hpc.plan.assess.settle import settle_auto
from primerl_hpc.plan.components import allocated_gpus, node_of, plan_components
from primerl_hpc.plan.container import in_container, with_cache
from primerl_hpc.plan.degrees import resolve_degrees
from primerl_hpc.plan.env import inherited_env, kept_env, process_env, readers_env, secret_env
from primerl_hpc.plan.env_servers import resolve_servers
from primerl_hpc.plan.plan import ComponentPlan, NodePlan, OnExit, PhasePlan, Plan, ProcessPlan
from primerl_hpc.plan.pools import Pools
from primerl_hpc.plan.predict.hardware import FP8_NEEDS, fp8_modes, gpu_spec, is_known_gpu
from primerl_hpc.plan.preflight import TRAINERS, binding_plan, phases_preflight
from primerl_hpc.plan.split import NodeSplit, Placement, split
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir

_ON_EXIT = {
    Role.TRAINER: OnExit.ENDS_PHASE,
    Role.SFT: OnExit.ENDS_PHASE,
    Role.ORCHESTRATOR: OnExit.ENDS_PHASE,
    Role.EVALUATOR: OnExit.ENDS_PHASE,
    Role.TRACKER: OnExit.OPTIONAL,
}


_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_BOUND = (Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE, Role.TRAINER, Role.SFT)
"""Roles whose processes use accelerators."""


def compile_plan(
    recipe: Recipe, profile: Profile, *, run_dir: str, python: str, only_trainer: bool = False
) -> Plan:
    """Compile a plan. ``only_trainer``: plan only the trainer of a recipe of kind rl or sft, on exclusive nodes.

    Raises ConfigError if recipe and profile are incompatible.
    """
    recipe, reasons_for_auto = settle_auto(recipe)
    _check(recipe, profile)
    layout = split(_without_engines(recipe) if only_trainer else recipe, profile)
    components = plan_components(layout, profile)
    recipe, reasons = resolve_servers(recipe, node_of(layout, profile, layout.head).cores)
    notes = reasons_for_auto + layout.notes + reasons
    if layout.trainer is not None:
        per_node = len(layout.trainer.accelerators)
        recipe, reasons = resolve_degrees(
            recipe, ranks=len(layout.trainer.nodes) * per_node, ranks_per_node=per_node
        )
        notes += reasons
    phases = tuple(
        PhasePlan(
            name=name,
            recipe=phase_recipe,
            model_path=model_path,
            processes=(processes.trainer(),) if only_trainer else processes.all(),
            elastic=processes.elastic(),
        )
        for name, phase_recipe, model_path in _phases(recipe, run_dir)
        for processes in (_Processes(phase_recipe, profile, layout, run_dir, python, name),)
    )
    if profile.stages_models:
        num_hosts = sum(len(component.nodes) for component in components) + max(map(_num_elastic, phases))
        phases = tuple(readers_env(phase, num_hosts) for phase in phases)
    _check_limits(components, profile)
    check_elastic(profile, max(map(_num_elastic, phases)))
    return Plan(
        name=recipe.name,
        kind=recipe.kind,
        run_dir=run_dir,
        profile_name=profile.name,
        scheduler=profile.scheduler.type,
        accelerator=profile.accelerator,
        accelerators_per_node=max(component.accelerators_per_node for component in components),
        nodes=_nodes(phases, layout),
        components=() if len(components) == 1 and components[0].node_type is None else components,
        spare_nodes=sum(component.spare_nodes for component in components),
        allocated_gpus=allocated_gpus(components, profile),
        signal_margin_s=profile.scheduler.signal_margin_s if profile.scheduler.type == "slurm" else None,
        preflight=phases_preflight(phases, profile, python, components),
        step_memory=profile.scheduler.step_memory,
        step_gres=profile.scheduler.step_gres,
        may_name_nodes=profile.scheduler.may_name_nodes,
        ask_every_s=profile.scheduler.ask_every_s,
        submit_keep=_submit_keep(phases, profile),
        submit_drop=profile.scheduler.submit_env.drop,
        allow_shared_parent=profile.allow_shared_parent,
        no_proxy=profile.network.proxy.no_proxy if profile.network.proxy is not None else None,
        phases=phases,
        notes=notes,
    )


def _num_elastic(phase: PhasePlan) -> int:
    return len(phase.elastic)


def _check_limits(components: tuple[ComponentPlan, ...], profile: Profile) -> None:
    """Raise ConfigError if the site's limits do not admit a component of the job."""
    for component in components:
        if component.is_cpu:
            block, key, num_gpus = profile.cpu_partition, "cpu_partition", 0
            if all(limit.partition != getattr(block, "partition", None) for limit in profile.limits):
                continue  # the others are those of GPU nodes
        else:
            block = Pools(profile).by_type[component.node_type].node
            key, num_gpus = f"node_types.{component.node_type}" if component.node_type else "", block.gpus
        own = {
            name: value for name in ("partition", "qos") if (value := getattr(block, name, None)) is not None
        }
        num_nodes = len(component.nodes) + component.spare_nodes
        check_limits(profile, profile.scheduler.model_copy(update=own), num_nodes, num_gpus, key=key)


def _submit_keep(phases: tuple[PhasePlan, ...], profile: Profile) -> tuple[str, ...]:
    """Return the variables that the submitting shell passes on in addition to the list: those of the profile, those
    that processes read, and those to which values of the profile and recipes refer (``$WORK``)."""
    keep = profile.scheduler.submit_env.keep
    processes = [process for phase in phases for process in (*phase.processes, *phase.elastic)]
    names = {name for process in processes for name in (*process.inherited_env.values(), *process.secret_env)}
    for block in (profile, *(phase.recipe for phase in phases)):
        names.update(_REFERENCE.findall(block.model_dump_json()))
    return (*keep, *sorted(names - set(keep)))


def _without_engines(recipe: Recipe) -> Recipe:
    inference = recipe.layout.inference.model_copy(update={"elastic": False})
    layout = recipe.layout.model_copy(update={"inference": inference})
    return recipe.model_copy(update={"kind": Kind.SFT, "layout": layout, "evaluation": None})


def _check(recipe: Recipe, profile: Profile) -> None:
    containers = [
        software.container.kind for software in (profile.software.default, *profile.software.roles.values())
    ]
    if profile.scheduler.type == "local" and (steps := sorted(set(containers) & set(STEP_KINDS))):
        raise ConfigError(
            f"profile '{profile.name}' has a container of kind {steps[0]}, which requires SLURM",
            hint="use apptainer",
        )
    if profile.scheduler.type == "local" and profile.nodes != 1:
        raise ConfigError(
            f"profile '{profile.name}' is local and has {profile.nodes} nodes; a local profile has one node"
        )
    engines = {"inference": recipe.inference} | {
        f"{role.value}.inference": model.inference for role, model in recipe.served_models.items()
    }
    for key, inference in engines.items():
        if inference.kv_offload_gib is not None and profile.accelerator == "cpu":
            raise ConfigError(
                f"{key}.kv_offload_gib: engines of profile '{profile.name}' already have their KV cache in host memory",
                hint="raise kv_cache_gib instead",
            )
    if recipe.replays_routers and profile.accelerator == "cpu":
        raise ConfigError(
            f"trainer.router_replay: engines of profile '{profile.name}' run on CPUs, where vLLM does not return the "
            "selected experts",
            hint="remove the key, or choose a profile with GPUs",
        )
    is_trained = recipe.kind in (Kind.RL, Kind.SFT)
    if is_trained and profile.accelerator == "cpu" and recipe.layout.trainer.expert_backend == "deepep":
        raise ConfigError(
            f"layout.trainer.expert_backend: deepep requires GPUs, and profile '{profile.name}' has none",
            hint="use torch, or choose a profile with GPUs",
        )
    if (
        is_trained
        and profile.accelerator == "cpu"
        and recipe.model.attention in ("varlen", "flash_attention_2", "flash_attention_3")
    ):
        raise ConfigError(
            f"model.attention: {recipe.model.attention} requires GPUs, and profile '{profile.name}' has none",
            hint="use auto, or choose a profile with GPUs",
        )
    if is_trained:
        _check_fp8(recipe, profile)
    if recipe.layout.orchestrator.place == "cpu-partition" and (
        profile.cpu_partition is None or profile.scheduler.type == "local"
    ):
        raise ConfigError(
            f"layout.orchestrator.place: profile '{profile.name}' has no cpu_partition",
            hint="use head or trainer, or add cpu_partition to the profile",
        )


def _check_fp8(recipe: Recipe, profile: Profile) -> None:
    """Raise ConfigError if the trainer's GPUs are known not to compute in the format of ``trainer.fp8``."""
    node, mode = Pools(profile).of(recipe.layout.trainer.node_type, "layout.trainer").node, recipe.trainer.fp8
    if mode == "none" or not node.gpus or not is_known_gpu(node.gpu):
        return
    modes = fp8_modes(gpu_spec(node.gpu).capability)
    if mode not in modes:
        raise ConfigError(
            f"trainer.fp8: {mode} needs {FP8_NEEDS[mode]}, and profile '{profile.name}' has {node.gpu}",
            hint=f"set it to {modes[-1] if modes else 'none'}",
        )


def _phases(recipe: Recipe, run_dir: str) -> list[tuple[str, Recipe, str]]:
    """Return (name, recipe, initial weights) of each phase: the warm-up's last weights are policy v0 of the main
    phase."""
    if recipe.warmup is None:
        return [(MAIN_PHASE, recipe, recipe.model.name)]
    warmup = recipe.for_warmup()
    # a pure path: the plan only builds paths of the run directory
    run = RunDir(PurePosixPath(run_dir))  # pyright: ignore[reportArgumentType]
    weights = run.phase(WARMUP_PHASE).weights_step(warmup.steps)
    return [(WARMUP_PHASE, warmup, recipe.model.name), (MAIN_PHASE, recipe, str(weights))]


class _Processes:
    """The processes of one phase, in display order."""

    def __init__(
        self, recipe: Recipe, profile: Profile, layout: NodeSplit, run_dir: str, python: str, phase: str
    ) -> None:
        self.recipe, self.profile, self.layout = recipe, profile, layout
        self.run_dir, self.python, self.phase = run_dir, python, phase

    def all(self) -> tuple[ProcessPlan, ...]:
        head = Placement((self.layout.head,), ())
        trackers = (
            self._process(Role.TRACKER, index, head, "tracker.log" if index == 0 else f"tracker/{target}.log")
            for index, target in enumerate(() if self.recipe.tracking.relay else self.recipe.tracking.targets)
        )
        return (*self._untracked(head), *trackers)

    def _untracked(self, head: Placement) -> tuple[ProcessPlan, ...]:
        if not self.recipe.has_engines:
            return (self.trainer(),)
        servers = self._env_servers(head)
        evaluator = self._process(Role.EVALUATOR, 0, head, "evaluator.log")
        if self.recipe.is_external:
            return (*servers, evaluator)
        engines = self._engines(Role.INFERENCE, self.layout.replicas)
        ready_s = self.recipe.timeouts.inference_ready_s
        router = self._process(Role.ROUTER, 0, head, "inference/router.log", ready_s)
        others = [
            engine
            for role, placements in self.layout.other_engines.items()
            for engine in self._engines(role, placements)
        ]
        if self.recipe.kind == Kind.INFERENCE:
            return (*engines, router, *others)
        if self.recipe.kind == Kind.EVAL:
            return (*engines, router, *others, *servers, evaluator)
        if self.recipe.kind == Kind.SFT:
            return (*engines, router, *others, *servers, evaluator, self.trainer())
        orchestrator = self._process(Role.ORCHESTRATOR, 0, head, "orchestrator.log")
        return (*engines, router, *others, *servers, orchestrator, self.trainer())

    def trainer(self) -> ProcessPlan:
        assert self.layout.trainer is not None
        role = Role.SFT if self.recipe.kind == Kind.SFT else Role.TRAINER
        return self._process(role, 0, self.layout.trainer, f"{role.value}.log")

    def elastic(self) -> tuple[ProcessPlan, ...]:
        if self.recipe.kind != Kind.RL:
            return ()
        node = Pools(self.profile).by_type[self.recipe.layout.inference.node_type].node
        return self._engines(Role.INFERENCE, self.layout.elastic, node)

    def _engines(
        self, role: Role, placements: tuple[Placement, ...], node: Node | None = None
    ) -> tuple[ProcessPlan, ...]:
        ready_s = self.recipe.timeouts.inference_ready_s
        if self.recipe.layout.takes_turns:
            ready_s += self.recipe.timeouts.weights_s  # an engine starts when the trainer's turn is over
        return tuple(
            self._process(role, index, placement, f"{role.value}/{index}.log", ready_s, node)
            for index, placement in enumerate(placements)
        )

    def _env_servers(self, head: Placement) -> list[ProcessPlan]:
        numbers: Counter[str] = Counter()  # servers so far, by the log of the first
        planned = []
        for index, (split_name, environment) in enumerate(self.recipe.environments.by_server):
            stem = f"envs/{split_name}/{environment.label}"
            log = f"{stem}/{numbers[stem]}.log" if numbers[stem] else f"{stem}.log"
            numbers[stem] += 1
            if environment.address is None and (split_name == "eval" or self.recipe.kind == Kind.RL):
                planned.append(
                    self._process(Role.ENV_SERVER, index, head, log, self.recipe.env_server_ready_s)
                )
        return planned

    def _process(
        self,
        role: Role,
        index: int,
        placement: Placement,
        log: str,
        ready_timeout_s: int = 0,
        node: Node | None = None,
    ) -> ProcessPlan:
        """Return a process. ``node``: hardware of its nodes; None: that of its node in the plan."""
        name = process_name(role, index)
        software = self.profile.software.of_role(role)
        python = software.python or self.python
        node = node or node_of(self.layout, self.profile, placement.nodes[0])
        variables = process_env(role, self.recipe, self.profile) | self._binding(role, placement, node)
        held = [str(folder.expanded_path or folder.path) for folder in self.profile.held_parts.values()]
        inherited = inherited_env(role, self.recipe, self.profile)
        prefix, container_args = in_container(
            with_cache(software.container, self.profile.cache_path, held),
            node,
            self.run_dir,
            (*variables, *inherited),
        )
        return ProcessPlan(
            name=name,
            role=role,
            index=index,
            nodes=placement.nodes,
            accelerators=placement.accelerators,
            argv=(*prefix, python, "-m", f"primerl_hpc.roles.{role.value}", self.run_dir, self.phase, name),
            srun_args=(*srun_args(self.profile.scheduler), *container_args),
            container="command" if prefix else "step" if container_args else "none",
            env=variables,
            inherited_env=inherited,
            kept_env=kept_env(role, self.recipe),
            secret_env=secret_env(role, self.recipe, self.profile),
            on_exit=_ON_EXIT.get(role, OnExit.RESTART),
            log=log,
            ready_timeout_s=ready_timeout_s,
        )

    def _binding(self, role: Role, placement: Placement, node: Node) -> dict[str, str]:
        """Return the variable with the CPUs of an engine's or trainer's accelerators.

        A job with a part of a node has other GPUs than the plan's first ones, and SLURM chooses its CPUs.
        """
        is_part = placement in self.layout.elastic and len(placement.accelerators) < node.accelerators
        binding = binding_plan(node)
        if binding is None or role not in _BOUND or is_part:
            return {}
        values = binding.model_dump(mode="json", exclude_none=True)
        values |= {"accelerators": placement.accelerators, "is_engine": role not in TRAINERS}
        return {env.BINDING: json.dumps(values)}


def _nodes(phases: tuple[PhasePlan, ...], layout: NodeSplit) -> tuple[NodePlan, ...]:
    """Return the processes of all phases by node, for display."""
    roles: dict[int, list[str]] = {index: [] for index in range(layout.num_nodes)}
    for phase in phases:
        for process in phase.processes:
            accelerators = f" [{','.join(map(str, process.accelerators))}]" if process.accelerators else ""
            for node in process.nodes:
                roles[node].append(process.name + accelerators)
    return tuple(NodePlan(index=index, roles=tuple(dict.fromkeys(names))) for index, names in roles.items())
