"""Adaptations of verifiers' environment server."""

from __future__ import annotations

import os
import sys

from tests.support.helpers import PATIENCE_S, ROOT, captured

SIGNALLED_IN_A_CALLBACK = """
import asyncio, os, signal, uvloop
from verifiers.v1.serve import pool
from primerl_hpc.envs.serving.server import end_at_sigterm

class Connection(asyncio.Protocol):
    def data_received(self, data):
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # the interpreter runs its signal handlers here

class Server:
    async def run(self):
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Connection, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        try:
            await asyncio.Event().wait()
        finally:
            print("cleaned up")

pool._arm_teardown()
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
asyncio.run(end_at_sigterm(Server.run)(Server()))
"""


def test_sigterm_in_a_callback_of_uvloop_ends_the_server() -> None:
    command = [sys.executable, "-c", SIGNALLED_IN_A_CALLBACK]
    done = captured(command, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr
