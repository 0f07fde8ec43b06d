"""Command lines of SLURM's commands. Only this folder and `runtime.steps.srun` write them.

    text = ask(node_states_command(["n1", "n2"]))
    reply = await retry_slurm(*requeue_command("7"))

`commands` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SEPARATOR = "\x1f"
"""Between the fields of squeue and sacct."""
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
"""The commands that submission, runs and their views need on a machine."""


def cancel_command(jobs: Iterable[str], *, only_pending: bool = False) -> list[str]:
    return ["scancel", *(["--state=PENDING"] if only_pending else []), *jobs]


def release_command(job: str) -> list[str]:
    return ["scontrol", "release", job]


def requeue_command(job: str) -> list[str]:
    return ["scontrol", "requeue", job]


def update_command(job: str, setting: str) -> list[str]:
    """Return the command that changes one setting of a job, such as ``Dependency=afterok:7``."""
    return ["scontrol", "update", f"JobId={job}", setting]


def queue_command(job: str, *fields: str) -> list[str]:
    """Return the squeue command for one job; `rows_of` parses its output."""
    return ["squeue", "--noheader", f"--jobs={job}", f"--format={SEPARATOR.join(('%A', '%i', *fields))}"]


def rows_of(job: str, text: str, width: int) -> list[list[str]]:
    """Return the ``width`` fields that `queue_command` requested, a row for each component of a heterogeneous job.

    The number of a job array lists all of its tasks, and is also the own number of one of them; a site's wrapper may
    print notices.
    """
    rows = [line.strip(" ").split(SEPARATOR) for line in text.splitlines()]
    return [row[2:] for row in rows if len(row) == 2 + width and is_of(job, row[0], row[1])]


def is_of(job: str, number: str, listed: str) -> bool:
    """True if a row belongs to ``job``, or is a component of it.

    ``number``: the job's own number (squeue %A, sacct JobIDRaw), which SLURM_JOB_ID contains too. ``listed``: the form
    for users (%i, JobID): ``1_3`` for task 3 of array 1, ``7+1`` for component 1 of the heterogeneous job 7.
    """
    return job == number or job == listed.partition("+")[0]


def task_name(job: str, environ: Mapping[str, str]) -> str:
    """Return how commands that change a job name that of this process and no other: ``1_4`` for the task of an array.

    For them the number of an array means all of its tasks, one of which has it as its own number.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task and environ.get("SLURM_JOB_ID") == job else job


def hostnames_command(nodelist: str) -> list[str]:
    """Return the command that expands ``n[1-3]``."""
    return ["scontrol", "show", "hostnames", nodelist]


def topology_command() -> list[str]:
    """Return the command that prints the switches or blocks of the network with their nodes."""
    return ["scontrol", "show", "topology"]


def node_states_command(hosts: Iterable[str]) -> list[str]:
    """Return the command that prints a line with name and state for each host."""
    return ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %T"]


def partitions_command(fields: str) -> list[str]:
    return ["sinfo", "--noheader", f"--format={fields}"]


def version_command() -> list[str]:
    return ["sinfo", "--version"]


def accounting_command(jobs: Iterable[str], *options: str) -> list[str]:
    return ["sacct", "--noheader", *options, f"--jobs={','.join(jobs)}"]


def accounts_command(user: str) -> list[str]:
    """Return the command that prints the accounts of a user, one in each line."""
    listing = ("--noheader", "--parsable2", "show", "associations")
    return ["sacctmgr", *listing, f"user={user}", "format=Account"]


def shares_command() -> list[str]:
    """Return the command that prints limits and usage of the user's accounts and of their parents, in minutes."""
    columns = "Account,User,GrpTRESMins,GrpTRESRaw"
    return ["sshare", "--noheader", "--parsable2", f"--format={columns}"]


def broadcast_command(job: str, source: str, target: str) -> list[str]:
    """Return the command that copies a file to ``target`` on every node of a job, from node to node."""
    return ["sbcast", "--force", f"--jobid={job}", source, target]


def srun_command(options: Iterable[str], command: Iterable[str] = ()) -> list[str]:
    """Return the command that starts a step, or a job of its own outside an allocation."""
    return ["srun", *options, *command]
