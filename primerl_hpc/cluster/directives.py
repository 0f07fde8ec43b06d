"""Convert profile keys to ``sbatch`` and ``srun`` options: the table of names, and the order in the script.

    options(profile.scheduler, profile.node)      # [("partition", "gpu"), ("exclusive", None), ("gres", "gpu:8"), …]

An option without a value has the value None. The renderer quotes values.
"""

from __future__ import annotations

import re
from typing import Literal, Protocol

Option = tuple[str, str | None]


class SchedulerKeys(Protocol):
    """The keys of `scheduler_schema.Scheduler` that are read by attribute; `OPTION_OF_KEY` names the others."""

    @property
    def type(self) -> str: ...
    @property
    def exclusive(self) -> bool | str: ...
    @property
    def gpu_request(self) -> str: ...
    @property
    def gpu_type(self) -> str | None: ...
    @property
    def gres(self) -> tuple[str, ...]: ...
    @property
    def licenses(self) -> tuple[str, ...]: ...
    @property
    def mail_type(self) -> tuple[str, ...]: ...
    @property
    def extra(self) -> tuple[str, ...]: ...
    @property
    def mpi(self) -> str | None: ...
    @property
    def srun_extra(self) -> tuple[str, ...]: ...
    @property
    def charged_account(self) -> str | None: ...


class NodeKeys(Protocol):
    """The keys of `node_types.Node` that determine options."""

    @property
    def gpus(self) -> int: ...
    @property
    def gpu(self) -> str | None: ...
    @property
    def gpu_vendor(self) -> Literal["nvidia", "amd"] | None: ...
    @property
    def cores(self) -> int: ...
    @property
    def threads_per_core(self) -> int | None: ...


OPTION_OF_KEY = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "reservation": "reservation",
    "time": "time",
    "time_min": "time-min",
    "memory": "mem",
    "memory_per_cpu": "mem-per-cpu",
    "memory_per_gpu": "mem-per-gpu",
    "exclusive": "exclusive",
    "gres": "gres",
    "nodelist": "nodelist",
    "exclude": "exclude",
    "switches": "switches",
    "segment": "segment",
    "hint": "hint",
    "licenses": "licenses",
    "dependency": "dependency",
    "begin": "begin",
    "nice": "nice",
    "wckey": "wckey",
    "comment": "comment",
    "mail_type": "mail-type",
    "mail_user": "mail-user",
    "requeue": "requeue",
    "signal_margin_s": "signal",
}
"""Keys of `scheduler_schema.Scheduler` → ``sbatch`` options."""

OWN_OPTIONS = frozenset(
    (
        *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node"),
        *("gpus-per-task", "signal", "open-mode", "output", "error", "input", "requeue", "no-requeue"),
        *("array", "export", "wait", "wrap", "test-only", "parsable", "quiet", "hold", "kill-on-invalid-dep"),
    )
)
"""Options set by the plan or the supervisor; a second one in the script would silently break the run."""

OWN_STEP_OPTIONS = frozenset(
    (
        *("overlap", "job-name", "nodes", "ntasks", "ntasks-per-node", "nodelist", "het-group"),
        *("cpus-per-task", "mem", "gres", "export", "kill-on-bad-exit", "input", "output", "error"),
        *("open-mode", "wait"),
    )
)
"""srun options that `runtime/steps/srun.py` sets, or on which its exit status and logs depend."""

NODE_OPTIONS = {"threads-per-core": "node.threads_per_core"}
"""Options that keys of other blocks determine."""

_PLAIN_KEYS = ("qos", "constraint", "reservation", "time", "time_min")
_LATER_KEYS = ("nodelist", "exclude", "switches", "segment", "hint")
_LAST_KEYS = ("dependency", "begin", "nice", "wckey", "comment")


def options(scheduler: SchedulerKeys, node: NodeKeys, num_nodes: int = 1) -> list[Option]:
    """Return the sbatch options of a profile for nodes of one shape, without the number of nodes."""
    account, threads = scheduler.charged_account, node.threads_per_core
    return [
        *_set_keys(scheduler, ("partition",)),
        *([("account", account)] if account is not None else []),
        *_set_keys(scheduler, _PLAIN_KEYS),
        *_memory(scheduler),
        *_sharing(scheduler),
        *_accelerators(scheduler, node, num_nodes),
        *([("cpus-per-task", str(node.cores))] if node.cores > 1 else []),
        *([("threads-per-core", str(threads))] if threads is not None else []),
        *_set_keys(scheduler, _LATER_KEYS),
        *([("licenses", ",".join(scheduler.licenses))] if scheduler.licenses else []),
        *_set_keys(scheduler, _LAST_KEYS),
        *([("mail-type", ",".join(scheduler.mail_type))] if scheduler.mail_type else []),
        *_set_keys(scheduler, ("mail_user",)),
        *(parse_option(text) for text in scheduler.extra),
    ]


def parse_option(text: str) -> Option:
    """``--wait-all-nodes=1`` → ("wait-all-nodes", "1"); ``--no-kill`` → ("no-kill", None)"""
    name, equals, value = text.removeprefix("--").partition("=")
    return name, value if equals else None


def srun_args(scheduler: SchedulerKeys) -> tuple[str, ...]:
    """Return the arguments of every srun: ``mpi``, unless ``srun_extra`` sets it, and ``srun_extra``."""
    is_named = any(parse_option(text)[0] == "mpi" for text in scheduler.srun_extra)
    is_default = scheduler.mpi is None or is_named or scheduler.type == "local"
    return (*(() if is_default else (f"--mpi={scheduler.mpi}",)), *scheduler.srun_extra)


def gpu_vendor(node: NodeKeys) -> Literal["nvidia", "amd"]:
    """Return the profile's ``gpu_vendor``, or derive it from the name: AMD's accelerators are named MI and a number."""
    is_amd = re.search(r"\b(MI\d|AMD|Instinct|Radeon)", node.gpu or "", re.IGNORECASE) is not None
    return node.gpu_vendor or ("amd" if is_amd else "nvidia")


def _set_keys(scheduler: SchedulerKeys, keys: tuple[str, ...]) -> list[Option]:
    return [
        (OPTION_OF_KEY[key], str(value)) for key in keys if (value := getattr(scheduler, key)) is not None
    ]


def _memory(scheduler: SchedulerKeys) -> list[Option]:
    per_unit = _set_keys(scheduler, ("memory_per_cpu", "memory_per_gpu"))
    return per_unit or _set_keys(scheduler, ("memory",))


def _sharing(scheduler: SchedulerKeys) -> list[Option]:
    if scheduler.exclusive is False:
        return []
    return [("exclusive", None if scheduler.exclusive is True else scheduler.exclusive)]


def _accelerators(scheduler: SchedulerKeys, node: NodeKeys, num_nodes: int) -> list[Option]:
    """Return the GPU options in the site's form; ``--gres`` also contains the other generic resources of a node."""
    num_gpus = node.gpus * (num_nodes if scheduler.gpu_request == "gpus" else 1)
    count = f"{scheduler.gpu_type}:{num_gpus}" if scheduler.gpu_type else str(num_gpus)
    request = scheduler.gpu_request if node.gpus else "none"
    gres = [f"gpu:{count}"] if request == "gres" else []
    gres += scheduler.gres
    return [
        *([("gres", ",".join(gres))] if gres else []),
        *([(request, count)] if request not in ("gres", "none") else []),
    ]
