"""The plan: all nodes, accelerators, processes and environment variables, determined before the job is queued.

``plan.json`` is a pure function of recipe, profile and run directory. At run time the supervisor reads it to start
processes, and each role reads the recipe of its phase:

    plan = load_plan(RunDir(path))
    recipe = plan.phase("main").recipe
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, ValidationError

from primerl_hpc.common.block import Block
from primerl_hpc.common.errors import DataError, NotFoundError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.common.passed import PassedVariables
from primerl_hpc.recipe.schema.after import After
from primerl_hpc.recipe.schema.cross_checks import check_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir

PLAN_VERSION = 1
BUNDLE_PYTHON = "bundle/bin/python"
"""Interpreter of processes that run from the bundle: its folder is known on the node only."""
BUNDLE_MANIFEST = "primerl-bundle.json"
"""File in the unpacked folder of a bundle."""
DEFAULT_ASK_EVERY_S = 5.0
"""Minimum time between questions to SLURM that every site accepts."""


class OnExit(StrEnum):
    """Consequence of a process's exit for its phase."""

    ENDS_PHASE = "ends_phase"  # the phase ends when all of these exit with 0; another code ends the run
    RESTART = "restart"  # must run as long as the phase: restarted, limited by progress
    OPTIONAL = "optional"  # restarted too, but the run continues without it if that fails


class ProcessPlan(Block):
    """One process (or one SLURM step of several tasks: a trainer spans nodes with one torchrun per node)."""

    name: str
    """``<role>-<index>``"""
    role: Role
    index: int
    nodes: tuple[int, ...]
    """Node indices of the allocation; one task runs on each."""
    accelerators: tuple[int, ...] = ()
    """Accelerators on each of the nodes: GPU indices, or CPU slots of a profile without GPUs."""
    argv: tuple[str, ...]
    """Command line: the role's Python interpreter, optionally after a container's command, and its module."""
    srun_args: tuple[str, ...] = ()
    """Additional srun arguments: those of the profile and of a container that is an option of srun."""
    container: Literal["none", "command", "step"] = "none"
    """``command``: ``argv`` begins with the command of a container runtime; ``step``: srun starts the step in a
    container, in which only the container's interpreter exists."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables added to the job's environment."""
    inherited_env: dict[str, str] = Field(default_factory=dict)
    """Variables whose values are taken from the job's environment and not stored: name → name in the job."""
    kept_env: tuple[str, ...] | None = None
    """Names or patterns (``LC_*``) of the job's variables that are passed to the process; None: all but secrets."""
    secret_env: tuple[str, ...] = ()
    """Names of the job's variables with secrets that are passed to the process."""
    on_exit: OnExit
    log: str
    """Log file relative to the attempt's log folder."""
    ready_timeout_s: int = 0
    """Time limit for publishing the endpoint, after which the process has failed; 0: it has no endpoint."""


PER_PROCESS, MIN_REQUESTS = 4, 1024


