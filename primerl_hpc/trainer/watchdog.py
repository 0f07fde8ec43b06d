"""Hang detection: every rank reports its stacks and position, and one sentence names the rank that blocks the others.

    watchdog = Watchdog(root, "trainer-0", rank=0, size=8, timeout_s=900)
    watchdog.heartbeat("step 7")   # the next call is due within timeout_s
    watchdog.pause()               # nothing is due

A thread of each rank checks the time of the last heartbeat. The first rank whose heartbeat is too old writes a report
(``control/hangs/<process>/rank_R.json``); the others see it and write theirs. The collective of a rank is in torch's
flight recorders. A rank that cannot run Python any more is identified by its missing report, and faulthandler's own
thread still writes its stacks to its stderr.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.waiting import Polling
from primerl_hpc.run.rundir import RunDir

POLL_S = 1.0
GRACE_S = 20.0  # to wait for the reports of other ranks
RECORDED_COLLECTIVES = "256"


@dataclass(frozen=True)
class Collective:
    """Position of a rank in a group: its first unfinished collective, else its last. ``number`` counts by group."""

    name: str
    number: int
    is_done: bool


@dataclass(frozen=True)
class HangReport:
    rank: int
    doing: str  # text of the last heartbeat
    location: str  # innermost line of this package on the main thread
    collectives: dict[str, Collective] = field(default_factory=dict)  # by group
    stacks: list[str] = field(default_factory=list)


class Watchdog:
    def __init__(
        self,
        root: RunDir,
        process: str,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """``end`` receives the sentence and does not return; the default prints it and exits with code 1."""
        self.folder = root.hangs(process)
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.end = end or exit_failed
        self._doing = ""
        self._since: float | None = None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def heartbeat(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()
        assert sys.__stderr__ is not None  # the launcher opens the log of every rank
        faulthandler.dump_traceback_later(self.timeout_s + GRACE_S / 2, file=sys.__stderr__)

    def pause(self) -> None:
        self._since = None
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            time.sleep(min(POLL_S, self.timeout_s / 10))
            since = self._since
            if since is None:
                continue
            age_s = time.monotonic() - since
            # a peer that reported a little earlier triggers this one, so that all reports are from one moment
            if age_s > self.timeout_s or (
                age_s > self.timeout_s / 2 and any(self.folder.glob("rank_*.json"))
            ):
                self._end_hung(age_s)

    def _end_hung(self, age_s: float) -> None:
        own_report = report_here(self.rank, self._doing)
        print("\n".join(own_report.stacks), file=sys.__stderr__, flush=True)
        write_json(self.folder / f"rank_{self.rank}.json", asdict(own_report))
        polling = Polling(GRACE_S, POLL_S / 4)
        reports = polling.last(lambda: read_reports(self.folder), lambda found: len(found) >= self.size)
        silent = sorted(set(range(self.size)) - set(reports))
        self.end(f"no progress in {age_s:.0f} s of {own_report.doing}: {verdict(reports, silent)}")


def exit_failed(sentence: str) -> None:
    print(sentence, file=sys.__stderr__, flush=True)
    os._exit(ExitCode.FAILED)


def record_collectives() -> None:
    """Make torch record the last collectives. Call before the process group is created."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)


def report_here(rank: int, doing: str) -> HangReport:
    """Return stacks of all threads but this one, the main thread's first, and the last collective of each group."""
    main = threading.main_thread().ident
    assert main is not None  # it has started
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    stacks = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        stacks.append(f"-- rank {rank}, thread {names.get(ident, ident)}")
        stacks += [line.rstrip() for line in traceback.format_stack(frames[ident])]
    return HangReport(
        rank, doing, _location(traceback.extract_stack(frames[main])), last_collectives(), stacks
    )


def _location(stack: traceback.StackSummary) -> str:
    """Return the innermost line of this package, else the innermost of all."""
    package = str(Path(__file__).parents[1])
    own_frames = [frame for frame in stack if frame.filename.startswith(package)] or list(stack)
    frame = own_frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def last_collectives() -> dict[str, Collective]:
    """Return the position in each group from torch's flight recorders, by backend and process group.

    GPU ranks enqueue collectives ahead of the device: the first unfinished one blocks those after it.
    """
    found: dict[str, Collective] = {}
    for entry in recorded_collectives():
        backend, _, name = entry["profiling_name"].rpartition(":")
        # with "cpu:gloo,cuda:nccl" each backend has its own count
        group = f"{backend} {entry['process_group'][0]}"
        if not entry["is_p2p"] and (group not in found or found[group].is_done):
            is_done = entry["retired"] or entry["state"] == "completed"
            found[group] = Collective(name, entry["collective_seq_id"], is_done)
    return found


def recorded_collectives() -> list[dict[str, Any]]:
    """Return recorded collectives, oldest first, from gloo's recorder and NCCL's, which a CPU build of torch lacks."""
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return entries


def read_reports(folder: Path) -> dict[int, HangReport]:
    found = {}
    for path in folder.glob("rank_*.json"):
        row: dict[str, Any] | None = read_json_or_none(path)
        if row is not None:
            row["collectives"] = {group: Collective(**values) for group, values in row["collectives"].items()}
            found[row["rank"]] = HangReport(**row)
    return found


def verdict(reports: dict[int, HangReport], silent: list[int]) -> str:
    """Return one clause that names the waiting ranks, their collective and the ranks that are not in it."""
    waiting = {
        rank: [
            (group, collective) for group, collective in report.collectives.items() if not collective.is_done
        ]
        for rank, report in reports.items()
    }
    counts: dict[tuple[str, Collective], list[int]] = {}
    for rank, unfinished in waiting.items():
        for key in unfinished:
            counts.setdefault(key, []).append(rank)
    if not counts:
        where = "; ".join(f"rank {rank} at {report.location}" for rank, report in sorted(reports.items())[:8])
        return where + (f"; {_ranks(silent)} did not respond" if silent else "")
    (group, collective), inside = max(counts.items(), key=lambda item: len(item[1]))
    entered = f"{_ranks(inside)} waited in {collective.name} (number {collective.number})"
    absent = []
    for rank, report in sorted(reports.items()):
        last = report.collectives.get(group)
        if rank not in inside and last is not None and last.number < collective.number:
            absent.append(f"rank {rank} at {report.location}")
        elif rank not in inside and last is not None and last.name != collective.name:
            absent.append(f"rank {rank} in {last.name} (number {last.number})")
    if silent:
        absent.append(f"{_ranks(silent)}, which did not respond")
    return f"{entered}, without {', '.join(absent)}" if absent else f"{entered}, and no rank is missing"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
