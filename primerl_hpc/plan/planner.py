"""The planner, as a list of passes: check → split → environment servers → degrees → phases → processes → plan.

    plan = compile_plan(recipe, profile, run_dir="/scratch/runs/x", python="/venv/bin/python")

Everything that was read from disk (the recipe's absolute paths, the interpreter) comes in as an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from primerl_hpc.cluster.schema import Environment, Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE, WARMUP_PHASE, Kind, Role, process_name
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.container import in_container
from primerl_hpc.plan.degrees import settle_degrees
from primerl_hpc.plan.env import process_env
from primerl_hpc.plan.env_servers import settle_servers
from primerl_hpc.plan.split import Placement, Split, split
from primerl_hpc.plan.types import NodePlan, OnExit, PhasePlan, Plan, PreflightPlan, ProcessPlan
from primerl_hpc.recipe.schema import Recipe

_ON_EXIT = {
    Role.TRAINER: OnExit.ENDS_PHASE,
    Role.SFT: OnExit.ENDS_PHASE,
    Role.ORCHESTRATOR: OnExit.ENDS_PHASE,
    Role.EVALUATOR: OnExit.ENDS_PHASE,
    Role.TRACKER: OnExit.OPTIONAL,
}


def compile_plan(
    recipe: Recipe, profile: Profile, *, run_dir: str, python: str, only_trainer: bool = False
) -> Plan:
    """``only_trainer``: the trainer of a recipe of kind rl or sft has the machines for itself.

    Raises ConfigError when recipe and profile do not fit together.
    """
    _check(recipe, profile)
    layout = split(_without_engines(recipe) if only_trainer else recipe, profile)
    head = profile.node if layout.cpu_node is None else profile.cpu_partition
    assert head is not None  # checked
    recipe, reasons = settle_servers(recipe, head.cores)
    notes = layout.notes + reasons
    if layout.trainer is not None:
        per_node = len(layout.trainer.accelerators)
        recipe, reasons = settle_degrees(
            recipe, ranks=len(layout.trainer.nodes) * per_node, ranks_per_node=per_node
        )
        notes += reasons
    phases = tuple(
        PhasePlan(
            name=name,
            recipe=phase_recipe,
            model_path=model_path,
            processes=(made.trainer(),) if only_trainer else made.all(),
            elastic=made.elastic(),
        )
        for name, phase_recipe, model_path in _phases(recipe, run_dir)
        for made in (_Processes(phase_recipe, profile, layout, run_dir, python, name),)
    )
    return Plan(
        name=recipe.name,
        kind=recipe.kind,
        run_dir=run_dir,
        profile_name=profile.name,
        scheduler=profile.scheduler.type,
        accelerator=profile.accelerator,
        accelerators_per_node=profile.accelerators_per_node,
        nodes=_nodes(phases, layout),
        spare_nodes=profile.scheduler.spare_nodes,
        signal_margin_s=profile.scheduler.signal_margin_s if profile.scheduler.type == "slurm" else None,
        preflight=_preflight(phases, profile, python),
        phases=phases,
        notes=notes,
    )


def _without_engines(recipe: Recipe) -> Recipe:
    inference = recipe.layout.inference.model_copy(update={"elastic": False})
    layout = recipe.layout.model_copy(update={"inference": inference})
    return recipe.model_copy(update={"kind": Kind.SFT, "layout": layout})


def _check(recipe: Recipe, profile: Profile) -> None:
    containers = [
        each.container.kind for each in (profile.software.default, *profile.software.roles.values())
    ]
    if profile.scheduler.type == "local" and "pyxis" in containers:
        raise ConfigError(
            f"profile '{profile.name}' has a pyxis container, which needs SLURM", mend="use apptainer"
        )
    if profile.scheduler.type == "local" and profile.nodes != 1:
        raise ConfigError(
            f"profile '{profile.name}' is local and has {profile.nodes} nodes; a machine is one node"
        )
    engines = {"inference": recipe.inference} | {
        f"{role.value}.inference": model.inference for role, model in recipe.served_models.items()
    }
    for key, inference in engines.items():
        if inference.kv_offload_gib is not None and profile.accelerator == "cpu":
            raise ConfigError(
                f"{key}.kv_offload_gib: engines of profile '{profile.name}' have their KV cache in host memory already",
                mend="raise kv_cache_gib instead",
            )
    if recipe.replays_routers and profile.accelerator == "cpu":
        raise ConfigError(
            f"trainer.router_replay: engines of profile '{profile.name}' run on CPUs, where vLLM does not return the "
            "experts it chose",
            mend="leave it out, or choose a profile with GPUs",
        )
    is_trained = recipe.kind in (Kind.RL, Kind.SFT)
    if is_trained and profile.accelerator == "cpu" and recipe.layout.trainer.expert_backend == "deepep":
        raise ConfigError(
            f"layout.trainer.expert_backend: deepep needs GPUs, and profile '{profile.name}' has none",
            mend="use torch, or choose a profile with GPUs",
        )
    if is_trained and profile.accelerator == "cpu" and recipe.model.attention.startswith("flash"):
        raise ConfigError(
            f"model.attention: {recipe.model.attention} needs GPUs, and profile '{profile.name}' has none",
            mend="use auto, or choose a profile with GPUs",
        )
    if recipe.layout.orchestrator.place == "cpu-partition" and (
        profile.cpu_partition is None or profile.scheduler.type == "local"
    ):
        raise ConfigError(
            f"layout.orchestrator.place: profile '{profile.name}' has no cpu_partition",
            mend="use head or trainer, or describe the site's CPU nodes there",
        )


def _phases(recipe: Recipe, run_dir: str) -> list[tuple[str, Recipe, str]]:
    """(name, recipe, initial weights): the warm-up's last weights are the main phase's policy v0."""
    if recipe.warmup is None:
        return [(MAIN_PHASE, recipe, recipe.model.name)]
    warmup = recipe.for_warmup()
    weights = RunDir(PurePosixPath(run_dir)).phase(WARMUP_PHASE).weights_step(warmup.steps)  # type: ignore[arg-type]
    return [(WARMUP_PHASE, warmup, recipe.model.name), (MAIN_PHASE, recipe, str(weights))]


class _Processes:
    """The processes of one phase, in the order in which people read them."""

    def __init__(
        self, recipe: Recipe, profile: Profile, layout: Split, run_dir: str, python: str, phase: str
    ) -> None:
        self.recipe, self.profile, self.layout = recipe, profile, layout
        self.run_dir, self.python, self.phase = run_dir, python, phase

    def all(self) -> tuple[ProcessPlan, ...]:
        head = Placement((self.layout.head,), ())
        is_tracked = self.recipe.tracking.wandb is not None
        tracker = (self._process(Role.TRACKER, 0, head, "tracker.log"),) if is_tracked else ()
        return (*self._working(head), *tracker)

    def _working(self, head: Placement) -> tuple[ProcessPlan, ...]:
        if self.recipe.kind == Kind.SFT:
            return (self.trainer(),)
        servers = self._env_servers(head)
        evaluator = self._process(Role.EVALUATOR, 0, head, "evaluator.log")
        if self.recipe.is_external:
            return (*servers, evaluator)
        engines = self._engines(Role.INFERENCE, self.layout.replicas)
        ready_s = self.recipe.timeouts.inference_ready_s
        router = self._process(Role.ROUTER, 0, head, "inference/router.log", ready_s)
        beside = [each for role, places in self.layout.beside.items() for each in self._engines(role, places)]
        if self.recipe.kind == Kind.INFERENCE:
            return (*engines, router, *beside)
        if self.recipe.kind == Kind.EVAL:
            return (*engines, router, *beside, *servers, evaluator)
        orchestrator = self._process(Role.ORCHESTRATOR, 0, head, "orchestrator.log")
        return (*engines, router, *beside, *servers, orchestrator, self.trainer())

    def trainer(self) -> ProcessPlan:
        assert self.layout.trainer is not None
        role = Role.SFT if self.recipe.kind == Kind.SFT else Role.TRAINER
        return self._process(role, 0, self.layout.trainer, f"{role.value}.log")

    def elastic(self) -> tuple[ProcessPlan, ...]:
        return self._engines(Role.INFERENCE, self.layout.elastic) if self.recipe.kind == Kind.RL else ()

    def _engines(self, role: Role, placements: tuple[Placement, ...]) -> tuple[ProcessPlan, ...]:
        ready_s = self.recipe.timeouts.inference_ready_s
        return tuple(
            self._process(role, index, placement, f"{role.value}/{index}.log", ready_s)
            for index, placement in enumerate(placements)
        )

    def _env_servers(self, head: Placement) -> list[ProcessPlan]:
        numbers: Counter[str] = Counter()  # of servers so far, by the log of the first
        made = []
        for index, (which, each) in enumerate(self.recipe.environments.by_server):
            stem = f"envs/{which}/{each.label}"
            log = f"{stem}/{numbers[stem]}.log" if numbers[stem] else f"{stem}.log"
            numbers[stem] += 1
            if each.address is None and (which == "eval" or self.recipe.kind != Kind.EVAL):
                made.append(self._process(Role.ENV_SERVER, index, head, log, self.recipe.env_server_ready_s))
        return made

    def _process(
        self, role: Role, index: int, placement: Placement, log: str, ready_timeout_s: int = 0
    ) -> ProcessPlan:
        name = process_name(role, index)
        software = self.profile.software.of_role(role)
        python = software.python or self.python
        prefix, srun_args = in_container(software.container, self.profile, self.run_dir)
        return ProcessPlan(
            name=name,
            role=role,
            index=index,
            nodes=placement.nodes,
            accelerators=placement.accelerators,
            argv=(*prefix, python, "-m", f"primerl_hpc.roles.{role.value}", self.run_dir, self.phase, name),
            srun_args=srun_args,
            env=process_env(role, self.recipe, self.profile),
            on_exit=_ON_EXIT.get(role, OnExit.RESTART),
            log=log,
            ready_timeout_s=ready_timeout_s,
        )


def _preflight(phases: tuple[PhasePlan, ...], profile: Profile, python: str) -> PreflightPlan | None:
    if not profile.preflight.enabled:
        return None
    roles = dict.fromkeys(process.role for phase in phases for process in phase.processes)
    return preflight_plan(profile, [profile.software.of_role(role) for role in roles], python)


def preflight_plan(profile: Profile, software: Sequence[Environment], python: str) -> PreflightPlan:
    """What a node is asked that will run ``software``, by ``python`` where that names no interpreter."""
    pythons = dict.fromkeys(each.python or python for each in software if each.container.kind == "none")
    return PreflightPlan(
        pythons=tuple(pythons),
        gpus=profile.node.gpus,
        scratch=profile.scratch,
        srun_args=profile.scheduler.srun_extra,
        interface=profile.network.interface,
        **profile.preflight.model_dump(exclude={"enabled"}),
    )


def _nodes(phases: tuple[PhasePlan, ...], layout: Split) -> tuple[NodePlan, ...]:
    """What runs where, for people, over all phases."""
    roles: dict[int, list[str]] = {index: [] for index in range(layout.num_nodes)}
    for phase in phases:
        for process in phase.processes:
            taken = f" [{','.join(map(str, process.accelerators))}]" if process.accelerators else ""
            for node in process.nodes:
                roles[node].append(process.name + taken)
    return tuple(
        NodePlan(index=index, roles=tuple(dict.fromkeys(names)), is_cpu=index == layout.cpu_node)
        for index, names in roles.items()
    )
