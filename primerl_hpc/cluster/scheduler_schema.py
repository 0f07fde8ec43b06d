"""Block ``scheduler`` of the cluster profile, and the jobs with requests of their own: elastic engines, CPU nodes."""

from __future__ import annotations

import re
from typing import ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from primerl_hpc.cluster import directives
from primerl_hpc.cluster.value_types import MailType, Memory, OneLine, Pattern, SlurmTime, Suffix, Word
from primerl_hpc.common.block import Block, Bool, Int, NonNegativeInt, PositiveFloat, PositiveInt
from primerl_hpc.slurm.jobs import minutes

STARTS_S = 90
"""No warning during this time of a job: SLURM sends it up to 60 s early, and the batch script needs some to start."""


def check_margin(time: str | None, key: str, margin_s: int) -> None:
    """Raise ValueError if the walltime is not longer than the margin: the warning would be due before the job
    starts."""
    limit = minutes(time)
    if limit is not None and margin_s >= 60 * limit:
        raise ValueError(
            f"the walltime {time} ({limit:g} minutes) is not longer than signal_margin_s {margin_s}; "
            f"raise {key} or lower signal_margin_s"
        )


def _with_suffix(account: str | None, suffix: str | None) -> str | None:
    if account is None or suffix is None or account.endswith(suffix):
        return account
    return account + suffix


class GpuShare(Block):
    """Share of one GPU in a job that requests a part of a node; null: the node's divided by its GPUs."""

    cores: PositiveInt | None = None
    """Number of cores per GPU."""
    memory: Memory | None = None
    """Memory per GPU, e.g. ``216G``."""

    @field_validator("memory")
    @classmethod
    def _memory_is_an_amount(cls, value: str | None) -> str | None:
        if value is not None and not int(value.rstrip("KMGTB")):
            raise ValueError("must be greater than 0")
        return value


class SubmitEnvironment(Block):
    """Variables of the submitting shell that reach the run, as names or patterns (``MY_SITE_*``). What passes and what
    does not is recorded in provenance.json."""

    keep: tuple[Pattern, ...] = ()
    """Pass these in addition to the list (docs/security.md): those of the user, modules, Python, CUDA, networks, …
    A secret passes only by its name, never by a pattern."""
    drop: tuple[Pattern, ...] = ()
    """Do not pass these, e.g. ``BASH_ENV``."""


