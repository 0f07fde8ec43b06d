"""Sends policy versions from the trainer's memory to the engines': rank 0 broadcasts to a group.

    sender = BroadcastPublisher(run, trainer, host, num_ranks)
    sender.publish(version, is_full=False)

The leader announces a version (`transport.weights.broadcast`) and waits `ANSWER_S` for the orchestrator to pause
engines and name the group; then every layer is gathered in turn and sent from the device as a bucket. A version that
was not sent completely is written to ``weights/``.
"""

from __future__ import annotations

import logging
import secrets
from typing import Any

import torch

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import is_there
from primerl_hpc.common.waiting import Polling
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.model.families import file_tensors
from primerl_hpc.trainer.setup import broadcast_from_rank0
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.trainer.weights.filesystem import DTYPES, export_types, gather_shards, publish_policy
from primerl_hpc.transport.store import SecureStore, serve_store
from primerl_hpc.transport.weights.broadcast import publish_offer, read_group
from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup
from primerl_hpc.transport.weights.sources import BroadcastOffer

ANSWER_S = 60.0  # an orchestrator that waits for an engine to start responds later and uses the folder
POLL_S = 0.02

log = logging.getLogger("primerl_hpc.trainer")


class BroadcastPublisher:
    def __init__(self, run: RunDir, trainer: Trainer, host: str, num_ranks: int) -> None:
        """``host``: address of this node for the engines; ``num_ranks``: processes of the run that may join."""
        self.run, self.trainer, self.host = run, trainer, host
        self._num_ranks = num_ranks
        self._sender_id = secrets.token_hex(4)
        self._store: SecureStore | None = None  # the leader's
        self._group: BroadcastGroup | None = None

    def publish(self, version: int, *, is_full: bool) -> None:
        """Send the policy to the running engines; write it to disk if it ``is_full`` or was not sent. Collective."""
        is_sent = self._send(version)
        if is_full or not is_sent:
            self.write_full(version)

    def write_full(self, version: int) -> None:
        publish_policy(self.run, self.trainer, version)

    @torch.no_grad()
    def _send(self, version: int) -> bool:
        world = self.trainer.world
        announcement: BroadcastOffer | None = None
        if world.is_leader:
            announcement = self._announce(version)
            self._group = self._meet(announcement)
        if not broadcast_from_rank0(self._group is not None):
            return False
        policy = self.trainer.policy
        types = export_types(policy, DTYPES[self.trainer.recipe.model.dtype])
        for _, _, gathered in gather_shards(policy, world, types, for_leader=True):
            self._send_bucket(file_tensors(policy.hf, gathered))
        if announcement is not None:
            self._send_bucket(None)
            publish_offer(self.run, announcement, is_open=False)
        return broadcast_from_rank0(self._group is not None)

    def _announce(self, version: int) -> BroadcastOffer:
        if self._store is None:
            self._store = serve_store(run_keys(self.run), "weights", self.host, num_clients=self._num_ranks)
        announcement = BroadcastOffer(version, self.host, self._store.port, self._sender_id)
        publish_offer(self.run, announcement, is_open=True)
        return announcement

    def _meet(self, announcement: BroadcastOffer) -> BroadcastGroup | None:
        """Return the group that the orchestrator names, after all its members have joined; None if there is none."""
        assert self._store is not None  # `_announce` starts it
        answer = self._wait_for_answer(announcement)
        fault = "no engine is ready to receive it"
        if answer is not None and answer["size"] > 1:
            if self._group is not None and self._group.name == answer["group"]:
                return self._group
            self._group = None  # the old group ends before the new one starts
            try:
                return BroadcastGroup.join(
                    self._store,
                    answer["group"],
                    rank=0,
                    size=answer["size"],
                    device=self.trainer.world.device,
                )
            except RoleError as error:
                fault = str(error)
        publish_offer(self.run, announcement, is_open=False)
        log.warning("broadcast of v%d failed, writing it to disk: %s", announcement.version, fault)
        return None

    def _wait_for_answer(self, announcement: BroadcastOffer) -> dict[str, Any] | None:
        for _ in Polling(ANSWER_S, POLL_S):
            if (answer := read_group(self.run, announcement)) is not None:
                return answer
            if is_there(self.run.stop_request):
                break
        publish_offer(self.run, announcement, is_open=False)
        return read_group(self.run, announcement)  # the answer may have arrived in between

    def _send_bucket(self, bucket: dict[str, Any] | None) -> None:
        """Send a bucket; None marks the end. A broken group is left; gathering continues for the other ranks."""
        if self._group is None:
            return
        try:
            self._group.send(bucket) if bucket is not None else self._group.send_end()
        except RuntimeError as error:
            log.warning("broadcast failed, writing the version to disk: %s", str(error).splitlines()[0])
            self._group = None
