"""Blocks of the cluster profile about the site: limits of jobs, scratch and shared folders, login nodes."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from primerl_hpc.cluster.value_types import OneLine, SlurmTime
from primerl_hpc.common.block import Block, Bool, PositiveFloat, PositiveInt


class JobLimit(Block):
    """Limit of a partition or a QOS, for jobs of ``min_nodes`` to ``max_nodes`` nodes."""

    partition: OneLine | None = None
    """Partition of this limit; null: any."""
    qos: OneLine | None = None
    """QOS of this limit; null: any."""
    min_nodes: PositiveInt = 1
    """Smallest number of nodes of a job."""
    max_nodes: PositiveInt | None = None
    """Largest number of nodes of a job; null: no limit."""
    max_gpus: PositiveInt | None = None
    """Largest number of GPUs of a job; null: no limit."""
    time: SlurmTime | None = None
    """Longest walltime. If ``scheduler.time`` is null, it is the walltime of such jobs."""
    node_minutes: PositiveInt | None = None
    """Largest product of nodes and minutes; null: no limit."""
    max_running: PositiveInt | None = None
    """Number of your jobs that may run at once; null: no limit."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes {self.max_nodes} is less than min_nodes {self.min_nodes}")
        return self


class ScratchFolder(Block):
    """A node-local folder; the path alone is short for one that needs no request."""

    path: OneLine
    """The folder. ``~`` and ``$VARIABLES`` are expanded on the node (``$TMPDIR``, ``/mnt/bb/$USER``)."""
    kind: Literal["disk", "ram"] | None = None
    """``ram``: its content is in memory. The preflight refuses a folder in memory that is a ``disk`` here. Null: not
    checked."""
    counts_as_job_memory: Bool = False
    """The content of a folder in memory counts toward the memory of the job."""
    size_gib: PositiveFloat | None = None
    """Size in GiB; the preflight reports a folder that is smaller."""
    constraint: OneLine | None = None
    """Node feature that a job must request to have the folder, added to ``scheduler.constraint``: ``nvme``."""
    gres: OneLine | None = None
    """Generic resource that a job must request to have the folder, added to ``scheduler.gres``: ``tmpfs:200G``."""


class SharedCache(Block):
    """A shared folder for what runs of several users and jobs read again; the path alone is short for the defaults."""

    path: OneLine
    """The folder, seen by login and compute nodes. ``~`` and ``$VARIABLES`` are expanded when the profile is loaded.
    Models and datasets of the hub are in ``hub/`` and ``datasets/``, container images in ``images/``."""
    stage_models: Bool = False
    """Copy base models to the job's folder in ``scratch``, once for each node. The nodes divide the reading among each
    other and exchange the rest, so that the shared filesystem sends a model once, not once for each engine."""
    keep_compiled: Bool = False
    """Keep the compile caches of engines and trainers (Inductor, Triton, vLLM, FlashInfer, DeepGEMM, MIOpen) in
    ``compile-<uid>/``, one archive per role, versions, GPU and model. A job restores them into its scratch folder."""
    compiled_gib: PositiveFloat = 20.0
    """Size of all archives of compile caches of a user in GiB; the oldest ones are deleted."""


class StorageFolder(Block):
    """A shared folder of the site, for `doctor` and for warnings at submission."""

    path: OneLine
    """The folder. ``~`` and ``$VARIABLES`` are expanded."""
    purge_days: PositiveInt | None = None
    """Files are deleted after this many days without access; null: never."""
    quota_gib: PositiveFloat | None = None
    """Quota in GiB."""
    quota_files: PositiveInt | None = None
    """Quota of files and folders."""
    holds: tuple[Literal["checkpoints", "weights"], ...] = ()
    """Parts of runs that are kept in this folder: the run directory has a symbolic link to each. For sites whose
    scratch is fast, but purged or short of files, and whose project folder is neither."""

    @property
    def expanded_path(self) -> Path | None:
        """The path with variables replaced; None if one of them is not set here."""
        text = os.path.expandvars(self.path)
        return None if "$" in text else Path(text).expanduser()


class Login(Block):
    """The machines from which jobs of this profile are submitted."""

    hosts: tuple[OneLine, ...] = ()
    """Patterns of their host names (``trig-login*``); empty: any machine."""

    def admits(self, host: str) -> bool:
        short = host.partition(".")[0]
        return not self.hosts or any(
            fnmatch.fnmatchcase(name, pattern) for pattern in self.hosts for name in (host, short)
        )
