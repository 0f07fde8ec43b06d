"""A hang is noticed: every rank writes down its stacks and where it is, and one sentence names who kept whom waiting.

    watchdog = Watchdog(root, "trainer-0", rank=0, size=8, timeout_s=900)
    watchdog.beat("step 7")        # something must be finished within timeout_s from here, or said anew
    watchdog.rest()                # nothing is due

A thread of each rank looks at the time of the last beat. The first rank to find it too old leaves a report
(``control/hangs/<process>/rank_R.json``); the others see it and leave theirs. Which collective a rank is in is in torch's
flight recorders. A rank that cannot run Python any more is named by its silence, and faulthandler's own thread
still writes its stacks to its stderr.
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

import torch

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.rundir import RunDir

POLL_S = 1.0
GRACE_S = 20.0  # for the reports of the others
RECORDED_COLLECTIVES = "256"


@dataclass(frozen=True)
class Collective:
    """Where a rank is in one group: its first collective that is not done, else its last. ``number`` counts the group's."""

    name: str
    number: int
    is_done: bool


@dataclass(frozen=True)
class HangReport:
    rank: int
    doing: str  # what the last beat said
    place: str  # innermost line of ours on the main thread
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
        """``end`` gets the sentence and does not return; the default prints it and leaves with exit code 1."""
        self.folder = root.hangs(process)
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.end = end or leave
        self._doing, self._since = "", None
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str) -> None:
        self._doing, self._since = doing, time.monotonic()
        faulthandler.dump_traceback_later(self.timeout_s + GRACE_S / 2, file=sys.__stderr__)

    def rest(self) -> None:
        self._since = None
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while True:
            time.sleep(min(POLL_S, self.timeout_s / 10))
            since = self._since
            if since is None:
                continue
            age_s = time.monotonic() - since
            # a peer that fired a little earlier is joined, so that all reports are of one moment
            if age_s > self.timeout_s or (
                age_s > self.timeout_s / 2 and any(self.folder.glob("rank_*.json"))
            ):
                self._end_hung(age_s)

    def _end_hung(self, age_s: float) -> None:
        mine = report_here(self.rank, self._doing)
        print("\n".join(mine.stacks), file=sys.__stderr__, flush=True)
        write_json(self.folder / f"rank_{self.rank}.json", asdict(mine))
        deadline = time.monotonic() + GRACE_S
        while len(reports := read_reports(self.folder)) < self.size and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        silent = sorted(set(range(self.size)) - set(reports))
        self.end(f"no progress in {age_s:.0f} s of {mine.doing}: {verdict(reports, silent)}")


def leave(sentence: str) -> None:
    print(sentence, file=sys.__stderr__, flush=True)
    os._exit(ExitCode.FAILED)


def record_collectives() -> None:
    """Have torch remember the last collectives. Before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)


def report_here(rank: int, doing: str) -> HangReport:
    """Stacks of all threads but this one, the main thread's first, and the last collective of each group."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    stacks = []
    for ident in sorted(frames, key=lambda ident: ident != main):
        stacks.append(f"-- rank {rank}, thread {names.get(ident, ident)}")
        stacks += [line.rstrip() for line in traceback.format_stack(frames[ident])]
    return HangReport(rank, doing, _place(traceback.extract_stack(frames[main])), last_collectives(), stacks)


def _place(stack: traceback.StackSummary) -> str:
    """Innermost line outside torch and the standard library, else the innermost of all."""
    package = str(Path(__file__).parents[1])
    ours = [frame for frame in stack if frame.filename.startswith(package)] or list(stack)
    frame = ours[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def last_collectives() -> dict[str, Collective]:
    """From torch's flight recorders, by backend and process group.

    GPU ranks enter collectives ahead of the device: the first that is not done holds back those after it.
    """
    found: dict[str, Collective] = {}
    for entry in recorded_collectives():
        backend, _, name = entry["profiling_name"].rpartition(":")
        group = (
            f"{backend} {entry['process_group'][0]}"  # of "cpu:gloo,cuda:nccl" each backend counts for itself
        )
        if not entry["is_p2p"] and (group not in found or found[group].is_done):
            is_done = entry["retired"] or entry["state"] == "completed"
            found[group] = Collective(name, entry["collective_seq_id"], is_done)
    return found


def recorded_collectives() -> list[dict[str, Any]]:
    """Oldest first. NCCL has a recorder of its own; the other one is gloo's. A CPU build of torch lacks NCCL's."""
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return entries


def read_reports(folder: Path) -> dict[int, HangReport]:
    found = {}
    for path in folder.glob("rank_*.json"):
        row: dict[str, Any] | None = read_json_or_none(path)
        if row is not None:
            row["collectives"] = {key: Collective(**each) for key, each in row["collectives"].items()}
            found[row["rank"]] = HangReport(**row)
    return found


def verdict(reports: dict[int, HangReport], silent: list[int]) -> str:
    """Who keeps whom waiting, in which collective: one clause."""
    waiting = {
        rank: [(group, each) for group, each in report.collectives.items() if not each.is_done]
        for rank, report in reports.items()
    }
    counts: dict[tuple[str, Collective], list[int]] = {}
    for rank, each in waiting.items():
        for key in each:
            counts.setdefault(key, []).append(rank)
    if not counts:
        where = "; ".join(f"rank {rank} at {report.place}" for rank, report in sorted(reports.items())[:8])
        return where + (f"; {_ranks(silent)} did not answer" if silent else "")
    (group, collective), inside = max(counts.items(), key=lambda item: len(item[1]))
    entered = f"{_ranks(inside)} waited in {collective.name} (number {collective.number})"
    absent = []
    for rank, report in sorted(reports.items()):
        last = report.collectives.get(group)
        if rank not in inside and last is not None and last.number < collective.number:
            absent.append(f"rank {rank} at {report.place}")
        elif rank not in inside and last is not None and last.name != collective.name:
            absent.append(f"rank {rank} in {last.name} (number {last.number})")
    if silent:
        absent.append(f"{_ranks(silent)}, which did not answer")
    return f"{entered}, without {', '.join(absent)}" if absent else f"{entered}, and no rank is missing"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
