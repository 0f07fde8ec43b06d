"""A minimum time between questions to SLURM, for all processes of a run together.

    floor = QuestionFloor(run.slurm_questions, plan.ask_every_s)
    if floor.may_ask(): …                       # at most one process of the run asks within `every_s`
    floor.is_over(job, is_job_over)             # the answer of whichever process asked

Each question is a file with the next number, created exclusively, so that one process wins on every shared filesystem.
Clocks of nodes differ, so no time stamps are compared: a process may ask if the newest number has not changed for
``every_s`` on its own clock. A process reads the folder once in that time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from primerl_hpc.common.files import create_exclusive, is_there

_OVER = "over_"
LOOK_EVERY_S = 5.0
"""How often a process reads whether another one received an answer."""


class QuestionFloor:
    def __init__(self, folder: Path, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.every_s, self._clock = folder, every_s, clock
        self._seen: int | None = None
        self._seen_at = self._next_look = 0.0

    def may_ask(self) -> bool:
        """True if this process may ask now; its question is then counted. Raises OSError."""
        now = self._clock()
        if self._seen is not None and now - self._seen_at < self.every_s:
            return False
        newest = self._newest()
        is_unchanged = newest in (self._seen, 0)
        self._seen, self._seen_at = newest, now
        return is_unchanged and self._claim(newest + 1)

    def note(self) -> None:
        """Count a question that cannot wait, so that the other processes do not ask soon after it. Raises OSError."""
        self._claim(self._newest() + 1)

    def is_over(self, job: str, ask: Callable[[str], bool]) -> bool:
        """True if SLURM reported to this process or another one that the job has ended. Asks if that is allowed.

        Raises OSError.
        """
        if self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + min(self.every_s, LOOK_EVERY_S)
        if is_there(self.folder / f"{_OVER}{job}"):
            return True
        if not self.may_ask() or not ask(job):
            return False
        create_exclusive(self.folder / f"{_OVER}{job}", "")
        return True

    def _newest(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return max((int(path.name) for path in self.folder.iterdir() if path.name.isdigit()), default=0)
        return 0

    def _claim(self, number: int) -> bool:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not create_exclusive(self.folder / str(number), ""):
            return False
        self._seen, self._seen_at = number, self._clock()
        with contextlib.suppress(FileNotFoundError):
            (self.folder / str(number - 1)).unlink()
        return True
