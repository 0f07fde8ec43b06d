"""The hosts of the allocation: which node of the plan is on which, which are spare, which are bad.

The plan speaks of nodes 0, 1, …; SLURM gives hosts. A host that its preflight finds bad, or that is lost later, gets no
work, and a spare takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.runtime.allocation import Allocation, ask
from primerl_hpc.runtime.failures import supervisor_failure
from primerl_hpc.runtime.preflight import NAME, Preflight, faults

if TYPE_CHECKING:
    from primerl_hpc.runtime.supervisor import Supervisor


class Nodes:
    def __init__(self, supervisor: Supervisor, allocation: Allocation, earlier: dict[str, Any]) -> None:
        """``earlier``: what `as_state` said in the attempt before."""
        self.supervisor, self.allocation = supervisor, allocation
        self.journal = supervisor.journal
        self.excluded: dict[str, str] = {}
        """Hosts that this attempt found bad or lost, and why."""
        self.excluded_before = frozenset(earlier.get("ever_excluded", ()))

    @property
    def has_news(self) -> bool:
        """Whether a next attempt without the excluded hosts would be another try: SLURM may not heed our wish."""
        return bool(set(self.excluded) - self.excluded_before)

    async def look(self) -> bool:
        """Have every node look at itself. False when too few are good; failure.json names the first bad one then."""
        supervisor, wants = self.supervisor, self.supervisor.plan.preflight
        if wants is None:
            return True
        start = time.monotonic()
        log = supervisor.run_dir.attempt_logs(supervisor.attempt) / "slurm" / f"{NAME}.log"
        findings = await Preflight(supervisor.run_dir, wants, self.allocation, log).look()
        for host, told in faults(findings, "warn").items():
            for each in told:
                self.journal.record("node_warning", node=host, check=each.check, said=each.said)
        bad = faults(findings, "bad")
        seconds = round(time.monotonic() - start, 1)
        self.journal.record("preflight_done", nodes=len(findings), bad=len(bad), in_s=seconds)
        if self.exclude({host: f"{told[0].check}: {told[0].said}" for host, told in bad.items()}):
            return True
        host, (first, *_) = next(iter(bad.items()))
        reason = f"{len(bad)} of {len(findings)} nodes are bad, the plan needs {len(self.allocation.hosts)}"
        message = f"{host} is bad: {first.check}: {first.said}; {first.mend}"
        self.write_shortage(host, reason, message, process=NAME, check=first.check, log=log)
        return False

    def write_shortage(
        self, host: str, reason: str, message: str, *, process: str, check: str, log: Path | None = None
    ) -> None:
        """failure.json for too few good nodes."""
        failure = supervisor_failure(
            attempt=self.supervisor.attempt,
            phase=self.journal.state["phase"],
            process=process,
            node=host,
            exit_code=ExitCode.BAD_NODE,
            reason=reason,
            message=message,
            log=log,
        )
        self.journal.write_failure(failure | {"check": check})

    async def find_lost(self, hosts: Collection[str]) -> dict[str, str] | None:
        """Which of ``hosts`` are gone, and why: SLURM took them out of the job, or hears nothing from them.

        None when SLURM does not answer: nobody knows.

        With ``--no-kill``, which spare nodes bring with them, a job lives on without a lost node. Its steps there end
        when SLURM calls the node DOWN, which may take minutes; a role that lost a peer there ends earlier.
        """
        job = self.allocation.job_id
        if not (mine := await ask("squeue", "--noheader", f"--jobs={job}", "--format=%N")):
            return None if mine is None else {}
        parts = ",".join(mine.split())  # a line per component
        if not (names := await ask("scontrol", "show", "hostnames", parts)):
            return None if names is None else {}
        lost = {host: "lost: it is no longer part of the job" for host in hosts if host not in names.split()}
        asked = f"--nodes={','.join(hosts)}"
        if (states := await ask("sinfo", "--noheader", "--Node", asked, "--format=%N %T")) is None:
            return None
        for line in states.splitlines():
            host, _, state = line.strip().partition(" ")
            if host in hosts and (state.endswith("*") or state.startswith(("down", "fail"))):
                lost.setdefault(host, f"lost: SLURM says {state}")
        return {host: why for host, why in lost.items() if host not in self.excluded}

    def exclude(self, bad: dict[str, str]) -> bool:
        """No work for these hosts (host → why) any more, a spare in place of each. False when there are too few."""
        before, after = self.allocation, self.allocation.without(bad)
        self.allocation = after or before
        self.excluded |= bad
        instead = dict(zip(before.hosts, self.allocation.hosts, strict=True))
        for host, why in bad.items():
            spare = instead.get(host)
            self.journal.record("node_excluded", node=host, why=why, spare=spare if spare != host else None)
        self.supervisor.set_nodes(self.allocation.hosts, self.as_state())
        return after is not None

    def as_state(self) -> dict[str, Any]:
        return {
            "spares": list(self.allocation.spares),
            "excluded": self.excluded,
            "ever_excluded": sorted(self.excluded_before | set(self.excluded)),
        }
