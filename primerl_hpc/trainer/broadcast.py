"""Policy versions from the trainer's memory into the engines': rank 0 sends them to a group (`transport.weights_broadcast`).

    sender = BroadcastPublisher(run, core, host)
    sender.publish(version, is_whole=False)

The leader announces a version and waits `ANSWER_S` for the orchestrator to pause engines and name the group; then every layer is
gathered in turn and sent from the device as a bucket. What was not sent to its end is written into ``weights/``.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import torch
from torch.distributed import TCPStore
from transformers.core_model_loading import revert_weight_conversion

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import is_there
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.export import DTYPES, export_types, gather_shards, publish_policy
from primerl_hpc.trainer.setup import from_leader
from primerl_hpc.transport.broadcast_group import Group, open_store
from primerl_hpc.transport.weights import Announcement
from primerl_hpc.transport.weights_broadcast import announce, read_answer

ANSWER_S = 60.0  # an orchestrator that waits for an engine to start answers later: a folder serves it as well
POLL_S = 0.02

log = logging.getLogger("primerl_hpc.trainer")


class BroadcastPublisher:
    def __init__(self, run: RunDir, core: Core, host: str) -> None:
        """``host``: this node's address for the engines."""
        self.run, self.core, self.host = run, core, host
        self._life = secrets.token_hex(4)
        self._store: TCPStore | None = None  # the leader's
        self._group: Group | None = None

    def publish(self, version: int, *, is_whole: bool) -> None:
        """Send the policy to the engines that are there; into ``weights/`` where it ``is_whole`` or was not sent. Collective."""
        is_sent = self._send(version)
        if is_whole or not is_sent:
            self.write_whole(version)

    def write_whole(self, version: int) -> None:
        publish_policy(self.run, self.core, version)

    @torch.no_grad()
    def _send(self, version: int) -> bool:
        world, announcement = self.core.world, None
        if world.is_leader:
            announcement = self._announce(version)
            self._group = self._meet(announcement)
        if not from_leader(self._group is not None):
            return False
        policy = self.core.policy
        types = export_types(policy, DTYPES[self.core.recipe.model.dtype])
        for _, _, gathered in gather_shards(policy, world, types, for_leader=True):
            self._pass_on(revert_weight_conversion(policy.hf, gathered))
        if world.is_leader:
            self._pass_on(None)
            announce(self.run, announcement, is_open=False)
        return from_leader(self._group is not None)

    def _announce(self, version: int) -> Announcement:
        if self._store is None:
            self._store = open_store(self.host)
        announcement = Announcement(version, self.host, self._store.port, self._life)
        announce(self.run, announcement, is_open=True)
        return announcement

    def _meet(self, announcement: Announcement) -> Group | None:
        """The group that the orchestrator names, once all its members are there; None when there will be none."""
        answer = self._wait_for_answer(announcement)
        fault = "no engine is there to receive it"
        if answer is not None and answer["size"] > 1:
            if self._group is not None and self._group.name == answer["group"]:
                return self._group
            self._group = None  # the old one ends before the new one begins
            try:
                return Group.join(
                    self._store, answer["group"], rank=0, size=answer["size"], device=self.core.world.device
                )
            except RoleError as error:
                fault = str(error)
        announce(self.run, announcement, is_open=False)
        log.warning("v%d is written instead of sent: %s", announcement.version, fault)
        return None

    def _wait_for_answer(self, announcement: Announcement) -> dict[str, Any] | None:
        deadline = time.monotonic() + ANSWER_S
        while (answer := read_answer(self.run, announcement)) is None:
            if time.monotonic() >= deadline or is_there(self.run.stop_request):
                announce(self.run, announcement, is_open=False)
                return read_answer(self.run, announcement)  # it may have come in between
            time.sleep(POLL_S)
        return answer

    def _pass_on(self, bucket: dict[str, Any] | None) -> None:
        """Send a bucket, None: the end. A broken group is left; gathering goes on, for the other ranks."""
        if self._group is None:
            return
        try:
            self._group.send(bucket) if bucket is not None else self._group.send_end()
        except RuntimeError as error:
            log.warning("the version is written instead of sent: %s", str(error).splitlines()[0])
            self._group = None
