"""What sbatch says when it refuses a job, as one sentence with the profile's key and the mend.

    raise explain_refusal("sbatch: error: Batch job submission failed: Invalid qos specification", {"qos": "long"})
    # the QOS long does not exist or is not yours; scheduler.qos of the profile, or --qos; …

The words are SLURM's own (``slurm_strerror``), the same from 20.11 to 26.05; they follow ours in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.slurm import NO_ADDRESS, no_address


@dataclass(frozen=True)
class Refusal:
    says: str
    """Pattern in what sbatch prints."""
    cause: str
    """``{partition}`` and the like become the script's own values."""
    mend: str


_LIMITS = "wait until other jobs end, or ask for less: fewer nodes, a shorter --time; `sacctmgr show qos` lists limits"

REFUSALS = (
    Refusal(
        "invalid partition",
        "there is no partition {partition}",
        "scheduler.partition of the profile, or --partition; `sinfo -s` lists them",
    ),
    Refusal(
        "No partition specified or system default",
        "no partition was named, and this site has no default one",
        "scheduler.partition of the profile, or --partition; `sinfo -s` lists them",
    ),
    Refusal(
        "group not permitted to use this partition",
        "you may not use partition {partition}",
        "another --partition, or ask the site",
    ),
    Refusal(
        "Required partition not available|Partition in DOWN state",
        "partition {partition} takes no jobs now",
        "wait, or another --partition",
    ),
    Refusal(
        "Invalid account",
        "account {account} does not exist, or may not use partition {partition}",
        "scheduler.account of the profile, or --account; `sacctmgr show associations user=$USER` lists yours",
    ),
    Refusal(
        "Invalid qos",
        "the QOS {qos} does not exist or is not yours",
        "scheduler.qos of the profile, or --qos; `sacctmgr show associations user=$USER format=qos` lists yours",
    ),
    Refusal(
        "Requested time limit is invalid|Time limit specification required",
        "a walltime of {time} is more than the partition allows",
        "scheduler.time of the profile, or --time; `sinfo -o '%P %l'` shows the limits",
    ),
    Refusal(
        "Invalid time-min",
        "scheduler.time_min exceeds the walltime or a limit",
        "lower scheduler.time_min of the profile",
    ),
    Refusal(
        "SubmitJob|job submit limit reached|MaxSubmit",
        "you have as many jobs in the queue as this site lets you",
        "wait until other jobs end, or cancel some",
    ),
    Refusal(
        r"violates accounting/QOS policy",
        "the job is beyond a limit of your account or QOS (jobs in the queue, size or walltime)",
        _LIMITS,
    ),
    Refusal(
        "Invalid feature|Invalid preferred feature",
        "no node has the features {constraint}",
        "scheduler.constraint of the profile; `sinfo -o '%P %f'` lists them",
    ),
    Refusal(
        r"Invalid generic resource|Invalid GRES|Invalid Trackable RESource|Insufficient GRES",
        "this site does not know the GPUs asked for ({gres}{gpus-per-node}{gpus-per-task})",
        "scheduler.gpu_request, gpu_type and gres of the profile; `sinfo -o '%P %G'` shows what nodes have",
    ),
    Refusal(
        "Requested node configuration is not available|Requested partition configuration not available",
        "no node of the partition has what the profile asks for",
        "primerl-hpc doctor compares node, scheduler.constraint and memory with the site",
    ),
    Refusal(
        "Node count specification invalid|Requested nodes not in this partition",
        "partition {partition} cannot give {nodes} nodes",
        "fewer nodes, or another --partition; `sinfo -s` shows their sizes",
    ),
    Refusal(
        "Memory (required|specification)",
        "nodes do not have the memory asked for ({mem}{mem-per-cpu}{mem-per-gpu})",
        "scheduler.memory of the profile; `sinfo -o '%P %m'` shows what they have",
    ),
    Refusal(
        "CPU count specification invalid|More processors requested|more tasks than available processors",
        "nodes do not have {cpus-per-task} CPUs",
        "node.cores of the profile; `sinfo -o '%P %c'` shows what they have",
    ),
    Refusal(
        "reservation",
        "reservation {reservation} does not exist, has ended or is not yours",
        "scheduler.reservation of the profile, or --reservation; `scontrol show reservation` lists them",
    ),
    Refusal("Invalid license", "this site has no licenses {licenses}", "scheduler.licenses of the profile"),
    Refusal("Invalid wckey", "the workload key {wckey} is not yours", "scheduler.wckey of the profile"),
    Refusal(
        "Job dependency problem",
        "SLURM cannot wait for {dependency}",
        "name jobs that squeue or sacct still know",
    ),
    Refusal("Invalid node name", "a node of scheduler.nodelist or exclude does not exist", "see `sinfo -N`"),
    Refusal(
        "(unrecognized|unknown|invalid) option|Invalid directive",
        "this version of sbatch does not know an option of the script",
        "scheduler.extra of the profile, or your own template",
    ),
    Refusal(
        "Invalid --[a-z-]+ specification|Invalid numeric value",
        "sbatch cannot read the value of an option",
        "mend it in scheduler of the profile",
    ),
    Refusal(
        "authenticat|munge",
        "SLURM does not trust this machine",
        "try another login node; if it stays so, ask the site (munge)",
    ),
    Refusal(
        "parameter too long|too large",
        "a directive or the script is longer than SLURM takes",
        "shorten the longest value of scheduler in the profile, or your own template",
    ),
    Refusal(
        "permission denied", "you may not submit jobs here", "ask the site for an account on this cluster"
    ),
)


def explain_refusal(said: str, options: Mapping[str, str | None]) -> SchedulerError:
    """``said``: everything sbatch printed; ``options``: the script's directives."""
    lines = [_plain(line) for line in said.splitlines() if line.strip()]
    words = "; ".join(list(dict.fromkeys(lines))[-2:]) or "sbatch gave no reason"
    if NO_ADDRESS.search(said):
        return no_address(words)
    for refusal in REFUSALS:
        if re.search(refusal.says, said, re.IGNORECASE):
            cause = re.sub(r"\{([a-z-]+)\}", lambda match: _value(options, match[1]), refusal.cause)
            return SchedulerError(
                f"SLURM refused the job: {' '.join(cause.split())} ({words})", mend=refusal.mend
            )
    return SchedulerError(f"SLURM refused the job: {words}")


def _plain(line: str) -> str:
    line = line.strip().removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ")
    return line.removeprefix("Batch job submission failed: ")


def _value(options: Mapping[str, str | None], name: str) -> str:
    """Of an option that a script has in one of several spellings, those it has not are left out."""
    missing = "" if name.startswith(("gres", "gpus", "mem")) else "(none named)"
    return options.get(name) or missing
