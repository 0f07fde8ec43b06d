"""Rendezvous of a process that spans nodes: the first node chooses a free port and publishes it.

    address = meet(root, "trainer-0", node_rank=env.slurm_node_rank())      # on all nodes, with the same result
    address["host"], address["port"]

The file is endpoint ``rdzv-<process>``, which the supervisor removes with the process's own endpoint. ``listen`` may
bind the port. By default a free port is chosen, which a library binds a moment later: if another process takes it in
between, the process exits, and its next incarnation chooses another port.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint, rendezvous_name
from primerl_hpc.run.ports import free_port, listen_host
from primerl_hpc.run.rundir import RunDir

TIMEOUT_S = 600.0


def meet(
    root: RunDir,
    process: str,
    *,
    node_rank: int,
    num_nodes: int = 2,
    listen: Callable[[str], int] = free_port,
    choose: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Return ``{"host": address of the first node, "port": …, …}``, the same on all nodes of this incarnation.

    ``listen(host)``, which returns the port, and ``choose()``, whose result is added, are called only on the first
    node. Raises TimeoutWaitingError.
    """
    name = rendezvous_name(process)
    if node_rank == 0:
        host = listen_host(num_nodes)
        port = listen(host)
        publish_endpoint(root, name, f"tcp://{host}:{port}", address={"host": host, "port": port, **choose()})
    endpoint = wait_until(
        lambda: _current(read_endpoint(root, name)),
        what=f"node 0 of {process} to publish its rendezvous",
        timeout_s=TIMEOUT_S,
    )
    return endpoint["address"]


def _current(endpoint: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ignore endpoints published by an earlier incarnation."""
    own = {"attempt": env.attempt(), "incarnation": env.incarnation()}
    return endpoint if endpoint is not None and endpoint.items() >= own.items() else None
