"""Only members of the run become peers in a gloo group. Requires torch.

    require_proofs()                                                          # once per process, before its first group
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)        # protected, as are all later groups

gloo listens on a TCP port and takes the first connection that sends a small sequence number for the expected rank.
Any user of the node, or of the network between nodes, can send it. `require_proofs` replaces the constructor of torch's
gloo backend in this process, so that all groups are protected, including those of DeviceMesh and vLLM:

1. The sequence numbers of a listener start at a random one (`listen`), which only members read in the store.
2. After the group has connected, all ranks send each other an HMAC over each connection (`prove_peers`). Its key
   consists of the attempt's API key and a random value in the group's store. A rank's message names sender and
   receiver, so that it cannot be reflected. It cannot be relayed, because a stranger can connect only to a rank that
   listens, and the rank that connects does so to an address in the store.
3. Ranks agree in the store whether all proofs hold. If not, they form the group again on other ports, `TRIES` times.

A connection is taken over only while it is made, so a group that is proven stays so. See docs/decisions/0014-security.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from primerl_hpc.common import env
from primerl_hpc.common.errors import RoleError
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir

TRIES = 4
PROOF_S = 10.0
"""Time limit of the proofs of the first try; it doubles with each try, because a busy node may be slow."""
PROOF_S_PER_RANK = 0.1
MAX_SKIPPED = 1 << 12
"""Bound of a listener's first sequence number. A number costs a microsecond, a guess of a stranger 20 or more."""
PROOF_BYTES = 32

log = logging.getLogger("primerl_hpc.transport")
_new, _init = ProcessGroupGloo.__new__, ProcessGroupGloo.__init__


def require_proofs() -> None:
    """Let all gloo groups that this process forms from now on prove their members."""

    def construct(_: type, *args: Any, **kwargs: Any) -> ProcessGroupGloo:
        return form_group(*args, **kwargs)

    # on the class itself, because torch and vLLM import it by name
    setattr(ProcessGroupGloo, "__new__", staticmethod(construct))  # noqa: B010 (pyright refuses the assignment)
    setattr(ProcessGroupGloo, "__init__", lambda *_, **__: None)  # noqa: B010 (`construct` has called it)


def form_group(
    store: Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
) -> ProcessGroupGloo:
    """Connect a group whose members are proven. Same arguments as ``ProcessGroupGloo``. Collective.

    Raises RoleError if a stranger takes the place of a rank in every try, RuntimeError if a rank does not arrive.
    """
    if size == 1:
        return _connect(store, rank, size, timeout, [])
    fault = ""
    for number in range(TRIES):
        place = PrefixStore(f"try_{number}", store)
        nonce = _agree(place, "nonce", size, lambda: secrets.token_bytes(PROOF_BYTES))
        group = None
        try:
            devices = listen()
            group = _connect(place, rank, size, timeout, devices)
            limit_s = PROOF_S * 2**number + PROOF_S_PER_RANK * size
            fault = prove_peers(group, _key(nonce), len(devices), limit_s)
        except RuntimeError as error:
            fault = f"rank {rank} cannot connect: {str(error).splitlines()[0]}"
        if fault:
            place.set("fault", fault)
        fault = _agree(place, "verdict", size, lambda place=place: _fault(place)).decode()
        if group is not None and not fault:
            return group
        log.warning(
            "forming a process group of %d ranks failed (try %d of %d): %s", size, number + 1, TRIES, fault
        )
        del group
    raise RoleError(
        f"the process group cannot be formed: {fault}",
        hint="another user of this node or network may have connected in the place of a rank; use exclusive nodes or a "
        "network that only the job's nodes can reach (docs/security.md)",
    )


def listen() -> list[ProcessGroupGloo.Device]:
    """Open a listener on each interface of gloo, whose sequence numbers start at a random one."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create: Any = ProcessGroupGloo.create_device
    devices = [create(interface=name) for name in names] or [ProcessGroupGloo.create_default_device()]
    for device in devices:
        # a listener takes a number for each peer of a group, also if the group is then not formed
        with contextlib.suppress(_NotFormed):
            _connect(_NoStore(), 0, 2 + secrets.randbelow(MAX_SKIPPED), timedelta(seconds=1), [device])
    return devices


class _NotFormed(RuntimeError):
    """The group of `_NoStore`."""


class _NoStore(Store):
    """The store of a group that is not formed."""

    def set(self, *_: Any) -> None:
        raise _NotFormed


def _connect(store: Store, rank: int, size: int, timeout: timedelta, devices: list[Any]) -> ProcessGroupGloo:
    """Call torch's own constructor. ``devices``: empty for those that torch chooses."""
    group = _new(ProcessGroupGloo)
    if not devices:
        _init(group, store, rank, size, timeout)
        return group
    gloo: Any = ProcessGroupGloo  # torch's stubs lack these options
    options = gloo._Options()
    options._devices, options._timeout = devices, timeout
    _init(group, store, rank, size, options)
    return group


def prove_peers(group: Any, key: bytes, num_connections: int, limit_s: float) -> str:
    """Exchange proofs with all peers. Returns which peer gave none, or an empty text.

    ``num_connections``: to each peer, one for each interface; the tag of a message selects it.
    """
    rank, size = group.rank(), group.size()
    deadline = time.monotonic() + limit_s
    sent, received = [], []
    for peer, number in itertools.product(range(size), range(num_connections)):
        if peer == rank:
            continue
        own = torch.frombuffer(bytearray(proof(key, size, number, rank, peer)), dtype=torch.uint8)
        theirs = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
        sent.append((peer, own, group.send([own], peer, number)))
        received.append((peer, number, theirs, group.recv([theirs], peer, number)))
    faults = []
    for (
        peer,
        number,
        theirs,
        work,
    ) in received:  # to the end, because the peers wait for this rank's messages as well
        if not _finish(work, deadline):
            faults.append(f"rank {peer} sent rank {rank} no proof that it is a member of the run")
        elif not hmac.compare_digest(theirs.numpy().tobytes(), proof(key, size, number, peer, rank)):
            faults.append(f"another process is connected to rank {rank} in the place of rank {peer}")
    unsent = [peer for peer, _, work in sent if not _finish(work, deadline)]
    faults += [f"rank {peer} took no proof of rank {rank}" for peer in unsent]
    return faults[0] if faults else ""


def _finish(work: Any, deadline: float) -> bool:
    """True if the message was transferred before the deadline."""
    try:
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError:
        return False
    return True


def proof(key: bytes, size: int, connection: int, sender: int, receiver: int) -> bytes:
    """Return what ``sender`` sends to ``receiver`` over one of their connections in a group of ``size`` ranks."""
    message = f"primerl-hpc group member|{size}|{connection}|{sender}|{receiver}"
    return hmac.digest(key, message.encode(), "sha256")


def _key(nonce: bytes) -> bytes:
    """Return the key of a group's proofs. ``nonce``: from the group's store, known to its members only."""
    run_dir = env.run_dir()
    return nonce if run_dir is None else nonce + run_keys(RunDir(run_dir)).api_key.encode()


def _agree(store: Store, name: str, size: int, value: Callable[[], Any]) -> bytes:
    """Return the ``value`` of the rank that arrives last. Collective. Raises RuntimeError if a rank does not arrive."""
    if store.add(f"{name}/arrived", 1) == size:
        store.set(name, value())
    return store.get(name)


def _fault(store: Store) -> bytes:
    """Return the fault that a rank found, or an empty text."""
    return store.get("fault") if store.check(["fault"]) else b""
