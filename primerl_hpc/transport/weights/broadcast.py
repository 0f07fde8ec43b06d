"""Weights sent to a group of processes: the files by which trainer and orchestrator agree on its members. No tensors.

    control/broadcast/announcement.json   written by the trainer:
        {"version", "host", "port", "store_id", "is_open"}      the version that it offers to send
    control/broadcast/group.json          written by the orchestrator:
        {"version", "store_id", "group", "size"}                the group whose engines are paused and ready to receive

The trainer serves a store at host:port until it exits; ``store_id`` identifies that store. Members meet there under the
group's name, and rank 0 is the trainer. A group is reused as long as all its members run and no operation failed. A
version that was not sent completely is written to ``weights/`` instead: whatever fails, engines can read files.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.filesystem import FilesystemWeightReader
from primerl_hpc.transport.weights.sources import BroadcastOffer, Source


def publish_offer(run: RunDir, offer: BroadcastOffer, *, is_open: bool) -> None:
    """Write the trainer's offer. ``is_open`` False: it is too late to join the group."""
    write_json(
        run.announcement,
        {
            "version": offer.version,
            "host": offer.host,
            "port": offer.port,
            "store_id": offer.store_id,
            "is_open": is_open,
        },
    )


def read_offer(run: RunDir) -> tuple[BroadcastOffer, bool] | None:
    """Return the trainer's offer and True if it is open; None if there is no offer."""
    found = read_json_or_none(run.announcement)
    if found is None:
        return None
    return BroadcastOffer(found["version"], found["host"], found["port"], found["store_id"]), found["is_open"]


def publish_group(run: RunDir, offer: BroadcastOffer, group: str, size: int) -> None:
    """Write the orchestrator's reply to an offer. ``size``: number of members, the trainer included."""
    write_json(
        run.broadcast_group,
        {"version": offer.version, "store_id": offer.store_id, "group": group, "size": size},
    )


def read_group(run: RunDir, offer: BroadcastOffer) -> dict[str, Any] | None:
    """Return ``{"group", "size", …}``, the orchestrator's reply to this offer; None if there is none yet."""
    found = read_json_or_none(run.broadcast_group)
    expected = {"version": offer.version, "store_id": offer.store_id}
    return found if found is not None and found.items() >= expected.items() else None


class BroadcastWeightReader(FilesystemWeightReader):
    """Versions in ``weights/``, and the one that the trainer offers."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self._given_up: set[BroadcastOffer] = set()

    def newest(self) -> int | None:
        offer = self._open_offer()
        versions = (super().newest(), offer.version if offer else None)
        return max((version for version in versions if version is not None), default=None)

    def has(self, version: int) -> bool:
        offer = self._open_offer()
        return (offer is not None and offer.version == version) or super().has(version)

    def open(self, version: int, reader: str) -> Source:
        """Return the folder if it exists; otherwise the offer, which may be closed in the meantime."""
        found = read_offer(self.run)
        if not super().has(version) and found is not None and found[0].version == version:
            return found[0]
        return super().open(version, reader)

    def request_full(self) -> bool:
        write_text(self.run.full_weights_request, "")
        return True

    def give_up(self, version: int, source: Source) -> None:
        """Ignore a failed offer: a folder may follow. Raises DataError for a folder, which is the last resort."""
        if isinstance(source, BroadcastOffer):
            self._given_up.add(source)
        else:
            super().give_up(version, source)

    def _open_offer(self) -> BroadcastOffer | None:
        found = read_offer(self.run)
        if found is None or not found[1] or found[0] in self._given_up:
            return None
        return found[0]
