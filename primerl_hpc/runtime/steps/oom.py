"""Evidence of out-of-memory kills: the counter of the control group, else the kernel log.

    watch = OomWatch()
    watch.check(pids)                     # from time to time, while the processes run
    print(watch.evidence())               # "" without evidence

SIGKILL alone proves nothing: the scheduler and users send it too. The guard prints the evidence to the log of its
process, where `runtime/failures.py` reads it. Standard library only, because the guard imports it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection

RECENT_S = 60.0
"""torchrun may take this long to exit after one of its ranks was killed; older kills are unrelated."""
_COUNTER = re.compile(r"^oom_kill (\d+)$", re.M)
_KILLED = re.compile(r"Killed process (\d+) \((.*?)\)")
_RECORD_BYTES = 8192


def counter_file(groups: str, root: str = "/sys/fs/cgroup") -> str | None:
    """Return the file that counts kernel kills of a control group; ``groups``: content of /proc/self/cgroup.

    Version 2: ``memory.events`` of the group; version 1: ``memory.oom_control``. None if neither can be read.
    """
    candidates = []
    for line in groups.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            candidates.insert(0, f"{root}/memory{path.rstrip('/')}/memory.oom_control")
        elif number == "0":
            candidates.append(f"{root}{path.rstrip('/')}/memory.events")
            candidates.append(f"{root}/unified{path.rstrip('/')}/memory.events")
    return next((path for path in candidates if read_count(path) is not None), None)


def read_count(path: str) -> int | None:
    """Return the number of processes of the group that the kernel has killed; None if the file does not contain it."""
    try:
        with open(path) as file:
            found = _COUNTER.search(file.read())
    except OSError:
        return None
    return int(found[1]) if found else None


def killed_in_log(text: str, pids: Collection[int]) -> str | None:
    """Return the kernel log's last message about a kill of one of ``pids``."""
    matches = [match for match in _KILLED.finditer(text) if int(match[1]) in pids]
    return matches[-1][0] if matches else None


def read_kernel_log() -> str:
    """Return the current content of /dev/kmsg; empty if this user may not read it."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    records = []
    try:
        while record := os.read(log, _RECORD_BYTES):
            records.append(record.decode(errors="replace"))
    except OSError:
        pass  # EAGAIN: end of the log; EPIPE: overwritten while reading
    finally:
        os.close(log)
    return "\n".join(records)


class OomWatch:
    def __init__(self) -> None:
        try:
            with open("/proc/self/cgroup") as file:
                self.path = counter_file(file.read())
        except (OSError, ValueError):
            self.path = None
        self.count = read_count(self.path) if self.path else None
        self.killed_at: float | None = None
        self.pids: set[int] = set()
        """Processes to search for in the kernel log, if the group has no counter."""

    def check(self, pids: Collection[int] = ()) -> None:
        """Record a kill since the last check."""
        if self.path is None:
            self.pids.update(pids)
            return
        count = read_count(self.path)
        if count is not None and count > (self.count or 0):
            self.count, self.killed_at = count, time.monotonic()

    def evidence(self) -> str:
        """Return one line about a kill within the last `RECENT_S`; empty without one."""
        if self.path is None:
            killed = killed_in_log(read_kernel_log(), self.pids)
            return f"out of memory: the kernel log reports: {killed}" if killed else ""
        if self.killed_at is None or (ago_s := time.monotonic() - self.killed_at) > RECENT_S:
            return ""
        name = os.path.basename(self.path)
        return (
            f"out of memory: the kernel killed a process of this control group {ago_s:.0f} s ago "
            f"({name}: oom_kill {self.count})"
        )
