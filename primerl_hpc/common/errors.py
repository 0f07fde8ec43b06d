"""The one exception tree. Each error carries cause, place and mend, and the exit code the process ends with.

    raise ConfigError("unknown key 'lerning_rate'", place="recipe.yaml:7", mend="did you mean 'lr'?")

prints as one sentence: ``recipe.yaml:7: unknown key 'lerning_rate'; did you mean 'lr'?``
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a primerl-hpc process says when it ends. The batch script's code is the supervisor's."""

    DONE = 0
    FAILED = 1  # a role crashed; control/failure.json says which
    USAGE = 2  # bad command line (click's own code)
    DATA = 65  # a dataset, model folder or checkpoint is not what it must be
    NOT_FOUND = 66  # no such file, run, role or key
    UNAVAILABLE = 69  # the scheduler or a server does not answer
    OCCUPIED = 73  # the run directory, or the run itself, belongs to somebody else
    STOPPED = 75  # stopped on request or for walltime, state saved: continue
    PREEMPTED = 76  # ended before a save: continue from the last complete checkpoint
    CONFIG = 78  # recipe, profile or preflight refused
    NO_CONTINUE = 93  # going on would repeat the fault: no progress, NaN policy, data fault
    BAD_NODE = 94  # a node was found bad and excluded: continue elsewhere


class PrimerlError(Exception):
    """Base of all errors a user may see: one sentence with cause, place (optional) and mend (optional)."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, cause: str, *, place: str = "", mend: str = "") -> None:
        self.cause, self.place, self.mend = cause, place, mend
        super().__init__(cause)

    def __str__(self) -> str:
        text = f"{self.place}: {self.cause}" if self.place else self.cause
        return f"{text}; {self.mend}" if self.mend else text


class ConfigError(PrimerlError):
    """A recipe, profile or override cannot be what the user meant, or the two do not fit together."""

    exit_code = ExitCode.CONFIG


class DataError(PrimerlError):
    """A dataset row, model folder, weight folder or checkpoint is missing something it needs."""

    exit_code = ExitCode.DATA


class NotFoundError(PrimerlError):
    """A file, run, role, template or key that was named does not exist."""

    exit_code = ExitCode.NOT_FOUND


class OccupiedError(PrimerlError):
    """The run directory already holds a run, or another supervisor runs on it."""

    exit_code = ExitCode.OCCUPIED


class SchedulerError(PrimerlError):
    """The scheduler (SLURM or the local executor) refused or did not answer."""

    exit_code = ExitCode.UNAVAILABLE


class RoleError(PrimerlError):
    """A role cannot go on: an engine, environment server or peer failed beyond its budget."""


class TimeoutWaitingError(RoleError):
    """A peer did not publish what was waited for in time; names what, where and how long."""
