"""How long the phases of a process's start took: imports, model, compilation, first token.

    own_phases().end("imports"); ...; own_phases().end("model")       # of this process, since it was started
    own_phases().seconds                                              # {"imports": 21.4, "model": 3.0}

The process publishes the result in its endpoint; the supervisor records it in the event ``role_ready`` or
``role_started``. Standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import cache


class StartPhases:
    def __init__(self, age_s: float | None = None) -> None:
        """``age_s``: how long ago the first phase began; None: it began when this process was started."""
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic() - (process_age() if age_s is None else age_s)

    def end(self, name: str, parts: Mapping[str, float] | None = None) -> None:
        """End the current phase. ``parts``: measured parts of it in seconds, which are listed before the rest."""
        now = time.monotonic()
        rest = now - self._last
        for part, seconds in (parts or {}).items():
            self.seconds[part] = round(seconds, 2)
            rest -= seconds
        self.seconds[name] = round(max(rest, 0.0), 2)
        self._last = now


@cache
def own_phases() -> StartPhases:
    """Return the phases of this process."""
    return StartPhases()


def process_age() -> float:
    """Return the seconds since this process was started, to a hundredth."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since boot
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)


def phases_sentence(seconds: Mapping[str, float]) -> str:
    """``imports 21.4 s, compile 0.0 s``"""
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