class PhasePlan(Block):
    """A part of the run with its own processes. Phases run one after another in the same allocation."""

    name: str
    recipe: Recipe
    """Resolved recipe of this phase; its kind may differ from the run's (an SFT warm-up of an RL run)."""
    model_path: str
    """Hub id or absolute folder of the phase's initial weights (policy v0)."""
    processes: tuple[ProcessPlan, ...]
    elastic: tuple[ProcessPlan, ...] = ()
    """Engines in separate jobs, each on node 0 of its job."""

    def process(self, name: str) -> ProcessPlan:
        processes = (*self.processes, *self.elastic)
        for process in processes:
            if process.name == name:
                return process
        known = ", ".join(process.name for process in processes)
        raise NotFoundError(f"no process '{name}' in phase '{self.name}'", hint=f"its processes: {known}")

    @property
    def max_connections(self) -> int:
        """Connections that processes of the phase may open to one server at once: a few each, and one for each request
        of a rollout, or of a benchmark or user."""
        processes = len(self.processes) + len(self.elastic)
        return PER_PROCESS * processes + max(MIN_REQUESTS, self.recipe.rollouts.in_flight_ceiling)

    @property
    def num_data_ranks(self) -> int:
        """Number of data-parallel ranks of the trainer: ranks / context_parallel / tensor_parallel."""
        trainers = (*self.of_role(Role.TRAINER), *self.of_role(Role.SFT))
        world = sum(len(process.nodes) * len(process.accelerators) for process in trainers)
        layout = self.recipe.layout.trainer
        context = 1 if layout.context_parallel == "auto" else layout.context_parallel  # resolved in a plan
        return world // context // layout.tensor_degree

    @property
    def num_ranks(self) -> int:
        """Number of processes of the phase, ranks counted individually."""
        processes = (*self.processes, *self.elastic)
        return sum(len(process.nodes) * max(1, len(process.accelerators)) for process in processes)

    def for_prefill(self) -> PhasePlan:
        """Return the phase for prefill engines, with their layout."""
        return self.model_copy(update={"recipe": self.recipe.for_prefill()})

    def for_frozen(self, role: Role) -> PhasePlan:
        """Return the phase for engines of a teacher or judge, with its model."""
        recipe = self.recipe.for_frozen(role)
        return self.model_copy(update={"recipe": recipe, "model_path": recipe.model.name})

    def of_role(self, role: Role) -> tuple[ProcessPlan, ...]:
        return tuple(process for process in self.processes if process.role == role)


class NodePlan(Block):
    index: int
    roles: tuple[str, ...]
    """Processes on this node, for display: ``inference-0 [0,1]``."""


class HourBudget(Block):
    """Time after which a run saves and stops, over all attempts."""

    text: str
    """As the user wrote it, for example ``500GPUh``."""
    job_s: float
    """Seconds for which its job may hold all nodes of the plan."""


class ComponentPlan(Block):
    """Nodes of one kind: a component of a heterogeneous SLURM job, or all nodes of an ordinary one."""

    node_type: str | None = None
    """Name in the profile's ``node_types``; None: nodes of the profile's ``node``, or of the CPU partition."""
    is_cpu: bool = False
    """True for the node of the CPU partition."""
    nodes: tuple[int, ...]
    """Node indices of the plan."""
    spare_nodes: int = 0
    """Number of nodes requested in addition to ``nodes``."""
    accelerators_per_node: int = 0
    """GPUs, or CPU slots of nodes without GPUs; 0: nodes of the CPU partition."""


class BindingPlan(Block):
    """CPUs next to each accelerator of a node, from the profile; without a map they are read from the node."""

    cpus: tuple[str, ...] | None = None
    """CPUs of each accelerator: ``0-71``."""
    numa: tuple[int, ...] | None = None
    """NUMA node of each GPU."""
    num_accelerators: int = 0


