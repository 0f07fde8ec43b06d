"""Explain a refusal of sbatch in one sentence with the key of the profile to change.

    raise explain_refusal("sbatch: error: Batch job submission failed: Invalid qos specification", [{"qos": "long"}])
    # QOS long does not exist or is not available to you; scheduler.qos of the profile, or --qos; …
    srun_reason("srun: error: Unable to create step: …")      # the line of srun that states why a step did not start

SLURM's messages (``slurm_strerror``) are the same from 20.11 to 26.05; they are appended in parentheses. A longer text,
such as that of a site's job_submit plug-in, is printed in full below the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.slurm.commands import NO_ADDRESS, no_address, printable
from primerl_hpc.slurm.partitions import Partition, find_excess


@dataclass(frozen=True)
class Refusal:
    pattern: str
    """Regular expression that matches the output of sbatch."""
    cause: str
    """Explanation. ``{partition}`` and other options are replaced by the script's values."""
    hint: str
    is_of_partition: bool = False
    """True if a limit of the partition is a possible reason."""


_LIMITS = "wait until other jobs end, or request fewer nodes or a shorter --time; `sacctmgr show qos` lists the limits"

_OPTION = re.compile(r"(?:unrecognized|unknown|invalid) option\W+([a-z][a-z-]*)", re.IGNORECASE)
_USAGE = re.compile(r"Try [\"']?s\w+ --help")
_KEY_OF_OPTION = {
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), "scheduler.gpu_request"),
    "mem": "scheduler.memory",
    "mem-per-cpu": "scheduler.memory_per_cpu",
    "mem-per-gpu": "scheduler.memory_per_gpu",
    "threads-per-core": "node.threads_per_core",
}
"""Options of sbatch whose key has another name."""
_PLUGIN = "{} is a plug-in that this site lacks; choose another software.default.container.kind"
_KEY_OF_STEP_OPTION = {
    "mpi": "set scheduler.mpi of the profile to null",
    **dict.fromkeys(("container-image", "container-mounts", "container-workdir"), _PLUGIN.format("pyxis")),
    "environment": _PLUGIN.format("the Container Engine"),
    **dict.fromkeys(("uenv", "view"), _PLUGIN.format("uenv")),
}
"""Options of srun that the profile sets elsewhere than in scheduler.srun_extra."""
MOST_INLINE = 2
"""Maximum number of lines of SLURM's output that are quoted in the sentence."""

DOCTOR = ", as primerl-hpc doctor does"
"""End of the hint for a request that no node satisfies, except in that command itself."""

REFUSALS = (
    Refusal(
        "Unspecified error",
        "a rule of this site (job_submit) rejects it",
        "change the profile or the options of this command as the site's message requests",
    ),
    Refusal(
        "Invalid job array",
        "elastic engines need a job array ({array}), which this cluster does not allow, or not of this size",
        "set layout.inference.elastic to false, or ask the site to allow job arrays (MaxArraySize of slurm.conf)",
    ),
    Refusal(
        "invalid partition",
        "partition {partition} does not exist",
        "scheduler.partition of the profile, or --partition; `sinfo -s` lists them",
    ),
    Refusal(
        "No partition specified or system default",
        "no partition was given, and this site has no default partition",
        "scheduler.partition of the profile, or --partition; `sinfo -s` lists them",
    ),
    Refusal(
        "group not permitted to use this partition",
        "you have no access to partition {partition}",
        "choose another --partition, or ask the site",
    ),
    Refusal(
        "Required partition not available|Partition in DOWN state",
        "partition {partition} does not accept jobs now",
        "wait, or choose another --partition",
    ),
    Refusal(
        "Invalid account",
        "account {account} does not exist or has no access to partition {partition}",
        "scheduler.account of the profile, or --account; `sacctmgr show associations user=$USER` lists yours",
    ),
    Refusal(
        "Invalid qos",
        "QOS {qos} does not exist or is not available to you",
        "scheduler.qos of the profile, or --qos; `sacctmgr show associations user=$USER format=qos` lists yours",
    ),
    Refusal(
        "Requested time limit is invalid|Time limit specification required",
        "the walltime {time} exceeds the limit of the partition",
        "scheduler.time of the profile, or --time; `sinfo -o '%P %l'` shows the limits",
        is_of_partition=True,
    ),
    Refusal(
        "Invalid time-min",
        "scheduler.time_min exceeds the walltime or a limit",
        "lower scheduler.time_min of the profile",
    ),
    Refusal(
        "SubmitJob|job submit limit reached|MaxSubmit",
        "you have reached this site's limit of queued jobs",
        "wait until other jobs end, or cancel some",
    ),
    Refusal(
        r"violates accounting/QOS policy",
        "the job exceeds a limit of your account or QOS (queued jobs, size or walltime)",
        _LIMITS,
    ),
    Refusal(
        "Invalid feature|Invalid preferred feature",
        "no node has the features {constraint}",
        "scheduler.constraint of the profile; `sinfo -o '%P %f'` lists them",
    ),
    Refusal(
        r"Invalid generic resource|Invalid GRES|Invalid Trackable RESource|Insufficient GRES",
        "this site does not have the requested GPUs ({gres}{gpus-per-node}{gpus-per-task})",
        "scheduler.gpu_request, gpu_type and gres of the profile; `sinfo -o '%P %G'` lists the GPUs of nodes",
    ),
    Refusal(
        "Requested node configuration is not available|Requested partition configuration not available",
        "no node of the partition satisfies the request of the profile",
        "compare node.cores, node.gpus, scheduler.gpu_type, scheduler.memory and scheduler.constraint of the profile "
        "with `sinfo -o '%P %D %c %G %m %f'`" + DOCTOR,
        is_of_partition=True,
    ),
    Refusal(
        "Node count specification invalid|Requested nodes not in this partition",
        "partition {partition} does not have {nodes} nodes",
        "request fewer nodes, or choose another --partition; `sinfo -s` lists their sizes",
        is_of_partition=True,
    ),
    Refusal(
        "Memory (required|specification)",
        "nodes do not have the requested memory ({mem}{mem-per-cpu}{mem-per-gpu})",
        "scheduler.memory of the profile; `sinfo -o '%P %m'` lists the memory of nodes",
    ),
    Refusal(
        "CPU count specification invalid|More processors requested|more tasks than available processors",
        "nodes do not have {cpus-per-task} CPUs",
        "node.cores of the profile; `sinfo -o '%P %c'` lists the cores of nodes",
    ),
    Refusal(
        "reservation",
        "reservation {reservation} does not exist, has ended or is not available to you",
        "scheduler.reservation of the profile, or --reservation; `scontrol show reservation` lists them",
    ),
    Refusal(
        "Invalid license",
        "this site does not have the licenses {licenses}",
        "scheduler.licenses of the profile",
    ),
    Refusal(
        "Invalid wckey", "workload key {wckey} is not available to you", "scheduler.wckey of the profile"
    ),
    Refusal(
        "Job dependency problem",
        "SLURM cannot wait for {dependency}",
        "use jobs that squeue or sacct still list",
    ),
    Refusal(
        "Invalid node name",
        "a node of scheduler.nodelist or exclude does not exist",
        "`sinfo -N` lists the nodes",
    ),
    Refusal(
        "(unrecognized|unknown|invalid) option|Invalid directive",
        "this version of sbatch does not support an option of the script",
        "remove it from scheduler.extra of the profile, or correct your own template",
    ),
    Refusal(
        "Invalid --[a-z-]+ specification|Invalid numeric value",
        "sbatch cannot parse the value of an option",
        "correct it in scheduler of the profile",
    ),
    Refusal(
        "authenticat|munge",
        "SLURM cannot authenticate this machine",
        "try another login node; if that fails too, ask the site (munge)",
    ),
    Refusal(
        "parameter too long|too large",
        "a directive or the script is longer than SLURM accepts",
        "shorten the longest value of scheduler in the profile, or your own template",
    ),
    Refusal(
        "permission denied",
        "you are not allowed to submit jobs here",
        "ask the site for an account on this cluster",
    ),
)


