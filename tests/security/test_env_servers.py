"""Another user who connects to an environment server starts no episode and does not end the server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgpack
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.orchestrator.rollouts.env_client import EnvServerError, sampling_config, train_client
from primerl_hpc.recipe.schema.rollout import Environment
from primerl_hpc.roles.env_server import server_failure
from tests.e2e.test_env_server import Rollouts, with_rollouts
from tests.support.serving import Serving
from tests.support.stranger import as_stranger

SERVER = "env_server-0"
WAIT_MS = 2000
UNDECODABLE = b"\xff\xfe\xfd"


def frames_of(serving: Serving, request_id: bytes = b"1") -> list[bytes]:
    """Return a request for an episode whose model is the stranger's own server and whose headers are our secrets."""
    client = {
        "type": "eval",
        "base_url": "http://127.0.0.1:9/v1",
        "api_key_var": "WANDB_API_KEY",
        "headers_from_env": {"X-Stolen": "HF_TOKEN"},
    }
    task = {"prompt": "abcd", "answer": "dcba", "idx": 0}
    payload = {"client": client, "model": "m", "sampling": {"max_tokens": 4}, "task_data": task}
    return [request_id, b"run", msgpack.packb(payload)]


def ask(url: str, frames: list[bytes], **options: Any) -> tuple[list[bytes] | None, list[int]]:
    """Send frames as a ZMQ client; return the reply, or None, and the events of the connection.

    A refused connection ends the socket's queue. If that happens first, there is nothing to send to, ever.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger, client.sndtimeo = 0, WAIT_MS
        for name, value in options.items():
            setattr(client, name, value)
        monitor = client.get_monitor_socket()
        client.connect(url)
        with suppress(zmq.Again):
            client.send_multipart(frames)
        reply = client.recv_multipart() if client.poll(WAIT_MS) else None
        events = []
        while monitor.poll(100):
            events.append(int(recv_monitor_message(monitor)["event"]))
        client.disable_monitor()
        monitor.close()
    return reply, events


def other_key() -> dict[str, bytes]:
    """Return the options of a client with keys of its own, which does not know the server's public key."""
    public, secret = zmq.curve_keypair()
    wrong, _ = zmq.curve_keypair()
    return {"curve_publickey": public, "curve_secretkey": secret, "curve_serverkey": wrong}


@pytest.mark.e2e
@pytest.mark.parametrize("request_id", [b"1", UNDECODABLE])
@pytest.mark.parametrize("has_keys", [False, True], ids=["without keys", "with keys of its own"])
def test_a_stranger_starts_no_episode_and_does_not_end_the_server(
    serving: Serving, request_id: bytes, has_keys: bool
) -> None:
    url = serving.url(SERVER)
    assert urlsplit(url).hostname == "127.0.0.1"
    options = other_key() if has_keys else {}
    reply, events = as_stranger(lambda: ask(url, frames_of(serving, request_id), **options))
    assert reply is None
    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events

    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run()
        assert episode.ok, episode.errors

    with_rollouts(serving, check)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "change",
    [{"api_key_var": "WANDB_API_KEY"}, {"headers_from_env": {"X-Token": "HF_TOKEN"}}],
    ids=["key", "headers"],
)
def test_a_request_with_another_environment_variable_is_refused(
    serving: Serving, change: dict[str, Any]
) -> None:
    """Also of a client that has the keys of the attempt: the configuration of the model comes from the run."""

    async def check(rollouts: Rollouts) -> None:
        config = train_client(rollouts.recipe.model, serving.url("router-0")).model_copy(update=change)
        sampling = sampling_config(rollouts.recipe.rollouts.sampling, 0)
        with pytest.raises(EnvServerError, match="an environment variable that is not permitted in this run"):
            await rollouts.client.run(
                rollouts.tasks[0].data, config, rollouts.recipe.model.name, sampling, 30
            )
        assert (await rollouts.run()).ok

    with_rollouts(serving, check)


@pytest.mark.parametrize(("is_published", "code"), [(False, ExitCode.CONFIG), (True, ExitCode.FAILED)])
def test_a_failure_of_a_server_that_has_served_does_not_end_the_run(
    is_published: bool, code: ExitCode
) -> None:
    """One message ended the server before; as a configuration error that ended the run."""
    failure = server_failure(ValueError("x"), Environment(id="nim"), is_published=is_published)
    assert failure.exit_code == code and "environment nim: its server failed: " in str(failure)
