"""Assign engines to the group in which they receive a version together with the trainer.

A group is reused while the same incarnations of the same engines receive from the same incarnation of the trainer and
no error occurred in it. Otherwise the next group has another name, and the remaining members leave the old one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.broadcast import publish_group, read_offer
from primerl_hpc.transport.weights.sources import BroadcastOffer, RankAssignment


class BroadcastGroups:
    def __init__(self, run: RunDir, workers_per_engine: int) -> None:
        self.run, self.workers = run, workers_per_engine
        self._members: tuple[object, ...] = ()
        self._name = ""

    def assign_ranks(self, offer: BroadcastOffer, engines: Sequence[object]) -> list[RankAssignment] | None:
        """Assign broadcast ranks to engines and publish the group, even an empty one; None if the offer has expired."""
        if read_offer(self.run) != (offer, True):
            return None
        members = (offer.store_id, *engines)
        if members != self._members:
            self._members, self._name = members, secrets.token_hex(4)
        size = 1 + self.workers * len(engines)
        publish_group(self.run, offer, self._name, size)
        return [
            RankAssignment(offer.host, offer.port, self._name, 1 + index * self.workers, size)
            for index in range(len(engines))
        ]

    def discard(self) -> None:
        """Do not reuse the current group, because an error occurred in it."""
        self._members = ()
