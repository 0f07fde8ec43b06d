"""The plan: every node, accelerator, process and environment variable, decided before anything is queued.

``plan.json`` is a pure function of recipe, profile and run directory: same inputs, same bytes. At run time it is
read by the supervisor (what to start where) and by every role (its phase's recipe):

    plan = load_plan(RunDir(path))
    recipe = plan.phase("main").recipe
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, ValidationError

from primerl_hpc.common.block import Block
from primerl_hpc.common.errors import DataError, NotFoundError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.recipe.schema import Recipe

PLAN_VERSION = 1


class OnExit(StrEnum):
    """What the end of a process means for its phase."""

    ENDS_PHASE = "ends_phase"  # exit 0 of all of these ends the phase; another code ends the run
    RESTART = "restart"  # it should not end while the phase runs: start it again, bounded by progress
    OPTIONAL = "optional"  # started again like the others, but the run goes on without it in the end


class ProcessPlan(Block):
    """One process (or one SLURM step of several tasks: a trainer spans nodes with one torchrun per node)."""

    name: str
    """``<role>-<index>``"""
    role: Role
    index: int
    nodes: tuple[int, ...]
    """Node indices of the allocation; one task runs on each."""
    accelerators: tuple[int, ...] = ()
    """Accelerators taken on each of the nodes: GPU indices, or CPU slots of a profile without GPUs."""
    argv: tuple[str, ...]
    """Command line: the role's Python interpreter, perhaps behind ``apptainer exec``, and its module."""
    srun_args: tuple[str, ...] = ()
    """More arguments of its srun: a pyxis container, and what the profile asks of every srun."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables on top of the job's environment."""
    on_exit: OnExit
    log: str
    """Log file relative to the attempt's log folder."""
    ready_timeout_s: int = 0
    """The process publishes its endpoint within this time, or counts as failed; 0: it publishes none."""


class PhasePlan(Block):
    """A part of the run with its own processes; phases run one after another in the same allocation."""

    name: str
    recipe: Recipe
    """What this phase does, resolved; its kind may differ from the run's (an SFT warm-up of an RL run)."""
    model_path: str
    """Hub id or absolute folder of the phase's initial weights (policy v0)."""
    processes: tuple[ProcessPlan, ...]
    elastic: tuple[ProcessPlan, ...] = ()
    """Engines that join from jobs of their own; each is alone on node 0 of its job."""

    def process(self, name: str) -> ProcessPlan:
        every = (*self.processes, *self.elastic)
        for process in every:
            if process.name == name:
                return process
        known = ", ".join(process.name for process in every)
        raise NotFoundError(f"no process '{name}' in phase '{self.name}'", mend=f"it has: {known}")

    @property
    def num_data_ranks(self) -> int:
        """Data-parallel ranks of the trainer: its processes over context parallel."""
        trainers = (*self.of_role(Role.TRAINER), *self.of_role(Role.SFT))
        world = sum(len(process.nodes) * len(process.accelerators) for process in trainers)
        context = self.recipe.layout.trainer.context_parallel
        return world if context == "auto" else world // context  # a plan has a number there

    def for_prefill(self) -> PhasePlan:
        """The phase as the engines that prefill see it: their shape is their own."""
        return self.model_copy(update={"recipe": self.recipe.for_prefill()})

    def for_frozen(self, role: Role) -> PhasePlan:
        """The phase as the engines of a teacher or judge see it: its model is theirs."""
        recipe = self.recipe.for_frozen(role)
        return self.model_copy(update={"recipe": recipe, "model_path": recipe.model.name})

    def of_role(self, role: Role) -> tuple[ProcessPlan, ...]:
        return tuple(process for process in self.processes if process.role == role)


class NodePlan(Block):
    index: int
    is_cpu: bool = False
    """A node of the CPU partition: component 0 of a heterogeneous job, whose component 1 are all others."""
    roles: tuple[str, ...]
    """What runs here, for people: ``inference-0 [0,1]``."""


class PreflightPlan(Block):
    """What every node is asked before the first process of an attempt (`runtime/node_checks.py`)."""

    timeout_s: int
    pythons: tuple[str, ...]
    """Interpreters that must run on every node; those inside containers cannot be asked."""
    gpus: int
    scratch: str | None
    min_scratch_gib: float
    min_memory_gib: float
    health_checks: tuple[str, ...]
    srun_args: tuple[str, ...] = ()
    """What the profile asks of every srun."""
    interface: str | None = None
    """Whose address peers will use; None: that of the node's name."""


class Plan(Block):
    version: int = PLAN_VERSION
    name: str
    kind: Kind
    run_dir: str
    """Absolute."""
    profile_name: str
    scheduler: str
    """``slurm`` or ``local``"""
    accelerator: str
    """``gpu`` or ``cpu``"""
    accelerators_per_node: int
    nodes: tuple[NodePlan, ...]
    spare_nodes: int = 0
    """Asked for beyond ``nodes``, to stand in for bad and lost ones."""
    signal_margin_s: int | None = None
    """The run is asked to save at the latest so long before its walltime; None where there is none."""
    preflight: PreflightPlan | None = None
    phases: tuple[PhasePlan, ...]
    notes: tuple[str, ...] = ()
    """Choices that the planner made for the user, in words."""

    @property
    def is_heterogeneous(self) -> bool:
        return any(node.is_cpu for node in self.nodes)

    @property
    def num_elastic(self) -> int:
        """Engines that join from a job array."""
        return max(len(phase.elastic) for phase in self.phases)

    @property
    def num_hosts(self) -> int:
        """Machines on which processes of the run may be, at most."""
        return len(self.nodes) + self.num_elastic

    def phase(self, name: str) -> PhasePlan:
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise NotFoundError(f"the plan has no phase '{name}'")

    def phase_of(self, role: Role, name: str | None = None) -> PhasePlan:
        """The last phase that has ``role``, or the one called ``name`` if it has. Raises NotFoundError."""
        phases = [each for each in self.phases if each.of_role(role) and name in (None, each.name)]
        if phases:
            return phases[-1]
        known = ", ".join(
            f"{each.name} ({', '.join(p.name for p in each.processes)})" for each in self.phases
        )
        raise NotFoundError(f"no {role} in this run", mend=f"its phases: {known}")


def load_plan(run_dir: RunDir) -> Plan:
    """Raises NotFoundError when ``run_dir`` holds no run, DataError when its plan is of another version or was changed."""
    try:
        raw = read_json(run_dir.plan)
    except FileNotFoundError:
        raise NotFoundError("no run here: plan.json is missing", place=str(run_dir.root)) from None
    version = raw.get("version") if isinstance(raw, dict) else None
    mend = "run it with the version that made it, or submit again"
    if version != PLAN_VERSION:
        raise DataError(
            f"plan version {version} was written by another primerl-hpc (this one reads {PLAN_VERSION})",
            place=str(run_dir.plan),
            mend=mend,
        )
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise DataError(
            f"{key}: {fault['msg']}; another primerl-hpc wrote this plan, or somebody changed it",
            place=str(run_dir.plan),
            mend=mend,
        ) from None
