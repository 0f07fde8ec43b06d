"""The exception hierarchy. Each error carries cause, location and hint, and the exit code of the process.

    raise ConfigError("unknown key 'lerning_rate'", location="recipe.yaml:7", hint="did you mean 'lr'?")

prints as one sentence: ``recipe.yaml:7: unknown key 'lerning_rate'; did you mean 'lr'?``
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of primerl-hpc processes. The batch script exits with the supervisor's code."""

    DONE = 0
    FAILED = 1  # a role failed; details in control/failure.json
    USAGE = 2  # bad command line (click's code)
    DATA = 65  # a dataset, model folder or checkpoint is invalid
    NOT_FOUND = 66  # no such file, run, role or key
    UNAVAILABLE = 69  # the scheduler or a server does not answer
    OCCUPIED = 73  # the run directory is in use, or belongs to another user
    STOPPED = 75  # stopped on request or for the walltime with its state saved: continue
    PREEMPTED = 76  # terminated before a save: continue from the last complete checkpoint
    CONFIG = 78  # invalid recipe or profile, or failed preflight
    NO_CONTINUE = 93  # another attempt would fail again: no progress, NaN policy, invalid data
    BAD_NODE = 94  # a bad node was excluded: continue on other nodes


class PrimerlError(Exception):
    """Base of all errors shown to users: one sentence with a cause and optionally a location and a hint."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, cause: str, *, location: str = "", hint: str = "", details: str = "") -> None:
        """``details``: lines printed below the sentence, such as the output of another program."""
        self.cause, self.location, self.hint, self.details = cause, location, hint, details
        super().__init__(cause)

    def __str__(self) -> str:
        text = f"{self.location}: {self.cause}" if self.location else self.cause
        text = f"{text}; {self.hint}" if self.hint else text
        return f"{text}\n{self.details}" if self.details else text


class ConfigError(PrimerlError):
    """A recipe, profile or override is invalid, or recipe and profile are incompatible."""

    exit_code = ExitCode.CONFIG


class DataError(PrimerlError):
    """A dataset row, model folder, weight folder or checkpoint is incomplete or invalid."""

    exit_code = ExitCode.DATA


class NotFoundError(PrimerlError):
    """A requested file, run, role, template or key does not exist."""

    exit_code = ExitCode.NOT_FOUND


class OccupiedError(PrimerlError):
    """The run directory already contains a run, or another supervisor uses it."""

    exit_code = ExitCode.OCCUPIED


class SchedulerError(PrimerlError):
    """The scheduler (SLURM or the local executor) refused or did not answer."""

    exit_code = ExitCode.UNAVAILABLE


class RoleError(PrimerlError):
    """A role cannot continue: an engine, environment server or peer failed more often than allowed."""


class TimeoutWaitingError(RoleError):
    """A condition was not met in time; the message names the condition and the time limit."""
