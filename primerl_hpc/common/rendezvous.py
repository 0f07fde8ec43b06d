"""Where the tasks of one process meet when it spans nodes: the first node picks a free port and publishes it.

    address = meet(root, "trainer-0", node_rank=env.slurm_node_rank())      # on every node, same answer
    address["host"], address["port"]

The file is endpoint ``rdzv-<process>``; the supervisor removes it with the process's own endpoint. A port is free when it
is picked and bound a moment later by who uses it; one that was taken in between ends the process, and its next life picks
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import wait_until
from primerl_hpc.common.listen import free_port, listen_host
from primerl_hpc.common.rundir import RunDir, publish_endpoint, read_endpoint, rendezvous_name

TIMEOUT_S = 600.0


def meet(
    root: RunDir, process: str, *, node_rank: int, choose: Callable[[], dict[str, Any]] = dict
) -> dict[str, Any]:
    """``{"host": address of the first node, "port", …}``, the same on every node of the process's present life.

    ``choose()`` runs on the first node alone; what it decides for all is added. Raises TimeoutWaitingError.
    """
    name = rendezvous_name(process)
    if node_rank == 0:
        host = listen_host(num_nodes=2)
        port = free_port(host)
        publish_endpoint(root, name, f"tcp://{host}:{port}", address={"host": host, "port": port, **choose()})
    endpoint = wait_until(
        lambda: _current(read_endpoint(root, name)),
        what=f"node 0 of {process} to publish its rendezvous",
        timeout_s=TIMEOUT_S,
    )
    return endpoint["address"]


def _current(endpoint: dict[str, Any] | None) -> dict[str, Any] | None:
    """An endpoint of an earlier life is none."""
    mine = {"attempt": env.attempt(), "incarnation": env.incarnation()}
    return endpoint if endpoint is not None and endpoint.items() >= mine.items() else None
