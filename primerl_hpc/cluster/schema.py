"""The cluster profile: *where* a run lives. One file per site, with the source of its facts in comments.

`Profile` mirrors the YAML. What a site has not is null; what a user must fill in (an account) is refused with its key
when a job is rendered, not guessed.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from primerl_hpc.cluster import directives
from primerl_hpc.common.block import (
    Block,
    Bool,
    Int,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Variables,
)
from primerl_hpc.common.names import Role, is_valid_name
from primerl_hpc.common.slurm import minutes

_TIME = re.compile(r"(\d+-\d+(:\d{2}){0,2}|\d+(:\d{2}){0,2}|UNLIMITED|INFINITE)")


def _bare_number(value: object) -> object:
    """A number without unit is minutes or MiB, as SLURM has it."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_time(value: str) -> str:
    if not _TIME.fullmatch(value):
        raise ValueError("must be a SLURM time such as 30 (minutes), 04:00:00 or 2-12:00:00")
    return value


def _check_memory(value: str) -> str:
    if not re.fullmatch(r"\d+[KMGT]?B?", value):
        raise ValueError("must be memory as SLURM writes it, such as 480G or 0")
    return value


def _check_one_line(value: str) -> str:
    if any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise ValueError("must be one line without control characters")
    return value


def _check_given(value: str) -> str:
    if not value.strip():
        raise ValueError("must not be empty; write null for none")
    return value


