"""Advice about a run that has ended, by its ending and whether it has a checkpoint. `ADVICE` is the complete table.

    ending = ending_of(RunState.FAILED, failure, known, is_over_budget=False)
    advice = ADVICE[ending, has_checkpoint]
    advice.sentence.format(after="after step 20", step=20), command_of(advice.next, run)

`advise` does all of this for a run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.diagnose.known_faults import KnownFault, Retry
from primerl_hpc.run.ledger.attempts import budget_stop
from primerl_hpc.run.registry import word_for
from primerl_hpc.run.rundir import RunDir


class Ending(StrEnum):
    STOPPED = "stopped"
    """It saved and stopped: on request, or because its jobs ended."""
    CANCELLED = "cancelled"
    """It ended on request before it saved."""
    BUDGET = "budget"
    """It saved and stopped because one more step would exceed its budget of hours."""
    INTERRUPTED = "interrupted"
    """Something outside of the run ended it, or an unknown error, which may not recur."""
    NO_NEW_CHECKPOINT = "no new checkpoint"
    """It was interrupted before it saved anything new."""
    SITE = "site"
    """Something outside of recipe and profile must be corrected: a disk, a package, access to a model."""
    DATA = "data"
    """A dataset, model folder or checkpoint is invalid."""
    RECIPE = "recipe"
    """The recipe must change."""
    PROFILE = "profile"
    """The profile must change: the job as it was submitted cannot start the run."""


class NextCommand(StrEnum):
    """The next command."""

    RESUME = "resume"
    RESUME_WITH_BUDGET = "resume --budget"
    SUBMIT = "submit"
    FORK = "submit from the checkpoint"


@dataclass(frozen=True)
class EndingAdvice:
    can_retry: bool
    """True if another attempt of this run can succeed, maybe after a fix."""
    sentence: str
    """``{after}``: "after step 20" or "from the beginning"; ``{step}``: 20."""
    next: NextCommand


_RESUME = EndingAdvice(True, "resume continues {after}", NextCommand.RESUME)
_NOTHING_FAILED = EndingAdvice(True, "nothing failed; resume continues {after}", NextCommand.RESUME)
_LARGER_BUDGET = EndingAdvice(
    True, "nothing failed; with a larger budget, resume continues {after}", NextCommand.RESUME_WITH_BUDGET
)
_SAVE_MORE_OFTEN = EndingAdvice(
    True,
    "resume continues {after}; if it is interrupted again, save more often: resume --set checkpoint.interval=N",
    NextCommand.RESUME,
)
_FIX = EndingAdvice(True, "after a fix, resume continues {after}", NextCommand.RESUME)

ADVICE: Mapping[tuple[Ending, bool], EndingAdvice] = {
    (Ending.STOPPED, True): _NOTHING_FAILED,
    (Ending.STOPPED, False): _NOTHING_FAILED,
    (Ending.CANCELLED, True): _NOTHING_FAILED,
    (Ending.CANCELLED, False): _NOTHING_FAILED,
    (Ending.BUDGET, True): _LARGER_BUDGET,
    (Ending.BUDGET, False): _LARGER_BUDGET,
    (Ending.INTERRUPTED, True): _RESUME,
    (Ending.INTERRUPTED, False): _RESUME,
    (Ending.NO_NEW_CHECKPOINT, True): _SAVE_MORE_OFTEN,
    (Ending.NO_NEW_CHECKPOINT, False): _SAVE_MORE_OFTEN,
    (Ending.SITE, True): _FIX,
    (Ending.SITE, False): _FIX,
    (Ending.DATA, True): EndingAdvice(
        True, "after the data are corrected, resume continues {after}", NextCommand.RESUME
    ),
    (Ending.DATA, False): EndingAdvice(
        False,
        "the same data would fail again: correct the data or the recipe, then submit again",
        NextCommand.SUBMIT,
    ),
    (Ending.RECIPE, True): EndingAdvice(
        False,
        "the same recipe would fail again: correct it, then submit it from the checkpoint of step {step}",
        NextCommand.FORK,
    ),
    (Ending.RECIPE, False): EndingAdvice(
        False, "the same recipe would fail again: correct it, then submit it again", NextCommand.SUBMIT
    ),
    (Ending.PROFILE, True): EndingAdvice(
        False,
        "the same job would fail again: correct the profile, then submit from the checkpoint of step {step}",
        NextCommand.FORK,
    ),
    (Ending.PROFILE, False): EndingAdvice(
        False, "the same job would fail again: correct the profile, then submit again", NextCommand.SUBMIT
    ),
}
"""(what ended the run, has it a complete checkpoint?) → advice."""

_RETRY: Mapping[Retry, Ending] = {
    "as it is": Ending.INTERRUPTED,
    "with more checkpoints": Ending.NO_NEW_CHECKPOINT,
    "after a fix": Ending.SITE,
    "with another recipe": Ending.RECIPE,
    "with another profile": Ending.PROFILE,
}
NOT_STARTED = (126, 127)
"""Exit codes of a shell, and of the guard: the program cannot be executed, or does not exist."""


def ending_of(
    state: RunState, failure: Mapping[str, Any] | None, known: KnownFault | None, *, is_over_budget: bool
) -> Ending:
    """Return what ended a run in this state. ``failure``: content of control/failure.json of its last attempt."""
    if state == RunState.STOPPED and is_over_budget:
        return Ending.BUDGET
    if state != RunState.FAILED:
        is_stopped = state == RunState.STOPPED
        return _RETRY[known.retry] if known else Ending.STOPPED if is_stopped else Ending.CANCELLED
    failure = failure or {}
    code, is_ours = failure.get("exit_code"), failure.get("role") == "supervisor"
    if code == ExitCode.DATA:
        return Ending.DATA
    if code in NOT_STARTED or (is_ours and code == ExitCode.CONFIG):
        return Ending.PROFILE
    if code in (ExitCode.CONFIG, ExitCode.USAGE):
        return Ending.RECIPE
    if known is not None:
        return _RETRY[known.retry]
    return Ending.RECIPE if code == ExitCode.NO_CONTINUE else Ending.INTERRUPTED


def advise(
    run: RunDir, state: RunState, failure: Mapping[str, Any] | None, known: KnownFault | None
) -> tuple[bool, str, str]:
    """Return for an ended run: can another attempt succeed, the advice, and the next command."""
    saved = run.latest_checkpoint()
    ending = ending_of(state, failure, known, is_over_budget=budget_stop(run) is not None)
    advice = ADVICE[ending, saved is not None]
    sentence = advice.sentence.format(after=run.resume_point(), step=saved)
    return advice.can_retry, sentence, command_of(advice.next, run)


def command_of(command: NextCommand, run: RunDir) -> str:
    """Return a command line that can be copied, except for HOURS."""
    match command:
        case NextCommand.RESUME:
            return f"primerl-hpc resume {word_for(run)}"
        case NextCommand.RESUME_WITH_BUDGET:
            return f"primerl-hpc resume {word_for(run)} --budget HOURS"
        case NextCommand.SUBMIT:
            return shlex.join(_submission(run))
        case NextCommand.FORK:
            return shlex.join([*_submission(run), "--set", f"checkpoint.fork.run={run.root}"])


def _submission(run: RunDir) -> list[str]:
    """Return the command line that submitted this run, without the directory that it occupies."""
    words = (read_json_or_none(run.provenance) or {}).get("command") or []
    start = next((words.index(name) for name in ("submit", "eval") if name in words), None)
    if start is None:
        return ["primerl-hpc", "submit", "RECIPE", "--profile", "PROFILE"]
    kept, rest = ["primerl-hpc"], list(words[start:])
    while rest:
        word = rest.pop(0)
        if word == "--run-dir":
            del rest[:1]
        elif not word.startswith("--run-dir=") and word not in ("--overwrite", "--yes"):
            kept.append(word)
    return kept