class SumsPlan(Block):
    """The all-reduce with a known result that an attempt runs before its first process (`checks/sums.py`)."""

    argv: tuple[str, ...]
    """Interpreter of the trainer, in its container."""
    srun_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the trainer, with those of NCCL."""
    nodes: tuple[int, ...]
    """Nodes of the trainer, by index of the plan."""
    accelerator: Literal["gpu", "cpu"]
    ranks_per_node: int
    timeout_s: int


class PreflightPlan(Block):
    """Checks of every node before the first process of an attempt (`checks/node.py`)."""

    timeout_s: int
    pythons: tuple[str, ...]
    """Interpreters that must start on every node, without those inside containers."""
    containers: tuple[tuple[str, ...], ...] = ()
    """Container command, image and interpreter of each container that is a command in front of a process."""
    gpus: int
    component_gpus: tuple[int, ...] = ()
    """GPUs of a node of each component of a heterogeneous job; empty: ``gpus`` on every node."""
    scratch: str | None
    min_scratch_gib: float
    min_memory_gib: float
    health_checks: tuple[str, ...]
    srun_args: tuple[str, ...] = ()
    """Arguments of every srun, from the profile."""
    interface: str | None = None
    """Network interface whose address peers use; None: the address of the node's name."""
    arch: str | None = None
    """Processor architecture of the nodes; None: not checked."""
    vendor: str = "nvidia"
    """Vendor of the GPUs, which determines how they are counted."""
    scratch_kind: str | None = None
    """``disk`` or ``ram``; None: not checked."""
    scratch_gib: float | None = None
    """Size of the scratch folder according to the profile."""
    plugin: str = "none"
    """Network plugin that must be found: ``libfabric``, ``rccl`` or ``none``."""
    plugin_env: dict[str, str] = Field(default_factory=dict)
    """Variables of the trainer that name the plugin or the folders in which it is searched."""
    binding: BindingPlan | None = None
    sums: SumsPlan | None = None
    """None: sums are not checked."""
    bandwidth: SumsPlan | None = None
    """None: bandwidth is not measured."""
    proxy: str | None = None
    """HTTP proxy of the nodes, from the profile."""
    host_suffix: str | None = None
    """Text appended to a node's name to get its name in the fast network."""
    uses_rdma: bool = False
    """True if GPUs of several nodes exchange tensors: network adapters with RDMA need locked memory."""


class BundlePlan(Block):
    """The Python environment that each node unpacks."""

    path: str
    format: str
    """``tar.zst``, ``tar.gz`` or ``squashfs``"""
    sha256: str
    size_bytes: int
    unpacked_bytes: int
    arch: str
    glibc: str | None = None
    """Oldest glibc with which its interpreter starts; None: it uses another C library."""
    base: str | None = None
    """Folder of the operating system's Python that it needs; None: it contains its own."""
    python: str
    """Version of its interpreter."""
    srun_args: tuple[str, ...] = ()
    """Arguments of every srun, from the profile."""


class PredictedFigure(Block):
    value: float
    low: float
    high: float
    unit: str
    tier: str


class AppliedCorrection(Block):
    """A correction of the ledger that a figure of this plan contains."""

    factor: float
    deviation: float
    num_rows: int
    closest: str


class PredictionRecord(Block):
    gpu: str
    """GPU type of the trainer's nodes."""
    engine_gpu: str
    """GPU type of the engines' nodes."""
    family: str
    """Architecture of the model (``model_type`` of its config.json)."""
    layout: str
    """Layout of trainer and engines as text: what the same prediction would be made for."""
    software: dict[str, str] = Field(default_factory=dict)
    """Library → version for which corrections were selected."""
    figures: dict[str, PredictedFigure] = Field(default_factory=dict)
    """Figure → value, before the run measures it."""
    corrections: dict[str, AppliedCorrection] = Field(default_factory=dict)
    """Figure → correction by which it was multiplied."""


