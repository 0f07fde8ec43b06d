"""Profile keys as ``sbatch`` options: the one table of their names, and the options of a profile in the order of the script.

    options(profile.scheduler, profile.node)      # [("partition", "gpu"), ("exclusive", None), ("gres", "gpu:8"), …]

A value of None is an option without value. How a value is quoted is the renderer's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primerl_hpc.cluster.schema import Node, Scheduler

Option = tuple[str, str | None]

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
"""Profile keys of `Scheduler` → the ``sbatch`` option that each becomes."""

OWN_OPTIONS = frozenset(
    (
        *("job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node"),
        *("gpus-per-task", "signal", "open-mode", "output", "error", "input", "requeue", "no-requeue"),
        *("array", "export", "wait", "wrap", "test-only", "parsable", "quiet", "hold", "kill-on-invalid-dep"),
    )
)
"""Options that the plan or the supervisor decide; a second one in the script would break the run in silence."""

OWN_STEP_OPTIONS = frozenset(
    (
        *("overlap", "job-name", "nodes", "ntasks", "ntasks-per-node", "nodelist", "het-group"),
        *("cpus-per-task", "mem", "gres", "export", "kill-on-bad-exit", "input", "output", "error"),
        *("open-mode", "wait"),
    )
)
"""Options of srun that a step of ours has (`runtime/srun_step.py`), or that its ending and its log rely on."""

_PLAIN_KEYS = ("partition", "account", "qos", "constraint", "reservation", "time", "time_min")
_LATER_KEYS = ("nodelist", "exclude", "switches", "hint")
_LAST_KEYS = ("dependency", "begin", "nice", "wckey", "comment")


def options(scheduler: Scheduler, node: Node) -> list[Option]:
    """What the site's profile asks of sbatch for nodes of one shape, but for their number."""
    return [
        *_set_keys(scheduler, _PLAIN_KEYS),
        *_memory(scheduler),
        *_sharing(scheduler),
        *_accelerators(scheduler, node),
        *([("cpus-per-task", str(node.cores))] if node.cores > 1 else []),
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


def _set_keys(scheduler: Scheduler, keys: tuple[str, ...]) -> list[Option]:
    return [
        (OPTION_OF_KEY[key], str(value)) for key in keys if (value := getattr(scheduler, key)) is not None
    ]


def _memory(scheduler: Scheduler) -> list[Option]:
    per_unit = _set_keys(scheduler, ("memory_per_cpu", "memory_per_gpu"))
    return per_unit or _set_keys(scheduler, ("memory",))


def _sharing(scheduler: Scheduler) -> list[Option]:
    if scheduler.exclusive is False:
        return []
    return [("exclusive", None if scheduler.exclusive is True else scheduler.exclusive)]


def _accelerators(scheduler: Scheduler, node: Node) -> list[Option]:
    """GPUs in the site's spelling; ``--gres`` also carries every other generic resource of a node."""
    count = f"{scheduler.gpu_type}:{node.gpus}" if scheduler.gpu_type else str(node.gpus)
    asked = scheduler.gpu_request if node.gpus else "none"
    gres = [f"gpu:{count}"] if asked == "gres" else []
    gres += scheduler.gres
    return [
        *([("gres", ",".join(gres))] if gres else []),
        *([(asked, count)] if asked not in ("gres", "none") else []),
    ]