def _check_word(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", value):
        raise ValueError("must be one word of letters, digits, '_', '.', '+' and '-'")
    return value


def _check_no_option(value: str) -> str:
    if value.startswith("-"):
        raise ValueError("must not start with '-': it would be read as an option")
    return value


def _check_no_comma(value: str) -> str:
    if "," in value:
        raise ValueError("must not have a comma, which separates mounts; write each as an item of its own")
    return value


def _check_margin(time: str | None, key: str, margin_s: int) -> None:
    """Raises ValueError for a walltime within which the warning of its end would not come."""
    limit = minutes(time)
    if limit is not None and margin_s >= 60 * limit:
        raise ValueError(
            f"a walltime of {time} is {limit:g} minutes, and the job is to be warned "
            f"{margin_s} s before its end; raise {key} or lower signal_margin_s"
        )


SlurmTime = Annotated[str, BeforeValidator(_bare_number), AfterValidator(_check_time)]
OneLine = Annotated[str, AfterValidator(_check_one_line), AfterValidator(_check_given)]
Word = Annotated[str, AfterValidator(_check_word)]
Memory = Annotated[str, BeforeValidator(_bare_number), AfterValidator(_check_memory)]
Program = Annotated[OneLine, AfterValidator(_check_no_option)]
Mount = Annotated[Program, AfterValidator(_check_no_comma)]
MailType = Literal[
    *("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT"),
    *("TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50"),
]


class Scheduler(Block):
    """How to ask this site for nodes."""

    type: Literal["slurm", "local"] = "slurm"
    """``local``: child processes of a supervisor on this machine, through submitit's local executor."""
    partition: OneLine | None = None
    """Partition, or several with commas: SLURM takes the one that starts first."""
    account: OneLine | None = None
    """Whose budget pays; ``sacctmgr show associations user=$USER`` lists yours."""
    qos: OneLine | None = None
    """Quality of service; at some sites it decides walltime and priority in place of the partition."""
    constraint: OneLine | None = None
    """Node features, e.g. ``gpu&hbm80g``."""
    reservation: OneLine | None = None
    """A reservation of nodes that you may use."""
    time: SlurmTime | None = None
    """Walltime of one job: minutes, ``hours:minutes:seconds`` or ``days-hours:minutes:seconds``."""
    time_min: SlurmTime | None = None
    """Shortest walltime to accept: SLURM may shorten ``time`` down to it to start the job earlier."""
    gpu_request: Literal["gres", "gpus-per-node", "gpus-per-task", "none"] = "gres"
    """How this site wants GPUs to be said (a job has one task per node); ``none``: whole nodes carry them."""
    gpu_type: Word | None = None
    """Type inside the request: ``gpu:h100:8``."""
    gres: tuple[OneLine, ...] = ()
    """Generic resources of each node beside its GPUs, e.g. ``nvme:1``."""
    exclusive: Bool | Literal["user", "mcs"] = True
    """Whole nodes; ``user``: shared with your own jobs only."""
    memory: Memory | None = "0"
    """``--mem`` of a node, e.g. ``480G``; ``0`` is all of it, null emits nothing."""
    memory_per_cpu: Memory | None = None
    """In place of ``memory``, where a site wants it so."""
    memory_per_gpu: Memory | None = None
    """In place of ``memory``, where a site wants it so."""
    nodelist: OneLine | None = None
    """Nodes that must be among the job's, e.g. ``n[01-04]``."""
    exclude: OneLine | None = None
    """Nodes that must not be, e.g. ``n07,n09``."""
    switches: OneLine | None = None
    """At most so many leaf switches, and how long to wait for that: ``1`` or ``1@12:00:00``."""
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = None
    """``nomultithread``: one task per core, where nodes have hardware threads."""
    licenses: tuple[OneLine, ...] = ()
    """Licenses, at some sites also filesystems that the job needs: ``scratch``, ``matlab:1``."""
    dependency: OneLine | None = None
    """When the job may start, e.g. ``afterok:123``, ``singleton``."""
    begin: OneLine | None = None
    """Not before, e.g. ``2026-12-24T18:00:00`` or ``now+2hours``."""
    nice: Int | None = None
    """Lower priority by so much."""
    wckey: OneLine | None = None
    """Workload key, where a site accounts by it."""
    comment: OneLine | None = None
    """Any text; squeue and sacct show it, some sites account by it."""
    mail_type: tuple[MailType, ...] = ()
    """When SLURM writes to ``mail_user``: ``[END, FAIL, TIME_LIMIT_90]``."""
    mail_user: OneLine | None = None
    """Address; null is the user who submits."""
    signal_margin_s: PositiveInt = 300
    """How long before the walltime the job is asked to save, at the latest: it learns what its steps and saves need."""
    requeue: Bool = True
    """Whether SLURM may put the job back into the queue after a preemption or a lost node."""
    spare_nodes: NonNegativeInt = 0
    """Nodes asked for beyond the plan's: they stand in for bad and lost ones, and idle until then."""
    extra: tuple[OneLine, ...] = ()
    """Any other option of sbatch, as ``--key=value`` or ``--key``; quoted for you."""
    srun_extra: tuple[OneLine, ...] = ()
    """More arguments of every srun, as ``--key=value``."""

    @field_validator("extra")
    @classmethod
    def _extra_are_options_of_the_site(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        keys = {option: key for key, option in directives.OPTION_OF_KEY.items()}
        for text in value:
            if not re.fullmatch(r"--[a-z][a-z0-9-]+(=.*)?", text):
                raise ValueError(f"{text!r} is not an option; write it as --key=value")
            option, _ = directives.parse_option(text)
            if option in keys:
                raise ValueError(f"--{option} has a key of its own: scheduler.{keys[option]}")
            if option in directives.OWN_OPTIONS:
                raise ValueError(f"--{option} is decided by the plan")
        return value

    @field_validator("srun_extra")
    @classmethod
    def _srun_extra_are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [text for text in value if not re.fullmatch(r"--[a-z][a-z0-9-]+(=.*)?", text)]:
            raise ValueError(f"{bad[0]!r} is not an option; write it as --key=value")
        for text in value:
            option, _ = directives.parse_option(text)
            if option in directives.OWN_STEP_OPTIONS:
                raise ValueError(f"--{option} is decided by the plan")
        return value

    @model_validator(mode="after")
    def _memory_is_said_once(self) -> Self:
        said = [
            key
            for key in ("memory", "memory_per_cpu", "memory_per_gpu")
            if key in self.model_fields_set and getattr(self, key) is not None
        ]
        if len(said) > 1:
            raise ValueError(f"{said[0]} and {said[1]} exclude each other; give one")
        return self

    @model_validator(mode="after")
    def _the_warning_comes_within_the_walltime(self) -> Self:
        _check_margin(self.time, "time", self.signal_margin_s)
        _check_margin(self.time_min, "time_min", self.signal_margin_s)
        least, most = minutes(self.time_min), minutes(self.time)
        if least is not None and most is not None and least > most:
            raise ValueError(f"time_min {self.time_min} is longer than time {self.time}")
        return self


class CpuPartition(Block):
    """Nodes without GPUs for the orchestrator (``layout.orchestrator.place: cpu-partition``), one per run."""

    partition: OneLine
    """Partition of such nodes."""
    account: OneLine | None = None
    """Default: the scheduler's; so are ``qos`` and the walltime."""
    qos: OneLine | None = None
    """Default: the scheduler's."""
    constraint: OneLine | None = None
    """Node features to ask for."""
    cores: PositiveInt = 8
    """Cores to ask for."""
    memory: Memory | None = "32G"
    """``--mem``, as ``scheduler.memory``."""
    exclusive: Bool = False
    """Whole nodes."""


class Elastic(Block):
    """How jobs of elastic engines (``layout.inference.elastic``) differ from the run's own; null: they do not."""

    partition: OneLine | None = None
    """May be a preemptible one: an engine that is taken away is missed by nobody for long."""
    account: OneLine | None = None
    """Whose budget pays for them."""
    qos: OneLine | None = None
    """Their quality of service."""
    constraint: OneLine | None = None
    """Node features that they need."""
    time: SlurmTime | None = None
    """Walltime of one engine's job; an engine whose time is over goes back into the queue."""


class Node(Block):
    """The shape of one node."""

    gpus: NonNegativeInt = 8
    """0: a machine without GPUs, whose CPU slots take their place."""
    cpu_slots: PositiveInt = 4
    """Without GPUs: how many engines and trainer ranks may share the node."""
    gpu: OneLine | None = None
    """Kind of GPU, e.g. ``H100-SXM``."""
    gpu_memory_gib: PositiveFloat | None = None
    """Memory of one GPU."""
    cores: PositiveInt = 1
    """Cores that a run may use."""
    memory_gib: PositiveFloat | None = None
    """Memory of the node that a run may use."""


class Network(Block):
    """How processes on several nodes reach each other."""

    interface: Word | None = None
    """What joins the nodes, e.g. ``ib0``: processes listen on its address, and NCCL and Gloo use it unless ``env`` says
    otherwise. Null: the address of the node's name."""
    env: Variables = Field(default_factory=dict)
    """Variables of NCCL, UCX, libfabric."""


class Container(Block):
    """A container image, and what is mounted into it."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """Who starts it: pyxis (an option of srun), or apptainer."""
    image: Program | None = None
    """File, or registry address."""
    mounts: tuple[Mount, ...] = ()
    """``host:container[:flags]``"""

    @model_validator(mode="after")
    def _kind_and_image_go_together(self) -> Self:
        if (self.kind == "none") != (self.image is None):
            raise ValueError("kind and image are given together, or neither")
        return self


class Environment(Block):
    """The software of one role: an interpreter, or a container with one."""

    python: Program | None = None
    """Python interpreter; null: the one that submits."""
    container: Container = Container()
    """Container of these processes; kind none: they run on the node itself."""
    env: Variables = Field(default_factory=dict)
    """Variables of these processes, over ``env``."""


class Software(Block):
    """Modules, setup, interpreters and containers."""

    modules: tuple[OneLine, ...] = ()
    """Environment modules that the batch script loads, in this order."""
    setup: tuple[OneLine, ...] = ()
    """Shell lines run once in the batch script, after the modules. They are shell, on purpose."""
    default: Environment = Environment()
    """Of every role that has none of its own."""
    roles: dict[Role, Environment] = Field(default_factory=dict)
    """Roles with an environment of their own: vLLM's pins and the trainer's seldom agree."""

    def of_role(self, role: Role) -> Environment:
        """Engines of any kind run in the environment of the policy's, unless they have their own."""
        if role in (Role.PREFILL, Role.TEACHER, Role.JUDGE) and role not in self.roles:
            role = Role.INFERENCE
        return self.roles.get(role, self.default)


class Preflight(Block):
    """What every node is asked before the first process of an attempt. A bad node gets no work."""

    enabled: Bool = True
    """Whether nodes are asked at all."""
    timeout_s: PositiveInt = 120
    """A node that has not told its findings by then is bad."""
    min_scratch_gib: NonNegativeFloat = 1.0
    """Free space that a node's scratch folder must have."""
    min_memory_gib: NonNegativeFloat = 1.0
    """Memory that must be available on a node."""
    health_checks: tuple[OneLine, ...] = ()
    """The site's own commands, run by bash on every node: one that does not end with 0 makes the node bad."""


class Profile(Block):
    name: str
    """The site's, as ``--profile`` names it."""
    description: str = ""
    """One line, for people."""
    docs_url: str | None = None
    """Where the site describes its machine."""
    verified: str | None = None
    """When and how the facts of this file were last checked."""
    nodes: PositiveInt = 1
    """Nodes a job may have at most."""
    scheduler: Scheduler = Scheduler()
    elastic: Elastic = Elastic()
    cpu_partition: CpuPartition | None = None
    node: Node = Node()
    network: Network = Network()
    """How processes on several nodes reach each other."""
    preflight: Preflight = Preflight()
    software: Software = Software()
    """Modules, setup, interpreters and containers."""
    env: Variables = Field(default_factory=dict)
    """Variables for every role."""
    runs_dir: str | None = None
    """Shared folder under which run directories are made; default ./runs. ``~`` and ``$VARIABLES`` are expanded."""
    scratch: str | None = None
    """Node-local folder for caches; default: the system's temporary folder."""
    templates: OneLine | None = None
    """Folder of sbatch templates of this site's own, relative to this file: ``job.sbatch.j2``, ``partials/*.j2``."""
    offline: Bool = True
    """No internet on compute nodes: hub libraries are told so."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not is_valid_name(value):
            raise ValueError("must be letters, digits, '.', '_' or '-'")
        return value

    @model_validator(mode="after")
    def _spares_leave_nodes_to_work(self) -> Self:
        if self.scheduler.spare_nodes >= self.nodes:
            raise ValueError(
                f"scheduler.spare_nodes {self.scheduler.spare_nodes} leave none of {self.nodes} nodes"
            )
        if self.scheduler.spare_nodes and self.scheduler.type == "local":
            raise ValueError("scheduler.spare_nodes needs SLURM: a machine has no other node")
        return self

    @model_validator(mode="after")
    def _engines_are_warned_within_their_walltime(self) -> Self:
        _check_margin(self.elastic.time, "elastic.time", self.scheduler.signal_margin_s)
        return self

    @property
    def work_nodes(self) -> int:
        """Nodes that a plan may use."""
        return self.nodes - self.scheduler.spare_nodes

    @property
    def accelerator(self) -> Literal["gpu", "cpu"]:
        return "gpu" if self.node.gpus else "cpu"

    @property
    def accelerators_per_node(self) -> int:
        return self.node.gpus or self.node.cpu_slots