class Scheduler(Block):
    """Options of SLURM, or of a local run."""

    removed: ClassVar[dict[str, str]] = {"cpu_account": "set cpu_partition.account, the complete name"}
    type: Literal["slurm", "local"] = "slurm"
    """``slurm``, or ``local``: a supervisor and its child processes on this machine, by submitit's local executor."""
    partition: OneLine | None = None
    """Partition, or several separated by commas: SLURM uses the one that starts first."""
    account: OneLine | None = None
    """Account to charge; ``sacctmgr show associations user=$USER`` lists yours."""
    account_suffix: Suffix | None = None
    """Text that the site appends to a project's name for work on these GPUs (``-delta-gpu``); appended to ``account``
    unless it ends with it."""
    cpu_account_suffix: Suffix | None = None
    """As ``account_suffix``, for nodes of ``cpu_partition``; its own ``account`` takes precedence."""
    qos: OneLine | None = None
    """Quality of service; at some sites it determines walltime and priority instead of the partition."""
    constraint: OneLine | None = None
    """Node features, e.g. ``gpu&hbm80g``."""
    reservation: OneLine | None = None
    """Reservation of nodes to use."""
    time: SlurmTime | None = None
    """Walltime of one job: minutes, ``hours:minutes:seconds`` or ``days-hours:minutes:seconds``."""
    time_min: SlurmTime | None = None
    """Shortest walltime to accept: SLURM may shorten ``time`` down to it to start the job earlier."""
    gpu_request: Literal["gres", "gpus-per-node", "gpus-per-task", "gpus", "none"] = "gres"
    """Option that requests GPUs (a job has one task per node); ``gpus``: those of all nodes (``--gpus``); ``none``:
    nodes include their GPUs."""
    gpu_type: Word | None = None
    """GPU type in the request: ``h100`` in ``gpu:h100:8``."""
    gres: tuple[OneLine, ...] = ()
    """Generic resources of each node in addition to GPUs, e.g. ``nvme:1``."""
    exclusive: Bool | Literal["user", "mcs"] = True
    """Request exclusive nodes; ``user``: share them only with your own jobs."""
    memory: Memory | None = "0"
    """Memory of a node (``--mem``), e.g. ``480G``; ``0``: all memory; null: no option."""
    memory_per_cpu: Memory | None = None
    """``--mem-per-cpu``, in place of ``memory``."""
    memory_per_gpu: Memory | None = None
    """``--mem-per-gpu``, in place of ``memory``."""
    nodelist: OneLine | None = None
    """Nodes that the job must include, e.g. ``n[01-04]``."""
    exclude: OneLine | None = None
    """Nodes that the job must not include, e.g. ``n07,n09``."""
    switches: OneLine | None = None
    """Maximum number of leaf switches, and how long to wait for them: ``1`` or ``1@12:00:00``."""
    segment: PositiveInt | None = None
    """Number of nodes that must be in one block of the network (``--segment``, with topology/block since SLURM 24.05);
    it must divide the number of nodes of a job."""
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = None
    """``--hint``; ``nomultithread``: one task per core on nodes with hardware threads."""
    licenses: tuple[OneLine, ...] = ()
    """Licenses that the job needs; at some sites also filesystems: ``scratch``, ``matlab:1``."""
    dependency: OneLine | None = None
    """Condition for the start of the job, e.g. ``afterok:123``, ``singleton``."""
    begin: OneLine | None = None
    """Earliest start, e.g. ``2026-12-24T18:00:00`` or ``now+2hours``."""
    nice: Int | None = None
    """Amount by which to lower the priority."""
    wckey: OneLine | None = None
    """Workload characterization key, at sites that use it for accounting."""
    comment: OneLine | None = None
    """Arbitrary text, displayed by squeue and sacct; some sites use it for accounting."""
    mail_type: tuple[MailType, ...] = ()
    """Events for which SLURM sends mail to ``mail_user``: ``[END, FAIL, TIME_LIMIT_90]``."""
    mail_user: OneLine | None = None
    """Mail address; null: the submitting user."""
    signal_margin_s: PositiveInt = 300
    """Latest time before the end of the walltime, in seconds, at which the run saves and stops. It stops earlier if its
    steps and saves take longer."""
    requeue: Bool = True
    """Allow SLURM to requeue the job after a preemption or a node failure."""
    spare_nodes: NonNegativeInt = 0
    """Additional nodes that replace bad and lost nodes, and are idle until then."""
    extra: tuple[OneLine, ...] = ()
    """Other sbatch options, as ``--key=value`` or ``--key``. Values are quoted automatically."""
    per_gpu: GpuShare = GpuShare()
    may_name_nodes: Bool = True
    """The site accepts jobs that name or exclude nodes. If false, ``nodelist`` and ``exclude`` are refused, and a job
    that is requeued because of a bad node does not exclude it."""
    ask_every_s: PositiveFloat = 5.0
    """Minimum time in seconds between repeated questions to SLURM (squeue, sacct) by all processes of a run together.
    Some sites allow one per minute."""
    max_jobs: PositiveInt | None = None
    """Number of jobs that you may have in the queue; it limits elastic engines and chains."""
    step_memory: Bool = True
    """Start steps with ``--mem=0`` (all memory of the job); false where SLURM refuses the option."""
    step_gres: Bool = True
    """Start steps without GPUs with ``--gres=none``; false where SLURM refuses the option."""
    submit_env: SubmitEnvironment = SubmitEnvironment()
    mpi: Word | None = "none"
    """``--mpi`` of every srun. ``none`` avoids a PMI server for each step: no process of a run is an MPI program.
    Null: the site's default."""
    srun_extra: tuple[OneLine, ...] = ()
    """Additional arguments of every srun, as ``--key=value``."""

    @field_validator("extra")
    @classmethod
    def _extra_are_options_of_the_site(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        keys = {option: key for key, option in directives.OPTION_OF_KEY.items()}
        for text in value:
            if not re.fullmatch(r"--[a-z][a-z0-9-]+(=.*)?", text):
                raise ValueError(f"{text!r} is not an option; write it as --key=value")
            option, _ = directives.parse_option(text)
            if option in keys or option in directives.NODE_OPTIONS:
                key = directives.NODE_OPTIONS.get(option) or f"scheduler.{keys[option]}"
                raise ValueError(f"--{option} has its own key: {key}")
            if option in directives.OWN_OPTIONS:
                raise ValueError(f"--{option} is set by the plan")
        return value

    @field_validator("srun_extra")
    @classmethod
    def _srun_extra_are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if bad := [text for text in value if not re.fullmatch(r"--[a-z][a-z0-9-]+(=.*)?", text)]:
            raise ValueError(f"{bad[0]!r} is not an option; write it as --key=value")
        for text in value:
            option, _ = directives.parse_option(text)
            if option in directives.OWN_STEP_OPTIONS:
                raise ValueError(f"--{option} is set by the plan")
        return value

    @model_validator(mode="after")
    def _nodes_are_named_only_where_allowed(self) -> Self:
        for key in ("nodelist", "exclude"):
            if getattr(self, key) is not None and not self.may_name_nodes:
                raise ValueError(
                    f"{key}: this site does not accept jobs that name nodes (may_name_nodes: false); remove {key}"
                )
        return self

    @property
    def charged_account(self) -> str | None:
        """Return ``account`` with its suffix."""
        return _with_suffix(self.account, self.account_suffix)

    @property
    def charged_cpu_account(self) -> str | None:
        """Return the account of jobs without GPUs, with its suffix."""
        return _with_suffix(self.account, self.cpu_account_suffix)

    @property
    def warning_s(self) -> int | None:
        """Return how long before its end SLURM warns the job, in seconds; None: never. At most ``signal_margin_s``.

        The signal ends a batch script that has not reached its first line, so none may be sent while a job starts. The
        supervisor of a short job then relies on the clock alone.
        """
        limits = [60 * limit - STARTS_S for time in (self.time, self.time_min) if (limit := minutes(time))]
        warning_s = int(min([self.signal_margin_s, *limits]))
        return warning_s if warning_s > 0 else None

    @model_validator(mode="after")
    def _memory_is_given_once(self) -> Self:
        given = [
            key
            for key in ("memory", "memory_per_cpu", "memory_per_gpu")
            if key in self.model_fields_set and getattr(self, key) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are mutually exclusive")
        return self

    @model_validator(mode="after")
    def _warning_is_within_walltime(self) -> Self:
        check_margin(self.time, "time", self.signal_margin_s)
        check_margin(self.time_min, "time_min", self.signal_margin_s)
        least, most = minutes(self.time_min), minutes(self.time)
        if least is not None and most is not None and least > most:
            raise ValueError(f"time_min {self.time_min} is longer than time {self.time}")
        return self


class CpuPartition(Block):
    """Nodes without GPUs for the orchestrator (``layout.orchestrator.place: cpu-partition``), one per run."""

    partition: OneLine
    """Partition of these nodes."""
    account: OneLine | None = None
    """Account; default: the account of ``scheduler``. The walltime is that of ``scheduler``."""
    qos: OneLine | None = None
    """Quality of service; default: the one of ``scheduler``."""
    constraint: OneLine | None = None
    """Node features to request."""
    cores: PositiveInt = 8
    """Number of cores to request."""
    memory: Memory | None = "32G"
    """Memory to request, as in ``scheduler.memory``."""
    exclusive: Bool = False
    """Request an exclusive node."""


class Elastic(Block):
    """Scheduler keys of the jobs of elastic engines (``layout.inference.elastic``); null: the value of
    ``scheduler``."""

    partition: OneLine | None = None
    """Partition. It may be preemptible: the run continues while an engine is preempted."""
    account: OneLine | None = None
    """Account to charge."""
    qos: OneLine | None = None
    """Quality of service."""
    constraint: OneLine | None = None
    """Node features to request."""
    time: SlurmTime | None = None
    """Walltime of an engine's job, which is requeued when it expires."""
    max_engines: NonNegativeInt | None = None
    """Number of engines in jobs of their own that the site's limits admit at once; null: limited by ``limits`` and
    ``scheduler.max_jobs`` only."""
