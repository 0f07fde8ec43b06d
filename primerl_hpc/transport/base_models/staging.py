"""One copy of a base model on each node, of which every part is read once from the shared filesystem by one node.

    path = local_copy("org/model")       # the node-local folder; "org/model" itself if the run does not stage models

The first process of a node that loads a model copies it, the others wait for it. The nodes that load it divide its
chunks among each other: each one reads its share from the shared filesystem, and the rest from its peers. A share
whose node does not answer is read from the shared filesystem. If the copy fails (no space), the shared folder is used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from primerl_hpc.common import env
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.locks import lock_file
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.ports import listen_host
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models.chunks import LocalCopy, list_chunks, read_chunk, rotate
from primerl_hpc.transport.base_models.peers import PeerClient, serve_chunks
from primerl_hpc.transport.base_models.snapshots import local_snapshot

SMALL_BYTES = 64 * 2**20
"""Models up to this size are not copied: nodes would wait longer for each other than for the filesystem."""
PEER_WAIT_S = 60.0
"""How long a node waits for the first address or the next chunk of a peer before it reads the peer's share itself."""
LOOK_EVERY_S = 0.5
THREADS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """Where the nodes that load one model find each other."""

    folder: Path
    """Folder of the run directory with a file of each node's address."""
    nodes: tuple[int, ...]
    """Nodes of the plan that load the model."""
    node: int | None
    """This node; None for a node that joined later, which has no share."""
    host: str
    """Address on which this node listens."""
    process: str
    keys: RunKeys

    def publish(self, url: str) -> None:
        if self.node is not None:
            write_json(self.folder / f"{self.node}.json", {"url": url, "attempt": env.attempt()}, mode=0o600)

    def url_of(self, node: int) -> str | None:
        """Return the URL of a node in this attempt; None until it is published."""
        entry = read_json_or_none(self.folder / f"{node}.json") or {}
        return entry.get("url") if entry.get("attempt") == env.attempt() else None


def local_copy(model: str) -> str:
    """Return the node-local copy of a model folder or hub id; ``model`` itself if it is not staged.

    The variable ``PRIMERL_STAGE_MODELS`` of the process names the nodes that load it (`plan.env.readers_env`).
    """
    readers, base, run_folder = env.model_readers(), env.private_tmp(), env.run_dir()
    if readers is None or base is None or run_folder is None:
        return model
    try:
        source = local_snapshot(model)
        if source is None or sum(list_chunks(source).sizes.values()) <= SMALL_BYTES:
            return model
        return str(stage(source, base / "base-models", _meeting(RunDir(run_folder), source, readers)))
    except (OSError, PrimerlError, httpx.HTTPError) as error:
        logger.warning("Copy of %s to %s failed, reading the shared folder: %s", model, base, error)
        return model


def _meeting(run: RunDir, source: Path, readers: Mapping[str, Any]) -> Meeting:
    own = readers["own"]
    node = own[env.slurm_node_rank()] if own else None
    folder = run.control / "base_models" / list_chunks(source).digest
    host = listen_host(readers["hosts"])
    return Meeting(folder, tuple(readers["nodes"]), node, host, f"{env.process()}-{node}", run_keys(run))


def stage(source: Path, target: Path, meeting: Meeting) -> Path:
    """Return the complete copy of ``source`` in ``target``, made by the first process of the node.

    Raises OSError for a full disk, DataError for a wrong checksum.
    """
    target.mkdir(mode=0o700, exist_ok=True)
    table = list_chunks(source)
    final = target / table.digest
    with (target / f"{table.digest}.lock").open("w") as lock:
        is_alone = lock_file(lock.fileno())
        if final.is_dir():
            return final
        start = time.monotonic()
        own = (
            "" if is_alone else f".{os.getpid()}"
        )  # without locks each process of the node makes its own copy
        copy = LocalCopy(table, target / f"{table.digest}.partial{own}")
        shutil.rmtree(copy.folder, ignore_errors=True)
        try:
            copy.create()
            num_read = fill(copy, source, meeting)
            copy.finish()
        except BaseException:
            shutil.rmtree(copy.folder, ignore_errors=True)
            raise
        try:
            os.replace(copy.folder, final)
        except OSError:  # a process that could not be locked out was faster
            if not final.is_dir():
                raise
            shutil.rmtree(copy.folder, ignore_errors=True)
        copy.folder = final  # peers still read from it
    total = sum(table.sizes.values())
    logger.info(
        "Copied %s to %s: %.2f GiB in %.1f s, of which %.2f GiB from the shared filesystem",
        *(source, final, total / 2**30, time.monotonic() - start, num_read / 2**30),
    )
    return final


