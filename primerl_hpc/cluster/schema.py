"""Schema of the cluster profile: one file per site, with the sources of its values in comments.

`Profile` mirrors the YAML. Features that a site does not have are null. Its blocks are in ``scheduler_schema.py``,
``node_types.py``, ``network_schema.py``, ``site_schema.py`` and ``software_schema.py``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.cluster.network_schema import Network, PreflightSettings
from primerl_hpc.cluster.node_types import Node, NodeType
from primerl_hpc.cluster.scheduler_schema import CpuPartition, Elastic, Scheduler, check_margin
from primerl_hpc.cluster.site_schema import JobLimit, Login, ScratchFolder, SharedCache, StorageFolder
from primerl_hpc.cluster.software_schema import Software
from primerl_hpc.cluster.value_types import OneLine, Short
from primerl_hpc.common import env
from primerl_hpc.common.block import Block, Bool, PositiveInt, Variables
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import is_valid_name


def _excludes_ll128(protocol: str) -> bool:
    """True if a value of NCCL_PROTO (``^LL128``, ``Simple``, ``LL,Simple``) does not allow LL128."""
    names = [name.strip().upper() for name in protocol.removeprefix("^").split(",")]
    return ("LL128" in names) == protocol.startswith("^")


class Profile(Block):
    """A site: scheduler, nodes, network and software."""

    name: str
    """Name of the profile."""
    description: str = ""
    """One-line description."""
    docs_url: str | None = None
    """URL of the site's documentation."""
    verified: str | None = None
    """When and how the values of this file were last verified."""
    nodes: PositiveInt = 1
    """Maximum number of nodes of a job."""
    scheduler: Scheduler = Scheduler()
    elastic: Elastic = Elastic()
    cpu_partition: CpuPartition | None = None
    node: Node = Node()
    node_types: dict[str, NodeType] = Field(default_factory=dict)
    """Nodes of other types, by name: H100 nodes for the trainer, L40S nodes for engines. A recipe selects them with
    ``layout.trainer.node_type`` and ``layout.inference.node_type``."""
    network: Network = Network()
    """Network between nodes."""
    preflight: PreflightSettings = PreflightSettings()
    software: Software = Software()
    """Modules, setup, interpreters and containers."""
    env: Variables = Field(default_factory=dict)
    """Environment variables of all roles."""
    runs_dir: str | None = None
    """Shared parent folder of run directories; default ./runs. ``~`` and ``$VARIABLES`` are expanded."""
    run_dir_mode: Literal["700", "750", "755"] = "700"
    """Permissions of a run directory. With 750 your group can read weights, rollouts and metrics, with 755 all users
    can; ``control/`` and ``launch/`` always have 700."""
    allow_shared_parent: bool = False
    """Accept run directories below a folder that other users can write and that has no sticky bit. They can replace a
    run directory there, and run code as its owner. Also ``submit --allow-shared-parent``."""
    scratch: Short[ScratchFolder] | None = None
    """Node-local folder, as path or block: TMPDIR of all processes, compile caches, and engines' copies of the weights,
    in a subfolder of the job. Default: TMPDIR of the job, or the system's temporary folder."""
    cache: Short[SharedCache] | None = None
    """Shared cache of models, datasets and container images, as path or block. `primerl-hpc prefetch` fills it, and
    all roles read it. Default: the caches of the Hugging Face libraries in the home folder."""
    storage: dict[str, StorageFolder] = Field(default_factory=dict)
    """Shared folders by name, with quota, purge age, and the parts of runs that they hold instead of the run directory:
    ``work: {path: $WORK/me, holds: [checkpoints]}``."""
    limits: tuple[JobLimit, ...] = ()
    """Limits of the site. Of those for the partition and QOS of a job, one must admit its nodes and walltime."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Named changes of this profile, selected with ``--variant``: ``debug: {scheduler: {qos: debug, time: 30}}``."""
    login: Login = Login()
    """Machines from which jobs are submitted."""
    templates: OneLine | None = None
    """Folder of site-specific sbatch templates, relative to this file: ``job.sbatch.j2``, ``partials/*.j2``."""
    offline: Bool = True
    """Compute nodes have no internet access: sets the offline mode of the Hugging Face libraries."""

    @property
    def held_parts(self) -> dict[str, StorageFolder]:
        """The folders of ``storage`` for parts of runs that are not in the run directory, by part."""
        return {part: folder for folder in self.storage.values() for part in folder.holds}

    @property
    def run_dir_bits(self) -> int:
        return int(self.run_dir_mode, 8)

    @field_validator("storage")
    @classmethod
    def _a_part_is_in_one_folder(cls, value: dict[str, StorageFolder]) -> dict[str, StorageFolder]:
        parts = [part for folder in value.values() for part in folder.holds]
        for part in parts:
            if parts.count(part) > 1:
                names = [name for name, folder in value.items() if part in folder.holds]
                raise ValueError(f"{part} can be held by one folder, not by {' and '.join(names)}")
        return value

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, value: str) -> str:
        if not is_valid_name(value):
            raise ValueError("must be letters, digits, '.', '_' or '-'")
        return value

    @model_validator(mode="after")
    def _spare_nodes_leave_work_nodes(self) -> Self:
        if self.scheduler.spare_nodes >= self.nodes:
            raise ValueError(
                f"scheduler.spare_nodes {self.scheduler.spare_nodes} must be less than nodes {self.nodes}"
            )
        if self.scheduler.spare_nodes and self.scheduler.type == "local":
            raise ValueError("scheduler.spare_nodes needs SLURM: a local run has one node")
        return self

    @model_validator(mode="after")
    def _elastic_warning_is_within_walltime(self) -> Self:
        check_margin(self.elastic.time, "elastic.time", self.scheduler.signal_margin_s)
        return self

    @model_validator(mode="after")
    def _node_types_can_be_requested(self) -> Self:
        for name, node_type in self.node_types.items():
            if not is_valid_name(name):
                raise ValueError(f"node_types.{name}: the name must be letters, digits, '.', '_' or '-'")
            if self.scheduler.type == "local":
                raise ValueError(f"node_types.{name} needs SLURM: a local run has one node")
            if node_type.arch not in (None, self.node.arch):
                raise ValueError(
                    f"node_types.{name}.arch is {node_type.arch}, but node.arch is {self.node.arch or 'null'}; all "
                    "nodes of a run must have one architecture, because the same interpreter checks all of them"
                )
            if bool(node_type.gpus) == bool(self.node.gpus):
                continue
            if self.node.gpus:
                raise ValueError(
                    f"node_types.{name}.gpus is 0, but engines and trainers of this profile need GPUs; "
                    "describe nodes without GPUs in cpu_partition"
                )
            raise ValueError(
                f"node_types.{name} has {node_type.gpus} GPUs, but node.gpus is 0; describe GPU nodes in node"
            )
        return self

    @model_validator(mode="after")
    def _segment_divides_nodes(self) -> Self:
        segment = self.scheduler.segment
        if segment is not None and segment > self.nodes:
            raise ValueError(f"scheduler.segment {segment} must be at most nodes ({self.nodes})")
        return self

    @model_validator(mode="after")
    def _grace_hopper_avoids_ll128(self) -> Self:
        """NCCL's protocol LL128 corrupts sums between such nodes (NVIDIA/nccl issue 2001, pull request 2053)."""
        protocol = self.network.env.get("NCCL_PROTO")
        allowed = isinstance(protocol, str) and _excludes_ll128(protocol)
        if self.node.is_grace_hopper and self.nodes > 1 and not allowed:
            raise ValueError(
                f"network.env: nodes with {self.node.gpu} need NCCL_PROTO: ^LL128, because NCCL's protocol LL128 "
                "silently corrupts data between them"
            )
        return self

    @property
    def scratch_folder(self) -> ScratchFolder | None:
        """``scratch`` in the long form."""
        scratch = self.scratch
        return ScratchFolder(path=scratch) if isinstance(scratch, str) else scratch

    @property
    def cache_path(self) -> str | None:
        """Path of ``cache``; None without one."""
        return self.cache.path if isinstance(self.cache, SharedCache) else self.cache

    @property
    def stages_models(self) -> bool:
        """True if base models are copied to node-local scratch."""
        return isinstance(self.cache, SharedCache) and self.cache.stage_models

    def runs_folder(self) -> Path:
        """Return the folder of run directories.

        Raises ConfigError if ``runs_dir`` contains a variable that is not set.
        """
        if self.runs_dir is None:
            return env.runs_dir()
        expanded = os.path.expandvars(self.runs_dir)
        if (unset := re.search(r"\$\{?(\w+)", expanded)) is not None:
            raise ConfigError(
                f"runs_dir: {self.runs_dir} contains ${unset[1]}, which is not set",
                hint="set it, or write the full path in the profile",
            )
        return Path(expanded).expanduser()

    @property
    def requested(self) -> Scheduler:
        """Return ``scheduler`` with what a job must request for its scratch folder."""
        folder = self.scratch_folder
        if folder is None or (folder.constraint is None and folder.gres is None):
            return self.scheduler
        features = [text for text in (self.scheduler.constraint, folder.constraint) if text]
        both = [f"({text})" if "|" in text and len(features) > 1 else text for text in features]
        gres = (*self.scheduler.gres, *([folder.gres] if folder.gres else []))
        return self.scheduler.model_copy(update={"constraint": "&".join(both) or None, "gres": gres})

    @property
    def work_nodes(self) -> int:
        """Number of nodes that a plan may use."""
        return self.nodes - self.scheduler.spare_nodes

    @property
    def accelerator(self) -> Literal["gpu", "cpu"]:
        return "gpu" if self.node.gpus else "cpu"

    @property
    def accelerators_per_node(self) -> int:
        return self.node.accelerators