class Plan(Block):
    version: int = PLAN_VERSION
    name: str
    kind: Kind
    run_dir: str
    """Absolute path."""
    profile_name: str
    scheduler: str
    """``slurm`` or ``local``"""
    accelerator: str
    """``gpu`` or ``cpu``"""
    accelerators_per_node: int
    """Accelerators of a node; in a job of several components the largest number."""
    nodes: tuple[NodePlan, ...]
    components: tuple[ComponentPlan, ...] = ()
    """In SLURM's order: the batch process runs on the first node of the first. Empty: all nodes are of the profile's
    ``node``."""
    spare_nodes: int = 0
    """Number of nodes requested in addition to ``nodes``, to replace bad and lost ones."""
    allocated_gpus: int = 0
    """GPUs that SLURM allocates to the job, with those of spare nodes, also if no process uses them."""
    signal_margin_s: int | None = None
    """Latest time before the end of the walltime, in seconds, at which the run must save; None without SLURM."""
    preflight: PreflightPlan | None = None
    bundle: BundlePlan | None = None
    """Software of all roles without an interpreter of their own; None: the interpreter that submitted the run."""
    step_memory: bool = True
    """Steps request all memory of the job (``--mem=0``)."""
    step_gres: bool = True
    """Steps without GPUs request none (``--gres=none``)."""
    may_name_nodes: bool = True
    """Jobs may exclude nodes by name."""
    ask_every_s: float = DEFAULT_ASK_EVERY_S
    """Minimum time between repeated questions to SLURM by all processes together, in seconds."""
    submit_keep: tuple[str, ...] | None = None
    """Names or patterns of the submitting shell's variables that reach the run, besides those of `common.passed`."""
    submit_drop: tuple[str, ...] = ()
    """Names or patterns of variables that do not reach the job."""
    allow_shared_parent: bool = False
    """Other users may be able to write to a folder above the run directory (`check_parents`)."""
    budget: HourBudget | None = None
    """GPU-hours or node-hours that all attempts together may use; None: no limit."""
    no_proxy: tuple[str, ...] | None = None
    """Hosts that are reached without the HTTP proxy, in addition to those of the run; None: there is no proxy."""
    phases: tuple[PhasePlan, ...]
    notes: tuple[str, ...] = ()
    """Decisions of the planner, for display."""
    prediction: PredictionRecord | None = None
    """Predicted figures; None without GPUs, or if the GPU or the model is unknown."""

    @property
    def is_heterogeneous(self) -> bool:
        return len(self.components) > 1

    @property
    def allocated_nodes(self) -> int:
        return len(self.nodes) + self.spare_nodes

    @property
    def all_components(self) -> tuple[ComponentPlan, ...]:
        """The components, also of a job whose nodes are all of the profile's ``node``."""
        indices = tuple(node.index for node in self.nodes)
        one = ComponentPlan(
            nodes=indices,
            spare_nodes=self.spare_nodes,
            accelerators_per_node=self.accelerators_per_node,
        )
        return self.components or (one,)

    @property
    def after(self) -> After:
        """The recipe's ``after`` block; empty if it has none."""
        return self.phases[-1].recipe.after or After()

    @property
    def passed_variables(self) -> PassedVariables:
        """The rule about variables of the submitting shell that reach the run."""
        return PassedVariables(self.submit_keep or (), self.submit_drop)

    @property
    def num_elastic(self) -> int:
        """Number of engines in the job array."""
        return max(len(phase.elastic) for phase in self.phases)

    @property
    def num_hosts(self) -> int:
        """Maximum number of hosts with processes of the run."""
        return len(self.nodes) + self.num_elastic

    @property
    def max_ranks(self) -> int:
        """Number of processes of the largest phase, ranks counted individually."""
        return max(phase.num_ranks for phase in self.phases)

    def phase(self, name: str) -> PhasePlan:
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise NotFoundError(f"the plan has no phase '{name}'")

    def phase_of(self, role: Role, name: str | None = None) -> PhasePlan:
        """Return the last phase with ``role``, or phase ``name`` if it has the role. Raises NotFoundError."""
        phases = [phase for phase in self.phases if phase.of_role(role) and name in (None, phase.name)]
        if phases:
            return phases[-1]
        known = ", ".join(
            f"{phase.name} ({', '.join(process.name for process in phase.processes)})"
            for phase in self.phases
        )
        raise NotFoundError(f"no {role} in this run", hint=f"its phases: {known}")


