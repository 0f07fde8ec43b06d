"""Check every node of the allocation before the first process starts (`node_checks`), and evaluate the results.

One SLURM step named ``preflight`` runs over all nodes (one for each component of a heterogeneous job). Nodes without a
result are checked a second time, all at once and each in a step of its own, because a node that cannot start its task
may fail the step of all others; nodes without a result after that are bad.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import is_there, read_json_or_none, write_json
from primerl_hpc.common.findings import Finding
from primerl_hpc.common.waiting import Polling
from primerl_hpc.plan.plan import PreflightPlan, SumsPlan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.job.node_checks import judge_clock, make_request
from primerl_hpc.runtime.job.sums import judge_sums, make_sums_request, result_file
from primerl_hpc.runtime.steps.srun import environ_of_job, srun_options
from primerl_hpc.slurm.refusals import hint_about_option, srun_reason

NAME = "preflight"
POLL_S = 0.2
END_S = 10.0
_HOST = re.compile(r"srun: error: (?P<host>[^\s:]+): ")


class PreflightRun:
    def __init__(self, run: RunDir, wants: PreflightPlan, allocation: Allocation, log: Path) -> None:
        """``log``: output of srun and of the nodes."""
        self.run, self.wants, self.allocation, self.log = run, wants, allocation, log
        self.nonce = secrets.token_hex(8)
        self.asked_at = 0.0
        self.findings: dict[str, list[Finding]] = {}
        self.reasons: dict[str, str] = {}
        """Host → why its step failed, according to srun."""

    async def check(self) -> dict[str, list[Finding]]:
        """Run the checks; return the findings of every host of the allocation."""
        hosts = [*self.allocation.hosts, *self.allocation.spares]
        for host in hosts:
            self.run.preflight_result(host).unlink(missing_ok=True)
        request = await asyncio.to_thread(
            make_request,
            self.wants.model_dump(mode="json"),
            nonce=self.nonce,
            head=socket.gethostname(),
            gpus={host: self._gpus_of(host) for host in hosts},
        )
        self.asked_at = time.time()
        write_json(self.run.preflight_request, request)
        await asyncio.gather(*map(self._check_hosts, self.allocation.by_component(hosts)))
        await asyncio.gather(*(self._check_hosts([host]) for host in hosts if host not in self.findings))
        for host in hosts:
            self.findings.setdefault(host, [self._no_result(host)])
        return {host: self.findings[host] for host in hosts}

    def _gpus_of(self, host: str) -> int:
        """Return the number of GPUs that a host must have."""
        index, _ = self.allocation.component([host])
        by_component = self.wants.component_gpus
        return by_component[index] if index is not None and by_component else self.wants.gpus

    def _no_result(self, host: str) -> Finding:
        if reason := self.reasons.get(host):
            hint = hint_about_option(f"srun: {reason}") or f"see {self.log}; ask the site"
            return Finding("run directory", "bad", f"the step of the checks failed: {reason}", hint)
        message = f"no result in the run directory after {self.wants.timeout_s} s"
        hint = f"check that the run directory is shared and writable there; see {self.log}"
        return Finding("run directory", "bad", message, hint)

    async def _check_hosts(self, hosts: list[str]) -> None:
        """Run one step on ``hosts``; collect results until it ends or its time is over."""
        uses_gpus = self._gpus_of(hosts[0]) > 0
        command = [
            *srun_options(NAME, hosts, self.allocation, uses_gpus=uses_gpus),
            "--wait=0",
            *self.wants.srun_args,
            *(sys.executable, "-m", "primerl_hpc.runtime.job.node_checks", str(self.run.preflight_request)),
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log_start = log.tell()
            child = await asyncio.create_subprocess_exec(
                *command, env=environ_of_job(os.environ), stdout=log, stderr=log, start_new_session=True
            )
        async for _ in Polling(self.wants.timeout_s, POLL_S):
            self._collect(hosts)
            if child.returncode is not None or self._is_complete(hosts):
                break
        has_failed = bool(child.returncode)
        await end_step(child, END_S if self._is_complete(hosts) else 0.1)
        self._collect(hosts)
        if has_failed and not self._is_complete(hosts):
            with self.log.open("rb") as log:
                log.seek(log_start)
                text = log.read().decode(errors="replace")
            self.reasons |= dict.fromkeys(hosts, reason_on(hosts, text))

    def _collect(self, hosts: list[str]) -> None:
        for host in hosts:
            path = self.run.preflight_result(host)
            if host in self.findings or not is_there(path):
                continue
            result: dict[str, Any] = read_json_or_none(path) or {}
            if result.get("nonce") == self.nonce:
                clock = judge_clock(result["time"], self.asked_at, time.time())
                findings = [Finding.from_json(finding) for finding in result["findings"]]
                self.findings[host] = [*findings, clock]

    def _is_complete(self, hosts: list[str]) -> bool:
        return all(host in self.findings for host in hosts)


def reason_on(hosts: list[str], text: str) -> str:
    """Return why a step on these hosts failed, from a log to which the steps of other hosts write too."""
    named = ((_HOST.match(line), line) for line in text.splitlines())
    return srun_reason("\n".join(line for match, line in named if match is None or match["host"] in hosts))


async def end_step(child: asyncio.subprocess.Process, timeout_s: float) -> None:
    """Wait for the end of a step; after ``timeout_s`` end it (srun ends its step after a SIGTERM), then kill srun."""
    for end in (child.terminate, child.kill):
        try:
            async with asyncio.timeout(timeout_s):
                await child.wait()
            return
        except TimeoutError:
            end()
            timeout_s = END_S
    await child.wait()


@dataclass(frozen=True)
class RanksStep:
    """A SLURM step with the ranks of a trainer, in which every node writes a result (`sums.result_file`)."""

    name: str
    module: str
    request: Path
    """File with what the ranks are to do."""

    async def run(
        self, content: dict[str, Any], hosts: list[str], wants: SumsPlan, allocation: Allocation, log: Path
    ) -> list[dict[str, Any] | None]:
        """Run the step on ``hosts``; return the result of each, or None. ``content``: of the request, with a nonce."""
        for old in self.request.parent.glob(f"{self.request.stem}-*.json"):
            old.unlink(missing_ok=True)
        write_json(self.request, content)
        command = [
            *srun_options(self.name, hosts, allocation, uses_gpus=wants.accelerator == "gpu"),
            "--wait=0",
            *wants.srun_args,
            *(*wants.argv, "-m", self.module, str(self.request)),
        ]
        with log.open("ab") as file:
            child = await asyncio.create_subprocess_exec(
                *command,
                env=environ_of_job(os.environ) | wants.env,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        await end_step(child, wants.timeout_s + END_S)
        results = [read_json_or_none(result_file(self.request, node)) for node in range(len(hosts))]
        nonce = content["nonce"]
        shutil.rmtree(self.request.with_name(f"{self.request.stem}-store-{nonce}"), ignore_errors=True)
        return [result if result and result["nonce"] == nonce else None for result in results]


async def check_sums(run: RunDir, wants: SumsPlan, allocation: Allocation, log: Path) -> tuple[str, str]:
    """Run the all-reduce with a known result on the hosts of the trainer's nodes.

    Return (``ok`` | ``warn`` | ``bad``, message).
    """
    request = make_sums_request(
        nonce=secrets.token_hex(8),
        ranks_per_node=wants.ranks_per_node,
        accelerator=wants.accelerator,
        timeout_s=wants.timeout_s,
    )
    step = RanksStep("sums", "primerl_hpc.runtime.job.sums", run.sums_request)
    return judge_sums(await step.run(request, allocation.hosts_of(wants.nodes), wants, allocation, log))


def findings_of_level(findings: dict[str, list[Finding]], level: str) -> dict[str, list[Finding]]:
    """Return the findings of one level by host; hosts without any are left out."""
    chosen = {host: [item for item in items if item.level == level] for host, items in findings.items()}
    return {host: items for host, items in chosen.items() if items}
