"""Assignment of the plan's nodes to hosts of the allocation: which hosts are in use, spare, bad or lost.

The plan numbers nodes 0, 1, …; SLURM assigns hosts. A host that its preflight finds bad, or that is lost later, gets no
processes, and a spare takes its place.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError, ExitCode
from primerl_hpc.common.files import write_text
from primerl_hpc.plan.plan import BundlePlan, SumsPlan
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.context import RunContext
from primerl_hpc.runtime.failures import FailureOrigin, supervisor_failure
from primerl_hpc.runtime.job.preflight import (
    NAME,
    PreflightRun,
    check_sums,
    findings_of_level,
    measure_nodes,
)
from primerl_hpc.runtime.steps.bundle import unpack_on_nodes
from primerl_hpc.slurm.command_lines import hostnames_command, node_states_command, queue_command, rows_of
from primerl_hpc.slurm.commands import answered_output


class Nodes:
    def __init__(self, context: RunContext, allocation: Allocation, earlier: dict[str, Any]) -> None:
        """``earlier``: result of `as_state` in the previous attempt."""
        self.context, self.allocation = context, allocation
        self.journal = context.journal
        self.excluded: dict[str, str] = {}
        """Hosts that were found bad or lost in this attempt → the reason."""
        self.excluded_before = frozenset(earlier.get("ever_excluded", ()))

    @property
    def found_new_bad_nodes(self) -> bool:
        """True if another attempt may get better nodes: SLURM does not always honor an exclusion."""
        return bool(set(self.excluded) - self.excluded_before)

    async def check(self) -> bool:
        """Unpack the bundle and run the preflight on every node.

        False if too few are good; failure.json then names the first bad one.
        """
        context, wants = self.context, self.context.plan.preflight
        if context.plan.bundle is not None and not await self._unpack(context.plan.bundle):
            return False
        if wants is None:
            return True
        start = time.monotonic()
        log = context.run_dir.attempt_logs(context.attempt) / "slurm" / f"{NAME}.log"
        findings = await PreflightRun(context.run_dir, wants, self.allocation, log).check()
        for host, warnings in findings_of_level(findings, "warn").items():
            for warning in warnings:
                self.journal.record("node_warning", node=host, check=warning.check, said=warning.message)
        bad = findings_of_level(findings, "bad")
        seconds = round(time.monotonic() - start, 1)
        self.journal.record("preflight_done", nodes=len(findings), bad=len(bad), in_s=seconds)
        if self.exclude({host: f"{first.check}: {first.message}" for host, (first, *_) in bad.items()}):
            if wants.bandwidth is not None:
                await self._exclude_slow(wants.bandwidth, log)
            if wants.sums is not None:
                await self._check_sums(wants.sums, log)
            return True
        host, (first, *_) = next(iter(bad.items()))
        reason = f"{len(bad)} of {len(findings)} nodes are bad, the plan needs {len(self.allocation.hosts)}"
        message = f"{host} is bad: {first.check}: {first.message}; {first.hint}"
        self.write_shortage(host, reason, message, process=NAME, check=first.check, log=log)
        return False

    async def _unpack(self, bundle: BundlePlan) -> bool:
        """Unpack the bundle on all nodes but this one, whose batch script has done it. False if too few can use it."""
        start = time.monotonic()
        log = self.context.run_dir.attempt_logs(self.context.attempt) / "slurm" / "bundle.log"
        failed = await unpack_on_nodes(self.context.run_dir, bundle, self.allocation, log)
        seconds = round(time.monotonic() - start, 1)
        self.journal.record(
            "bundle_unpacked", nodes=len(self.allocation.all_hosts), bad=len(failed), in_s=seconds
        )
        if self.exclude({host: f"bundle: {why}" for host, why in failed.items()}):
            return True
        host, why = next(iter(failed.items()))
        reason = f"{len(failed)} of {len(self.allocation.all_hosts)} nodes cannot use the bundle"
        message = f"{host}: {why}; see {log}"
        self.write_shortage(host, reason, message, process="bundle", check="bundle", log=log)
        return False

    async def _exclude_slow(self, wants: SumsPlan, log: Path) -> None:
        """Replace slow nodes by spares, as far as there are any; the run can use the others, slowly."""
        found = await measure_nodes(self.context.run_dir, wants, self.allocation, log)
        self.journal.record("bandwidth_measured", slow=sorted(found.slow), said=found.message)
        spares = self.allocation.spares
        for host, why in sorted(found.slow.items(), key=lambda item: item[0] not in spares):
            if host in spares or self.allocation.without([host]) is not None:
                self.exclude({host: why})
            else:
                self.journal.record(
                    "node_warning", node=host, check="bandwidth", said=f"{why}; no spare is left"
                )

    async def _check_sums(self, wants: SumsPlan, log: Path) -> None:
        """Raise ConfigError for wrong sums: no node is at fault alone, and training would diverge without an error."""
        found = await check_sums(self.context.run_dir, wants, self.allocation, log)
        self.journal.record("sums_checked", level=found.level, said=found.message)
        if not found.is_ok:
            raise ConfigError(
                f"the network corrupts data: {found.message}", location=str(log), hint=found.hint
            )

    def write_shortage(
        self, host: str, reason: str, message: str, *, process: str, check: str, log: Path | None = None
    ) -> None:
        """Write failure.json for too few good nodes."""
        failure = supervisor_failure(
            FailureOrigin(self.context.attempt, self.journal.state["phase"], process, host),
            exit_code=ExitCode.BAD_NODE,
            reason=reason,
            message=message,
            log=log,
        )
        self.journal.write_failure(failure | {"check": check})

    async def find_lost(self, hosts: Collection[str], unreachable: Collection[str] = ()) -> dict[str, str]:
        """Return the lost ones of ``hosts`` with reasons: removed from the job by SLURM, or not responding to it.

        ``unreachable``: those that did not accept the last step. SLURM marks a dead node DOWN, and ends the job or its
        steps there, after SlurmdTimeout, often 300 s. A role that lost a peer there ends earlier. Raises
        UnansweredError if SLURM does not answer.
        """
        job = self.allocation.job_id
        components = rows_of(job, await answered_output(*queue_command(job, "%N", "%T")), 2)
        if any(state == "COMPLETING" for _, state in components):
            return {}  # SLURM ends the job, and no longer lists the nodes that have ended it
        nodelist = ",".join(nodes for nodes, _ in components if nodes)
        if not nodelist or not (names := await answered_output(*hostnames_command(nodelist))):
            return {}
        lost = {host: "lost: it is no longer part of the job" for host in hosts if host not in names.split()}
        lost |= {host: "lost: it accepts no connection of srun" for host in hosts if host in unreachable}
        for line in (await answered_output(*node_states_command(hosts))).splitlines():
            host, _, state = line.strip().partition(" ")
            if host in hosts and (state.endswith("*") or state.startswith(("down", "fail"))):
                lost.setdefault(host, f"lost: SLURM reports its state as {state}")
        return {host: why for host, why in lost.items() if host not in self.excluded}

    def exclude(self, bad: dict[str, str]) -> bool:
        """Replace these hosts (host → reason) by spares. False if there are too few spares."""
        before, after = self.allocation, self.allocation.without(bad)
        self.allocation = after or before
        self.excluded |= bad
        replacements = dict(zip(before.hosts, self.allocation.hosts, strict=True))
        for host, why in bad.items():
            spare = replacements.get(host)
            self.journal.record("node_excluded", node=host, why=why, spare=spare if spare != host else None)
        self.publish()
        return after is not None

    def publish(self) -> None:
        """Write the hosts by node index of the plan, and what the next attempt needs to know about its nodes."""
        path, hosts = self.context.run_dir.attempt_hosts(self.context.attempt), self.allocation.hosts
        self.journal.write(lambda: write_text(path, "\n".join(hosts) + "\n"))
        self.journal.update(hosts=list(hosts), nodes=self.as_state())

    def as_state(self) -> dict[str, Any]:
        return {
            "spares": list(self.allocation.spares),
            "excluded": dict(self.excluded),
            "ever_excluded": sorted(self.excluded_before | set(self.excluded)),
        }
