"""ZMQ CURVE (encryption and authentication) between the orchestrator and its environment servers.

    serve_with_curve(keys.curve("env_server"), allowed_keys)       # in the environment server, before verifiers serves
    client = curve_client(url, keys.curve("env_server"))           # in the orchestrator: verifiers' EnvClient

A client needs the server's public key, which only the user of the run can read, and sends no data to a server without
the secret key (`run.access.keys.CurveKeys`). verifiers 0.4.0 creates its sockets itself, so the options are set on the
ZMQ context, which applies them to each socket.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from primerl_hpc.envs.visitors import HANDSHAKE_MS, limit_visitors
from primerl_hpc.run.access.admission import BACKLOG, SPARE
from primerl_hpc.run.access.keys import CurveKeys

if TYPE_CHECKING:
    from verifiers.v1.serve import EnvClient


def curve_client(url: str, keys: CurveKeys) -> EnvClient:
    """Return verifiers' client of the server at ``url``, connected with the keys of the attempt."""
    from verifiers.v1.serve import EnvClient

    public, secret = zmq.curve_keypair()
    options = {"curve_serverkey": keys.public.encode(), "curve_publickey": public, "curve_secretkey": secret}
    with _sockets_with(options):
        return EnvClient(url)


def serve_with_curve(keys: CurveKeys, allowed_keys: Set[str], num_clients: int) -> None:
    """Patch verifiers so that `verifiers.v1.serve.serve_env` in this process serves with CURVE.

    ``allowed_keys``: names of the environment variables that a request may use as the API key of its model. A request
    with another variable, or with headers from environment variables, is rejected. ``num_clients``: processes
    that may connect.
    """
    from verifiers.v1.serve import pool
    from verifiers.v1.serve.server import EnvServer

    options = {"curve_server": True, "curve_secretkey": keys.secret.encode()}
    options |= {"handshake_ivl": HANDSHAKE_MS, "backlog": BACKLOG}

    class CurveServer(EnvServer):
        def __init__(self, *args: Any, **more: Any) -> None:
            with _sockets_with(options):
                super().__init__(*args, **more)
            limit_visitors(self.frontend, SPARE + num_clients)

        def _context(self, client_config: Any, model: str, sampling: Any) -> Any:
            if client_config.headers_from_env or client_config.api_key_var not in allowed_keys:
                raise PermissionError(
                    "the request uses an environment variable that is not permitted in this run"
                )
            return super()._context(client_config, model, sampling)

    pool.EnvServer = CurveServer


@contextmanager
def _sockets_with(options: dict[str, Any]) -> Iterator[None]:
    """Apply ``options`` to every socket of ZMQ contexts that are created in the block."""
    original = zmq.asyncio.Context

    def make(*args: Any, **more: Any) -> zmq.asyncio.Context:
        context = original(*args, **more)
        for name, value in options.items():
            setattr(context, name, value)
        return context

    zmq.asyncio.Context = make
    try:
        yield
    finally:
        zmq.asyncio.Context = original
