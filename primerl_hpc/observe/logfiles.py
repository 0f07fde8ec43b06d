"""Which log files a run has and whose they are, from its plan: role, process, node, rank, attempt.

    files = LogFiles(run).choose(role="trainer", rank=1, attempt=2)

Files that are not there yet are in the list too, so that a follower can wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none, read_jsonl
from primerl_hpc.common.rundir import RunDir, read_endpoint

JOB = "job"
"""The name under which SLURM's own output is asked for: what the batch script, the supervisor and srun print."""
MANY = 8
"""Of a role with more files than this only so many are shown, unless it was asked for."""


@dataclass(frozen=True)
class LogFile:
    path: Path
    label: str
    """For people: ``trainer``, ``inference/0``, ``trainer@gpu-b``."""
    role: str
    process: str
    attempt: int
    node: str | None = None
    rank: int | None = None


class LogFiles:
    def __init__(self, run: RunDir) -> None:
        self.run = run
        phases = (read_json_or_none(run.plan) or {}).get("phases", [])
        self.processes: dict[str, dict[str, Any]] = {
            process["name"]: process
            for phase in phases
            for process in (*phase.get("processes", []), *phase.get("elastic", []))
        }
        self.elastic = {process["name"] for phase in phases for process in phase.get("elastic", [])}
        """Engines on nodes of jobs of their own."""

    @property
    def last_attempt(self) -> int:
        """The newest that has started; 1 before that."""
        return max(1, int((read_json_or_none(self.run.state) or {}).get("attempt", 1)))

    def choose(
        self,
        role: str | None = None,
        *,
        node: str | None = None,
        rank: int | None = None,
        attempt: int | None = None,
    ) -> list[LogFile]:
        """``role`` is a role, a process (inference-0), the beginning of a label, or ``job``.

        Raises NotFoundError naming what there is when the plan has nothing that fits.
        """
        attempt = self.last_attempt if attempt is None else attempt
        if role == JOB:
            return self._job_files(attempt)
        names = [name for name, process in self.processes.items() if role is None or _fits(process, role)]
        if not names:
            known = ", ".join(dict.fromkeys(process["role"] for process in self.processes.values()))
            raise NotFoundError(f"this run has no '{role}'", mend=f"it has: {known}, {JOB}")
        if rank is not None:
            return self._rank_files(names, rank, attempt)
        files = [file for name in names for file in self._process_files(name, attempt)]
        if node is not None:
            files = self._on_node(files, node, attempt)
        return files if role is not None or node is not None else _thin(files)

    def hosts(self, attempt: int) -> list[str]:
        """Names by node index of the plan; none before the attempt has its nodes."""
        try:
            return self.run.attempt_hosts(attempt).read_text().split()
        except FileNotFoundError:
            state = read_json_or_none(self.run.state) or {}
            is_one_node = all(process["nodes"] == [0] for process in self.processes.values())
            return [state["host"]] if is_one_node and state.get("host") else []

    def _process_files(self, name: str, attempt: int) -> Iterator[LogFile]:
        """A file; of a process on several nodes one a node, which `SrunStep` names by their place in it."""
        process, hosts = self.processes[name], self.hosts(attempt)
        if name in self.elastic:
            hosts = [(read_endpoint(self.run, name) or {}).get("host")]
        path, nodes = self.run.attempt_logs(attempt) / process["log"], sorted(process["nodes"])
        label = process["log"].removesuffix(".log")
        for place, node in enumerate(nodes):
            host = hosts[node] if node < len(hosts) else None
            if len(nodes) == 1:
                yield LogFile(path, label, process["role"], name, attempt, host)
            else:
                mine = path.with_name(f"{path.stem}_{place}.log")
                yield LogFile(mine, f"{label}@{host or place}", process["role"], name, attempt, host)

    def _on_node(self, files: list[LogFile], node: str, attempt: int) -> list[LogFile]:
        found = [file for file in files if file.node == node]
        if not found:
            known = ", ".join(dict.fromkeys(file.node for file in files if file.node)) or "not known yet"
            raise NotFoundError(
                f"nothing of this runs on '{node}' in attempt {attempt}", mend=f"nodes: {known}"
            )
        return found

    def _rank_files(self, names: list[str], rank: int, attempt: int) -> list[LogFile]:
        """torchrun writes a folder per node and life of the group, and in it one per local rank."""
        files, most, hosts = [], 0, self.hosts(attempt)
        for name in names:
            process = self.processes[name]
            if process["role"] not in ("trainer", "sft"):
                continue
            per_node, nodes = max(1, len(process["accelerators"])), sorted(process["nodes"])
            most = max(most, per_node * len(nodes))
            place, local = divmod(rank, per_node)
            if place >= len(nodes):
                continue
            folder = self.run.torchrun_logs(attempt, name, place)
            host = hosts[nodes[place]] if nodes[place] < len(hosts) else None
            for path in sorted(
                folder.glob(f"*/attempt_*/{local}/std*.log"), key=lambda path: path.stat().st_mtime
            ):
                label = f"{process['role']}[{rank}] {path.stem}"
                files.append(LogFile(path, label, process["role"], name, attempt, host, rank))
        if rank >= most:
            raise NotFoundError(
                f"there is no rank {rank}",
                mend=f"ranks of the trainer: 0 to {most - 1}" if most else "this role has no ranks",
            )
        return files

    def _job_files(self, attempt: int) -> list[LogFile]:
        """The batch job's own output, and srun's words about the steps of this attempt."""
        started = [event for event in read_jsonl(self.run.events) if event["event"] == "attempt_started"]
        jobs = [event.get("job") for event in started if event.get("attempt") == attempt]
        job = jobs[-1] if jobs else (read_json_or_none(self.run.job) or {}).get("job_id")
        files = [
            LogFile(path, f"job {job}", JOB, JOB, attempt) for path in self.run.job_outputs(str(job)) if job
        ]
        for path in sorted(
            (self.run.root / "logs").glob("engines-*.out")
        ):  # of all attempts: they outlive one
            files.append(LogFile(path, path.stem, JOB, JOB, attempt))
        words = self.run.attempt_logs(attempt) / "slurm"
        for path in sorted(words.glob("*.log")):
            files.append(LogFile(path, f"srun {path.stem}", JOB, path.stem, attempt))
        return files


def _fits(process: dict[str, Any], word: str) -> bool:
    """``env-server``, ``env_server-1``, ``inference/0``, ``envs/train``, ``router``, …"""
    plain, label = word.replace("-", "_"), process["log"].removesuffix(".log").replace("-", "_")
    name = process["name"].replace("-", "_")
    return plain in (process["role"], name, label) or label.startswith(plain + "/")


def _thin(files: list[LogFile]) -> list[LogFile]:
    """Hundreds of engines are not followed at once over a network filesystem, nor read by people."""
    counts: dict[str, int] = {}
    kept = []
    for file in files:
        counts[file.role] = counts.get(file.role, 0) + 1
        if counts[file.role] <= MANY:
            kept.append(file)
    return kept
