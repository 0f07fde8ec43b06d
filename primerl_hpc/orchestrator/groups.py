"""Which engines receive a version in one group with the trainer, and in which seats.

A group is used again while the same incarnations of the same engines meet the same life of the trainer, and nothing went wrong in
it; otherwise the next one has another name, and whoever is left of the old one leaves it.
"""

from __future__ import annotations

import secrets

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.transport.weights import Announcement, Seats
from primerl_hpc.transport.weights_broadcast import answer, read_announcement


class Groups:
    def __init__(self, run: RunDir, workers_per_engine: int) -> None:
        self.run, self.workers = run, workers_per_engine
        self._members: tuple[object, ...] = ()
        self._name = ""

    def seat(self, announcement: Announcement, engines: list) -> list[Seats] | None:
        """Seats by engine, and the trainer is told, also when there is nobody; None when it sends this version no more."""
        if read_announcement(self.run) != (announcement, True):
            return None
        members = (announcement.life, *engines)
        if members != self._members:
            self._members, self._name = members, secrets.token_hex(4)
        size = 1 + self.workers * len(engines)
        answer(self.run, announcement, self._name, size)
        return [
            Seats(announcement.host, announcement.port, self._name, 1 + index * self.workers, size)
            for index in range(len(engines))
        ]

    def forget(self) -> None:
        """Something went wrong in the group: it is not used again."""
        self._members = ()
