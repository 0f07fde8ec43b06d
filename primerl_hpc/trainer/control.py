"""What rank 0 decides for all ranks: stop and checkpoint requests, and what the end of the process says."""

from __future__ import annotations

import json
import time
from enum import IntEnum

from primerl_hpc.common.files import create_exclusive, is_there, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.trainer.setup import World, from_leader
from primerl_hpc.transport.rollouts_filesystem import FilesystemReceiver

WAIT_ROUND_S = 5.0  # a waiting rank hears from rank 0 this often, so that no collective times out
FIRST_POLL_S, MAX_POLL_S = 0.005, 0.25


class Next(IntEnum):
    """What follows a wait."""

    WAIT = 0
    BATCH = 1
    STOP = 2
    WHOLE_WEIGHTS = 3


class Requests(IntEnum):
    NONE = 0
    RETRY = 1  # of a save beside training that failed
    CHECKPOINT = 2
    STOP = 3

    @property
    def can_wait(self) -> bool:
        """Whether a save may be written beside training: nobody waits for it."""
        return self <= Requests.RETRY


def wait_for_batch(run: RunDir, receiver: FilesystemReceiver, step: int, world: World) -> Next:
    """BATCH when batch ``step`` is there, or what is asked for first. Collective, no time limit."""
    while True:
        found = from_leader(_look(run, receiver, step) if world.is_leader else Next.WAIT)
        if found != Next.WAIT:
            return Next(found)


def _look(run: RunDir, receiver: FilesystemReceiver, step: int) -> Next:
    deadline, poll_s = time.monotonic() + WAIT_ROUND_S, FIRST_POLL_S
    while time.monotonic() < deadline:
        if is_there(run.stop_request):
            return Next.STOP
        if receiver.is_ready(step):
            return Next.BATCH
        if is_there(run.full_weights_request):
            return Next.WHOLE_WEIGHTS
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, MAX_POLL_S)
    return Next.WAIT


def read_requests(run: RunDir, world: World, *, has_failed: bool) -> Requests:
    """Requests at a step boundary. Collective; stop outranks checkpoint, and either is a second try of a save.

    ``has_failed``: whether rank 0 knows that the last save failed.
    """
    found = Requests.RETRY if has_failed else Requests.NONE
    if world.is_leader:
        if run.stop_request.exists():
            found = Requests.STOP
        elif run.checkpoint_request.exists():
            found = Requests.CHECKPOINT
    return Requests(from_leader(int(found)))


def grant_checkpoint(run: RunDir, world: World) -> None:
    """The asked-for checkpoint is saved: take the request away."""
    if world.is_leader:
        run.checkpoint_request.unlink(missing_ok=True)


def is_whole_version_asked(run: RunDir, world: World) -> bool:
    """Whether an engine needs a whole version; the wish is taken back. Collective."""
    is_asked = world.is_leader and is_there(run.full_weights_request)
    if is_asked:
        run.full_weights_request.unlink(missing_ok=True)
    return from_leader(is_asked)


# -- how it ended: torchrun's own exit code says only 0 or 1 -----------------------------------------------------------


def write_outcome(run: RunDir, process: str, outcome: str, step: int) -> None:
    """``outcome``: ``done`` or ``stopped`` (saved, to be continued). ``step``: the last one finished."""
    write_json(run.outcome(process), {"process": process, "outcome": outcome, "step": step})


def write_error(
    run: RunDir, process: str, *, rank: int, exit_code: int, message: str, is_cause: bool
) -> None:
    """``is_cause``: one of our own errors; others may be a peer's echo and never replace what is there."""
    row = {"process": process, "rank": rank, "exit_code": exit_code, "message": message}
    if is_cause:
        write_json(run.error(process), row)
    else:
        create_exclusive(run.error(process), json.dumps(row) + "\n")
