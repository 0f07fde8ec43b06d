"""Types shared by all parts of the supervisor: what to start, how a process ended, how a phase ended."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from primerl_hpc.common import env
from primerl_hpc.common.package import SoftwareKind, expected_package, kept_modules, user_site_variables
from primerl_hpc.common.passed import withheld_secrets
from primerl_hpc.plan.container import LAUNCH_VARIABLES
from primerl_hpc.plan.plan import ProcessPlan
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir

APPTAINER = {"apptainer": "APPTAINERENV_", "singularity": "SINGULARITYENV_"}
"""Container command → prefix of variables that replace those of the image; without it the image's win."""


class PhaseEnd(StrEnum):
    DONE = "done"
    STOPPED = "stopped"
    ABANDONED = "abandoned"  # ended on request before a save
    FAILED = "failed"


@dataclass(frozen=True)
class Continuation:
    """The decision whether the run continues by itself after this attempt."""

    is_automatic: bool
    reason: str = ""
    """Why it does not; empty if the end was requested, or for the reason in failure.json."""

    @classmethod
    def automatic(cls) -> Continuation:
        return cls(True)

    @classmethod
    def ended(cls, reason: str = "") -> Continuation:
        return cls(False, reason)


@dataclass(frozen=True)
class ExitStatus:
    """Exit code or signal of a step; its host, and the log with the cause if it is not ``Launch.log``."""

    code: int
    host: str | None = None
    log: Path | None = None
    unreachable: frozenset[str] = frozenset()
    """Hosts on which srun could not start the step because their slurmd accepted no connection."""

    @property
    def signal(self) -> int | None:
        if self.code < 0:
            return -self.code
        return self.code - 128 if 128 < self.code < 128 + 65 else None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


@dataclass(frozen=True)
class Launch:
    """One incarnation of one process: what a step needs to start it, and where its output goes."""

    process: ProcessPlan
    run_dir: RunDir
    phase: str
    attempt: int
    incarnation: int

    @property
    def log(self) -> Path:
        return self.run_dir.attempt_logs(self.attempt) / self.process.log

    @property
    def scheduler_log(self) -> Path:
        """srun's own output: why a step could not start, which task ended first."""
        return self.run_dir.attempt_logs(self.attempt) / "slurm" / f"{self.process.name}.log"

    @property
    def software(self) -> SoftwareKind:
        """How the process finds the package."""
        if self.process.container != "none":
            return SoftwareKind.CONTAINER
        return SoftwareKind.PLAIN if self.process.argv[0] == sys.executable else SoftwareKind.INTERPRETER

    @property
    def environment(self) -> dict[str, str]:
        """Variables added to the supervisor's own environment, and which ones of that the guard removes."""
        own = self._own_environment
        named = (*own, *self.process.secret_env)
        variables = {**own, env.WITHHELD: " ".join(withheld_secrets(os.environ, named))}
        if self.process.kept_env is None:
            return variables
        return {**variables, env.KEPT: " ".join((*self.process.kept_env, *own))}

    @property
    def _own_environment(self) -> dict[str, str]:
        own = self._process_environment
        prefix = APPTAINER.get(Path(self.process.argv[0]).name)
        if self.process.container == "command" and prefix is not None:
            planned = (*self.process.env, *self.process.inherited_env, *LAUNCH_VARIABLES)
            own |= {f"{prefix}{name}": own[name] for name in planned if name in own}
        return own

    @property
    def _process_environment(self) -> dict[str, str]:
        inherited = self.process.inherited_env.items()
        return {
            **_plain_num_threads(),
            **self.process.env,
            **{name: os.environ[source] for name, source in inherited if source in os.environ},
            **env.role_pythonpath(
                kept_modules(self.process.role.value), self.process.env.get(env.PYTHONPATH)
            ),
            env.PACKAGE: expected_package(self.software),
            env.PRIVATE_TMP: _private_tmp(self.run_dir.root, self.attempt),
            env.RUN_DIR: str(self.run_dir.root),
            env.PROCESS: self.process.name,
            env.PHASE: self.phase,
            env.ATTEMPT: str(self.attempt),
            env.INCARNATION: str(self.incarnation),
            "PYTHONUNBUFFERED": "1",
            "PYTHONUTF8": "1",
            "PYTHONSAFEPATH": "1",  # keep `python -m` from importing modules of the working directory
            **user_site_variables(),
        }


def _plain_num_threads() -> dict[str, str]:
    """Return OMP_NUM_THREADS as one number, which libraries can parse, if the job has another form of it."""
    given = os.environ.get("OMP_NUM_THREADS")
    return {} if given is None or given.isdecimal() else {"OMP_NUM_THREADS": str(env.num_threads())}


@lru_cache(maxsize=4)
def _private_tmp(run: Path, attempt: int) -> str:
    """Return the name of the run's temporary folder on each node. The keys of an attempt do not change."""
    return run_keys(RunDir(run), attempt).temporary_name


class Step(Protocol):
    """One process of the plan, started once: a child process (`LocalStep`) or a SLURM step (`SrunStep`).

    `start` returns when the process was started, not when it is ready.
    """

    def prepare(self) -> None:
        """Open its log and read the keys for its environment: the file operations of `start`, which need a
        thread. The folder of the process's own log exists already."""

    async def start(self) -> None: ...

    async def wait(self) -> ExitStatus: ...

    async def terminate(self) -> None:
        """Send SIGTERM to its tasks; its guard kills the process tree after the grace time. Safe to call twice."""

    async def dump_stacks(self) -> None:
        """Make its Python processes write their stacks to its log."""

    async def kill(self) -> None:
        """Kill it and all its descendants now. Safe to call twice."""
