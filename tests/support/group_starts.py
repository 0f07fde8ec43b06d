"""Form process groups in forked ranks of a user of their own, and report what each rank did."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.trainer.setup import broadcast_from_rank0
from primerl_hpc.transport import members
from primerl_hpc.transport.store import SecureStore, serve_store

OWNER = 47001
"""User of the ranks: a stranger who attacks this user's listeners does not disturb other tests."""


@dataclass(frozen=True)
class GroupStart:
    num_ranks: int = 2
    max_skipped: int = members.MAX_SKIPPED
    """Bound of a listener's first sequence number; 1: it is the same in every start."""
    proof_s: float = 2.0
    is_protected: bool = True
    hang_s: float = 60.0

    def run(self, keys: RunKeys) -> list[tuple[str, int]]:
        """Form groups once. Returns for each rank ``done``, ``hung`` or its error, and the number of failed tries."""
        context = multiprocessing.get_context("fork")
        own_end, other_end = context.Pipe()
        server = context.Process(target=serve, args=(keys, other_end))
        server.start()
        address = own_end.recv()
        ranks = []
        for rank in range(self.num_ranks):
            reading, writing = context.Pipe(duplex=False)
            process = context.Process(target=self._run_rank, args=(rank, keys, address, writing))
            process.start()
            writing.close()
            ranks.append((process, reading))
        deadline, results = time.monotonic() + self.hang_s, []
        for process, reading in ranks:
            try:
                has_ended = reading.poll(max(0.0, deadline - time.monotonic()))
                results.append(reading.recv() if has_ended else ("hung", 0))
            except EOFError:
                process.join()
                results.append((f"exit code {process.exitcode}", 0))
        for process in (server, *(process for process, _ in ranks)):
            process.kill()
            process.join()
        return results

    def _run_rank(self, rank: int, keys: RunKeys, address: tuple[str, int], result: Connection) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        members.MAX_SKIPPED, members.PROOF_S = self.max_skipped, self.proof_s
        failures = CountedRecords()
        members.log.addHandler(failures)
        if self.is_protected:
            members.require_proofs()
        try:
            store = SecureStore(keys, *address, timeout_s=self.hang_s)
            os.setuid(OWNER)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self.num_ranks)
            group = dist.new_group(backend="gloo")
            total = torch.full((4,), float(rank))
            dist.all_reduce(total, group=group)
            objects = [{"rank": rank}]
            dist.broadcast_object_list(objects, src=0)  # as vLLM does; it unpickles what the peer sends
            is_right = total.tolist() == [self.num_ranks * (self.num_ranks - 1) / 2] * 4
            is_right = is_right and objects == [{"rank": 0}] and broadcast_from_rank0(rank) == 0
            result.send(("done" if is_right else "wrong result", failures.count))
        except BaseException as error:  # noqa: BLE001 (reported to the test)
            result.send((f"{type(error).__name__}: {error}", failures.count))
        os._exit(0)


class CountedRecords(logging.Handler):
    count = 0

    def emit(self, _: logging.LogRecord) -> None:
        self.count += 1


def serve(keys: RunKeys, ready: Connection) -> None:
    """Serve the ranks' store until this process is killed."""
    store = serve_store(keys, "ranks", "127.0.0.1")
    assert store.server is not None
    ready.send(store.server.address)
    ready.recv()
