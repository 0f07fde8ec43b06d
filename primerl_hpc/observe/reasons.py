"""Why SLURM lets a job wait, in words: the Reason column of squeue, and whether waiting can help.

The words are those of SLURM's source (job_reason_codes.c); the many limits are built by a rule:
``QOSMaxGRESPerUser`` is QOS + Max + GRES + PerUser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    words: str
    is_hopeless: bool = False
    """It will wait for ever unless somebody changes something."""


_PLAIN = {
    "Priority": Reason("jobs of a higher priority go first"),
    "Resources": Reason("it is next in line, and waits until enough nodes are free"),
    "BeginTime": Reason("it may not begin yet (a requeued job waits about two minutes)"),
    "Dependency": Reason("it waits for the job that it depends on"),
    "DependencyNeverSatisfied": Reason(
        "the job that it depends on ended in another way than it waits for", True
    ),
    "JobHeldUser": Reason("it is held: scontrol release lets it go", True),
    "JobHeldAdmin": Reason("an administrator holds it: ask the site", True),
    "JobHoldMaxRequeue": Reason("it was requeued too often and is held: scontrol release lets it go", True),
    "launch failed requeued held": Reason(
        "its start failed on a node and it is held: scontrol release lets it go", True
    ),
    "ReqNodeNotAvail": Reason("a node that it asks for is down, drained or reserved"),
    "Reservation": Reason("it waits for its reservation to begin"),
    "ReservationDeleted": Reason("its reservation is gone", True),
    "InvalidAccount": Reason("its account is not valid", True),
    "InvalidQOS": Reason("its QOS is not valid", True),
    "AccountNotAllowed": Reason("its account may not use this partition", True),
    "QOSNotAllowed": Reason("its QOS may not be used with this partition or account", True),
    "BadConstraints": Reason("no node has everything that it asks for", True),
    "PartitionDown": Reason("its partition is down"),
    "PartitionInactive": Reason("its partition is inactive"),
    "PartitionNodeLimit": Reason("it asks for more nodes than its partition gives one job", True),
    "PartitionTimeLimit": Reason("it asks for more time than its partition allows", True),
    "PartitionConfig": Reason("it asks for what its partition does not allow", True),
    "NodeDown": Reason("a node that it needs is down"),
    "Licenses": Reason("it waits for a license"),
    "Cleaning": Reason("its earlier life is still being cleaned up"),
    "Prolog": Reason("the site's prolog still runs on its nodes"),
    "FrontEndDown": Reason("the node that would start it is down"),
    "SystemFailure": Reason("SLURM had an error of its own: ask the site"),
    "JobArrayTaskLimit": Reason("its array may not run more tasks at once"),
    "MaxGRESPerAccount": Reason("your account has as many GPUs as it may at once"),
    "DeadLine": Reason("it could not end before its deadline", True),
    "TimeLimit": Reason("its time limit does not fit", True),
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
    """None when there is nothing to explain; a word that is not known is repeated."""
    if not reason or reason == "None":
        return None
    word = reason.partition(",")[0].strip()
    if word in _PLAIN:
        return _PLAIN[word]
    match = _LIMIT.fullmatch(word)
    if match is None or match["what"].lower() not in _WHAT:
        return Reason(f"SLURM says {reason}")
    what, per = _WHAT[match["what"].lower()], _PER.get(match["per"] or "", "")
    unit = f"{what.removesuffix('s')}-minutes" if match["minutes"] else what
    of = _OF[match["of"]]
    if match["how"] == "Min":
        return Reason(f"it asks for fewer {unit} than your {of} wants{per}", True)
    if match["per"] in ("PerJob", "PerNode"):
        return Reason(f"it asks for more {unit} than your {of} allows{per}", True)
    if match["how"] == "Grp":
        return Reason(f"all jobs of your {of} together use as many {unit} as they may{per}")
    if match["what"].lower() in ("wall",):
        return Reason(f"it asks for more {unit} than your {of} allows", True)
    return Reason(f"you use as many {unit} as your {of} allows{per}")
