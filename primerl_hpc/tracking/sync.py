"""Send the rows of a run from a login node: ``primerl-hpc sync RUN --watch``.

for report in sync(run, recipe, watch=True): …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from primerl_hpc.common.errors import ConfigError, OccupiedError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.lock import TOUCH_EVERY_S, SupervisorLock
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.base import TargetUnavailableError
from primerl_hpc.tracking.relay import POLL_S, Relay


@dataclass(frozen=True)
class SyncReport:
    """State of one target after a pass."""

    target: str
    sent: int
    is_complete: bool  # no row waits
    error: str = ""


def sync(
    run: RunDir, recipe: Recipe, ended: Event, *, watch: bool, show: Callable[[list[SyncReport]], None]
) -> list[SyncReport]:
    """Send all rows, with ``watch`` until the run has ended and every row was sent, or ``ended`` is set.

    Raises ConfigError without tracking, OccupiedError if the job or another ``sync`` sends.
    """
    if not recipe.tracking.targets:
        raise ConfigError(
            "this run has no tracking", hint="set tracking in the recipe, for example tracking.wandb"
        )
    if not recipe.tracking.relay and not _is_over(run):
        raise OccupiedError(
            "the job of this run sends its metrics itself",
            hint="sync it after its end, or submit with tracking.relay=true to send from here",
        )
    with _lock(run) as lock:
        relays = [Relay(run, recipe, name, ended) for name in recipe.tracking.targets]
        try:
            while True:
                is_over = _is_over(run)  # before the pass: it reads the last rows
                reports = [_pass(relay, is_last=is_over) for relay in relays]
                show(reports)
                if not watch or (is_over and all(report.is_complete for report in reports)):
                    return reports
                lock.touch()
                if ended.wait(TOUCH_EVERY_S if any(report.error for report in reports) else POLL_S):
                    return reports
        finally:
            for relay in relays:
                relay.finish()


def _pass(relay: Relay, *, is_last: bool) -> SyncReport:
    try:
        relay.send(is_last=is_last)
    except TargetUnavailableError as error:
        return SyncReport(relay.name, relay.stream.sent, False, str(error))
    return SyncReport(relay.name, relay.stream.sent, relay.stream.is_complete)


def _is_over(run: RunDir) -> bool:
    state = (read_json_or_none(run.state) or {}).get("state")
    return state is not None and RunState(state).is_final


@contextmanager
def _lock(run: RunDir) -> Iterator[SupervisorLock]:
    lock = SupervisorLock(run.tracker_state("sync").with_suffix(".lock"))
    try:
        lock.acquire()
    except OccupiedError as error:
        raise OccupiedError("another sync already sends the metrics of this run") from error
    try:
        yield lock
    finally:
        lock.release()
