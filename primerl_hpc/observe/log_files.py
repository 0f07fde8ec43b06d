"""The log files of a run with their role, process, node, rank and attempt, derived from its plan.

    files = LogFiles(run).choose(role="trainer", rank=1, attempt=2)

Files that do not exist yet are listed too, so that `logs --follow` can wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none, read_jsonl
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.rundir import RunDir

JOB = "job"
"""Pseudo-role that selects the output of the batch script, the supervisor and srun."""
MAX_FILES_PER_ROLE = 8
"""Maximum number of files shown of a role, unless the role or a node was requested."""


@dataclass(frozen=True)
class LogFile:
    path: Path
    label: str
    """Label in the output: ``trainer``, ``inference/0``, ``trainer@gpu-b``."""
    role: str
    process: str
    attempt: int
    node: str | None = None
    rank: int | None = None


class LogFiles:
    """The log files of ``run``. Its plan is read once."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        phases = (read_json_or_none(run.plan) or {}).get("phases", [])
        self.processes: dict[str, dict[str, Any]] = {
            process["name"]: process
            for phase in phases
            for process in (*phase.get("processes", []), *phase.get("elastic", []))
        }
        self.elastic = {process["name"] for phase in phases for process in phase.get("elastic", [])}
        """Names of the engines that run in SLURM jobs of their own."""

    @property
    def last_attempt(self) -> int:
        """Number of the latest attempt that has started; 1 if none has."""
        return max(1, int((read_json_or_none(self.run.state) or {}).get("attempt", 1)))

    def choose(
        self,
        role: str | None = None,
        *,
        node: str | None = None,
        rank: int | None = None,
        attempt: int | None = None,
    ) -> list[LogFile]:
        """Select log files. ``role`` is a role, a process (inference-0), the beginning of a label, or ``job``.

        ``attempt`` None: the latest one. Raises NotFoundError, which lists the roles, nodes or ranks of the plan, if
        none matches.
        """
        attempt = self.last_attempt if attempt is None else attempt
        if role == JOB:
            return self._job_files(attempt)
        names = [name for name, process in self.processes.items() if role is None or matches(process, role)]
        if not names:
            known = ", ".join(dict.fromkeys(process["role"] for process in self.processes.values()))
            raise NotFoundError(f"this run has no '{role}'", hint=f"roles of this run: {known}, {JOB}")
        if rank is not None:
            return self._rank_files(names, rank, attempt)
        files = [file for name in names for file in self._process_files(name, attempt)]
        if node is not None:
            files = self._on_node(files, node, attempt)
        return files if role is not None or node is not None else _limit_per_role(files)

    def hosts(self, attempt: int) -> list[str]:
        """Return host names by node index of the plan; [] while the attempt has no nodes."""
        try:
            return self.run.attempt_hosts(attempt).read_text().split()
        except FileNotFoundError:
            state = read_json_or_none(self.run.state) or {}
            is_one_node = all(process["nodes"] == [0] for process in self.processes.values())
            return [state["host"]] if is_one_node and state.get("host") else []

    def _process_files(self, name: str, attempt: int) -> Iterator[LogFile]:
        """Yield the log file of a process; if it spans several nodes, one file for each, which `SrunStep` numbers."""
        process, hosts = self.processes[name], self.hosts(attempt)
        if name in self.elastic:
            hosts = [(read_endpoint(self.run, name) or {}).get("host")]
        path, nodes = self.run.attempt_logs(attempt) / process["log"], sorted(process["nodes"])
        label = process["log"].removesuffix(".log")
        for index, node in enumerate(nodes):
            host = hosts[node] if node < len(hosts) else None
            if len(nodes) == 1:
                yield LogFile(path, label, process["role"], name, attempt, host)
            else:
                node_path = path.with_name(f"{path.stem}_{index}.log")
                yield LogFile(node_path, f"{label}@{host or index}", process["role"], name, attempt, host)

    def _on_node(self, files: list[LogFile], node: str, attempt: int) -> list[LogFile]:
        found = [file for file in files if file.node == node]
        if not found:
            known = ", ".join(dict.fromkeys(file.node for file in files if file.node)) or "not known yet"
            raise NotFoundError(
                f"no selected process runs on node '{node}' in attempt {attempt}", hint=f"nodes: {known}"
            )
        return found

    def _rank_files(self, names: list[str], rank: int, attempt: int) -> list[LogFile]:
        """Return the files of one rank. torchrun writes one folder per node and restart, and below it one per local
        rank.
        """
        files, num_ranks, hosts = [], 0, self.hosts(attempt)
        for name in names:
            process = self.processes[name]
            if process["role"] not in ("trainer", "sft"):
                continue
            per_node, nodes = max(1, len(process["accelerators"])), sorted(process["nodes"])
            num_ranks = max(num_ranks, per_node * len(nodes))
            node_index, local_rank = divmod(rank, per_node)
            if node_index >= len(nodes):
                continue
            folder = self.run.torchrun_logs(attempt, name, node_index)
            node = nodes[node_index]
            host = hosts[node] if node < len(hosts) else None
            for path in sorted(
                folder.glob(f"*/attempt_*/{local_rank}/std*.log"), key=lambda path: path.stat().st_mtime
            ):
                label = f"{process['role']}[{rank}] {path.stem}"
                files.append(LogFile(path, label, process["role"], name, attempt, host, rank))
        if rank >= num_ranks:
            raise NotFoundError(
                f"rank {rank} does not exist",
                hint=f"ranks of the trainer: 0 to {num_ranks - 1}" if num_ranks else "this role has no ranks",
            )
        return files

    def _job_files(self, attempt: int) -> list[LogFile]:
        """Return the output of the batch job, and srun's messages about the steps of this attempt."""
        started = [event for event in read_jsonl(self.run.events) if event["event"] == "attempt_started"]
        jobs = [event.get("job") for event in started if event.get("attempt") == attempt]
        job = jobs[-1] if jobs else (read_json_or_none(self.run.job) or {}).get("job_id")
        files = [
            LogFile(path, f"job {job}", JOB, JOB, attempt) for path in self.run.job_outputs(str(job)) if job
        ]
        for path in sorted((self.run.root / "logs").glob("engines-*.out")):  # these jobs span attempts
            files.append(LogFile(path, path.stem, JOB, JOB, attempt))
        messages = self.run.attempt_logs(attempt) / "slurm"
        for path in sorted(messages.glob("*.log")):
            files.append(LogFile(path, f"srun {path.stem}", JOB, path.stem, attempt))
        return files


def matches(process: dict[str, Any], word: str) -> bool:
    """True if ``word`` names the process: ``env-server``, ``env_server-1``, ``inference/0``, ``envs/train``,
    ``router``, …
    """
    plain, label = word.replace("-", "_"), process["log"].removesuffix(".log").replace("-", "_")
    name = process["name"].replace("-", "_")
    return plain in (process["role"], name, label) or label.startswith(plain + "/")


def _limit_per_role(files: list[LogFile]) -> list[LogFile]:
    """Keep `MAX_FILES_PER_ROLE` files of each role, because following hundreds of files overloads a network
    filesystem.
    """
    counts: dict[str, int] = {}
    kept = []
    for file in files:
        counts[file.role] = counts.get(file.role, 0) + 1
        if counts[file.role] <= MAX_FILES_PER_ROLE:
            kept.append(file)
    return kept
