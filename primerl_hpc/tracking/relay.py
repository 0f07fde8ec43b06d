"""The loop that sends the rows of a run to one target.

    Relay(run, recipe, "prime", ended).follow()        # until ``ended`` is set, then what is left, once

While a target is unavailable its rows wait; the time between two tries grows up to a minute. Nothing else waits for it.
"""

from __future__ import annotations

import logging
from threading import Event

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import Kind, RunState
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.metrics import read_last_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.base import Outcome, Target, TargetContext, TargetUnavailableError
from primerl_hpc.tracking.stream import Stream
from primerl_hpc.tracking.targets import extras_of, open_target, sources_of

POLL_S = 1.0
MAX_DELAY_S = 60.0

logger = logging.getLogger(__name__)


class Relay:
    def __init__(self, run: RunDir, recipe: Recipe, name: str, ended: Event) -> None:
        sources = sources_of(name, recipe.tracking)
        self.run, self.recipe, self.name, self.ended = run, recipe, name, ended
        self.stream = Stream(run, name, sources, extras_of(name, recipe.tracking))
        self.context = TargetContext(run, recipe, sources, self.stream.memory, self.stream.save, ended)
        self.target: Target | None = None
        self._delay_s = 0.0
        self._failed = False

    def follow(self) -> None:
        """Send rows until ``ended`` is set. Raises ConfigError if the target refuses the connection or a row."""
        while not self.ended.wait(self._delay_s):
            self._try()
        self._try()
        self.finish()

    def send(self, *, is_last: bool = False) -> None:
        """Send all rows. Raises TargetUnavailableError, after which the call can be repeated."""
        if self.target is None:
            self.target = open_target(self.name, self.context)
            self.stream.restore(self.target.position)
        for item in self.stream.pending(is_last=is_last):
            self.target.send(item)
            self.stream.commit(item)

    def finish(self) -> None:
        """End the connection, with the outcome of the run if it is known."""
        if self.target is None:
            return
        try:
            self.target.finish(find_outcome(self.run, self.recipe), self.stream.last_values)
        except TargetUnavailableError as error:
            logger.warning("Reporting the end of the run to %s failed: %s", self.name, error)

    def _try(self) -> None:
        is_over = self.ended.is_set()
        try:
            self.send(is_last=is_over and find_outcome(self.run, self.recipe) is not None)
        except TargetUnavailableError as error:
            if not self._failed or is_over:
                logger.warning("Tracking by %s is delayed: %s", self.name, error)
            self._failed = True
            self._delay_s = min(MAX_DELAY_S, max(POLL_S, self._delay_s * 2))
            return
        if self._failed:
            logger.info("Tracking by %s continues", self.name)
        self._failed, self._delay_s = False, POLL_S


def find_outcome(run: RunDir, recipe: Recipe) -> Outcome | None:
    """Return how the run ended; None while it may continue."""
    state = (read_json_or_none(run.state) or {}).get("state")
    main = run.metrics("sft" if recipe.kind == Kind.SFT else "trainer")
    if state == RunState.DONE or max(read_last_steps(main, 1), default=0) >= (recipe.max_steps or 1 << 62):
        return "completed"
    if state in (RunState.FAILED, RunState.CANCELLED) or run.failure.exists():
        return "failed"
    return None
