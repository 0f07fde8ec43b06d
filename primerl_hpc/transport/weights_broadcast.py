"""Weights sent to a group of processes: the files by which trainer and orchestrator agree on who is in it. No tensors here.

    control/broadcast/announcement.json   trainer        {"version", "host", "port", "life", "is_open"}: I can send this version
    control/broadcast/group.json          orchestrator   {"version", "life", "group", "size"}: these are paused and will receive it

The trainer holds a store at host:port for its whole life. Members meet there under the group's name, rank 0 is the trainer; a
group is used again as long as its members live and nothing went wrong in it. A version that was not sent to its end lies in
``weights/`` instead, like every version that must be there anyway: whatever breaks, files are the answer.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.transport.weights import Announcement, Source
from primerl_hpc.transport.weights_filesystem import FilesystemWeightReader


def announce(run: RunDir, announcement: Announcement, *, is_open: bool) -> None:
    """Trainer: ``is_open`` False: too late to join."""
    write_json(run.announcement, {**vars(announcement), "is_open": is_open})


def read_announcement(run: RunDir) -> tuple[Announcement, bool] | None:
    """What is announced, and whether it is open."""
    found = read_json_or_none(run.announcement)
    if found is None:
        return None
    is_open = found.pop("is_open")
    return Announcement(**found), is_open


def answer(run: RunDir, announcement: Announcement, group: str, size: int) -> None:
    """Orchestrator: ``size`` counts the trainer."""
    write_json(
        run.broadcast_group,
        {"version": announcement.version, "life": announcement.life, "group": group, "size": size},
    )


def read_answer(run: RunDir, announcement: Announcement) -> dict[str, Any] | None:
    """``{"group", "size", …}`` for this announcement."""
    found = read_json_or_none(run.broadcast_group)
    asked = {"version": announcement.version, "life": announcement.life}
    return found if found is not None and found.items() >= asked.items() else None


class BroadcastWeightReader(FilesystemWeightReader):
    """Versions in ``weights/``, and the one that is announced."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self._given_up: set[Announcement] = set()

    def newest(self) -> int | None:
        announced = self._announced()
        versions = [*self.versions(), *([announced.version] if announced else [])]
        return max(versions, default=None)

    def has(self, version: int) -> bool:
        announced = self._announced()
        return (announced is not None and announced.version == version) or super().has(version)

    def open(self, version: int, reader: str) -> Source:
        """A folder where there is one; else the announcement, which may be closed by now."""
        found = read_announcement(self.run)
        if not super().has(version) and found is not None and found[0].version == version:
            return found[0]
        return super().open(version, reader)

    def ask_for_whole(self) -> bool:
        write_text(self.run.full_weights_request, "")
        return True

    def give_up(self, version: int, source: Source) -> None:
        """What was sent may come as a folder; a folder is all there is."""
        if not isinstance(source, Announcement):
            super().give_up(version, source)
        self._given_up.add(source)

    def _announced(self) -> Announcement | None:
        found = read_announcement(self.run)
        if found is None or not found[1] or found[0] in self._given_up:
            return None
        return found[0]
