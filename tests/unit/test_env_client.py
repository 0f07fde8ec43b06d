"""Who watches for an environment server or a judge looks again after a filesystem's fault, and says it once."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.envs import judges
from primerl_hpc.orchestrator import env_client
from primerl_hpc.orchestrator.env_client import EnvServerClient, EnvServerDied
from primerl_hpc.recipe.rollout_schema import Environment


def stale() -> OSError:
    return OSError(errno.ESTALE, "Stale file handle")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_a_file_that_cannot_be_read_is_read_again_and_said_once(
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
            restart_timeout_s=0.3,
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


def test_a_restart_that_could_not_be_asked_for_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        await client._look()
        await asyncio.sleep(0.05)
        with pytest.raises(OSError, match="No space"):
            await client._look()
        assert client.is_up
        await client._look()
        assert asked == 2 and not client.is_up

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
    monkeypatch.setattr(judges, "FOLLOW_S", 0.0)
    monkeypatch.setattr(judges, "_base_url", lambda *_: answers.pop(0)())

    class Config:
        base_url = "http://old/v1"

    config = Config()
    with pytest.raises(Enough):
        judges._keep_following([config], RunDir(tmp_path), "judge-0")
    assert config.base_url == "http://new/v1"
    (said,) = warnings_of(caplog)
    assert "judge-0" in said
