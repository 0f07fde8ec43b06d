"""Adapt verifiers' environment server: one message with each finished episode, and an end at SIGTERM.

    adapt_server()          # in the environment server, before verifiers serves

verifiers 0.4.0 sends every change of a trace to the client at once, four to six messages for a rollout of one turn. The
orchestrator reads complete episodes only. Each message costs serialization, encryption and a wake-up on both sides.

SIGTERM ends the server through its event loop: verifiers raises KeyboardInterrupt in whatever code is executed, and
uvloop discards it in a callback of a connection, after which further signals are ignored.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import signal
from collections.abc import Callable
from typing import Any

from primerl_hpc.envs.serving.context_limits import end_at_context_limit
from primerl_hpc.envs.serving.own_user import check_users
from primerl_hpc.envs.serving.token_limits import rename_token_limits


def adapt_server() -> None:
    """Patch verifiers' server in this process, and select uvloop if it is installed."""
    from verifiers.v1.serve import server

    server.DeltaStreamer = _final_streamer()
    server.EnvServer.run = end_at_sigterm(server.EnvServer.run)
    end_at_context_limit()
    rename_token_limits()
    check_users()
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


def end_at_sigterm(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, the main coroutine of a server, which the first SIGTERM cancels and later ones do not."""

    @functools.wraps(run)
    async def run_until_sigterm(self: Any) -> None:
        task = asyncio.current_task()
        is_ending = asyncio.Event()

        def end() -> None:
            if task is not None and not is_ending.is_set():
                is_ending.set()
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        try:
            await run(self)
        except asyncio.CancelledError:
            if not is_ending.is_set():
                raise

    return run_until_sigterm


def _final_streamer() -> type[Any]:
    """Return verifiers' `DeltaStreamer`, restricted to the flush after the rollout."""
    from verifiers.v1.serve.delta import DeltaStreamer

    class FinalStreamer(DeltaStreamer):
        def watch(self, trace: Any) -> None:
            """Ignore the trace until the rollout has ended: `flush` reads it then."""

    return FinalStreamer
