"""Protect vLLM's key-value stores with TLS and the API key, and its process groups with proofs (`transport.members`).

An engine with data-parallel ranks or several nodes initializes through torch's TCPStore, and vLLM unpickles objects
that it reads there. `secure_stores` replaces TCPStore by `transport.store` in this process and in processes that vLLM
forks. A process that vLLM spawns imports the module of our role again (as ``__mp_main__``), which calls
`secure_stores` there.
"""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.waiting import Backoff, retry
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:
    from primerl_hpc.transport.store import SecureStore

DEFAULT_TIMEOUT = timedelta(seconds=300)  # TCPStore's default
RETRY_S = 0.2
_served: dict[int, SecureStore] = {}
"""Stores served by this process, by port: with ``multi_tenant``, TCPStore shares one server per port."""


def secure_stores() -> None:
    """Protect the stores and process groups that vLLM creates in this process. Does nothing outside a run."""
    if env.run_dir() is None:
        return
    from vllm.distributed import utils

    from primerl_hpc.transport.members import require_proofs

    # `from torch.distributed import rendezvous` would import the function of the same name
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = utils.TCPStore = secure_store
    require_proofs()
    os.environ["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] = "0"  # torch forms such groups without the constructor


def secure_store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    master_listen_fd: int | None = None,
    multi_tenant: bool = False,
    **_: Any,
) -> SecureStore:
    """Create a store. Same arguments as ``torch.distributed.TCPStore``.

    Raises RoleError if the master does not respond within ``timeout``.
    """
    from primerl_hpc.transport.store import SecureStore, serve_store

    folder = env.run_dir()
    assert folder is not None
    keys, timeout_s = run_keys(RunDir(folder)), timeout.total_seconds()
    if is_master:
        if multi_tenant and port in _served:
            return _served[port].clone()
        listener = None if master_listen_fd is None else socket.socket(fileno=master_listen_fd)
        if listener is None:
            listener = socket.create_server((host_name, port), backlog=4096)
        name = f"{env.process()}-{listener.getsockname()[1]}"
        store = serve_store(keys, name, host_name, listener, num_clients=world_size or 1)
        store.set_timeout(timeout)
        _served[store.port] = store
        return store
    backoff = Backoff(timeout_s, RETRY_S, RETRY_S)
    return retry(lambda: SecureStore(keys, host_name, port, timeout_s), backoff, if_raises=RoleError)
