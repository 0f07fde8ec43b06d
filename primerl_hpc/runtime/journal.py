"""What the supervisor writes about its run (state.json, events, failure.json), on a run directory that may falter.

    journal.record("role_started", process="trainer-0")     # now, or as soon as the run directory takes it
    journal.catch_up()                                      # raises OSError while something is still late
    step = await patiently(run.latest_checkpoint)           # a read that the run cannot go on without

A shared filesystem answers with errors now and then (EIO, ESTALE), for which nobody here is to blame. So no decision
waits for a file: what cannot be written is kept, in order. Errors that go on for `FALTERS_S` are a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.events import record_event
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.common.patience import AGAIN_S, FALTERS_S, FULL, Patience
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.runtime.failures import supervisor_failure, write_failure
from primerl_hpc.runtime.reserve import Reserve

T = TypeVar("T")

logger = logging.getLogger(__name__)


def run_directory_patience() -> Patience:
    """Around each look at the run directory that may falter."""
    return Patience("the run directory", FALTERS_S)


async def patiently(look: Callable[[], T], *, is_long: bool = False) -> T:
    """What ``look`` returns as soon as the run directory answers. Raises its OSError after `FALTERS_S`.

    ``is_long``: beside the loop, on which the lock must be kept alive meanwhile.
    """
    patience = run_directory_patience()
    while True:
        with patience:
            return await _beside_the_loop(look) if is_long else look()
        await asyncio.sleep(AGAIN_S)


async def _beside_the_loop(look: Callable[[], T]) -> T:
    """Who is cancelled waits for its end all the same: it must not go on beside a successor."""
    work = asyncio.create_task(asyncio.to_thread(look))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


class Journal:
    def __init__(self, run: RunDir, attempt: int) -> None:
        self.run_dir, self.attempt = run, attempt
        self.reserve = Reserve(run.reserve)
        self.state: dict[str, Any] = {}
        self.failure: dict[str, Any] = {}
        """The first fault of this attempt."""
        self.is_closing = False
        """The run ends: what is written now are its last words."""
        self.is_taken_over = False
        """The run directory is another supervisor's, and no longer ours to write."""
        self._late: deque[tuple[Callable[[], object], bool]] = deque()
        self._late_since = 0.0

    # -- what is told ----------------------------------------------------------------------------------------------

    def set_state(self, state: RunState, **values: Any) -> None:
        self.state.update(state=state.value, updated=round(time.time(), 3), **values)
        self.write(lambda: write_json(self.run_dir.state, self.state))

    def update(self, **values: Any) -> None:
        """More about a run whose state stays."""
        self.set_state(RunState(self.state["state"]), **values)

    def set_process(self, name: str, **values: Any) -> None:
        self.state["processes"].setdefault(name, {}).update(values)
        self.update()

    def record(self, event: str, **details: Any) -> None:
        row = {"time": round(time.time(), 3), **details}
        self.write(lambda: record_event(self.run_dir, event, **row))
        told = " ".join(f"{key}={value}" for key, value in details.items() if value is not None)
        logger.info("%s %s", event, told)

    def write_failure(self, failure: dict[str, Any]) -> None:
        self.failure = self.failure or failure
        self.write(lambda: write_failure(self.run_dir, failure), is_vital=True)

    def write_own_failure(self, reason: str, message: str, code: ExitCode) -> None:
        self.write_failure(
            supervisor_failure(
                attempt=self.attempt,
                phase=self.state.get("phase"),
                process="supervisor",
                node=socket.gethostname(),
                exit_code=code,
                reason=reason,
                message=message,
            )
        )

    # -- how it is written -----------------------------------------------------------------------------------------

    def write(self, write: Callable[[], object], *, is_vital: bool = False) -> None:
        """Now, or later and in order where the run directory falters: see `catch_up`.

        On a full disk only last words and what is vital are written, with the reserve's space; the rest is dropped. The
        run then ends by the fault of the role that needs the space, not by ours.
        """
        self._late.append((write, is_vital))
        try:
            self.catch_up()
        except OSError as error:
            if len(self._late) == 1:
                self._late_since = time.monotonic()
                logger.warning("this cannot be written yet: %s", error)

    def catch_up(self) -> None:
        """Write what is late. Raises OSError while the run directory does not take it."""
        while self._late and not self.is_taken_over:
            write, is_vital = self._late.popleft()
            try:
                write()
            except OSError as error:
                if error.errno not in FULL:
                    self._late.appendleft((write, is_vital))
                    raise
                if is_vital or self.is_closing:
                    self.reserve.spend()
                    with contextlib.suppress(OSError):
                        write()

    async def settle(self) -> None:
        """Before the end: until nothing is late, or has been for `FALTERS_S`."""
        while self._late and not self.is_taken_over and time.monotonic() - self._late_since < FALTERS_S:
            await asyncio.sleep(AGAIN_S)
            with contextlib.suppress(OSError):
                self.catch_up()