def with_interpreter(plan: Plan, python: str) -> Plan:
    """Return the plan on a node, where ``python`` is the interpreter of the unpacked bundle."""

    def replace(words: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(python if word == BUNDLE_PYTHON else word for word in words)

    def with_argv(processes: tuple[ProcessPlan, ...]) -> tuple[ProcessPlan, ...]:
        return tuple(process.model_copy(update={"argv": replace(process.argv)}) for process in processes)

    if plan.bundle is None:
        return plan
    phases = tuple(
        phase.model_copy(
            update={"processes": with_argv(phase.processes), "elastic": with_argv(phase.elastic)}
        )
        for phase in plan.phases
    )
    checks = plan.preflight
    if checks is not None:
        steps = {"sums": checks.sums, "bandwidth": checks.bandwidth}
        changes = {
            name: step and step.model_copy(update={"argv": replace(step.argv)})
            for name, step in steps.items()
        }
        checks = checks.model_copy(update={"pythons": replace(checks.pythons), **changes})
    return plan.model_copy(update={"phases": phases, "preflight": checks})


def load_plan(run_dir: RunDir) -> Plan:
    """Read ``plan.json``. Raises NotFoundError without one, DataError for another version or an invalid plan."""
    try:
        raw = read_json(run_dir.plan)
    except FileNotFoundError:
        raise NotFoundError("no run here: plan.json is missing", location=str(run_dir.root)) from None
    version = raw.get("version") if isinstance(raw, dict) else None
    hint = "use the version that created it, or submit again"
    if version != PLAN_VERSION:
        raise DataError(
            f"plan version {version} is not supported (this primerl-hpc reads version {PLAN_VERSION})",
            location=str(run_dir.plan),
            hint=hint,
        )
    try:
        plan = Plan.model_validate(upgrade(raw))
    except ValidationError as error:
        fault = error.errors()[0]
        raise _changed_plan(run_dir, ".".join(map(str, fault["loc"])), fault["msg"], hint) from None
    for index, phase in enumerate(plan.phases):
        try:
            check_recipe(phase.recipe)
        except ValueError as error:
            raise _changed_plan(run_dir, f"phases.{index}.recipe", str(error), hint) from None
    return plan


def upgrade(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the content of an earlier version's ``plan.json`` in its current form, so that its run can be resumed.

    ``nodes[].is_cpu`` became ``components``: the node of the CPU partition first, then all others. Content that cannot
    be converted stays unchanged. Keys of recipes that were removed are dropped.
    """
    plan = _without_removed_keys(plan)
    nodes = plan.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, dict) and "is_cpu" in node for node in nodes):
        return plan
    own_keys = [{key: value for key, value in node.items() if key != "is_cpu"} for node in nodes]
    cpu_nodes = [node.get("index") for node in nodes if node["is_cpu"]]
    if not cpu_nodes:
        return {**plan, "nodes": own_keys}
    others = {
        "nodes": [node.get("index") for node in nodes if not node["is_cpu"]],
        "spare_nodes": plan.get("spare_nodes", 0),
        "accelerators_per_node": plan.get("accelerators_per_node", 0),
    }
    preflight = plan.get("preflight")
    if isinstance(preflight, dict):
        preflight = {**preflight, "component_gpus": [0, preflight.get("gpus", 0)]}
    components = [{"is_cpu": True, "nodes": cpu_nodes}, others]
    return {**plan, "nodes": own_keys, "components": components, "preflight": preflight}


def _without_removed_keys(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the plan without ``timeouts.distributed_s`` of its recipes."""
    phases = []
    for phase in plan["phases"] if isinstance(plan.get("phases"), list) else ():
        recipe = phase.get("recipe") if isinstance(phase, dict) else None
        timeouts = recipe.get("timeouts") if isinstance(recipe, dict) else None
        if isinstance(recipe, dict) and isinstance(timeouts, dict):
            kept = {key: value for key, value in timeouts.items() if key != "distributed_s"}
            phases.append({**phase, "recipe": {**recipe, "timeouts": kept}})
        else:
            phases.append(phase)
    return {**plan, "phases": phases} if phases else plan


def _changed_plan(run_dir: RunDir, key: str, message: str, hint: str) -> DataError:
    return DataError(
        f"{key}: {message}; the plan was modified or written by another version of primerl-hpc",
        location=str(run_dir.plan),
        hint=hint,
    )
