"""Command lines of SLURM's commands. Only this folder and `runtime.steps.srun` write them.

    text = ask(node_states_command(["n1", "n2"]))
    reply = await retry_slurm(*requeue_command("7"))

`commands` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def queue_command(job: str, fields: str) -> list[str]:
    """Return the squeue command for one job; a heterogeneous job has one line for each component."""
    return ["squeue", "--noheader", f"--jobs={job}", f"--format={fields}"]


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