def fill(copy: LocalCopy, source: Path, meeting: Meeting) -> int:
    """Fill the copy from the shared filesystem and from peers; return the bytes that this node read from the former."""
    own_index = meeting.nodes.index(meeting.node) if meeting.node in meeting.nodes else None
    count = Counter()
    # each node reads 1/N of the chunks from the shared filesystem, and the rest from the peers that read them. A node
    # outside of the meeting (an elastic engine's) has no share of its own, and fetches all
    if own_index is None or len(meeting.nodes) == 1:
        shares = {} if own_index is not None else dict(enumerate(meeting.nodes))
        own = copy.table.share(0, 1) if own_index is not None else []
    else:
        shares = {index: node for index, node in enumerate(meeting.nodes) if index != own_index}
        own = copy.table.share(own_index, len(meeting.nodes))
    if len(meeting.nodes) > 1 and own_index is not None:
        _serve_for_ever(copy, meeting)
    client = PeerClient(meeting.keys, copy.table.digest)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            work = [pool.submit(_read_share, copy, source, own, count)]
            for index in rotate(list(shares), own_index or 0):  # not all begin with the same peer
                share = copy.table.share(index, len(meeting.nodes))
                work.append(pool.submit(_fetch_share, copy, shares[index], share, meeting, client))
            for item in work:
                item.result()
        _read_share(copy, source, copy.missing(), count)  # what peers that did not answer should have sent
    finally:
        client.close()
    return count.num_bytes


class Counter:
    """Bytes that were read from the shared filesystem."""

    def __init__(self) -> None:
        self.num_bytes = 0


def _serve_for_ever(copy: LocalCopy, meeting: Meeting) -> None:
    """Serve this node's chunks as long as this process runs."""
    ready = threading.Event()

    def serve() -> None:
        most = THREADS * len(meeting.nodes)
        with serve_chunks(copy, meeting.keys, meeting.process, meeting.host, num_connections=most) as url:
            meeting.publish(url)
            ready.set()
            threading.Event().wait()

    threading.Thread(target=serve, daemon=True).start()
    ready.wait(PEER_WAIT_S)


def _read_share(copy: LocalCopy, source: Path, indices: Sequence[int], count: Counter) -> None:
    for index in indices:
        copy.write(index, read_chunk(source, copy.table.chunks[index]))
        count.num_bytes += copy.table.chunks[index].length


def _fetch_share(
    copy: LocalCopy, node: int, indices: Sequence[int], meeting: Meeting, client: PeerClient
) -> None:
    """Fetch the share of a peer; return without the rest of it if the peer does not answer in time."""
    deadline = time.monotonic() + PEER_WAIT_S
    for url in _urls(meeting, node, deadline):
        for index in indices:
            while index not in copy.done:
                try:
                    data = client.fetch(url, index)
                except (httpx.HTTPError, PrimerlError) as error:
                    logger.warning("Node %d does not send its share of the base model: %s", node, error)
                    return
                if data is not None:
                    copy.write(index, data)
                    deadline = time.monotonic() + PEER_WAIT_S
                elif time.monotonic() > deadline:
                    return


def _urls(meeting: Meeting, node: int, deadline: float) -> Iterator[str]:
    """Yield the URL of a peer once it is published; nothing if it is not until the deadline."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if (url := meeting.url_of(node)) is not None:
                yield url
                return
        time.sleep(LOOK_EVERY_S)
