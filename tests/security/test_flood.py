"""Connections of another user cost a server a bounded amount of memory, descriptors and log; members are still served.

Real engine, router, environment server, store and chunk server; another process of another user floods them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import zmq

torch = pytest.importorskip("torch")

from primerl_hpc.common.waiting import wait_until  # noqa: E402
from primerl_hpc.envs.visitors import Visitors  # noqa: E402
from primerl_hpc.run.access.admission import SPARE  # noqa: E402
from primerl_hpc.run.access.keys import run_keys  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.transport.base_models.chunks import LocalCopy, list_chunks, read_chunk  # noqa: E402
from primerl_hpc.transport.base_models.peers import PeerClient, serve_chunks  # noqa: E402
from primerl_hpc.transport.store import PER_CLIENT, serve_store  # noqa: E402
from tests.e2e.test_env_server import Rollouts, with_rollouts  # noqa: E402
from tests.support.flood import CARELESS, flood  # noqa: E402
from tests.support.helpers import PATIENCE_S  # noqa: E402
from tests.support.serving import Serving  # noqa: E402
from tests.support.stranger import as_stranger  # noqa: E402

NUM_IDLE, NUM_BUSY = 3000, 600
MAX_GROWTH = 100 << 20
FEW = 24
"""Descriptors that a server opens and closes by itself."""
RUN_LIMIT = SPARE + 1024 + 4 * 4
"""Upper bound of connections without a key for the run of `Serving`, which has four processes."""


def withstand(
    process: psutil.Process, port: int, kinds: dict[str, int], limit: int, ask: Callable[[], None]
) -> None:
    """Flood a port of ``process`` twice with each kind of connection. ``ask``: a request of a member.

    malloc keeps what the first flood took; in the second, it must serve again."""
    ask()
    num_files, memory = process.num_fds(), process.memory_info().rss
    for kind, count in [*kinds.items()] * 2:
        with flood(port, kind, count):
            ask()
            assert process.num_fds() <= num_files + min(limit, count) + FEW, kind
            ask()
    assert process.memory_info().rss - memory < MAX_GROWTH
    wait_until(
        lambda: process.num_fds() <= num_files + FEW, what="connections to be closed", timeout_s=PATIENCE_S
    )
    ask()


TLS_KINDS = {"idle": NUM_IDLE, "half handshakes": NUM_BUSY, "half headers": NUM_BUSY}


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["router-0", "inference-0"])
def test_a_flood_costs_router_and_engine_a_bounded_amount_and_members_are_served(
    serving: Serving, name: str
) -> None:
    def ask() -> None:
        with httpx.Client(
            verify=serving.keys.client_context(),
            headers=serving.keys.headers,
            timeout=PATIENCE_S,
            trust_env=False,
        ) as client:  # a new connection
            assert client.get(f"{serving.url(name)}/v1/models").status_code == 200

    process = psutil.Process(serving.processes[name].pid)
    withstand(process, serving.port(name), TLS_KINDS, RUN_LIMIT, ask)
    assert serving.log(name).count("that did not send the key") <= 2


@pytest.mark.e2e
def test_a_flood_costs_an_environment_server_a_bounded_amount_and_a_new_client_gets_its_rollout(
    serving: Serving,
) -> None:
    async def check(rollouts: Rollouts) -> None:
        episode = await rollouts.run()
        assert episode.ok, episode.errors

    process = psutil.Process(serving.processes["env_server-0"].pid)
    kinds = {"idle": NUM_IDLE, "ZMQ greetings": NUM_IDLE}
    limit = NUM_IDLE // 2  # its limit is `SPARE` and a few; libzmq closes those above it a little later
    withstand(process, serving.port("env_server-0"), kinds, limit, lambda: with_rollouts(serving, check))


def test_a_flood_costs_a_store_a_bounded_amount_and_its_clients_are_served(tmp_path: Path) -> None:
    store = serve_store(run_keys(RunDir(tmp_path)), "weights", "127.0.0.1", num_clients=4)
    assert store.server is not None
    values = iter(range(100))

    def ask() -> None:
        client, value = store.clone(), str(next(values))  # a new connection
        client.set("key", value)
        assert store.get("key") == value.encode()
        while not client._idle.empty():
            client._idle.get().close()

    try:
        kinds = {"idle": NUM_IDLE, "half handshakes": NUM_BUSY}
        withstand(psutil.Process(), store.port, kinds, SPARE + 4 * PER_CLIENT, ask)
    finally:
        store.server.close()


def test_a_flood_costs_a_chunk_server_a_bounded_amount_and_its_peers_are_served(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(os.urandom(1000))
    table, keys = list_chunks(tmp_path / "model"), run_keys(RunDir(tmp_path))
    copy = LocalCopy(table, tmp_path / "copy")
    copy.create()
    copy.write(0, read_chunk(tmp_path / "model", table.chunks[0]))

    def ask() -> None:
        client = PeerClient(keys, table.digest)  # a new connection
        assert client.fetch(url, 0) == read_chunk(tmp_path / "model", table.chunks[0])
        client.close()

    with serve_chunks(copy, keys, "p", "127.0.0.1", num_connections=8) as url:
        port = urlsplit(url).port
        assert port is not None
        kinds = dict.fromkeys(TLS_KINDS, NUM_BUSY)  # 264 threads accept slowly
        withstand(psutil.Process(), port, kinds, SPARE + 8, ask)


# -- malformed input -------------------------------------------------------------------------------


def request(headers: bytes = b"", body: bytes = b"", key: bytes = b"x") -> bytes:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + key + b"\r\n" + headers
    )
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


JSON = b"Content-Type: application/json\r\n"
OF_STRANGERS = {
    "a key that is no text": request(key=b"\xff\xfe"),
    "an encoding without its package": request(b"Content-Encoding: br\r\n", b"xx"),
    "an unknown encoding": request(b"Content-Encoding: nonsense\r\n", b"xx"),
    "a body that is not gzip": request(b"Content-Encoding: gzip\r\n", b"xx"),
    "no HTTP": b"GARBAGE\x00\x01\r\n\r\n",
    "a path that is no text": b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
    "a header without a value": b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    "an invalid chunk": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    "an invalid address": b"GET http://[::bad HTTP/1.1\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a websocket": b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n"
    + b"".join(b"X%d: a\r\n" % index for index in range(20_000))
    + b"\r\n",
    "an endless header": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * (4 << 20),
}
WITHOUT_TLS = {"no TLS": b"GET / HTTP/1.1\r\n\r\n", "broken TLS": b"\x16\x03\x01\xff\xff" + b"\xff" * 100}
OF_MEMBERS = {
    "a body that is not gzip": (b"Content-Encoding: gzip\r\n", b"xx"),
    "an encoding without its package": (b"Content-Encoding: br\r\n", b"xx"),
    "a body that is no text": (JSON, b"\xff\xfe{"),
    "a body that is not JSON": (JSON, b"{"),
    "a body that is nested too deeply": (JSON, b"[" * 100_000),
}


def exchange(port: int, data: bytes, tls: ssl.SSLContext | None) -> bytes:
    """Send ``data`` and return everything that the server answers until it closes the connection."""
    answer = b""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection,
    ):
        channel = tls.wrap_socket(connection) if tls is not None else connection
        with contextlib.suppress(BrokenPipeError, ConnectionError, ssl.SSLError):
            channel.sendall(data)
        while part := channel.recv(65536):
            answer += part
    return answer


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["router-0", "inference-0"])
def test_malformed_input_gets_no_traceback_and_few_lines_and_its_connection_is_closed(
    serving: Serving, name: str
) -> None:
    port, before = serving.port(name), len(serving.log(name))

    def attack() -> dict[str, bytes]:
        answers = {what: exchange(port, data, CARELESS) for what, data in OF_STRANGERS.items()}
        return answers | {what: exchange(port, data, None) for what, data in WITHOUT_TLS.items()}

    for what, answer in as_stranger(attack).items():  # it ends, so each connection was closed
        assert not answer or answer.split(b" ", 2)[1] in (b"400", b"401", b"404", b"431"), (
            what,
            answer[:200],
        )
    for what, (headers, body) in OF_MEMBERS.items():
        close = b"Connection: close\r\n"
        answer = exchange(port, request(headers + close, body, serving.keys.api_key.encode()), CARELESS)
        assert answer.split(b" ", 2)[1] == b"400", (what, answer[:200])
    lines = serving.log(name)[before:].splitlines()
    assert not [line for line in lines if "Traceback" in line]
    assert len([line for line in lines if "malformed requests" in line]) <= 2
    assert len([line for line in lines if "throughput" not in line]) <= 4, lines
    assert serving.get(name, "/v1/models")["data"]


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    """Sockets of earlier tests that are garbage count as descriptors of this process."""
    gc.collect()
    yield


def test_the_number_of_a_closed_connection_that_is_now_that_of_a_pipe_costs_no_descriptor() -> None:
    """A copy of a pipe's end that stays open would keep its reader waiting."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as monitor:
        visitors = Visitors(monitor, port=1, limit=1)
        reading, writing = os.pipe()
        visitors._enter(writing)
        visitors._enter(reading)  # above the limit: the oldest is checked
        os.close(writing)
        os.set_blocking(reading, False)
        assert os.read(reading, 1) == b"", "no other writing end is open"
        os.close(reading)
