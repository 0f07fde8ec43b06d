"""Environment servers and judges: filesystem errors, unresponsive and lost servers, servers with an address."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgpack
import pytest
import zmq
import zmq.asyncio

from primerl_hpc.common import env
from primerl_hpc.envs import judges
from primerl_hpc.orchestrator.rollouts import env_client
from primerl_hpc.orchestrator.rollouts.env_client import (
    EnvServerClient,
    EnvServerDied,
    EnvServerError,
    external_client,
    external_sampling_config,
    sampling_config,
)
from primerl_hpc.recipe.schema.evaluation import External
from primerl_hpc.recipe.schema.rollout import Environment, Sampling
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S


def stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_a_file_that_cannot_be_read_is_read_again_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = 0

    def read(*_: object) -> None:
        nonlocal looks
        looks += 1
        if looks <= 3:
            raise stale()

    monkeypatch.setattr(env_client, "read_endpoint", read)

    async def check() -> None:
        client = EnvServerClient(
            RunDir(tmp_path),
            "env_server-0",
            Environment(id="reverse-text"),
            poll_s=0.01,
            restart_timeout_s=3.0,
        )
        for _ in range(2):
            before = looks
            with pytest.raises(EnvServerDied):
                await client.run({}, None, "m", None)  # type: ignore[arg-type]
            assert looks > before + 3
        await client.close()

    asyncio.run(check())
    (said,) = warnings_of(caplog)
    assert "reverse-text" in said and "Stale file handle" in said


def test_a_restart_request_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk while a server is stuck."""
    asked = 0

    def ask(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Stuck:
        async def health(self, timeout: float | None) -> bool:
            await asyncio.sleep(3600)
            return True

        async def close(self) -> None:
            pass

    endpoint = {"attempt": 1, "incarnation": 0, "pid": 1, "url": "tcp://h:1"}
    monkeypatch.setattr(env_client, "read_endpoint", lambda *_: endpoint)
    monkeypatch.setattr(env_client, "request_restart", ask)

    async def check() -> None:
        client = EnvServerClient(
            RunDir(tmp_path), "env_server-0", Environment(id="reverse-text"), health_s=0.01
        )
        client._identity, client._client = tuple(endpoint.values()), Stuck()  # type: ignore[assignment]
        client._up.set()
        await client._follow_endpoint()
        await asyncio.sleep(0.05)
        with pytest.raises(OSError, match="No space"):
            await client._follow_endpoint()
        assert client.is_up
        await client._follow_endpoint()
        assert asked == 2 and not client.is_up

    asyncio.run(check())


class PlayedServer:
    """The server's side of verifiers' protocol at a port of its own: healthy from the start; a rollout only ends."""

    def __init__(self) -> None:
        self.context, self.has_rollout = zmq.asyncio.Context(), asyncio.Event()
        self.socket, self.waiting = self.context.socket(zmq.ROUTER), list[tuple[bytes, bytes]]()
        self.is_well = True

    def bind(self, port: int) -> int:
        """Port 0: any; the port that it got."""
        self.socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return int(self.socket.LAST_ENDPOINT.rsplit(b":", 1)[1])

    async def serve(self) -> None:
        while True:
            client, request, method, _ = await self.socket.recv_multipart()
            if method == b"run":
                self.waiting.append((client, request))
                self.has_rollout.set()
            elif method == b"health" and self.is_well:
                await self._send(client, request, {"success": True})

    async def end_rollout(self) -> None:
        await self._send(*self.waiting.pop(), {"success": False, "error": "it is over"})

    async def _send(self, client: bytes, request: bytes, reply: dict) -> None:
        await self.socket.send_multipart([client, request, b"response", msgpack.packb(reply)])


@asynccontextmanager
async def played(port: int = 0) -> AsyncIterator[tuple[PlayedServer, int]]:
    server = PlayedServer()
    port = server.bind(port)
    task = asyncio.create_task(server.serve())
    try:
        yield server, port
    finally:
        task.cancel()
        await asyncio.wait({task})
        server.socket.close(linger=0)
        server.context.term()


def by_address(folder: Path, port: int, **more: float) -> EnvServerClient:
    environment = Environment(id="reverse-text", address=f"tcp://127.0.0.1:{port}")
    return EnvServerClient(RunDir(folder), "env_server-0", environment, poll_s=0.01, **more)


def start_rollout(client: EnvServerClient) -> asyncio.Task:
    how = external_client(External(base_url="http://h/v1"))
    return asyncio.create_task(client.run({}, how, "m", external_sampling_config(Sampling()), PATIENCE_S))


def test_a_server_by_address_that_pauses_for_a_while_keeps_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment's code that blocks the server, as scoring may."""
    monkeypatch.setattr(env_client, "_HEALTH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(env_client, "_HEALTH_EVERY_S", 0.0)

    async def check() -> None:
        async with played() as (server, port), asyncio.timeout(PATIENCE_S):
            client = by_address(tmp_path, port, health_s=300.0)
            rollout = start_rollout(client)
            await server.has_rollout.wait()
            server.is_well = False
            await asyncio.wait({rollout}, timeout=1)  # several times as long as a server may take to connect
            assert client.is_up
            await server.end_rollout()
            with pytest.raises(EnvServerError, match="it is over"):
                await rollout
            await client.close()

    asyncio.run(check())


def test_a_server_by_address_is_abandoned_without_a_response_for_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_client, "_HEALTH_EVERY_S", 0.0)

    async def check() -> None:
        async with played() as (server, port), asyncio.timeout(PATIENCE_S):
            client = by_address(tmp_path, port, health_s=3.0)
            rollout = start_rollout(client)
            await server.has_rollout.wait()
            server.is_well = False
            with pytest.raises(EnvServerDied):
                await rollout
            await client.close()

    asyncio.run(check())


def test_rollouts_of_a_server_by_address_end_with_it_though_its_successor_is_there_at_once(
    tmp_path: Path,
) -> None:
    async def check() -> None:
        async with asyncio.timeout(PATIENCE_S):
            async with played() as (server, port):
                client = by_address(tmp_path, port, health_s=300.0)
                rollout = start_rollout(client)
                await server.has_rollout.wait()
            async with played(port) as (successor, _):
                with pytest.raises(EnvServerDied):
                    await rollout
                again = start_rollout(client)
                await successor.has_rollout.wait()
                await successor.end_rollout()
                with pytest.raises(EnvServerError, match="it is over"):
                    await again
                await client.close()

    asyncio.run(check())


class Enough(Exception):
    """Ends a loop that has no end."""


def test_a_judge_is_followed_beyond_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Callable[[], str | None]] = [
        *[lambda: (_ for _ in ()).throw(stale())] * 3,
        lambda: "http://new/v1",
        lambda: (_ for _ in ()).throw(Enough()),
    ]
    monkeypatch.setattr(judges, "TRACK_S", 0.0)
    monkeypatch.setattr(judges, "_base_url", lambda *_: answers.pop(0)())

    class Config:
        base_url = "http://old/v1"

    config = Config()
    with pytest.raises(Enough):
        judges._track_forever([config], RunDir(tmp_path), "judge-0")
    assert config.base_url == "http://new/v1"
    (said,) = warnings_of(caplog)
    assert "judge-0" in said


def test_no_incarnation_of_the_orchestrator_shares_prefixes_with_another(monkeypatch):
    salts = set()
    for attempt in "12":
        for incarnation in "01":
            monkeypatch.setenv(env.ATTEMPT, attempt)
            monkeypatch.setenv(env.INCARNATION, incarnation)
            salts |= {sampling_config(Sampling(), version).model_dump()["cache_salt"] for version in (0, 1)}
    assert len(salts) == 8