def explain_refusal(
    output: str,
    components: Sequence[Mapping[str, str | None]],
    ask_partitions: Callable[[], Sequence[Partition]] = tuple,
) -> SchedulerError:
    """Return the error for the ``output`` of sbatch; ``components`` are the script's directives.

    ``ask_partitions`` is called if a limit of the partition may be the reason.
    """
    options = {name: value for component in components for name, value in component.items()}
    lines = [line for line in printable(output).splitlines() if not _USAGE.match(line)]
    printed = [_plain(line) for line in lines]
    last = list(dict.fromkeys(printed))[-MOST_INLINE:]
    message, details = "; ".join(last) or "sbatch printed no reason", ""
    if len(set(printed)) > MOST_INLINE:  # the last line is SLURM's; a site's text may contain anything
        last, message = printed[-1:], printed[-1]
        details = "\n".join(["SLURM printed:", *(f"    {line}" for line in printed)])
    if NO_ADDRESS.search(output):
        return no_address(message)
    for refusal in REFUSALS:
        if re.search(refusal.pattern, "\n".join(last), re.IGNORECASE):
            cause = re.sub(r"\{([a-z-]+)\}", lambda match: _value(options, match[1]), refusal.cause)
            hint = hint_about_option(message) or refusal.hint
            if refusal.is_of_partition and (excess := find_excess(components, ask_partitions())) is not None:
                cause, hint = excess.what, excess.remedy
            cause = f"SLURM refused the job: {' '.join(cause.split())} ({message})"
            return SchedulerError(cause, hint=hint, details=details)
    return SchedulerError(f"SLURM refused the job: {message}", details=details)


def hint_about_option(message: str) -> str:
    """Return the key of the profile to change if ``message`` rejects an option of sbatch or srun; empty otherwise."""
    if (found := _OPTION.search(message)) is None:
        return ""
    option = found[1]
    if "srun" in message:
        key = _KEY_OF_STEP_OPTION.get(option, "remove it from scheduler.srun_extra of the profile")
        return f"this SLURM has no srun option --{option}: {key}"
    key = _KEY_OF_OPTION.get(option, f"scheduler.{option.replace('-', '_')}")
    since = ", which needs SLURM 24.05," if option == "segment" else ""
    return (
        f"this SLURM has no option --{option}: set {key}{since} to null in the profile, or remove the option from "
        "scheduler.extra or your own template"
    )


def srun_reason(output: str) -> str:
    """Return the line of srun's ``output`` that states why a step or job did not start; empty without one."""
    lines = [line for line in printable(output).splitlines() if not _USAGE.match(line)]
    own = [line for line in lines if line.startswith("srun: ")]
    reasons = [line for line in own if _OPTION.search(line)] or [line for line in own if "error: " in line]
    last = (reasons[:1] or own[-1:] or lines[-1:] or [""])[0]
    return last.removeprefix("srun: ").removeprefix("error: ").removeprefix("fatal: ")


def _plain(line: str) -> str:
    line = line.strip().removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ")
    return line.removeprefix("Batch job submission failed: ")


def _value(options: Mapping[str, str | None], name: str) -> str:
    """Return an option's value. Of an option with several spellings, those that the script does not use are empty."""
    missing = "" if name.startswith(("gres", "gpus", "mem")) else "(none given)"
    return options.get(name) or missing
