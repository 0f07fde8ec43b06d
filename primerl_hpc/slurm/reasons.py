"""Explain the Reason column of squeue: why a job is pending, and whether it can start without intervention.

The codes are those of SLURM's source (job_reason_codes.c). Names of limits are composed: ``QOSMaxGRESPerUser`` is
QOS + Max + GRES + PerUser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    text: str
    is_hopeless: bool = False
    """The job cannot start without intervention."""
    held_by: str = ""
    """``user`` (the user may release the job), ``site`` (only an administrator may), empty (not held)."""

    @property
    def is_held(self) -> bool:
        return bool(self.held_by)

    def remedy(self, job: str) -> str:
        """Return how to release a held job."""
        if self.held_by == "site":
            return f"ask the site to release job {job}"
        return f"scontrol release {job} releases it"


_PLAIN = {
    "Priority": Reason("jobs of higher priority are scheduled first"),
    "Resources": Reason("it is next in the queue and waits for free nodes"),
    "BeginTime": Reason("its earliest start time is in the future (a requeued job waits about two minutes)"),
    "Dependency": Reason("it waits for the job that it depends on"),
    "DependencyNeverSatisfied": Reason(
        "its dependency can never be satisfied: the other job ended differently", True
    ),
    "JobHeldUser": Reason("it is held by its owner", True, "user"),
    "JobHeldAdmin": Reason("it is held by an administrator", True, "site"),
    "JobHoldMaxRequeue": Reason("it is held after too many requeues", True, "user"),
    "launch failed requeued held": Reason("it is held because its launch failed on a node", True, "user"),
    "ReqNodeNotAvail": Reason("a requested node is down, drained or reserved"),
    "Reservation": Reason("it waits for its reservation to start"),
    "ReservationDeleted": Reason("its reservation was deleted", True),
    "InvalidAccount": Reason("its account is invalid", True),
    "InvalidQOS": Reason("its QOS is invalid", True),
    "AccountNotAllowed": Reason("its account may not use this partition", True),
    "QOSNotAllowed": Reason("its QOS may not be used with this partition or account", True),
    "BadConstraints": Reason("no node satisfies its constraints", True),
    "PartitionDown": Reason("its partition is down"),
    "PartitionInactive": Reason("its partition is inactive"),
    "PartitionNodeLimit": Reason("it requests more nodes than its partition allows", True),
    "PartitionTimeLimit": Reason("its time limit exceeds the partition's", True),
    "PartitionConfig": Reason("its request violates the configuration of the partition", True),
    "NodeDown": Reason("a required node is down"),
    "Licenses": Reason("it waits for a license"),
    "Cleaning": Reason("its previous execution is still being cleaned up"),
    "Prolog": Reason("the site's prolog is still running on its nodes"),
    "FrontEndDown": Reason("its front-end node is down"),
    "SystemFailure": Reason("SLURM had an internal error: ask the site"),
    "JobArrayTaskLimit": Reason("its job array runs the maximum number of tasks"),
    "MaxGRESPerAccount": Reason("your account uses its maximum number of GPUs"),
    "DeadLine": Reason("it cannot finish before its deadline", True),
    "TimeLimit": Reason("its time limit is too long", True),
}
_OF = {"QOS": "QOS", "Assoc": "account", "Association": "account"}
_WHAT = {
    "gres": "GPUs",
    "cpu": "CPUs",
    "node": "nodes",
    "job": "jobs",
    "jobs": "jobs",
    "mem": "memory",
    "memory": "memory",
    "wall": "time",
    "submit": "submitted jobs",
    "submitjobs": "submitted jobs",
    "bb": "burst buffer",
    "billing": "billing units",
    "lic": "licenses",
    "license": "licenses",
    "energy": "energy",
    "resource": "resources",
}
_LIMIT = re.compile(
    r"(?P<of>QOS|Association|Assoc)(?P<how>Grp|Max|Min)(?P<what>[A-Za-z]+?)"
    r"(?P<minutes>RunMinutes|RunMins|Minutes|Mins)?(?P<per>Per(?:User|Account|Acct|Job|Node))?(?:Limit)?"
)
_PER = {
    "PerUser": " for one user",
    "PerAccount": " for one account",
    "PerAcct": " for one account",
    "PerJob": " for one job",
    "PerNode": " for one node",
}


def explain_reason(reason: str) -> Reason | None:
    """Return the explanation of a reason, None for no reason. An unknown reason is quoted."""
    if not reason or reason == "None":
        return None
    word = reason.partition(",")[0].strip()
    if word in _PLAIN:
        return _PLAIN[word]
    match = _LIMIT.fullmatch(word)
    if match is None or match["what"].lower() not in _WHAT:
        return Reason(f"SLURM reports {reason}")
    what, per = _WHAT[match["what"].lower()], _PER.get(match["per"] or "", "")
    unit = f"{what.removesuffix('s')}-minutes" if match["minutes"] else what
    of = _OF[match["of"]]
    if match["how"] == "Min":
        return Reason(f"it requests fewer {unit} than the minimum of your {of}{per}", True)
    if match["per"] in ("PerJob", "PerNode"):
        return Reason(f"it requests more {unit} than your {of} allows{per}", True)
    if match["how"] == "Grp":
        return Reason(f"the jobs of your {of} together use the maximum of {unit}{per}")
    if match["what"].lower() in ("wall",):
        return Reason(f"it requests more {unit} than your {of} allows", True)
    return Reason(f"you use the maximum of {unit} of your {of}{per}")
