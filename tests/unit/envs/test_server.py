"""Adaptations of verifiers' environment server."""

from __future__ import annotations

import os
import subprocess
import sys

from pydantic import BaseModel, Field
from pydantic._internal import _fields

from primerl_hpc.envs.serving.server import cache_default_factories
from tests.support.helpers import PATIENCE_S, ROOT


class Shape(BaseModel):
    sides: int = 3
    angles: list[int] = Field(default_factory=lambda: [60])
    total: int = Field(default_factory=lambda data: 60 * data["sides"])


def test_cached_factories_build_the_same_objects(monkeypatch):
    monkeypatch.setattr(_fields, "takes_validated_data_argument", _fields.takes_validated_data_argument)
    cache_default_factories()
    cache_default_factories()  # a second call must not wrap the cache
    shapes = [Shape.model_construct(sides=sides) for sides in (3, 4)]
    assert [shape.model_dump() for shape in shapes] == [
        {"sides": 3, "angles": [60], "total": 180},
        {"sides": 4, "angles": [60], "total": 240},
    ]
    assert shapes[0].angles is not shapes[1].angles
    info = _fields.takes_validated_data_argument.cache_info()
    assert info.misses <= 2 <= info.hits


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
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr
