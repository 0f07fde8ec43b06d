"""Check every node of the allocation before the first process starts (`checks`), and evaluate the results.

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
from pathlib import Path
from typing import Any

from primerl_hpc.checks import network, node, ranks, sums
from primerl_hpc.checks.findings import Finding, bad
from primerl_hpc.common.files import is_there, read_json_or_none, write_json
from primerl_hpc.common.waiting import Polling
from primerl_hpc.plan.plan import PreflightPlan, SumsPlan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
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
            node.make_request,
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
            return bad(f"the step of the checks failed: {reason}", hint, check="run directory")
        message = f"no result in the run directory after {self.wants.timeout_s} s"
        hint = f"check that the run directory is shared and writable there; see {self.log}"
        return bad(message, hint, check="run directory")

    async def _check_hosts(self, hosts: list[str]) -> None:
        """Run one step on ``hosts``; collect results until it ends or its time is over."""
        uses_gpus = self._gpus_of(hosts[0]) > 0
        command = [
            *srun_options(NAME, hosts, self.allocation, uses_gpus=uses_gpus),
            "--wait=0",
            *self.wants.srun_args,
            *(sys.executable, "-m", node.__name__, str(self.run.preflight_request)),
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
                self.findings[host] = node.findings_of_result(result, self.asked_at)

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


async def _run_ranks(
    module: str,
    request: Path,
    hosts: list[str],
    wants: SumsPlan,
    allocation: Allocation,
    log: Path,
    **more: Any,
) -> list[dict[str, Any] | None]:
    """Run a step with the ranks of a trainer on ``hosts`` (`checks.ranks`); return the result of each, or None.

    ``more``: further keys of the request.
    """
    for old in request.parent.glob(f"{request.stem}-*.json"):
        old.unlink(missing_ok=True)
    nonce = secrets.token_hex(8)
    write_json(request, ranks.make_request(wants, nonce) | more)
    command = [
        *srun_options(request.stem, hosts, allocation, uses_gpus=wants.accelerator == "gpu"),
        *("--wait=0", *wants.srun_args, *wants.argv, "-m", module, str(request)),
    ]
    environ = environ_of_job(os.environ) | wants.env
    with log.open("ab") as file:
        child = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=file, stderr=file, start_new_session=True
        )
    await end_step(child, wants.timeout_s + END_S)
    results = ranks.read_results(request, len(hosts), nonce)
    shutil.rmtree(ranks.store_folder(request, nonce), ignore_errors=True)
    return results


async def check_sums(run: RunDir, wants: SumsPlan, allocation: Allocation, log: Path) -> Finding:
    """Run the all-reduce with a known result on the hosts of the trainer's nodes."""
    hosts = allocation.hosts_of(wants.nodes)
    return sums.judge_sums(await _run_ranks(sums.MODULE, run.sums_request, hosts, wants, allocation, log))


async def measure_nodes(run: RunDir, wants: SumsPlan, allocation: Allocation, log: Path) -> network.SlowNodes:
    """Measure the bandwidth of the nodes of the trainer's component, and find the slow ones.

    Its spares are measured too: a spare that replaces a slow node must be fast.
    """
    trainer = allocation.component(allocation.hosts_of(wants.nodes)[:1])
    hosts = [host for host in allocation.all_hosts if allocation.component([host]) == trainer]
    hosts = allocation.in_order(hosts)
    request = run.network_request
    results = await _run_ranks(network.MODULE, request, hosts, wants, allocation, log, has_bandwidth=True)
    return network.judge_nodes([row for row in results if row], len(hosts))


def findings_of_level(findings: dict[str, list[Finding]], level: str) -> dict[str, list[Finding]]:
    """Return the findings of one level by host; hosts without any are left out."""
    chosen = {host: [item for item in items if item.level == level] for host, items in findings.items()}
    return {host: items for host, items in chosen.items() if items}
