"""Before the first process: every node of the allocation looks at itself (`node_checks`), the head judges.

One SLURM step named ``preflight`` over all nodes (of each component of a heterogeneous job). Nodes that tell nothing are
asked once more, all at a time and each alone, because one that cannot start its task may take the step of all others with
it; then they are bad.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import is_there, read_json_or_none, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import PreflightPlan
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.node_checks import Finding, judge_clock, make_request
from primerl_hpc.runtime.srun_step import srun_options, without_requests

NAME = "preflight"
POLL_S = 0.2
END_S = 10.0


class Preflight:
    def __init__(self, run: RunDir, wants: PreflightPlan, allocation: Allocation, log: Path) -> None:
        """``log``: what srun and the nodes print."""
        self.run, self.wants, self.allocation, self.log = run, wants, allocation, log
        self.nonce = secrets.token_hex(8)
        self.asked_at = 0.0
        self.findings: dict[str, list[Finding]] = {}

    async def look(self) -> dict[str, list[Finding]]:
        """Findings of every host of the allocation."""
        hosts = [*self.allocation.hosts, *self.allocation.spares]
        for host in hosts:
            self.run.preflight_result(host).unlink(missing_ok=True)
        request = await asyncio.to_thread(
            make_request,
            self.wants.model_dump(mode="json"),
            nonce=self.nonce,
            head=socket.gethostname(),
            cpu_host=self.allocation.cpu_host,
        )
        self.asked_at = time.time()
        write_json(self.run.preflight_request, request)
        await asyncio.gather(*map(self._ask, self.allocation.by_component(hosts)))
        await asyncio.gather(*(self._ask([host]) for host in hosts if host not in self.findings))
        for host in hosts:
            self.findings.setdefault(host, [self._silence()])
        return {host: self.findings[host] for host in hosts}

    def _silence(self) -> Finding:
        said = f"no result in the run directory after {self.wants.timeout_s} s"
        return Finding("run directory", "bad", said, f"is it shared and writable there? see {self.log}")

    async def _ask(self, hosts: list[str]) -> None:
        """One step over ``hosts``; takes in what they wrote until it ends or the time is over."""
        uses_gpus = self.wants.gpus > 0 and self.allocation.cpu_host not in hosts
        command = [
            *srun_options(NAME, hosts, self.allocation, uses_gpus=uses_gpus),
            "--wait=0",
            *self.wants.srun_args,
            *(sys.executable, "-m", "primerl_hpc.runtime.node_checks", str(self.run.preflight_request)),
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *command, env=without_requests(os.environ), stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + self.wants.timeout_s
        while time.monotonic() < deadline:
            self._take_in(hosts)
            if child.returncode is not None or self._have_answered(hosts):
                break
            await asyncio.sleep(POLL_S)
        await self._end(child, hosts)
        self._take_in(hosts)

    def _take_in(self, hosts: list[str]) -> None:
        for host in hosts:
            path = self.run.preflight_result(host)
            if host in self.findings or not is_there(path):
                continue
            result: dict[str, Any] = read_json_or_none(path) or {}
            if result.get("nonce") == self.nonce:
                clock = judge_clock(result["time"], self.asked_at, time.time())
                self.findings[host] = [*(Finding(**each) for each in result["findings"]), clock]

    async def _end(self, child: asyncio.subprocess.Process, hosts: list[str]) -> None:
        """A step whose nodes all answered ends by itself; another one is killed: srun takes SIGTERM for that."""
        try:
            async with asyncio.timeout(END_S if self._have_answered(hosts) else 0.1):
                await child.wait()
        except TimeoutError:
            child.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()

    def _have_answered(self, hosts: list[str]) -> bool:
        return all(host in self.findings for host in hosts)


def faults(findings: dict[str, list[Finding]], level: str) -> dict[str, list[Finding]]:
    """Findings of one level by host; hosts without any are left out."""
    chosen = {host: [each for each in told if each.level == level] for host, told in findings.items()}
    return {host: told for host, told in chosen.items() if told}
