"""Reserve a run for one ``resume``: two at once would submit two jobs, of which control/job.json names one."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from primerl_hpc.common.errors import OccupiedError
from primerl_hpc.common.waiting import repeating
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.run.lock import TOUCH_EVERY_S, SupervisorLock
from primerl_hpc.run.rundir import RunDir


@contextlib.contextmanager
def reserve_next_attempt(run: RunDir) -> Iterator[None]:
    """Let no other ``resume`` change the run or submit its next attempt until the block ends.

    Raises OccupiedError if another one does at this moment, or has done.
    """
    lock = SupervisorLock(run.resume_lock)
    try:
        lock.acquire()
    except OccupiedError as error:
        raise OccupiedError(
            "another resume of this run has not ended yet",
            location=error.location,
            hint=f"primerl-hpc status {shlex.quote(str(run.root))}",
        ) from None
    try:
        with repeating(TOUCH_EVERY_S, lock.touch):
            check_not_running(run)
            yield
    finally:
        lock.release()
