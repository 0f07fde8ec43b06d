"""The cluster profile: *where* a run lives. One file per site, with the source of its facts in comments.

`Profile` mirrors the YAML. What a site has not is null; what a user must fill in (an account) is refused with its key
when a job is rendered, not guessed.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from primerl_hpc.common.block import (
    Block,
    Bool,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from primerl_hpc.common.names import Role, is_valid_name

_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")


def _check_time(value: str) -> str:
    if not _TIME.fullmatch(value):
        raise ValueError(
            "must be a SLURM time such as 30, 04:00:00 or 2-12:00:00 (quote it: YAML reads 4:00 as 240)"
        )
    return value


def _check_one_line(value: str) -> str:
    if any(ord(char) < 32 for char in value):
        raise ValueError("must be one line without control characters")
    return value


SlurmTime = Annotated[str, AfterValidator(_check_time)]
OneLine = Annotated[str, AfterValidator(_check_one_line)]


class Scheduler(Block):
    """How to ask this site for nodes."""

    type: Literal["slurm", "local"] = "slurm"
    """``local``: child processes of a supervisor on this machine, through submitit's local executor."""
    partition: OneLine | None = None
    account: OneLine | None = None
    qos: OneLine | None = None
    constraint: OneLine | None = None
    reservation: OneLine | None = None
    time: SlurmTime | None = None
    """Walltime of one job."""
    gpu_request: Literal["gres", "gpus-per-node", "none"] = "gres"
    """How this site wants GPUs to be said; ``none``: whole nodes carry them."""
    gpu_type: OneLine | None = None
    """Type inside the request: ``gpu:h100:8``."""
    exclusive: Bool = True
    memory: OneLine | None = "0"
    """``--mem``; ``0`` is all of a node, null emits nothing."""
    signal_margin_s: PositiveInt = 300
    """How long before the walltime the job is warned, so that it can save."""
    requeue: Bool = True
    extra: tuple[OneLine, ...] = ()
    """More ``#SBATCH`` lines, as ``--key=value``."""
    srun_extra: tuple[OneLine, ...] = ()
    """More arguments of every srun."""

    @field_validator("extra")
    @classmethod
    def _extra_are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [line for line in value if not line.startswith("-")]:
            raise ValueError(f"{bad[0]!r} is not an option; write it as --key=value")
        return value


class Node(Block):
    """The shape of one node."""

    gpus: NonNegativeInt = 8
    """0: a machine without GPUs, whose CPU slots take their place."""
    cpu_slots: PositiveInt = 4
    """Without GPUs: how many engines and trainer ranks may share the node."""
    gpu: OneLine | None = None
    """Kind of GPU, e.g. ``H100-SXM``."""
    gpu_memory_gib: PositiveFloat | None = None
    cores: PositiveInt = 1
    memory_gib: PositiveFloat | None = None


class Network(Block):
    address: Literal["hostname", "loopback"] = "hostname"
    """What a process publishes as its host."""
    env: dict[str, str] = Field(default_factory=dict)
    """NCCL and interface variables."""


class Container(Block):
    kind: Literal["none", "pyxis", "apptainer"] = "none"
    image: OneLine | None = None
    mounts: tuple[OneLine, ...] = ()
    """``host:container[:flags]``"""

    @model_validator(mode="after")
    def _kind_and_image_go_together(self) -> Self:
        if (self.kind == "none") != (self.image is None):
            raise ValueError("kind and image are given together, or neither")
        return self


class Environment(Block):
    """The software of one role: an interpreter, or a container with one."""

    python: OneLine | None = None
    """Python interpreter; null: the one that submits."""
    container: Container = Container()
    env: dict[str, str] = Field(default_factory=dict)


class Software(Block):
    modules: tuple[OneLine, ...] = ()
    setup: tuple[OneLine, ...] = ()
    """Shell lines run once in the batch script, after the modules. They are shell, on purpose."""
    default: Environment = Environment()
    roles: dict[Role, Environment] = Field(default_factory=dict)
    """Roles with an environment of their own: vLLM's pins and the trainer's seldom agree."""

    def of_role(self, role: Role) -> Environment:
        return self.roles.get(role, self.default)


class Profile(Block):
    name: str
    description: str = ""
    docs_url: str | None = None
    verified: str | None = None
    """When and how the facts of this file were last checked."""
    nodes: PositiveInt = 1
    """Nodes a job may have at most."""
    scheduler: Scheduler = Scheduler()
    node: Node = Node()
    network: Network = Network()
    software: Software = Software()
    env: dict[str, str] = Field(default_factory=dict)
    """Variables for every role."""
    runs_dir: str | None = None
    """Shared folder under which run directories are made; default ./runs. ``~`` and ``$VARIABLES`` are expanded."""
    scratch: str | None = None
    """Node-local folder for caches; default: the system's temporary folder."""
    offline: Bool = True
    """No internet on compute nodes: hub libraries are told so."""

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not is_valid_name(value):
            raise ValueError("must be letters, digits, '.', '_' or '-'")
        return value

    @property
    def accelerator(self) -> Literal["gpu", "cpu"]:
        return "gpu" if self.node.gpus else "cpu"

    @property
    def accelerators_per_node(self) -> int:
        return self.node.gpus or self.node.cpu_slots
