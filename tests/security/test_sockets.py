"""Another user on a node of the run can connect to every port but obtains no key, prompt or engine."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from pathlib import Path

import pytest

from primerl_hpc.common.waiting import wait_until
from tests.support.flood import CARELESS, careless
from tests.support.helpers import PATIENCE_S
from tests.support.serving import Serving
from tests.support.stranger import as_stranger

pytestmark = pytest.mark.e2e

GENERATE = json.dumps({"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}})
ADMIN = ("/add_worker?url=http://127.0.0.1:9", "/remove_worker", "/flush_cache", "/pause", "/update_weights")


def exchange(port: int, data: bytes, tls: ssl.SSLContext | None = None) -> bytes:
    """Send ``data`` to a server and return its response."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        channel = tls.wrap_socket(connection) if tls else connection
        channel.sendall(data)
        answer = b""
        try:
            while part := channel.recv(65536):
                answer += part
        except (ConnectionError, TimeoutError):
            pass
        return answer


def request(method: str, path: str, body: str = "", key: str = "x") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_a_client_without_the_key_gets_only_401_from_engine_and_router(serving: Serving) -> None:
    requests = [("GET", path, "") for path in ("/health", "/metrics", "/v1/models", "/list_workers", "/load")]
    requests += [("POST", path, "{}") for path in ADMIN] + [("POST", "/inference/v1/generate", GENERATE)]
    for name in ("inference-0", "router-0"):
        port = serving.port(name)

        def ask_all(port: int = port) -> list[bytes]:
            return [exchange(port, request(*each), CARELESS) for each in requests]

        for answer in as_stranger(ask_all):
            assert answer.startswith(b"HTTP/1.1 401 "), (name, answer[:200])
        plain = as_stranger(lambda port=port: exchange(port, request("GET", "/v1/models")))
        assert b" 200 " not in plain.split(b"\r\n")[0]
    assert serving.get("router-0", "/primerl/engines")["engines"] == [serving.url("inference-0")]


def test_only_tls_1_3_is_spoken(serving: Serving) -> None:
    older = careless()
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    for name in ("inference-0", "router-0"):
        with pytest.raises(ssl.SSLError):
            exchange(serving.port(name), request("GET", "/v1/models"), older)


def test_another_user_cannot_read_the_keys(serving: Serving) -> None:
    folder = serving.keys.folder
    for path in (*folder.iterdir(), folder):
        with pytest.raises(PermissionError):
            as_stranger(lambda path=path: Path(path).read_bytes())


class Impostor(threading.Thread):
    """Server on a released port that records every byte it receives, before and after a TLS handshake."""

    def __init__(self, port: int, certificate: Path) -> None:
        super().__init__(daemon=True)
        self.received: list[bytes] = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate)
        self.listener = socket.create_server(("127.0.0.1", port))

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            try:
                with self.context.wrap_socket(connection, server_side=True) as channel:
                    self.received.append(channel.recv(65536))
            except (ssl.SSLError, OSError):
                self.received.append(b"")


def take_port(port: int, certificate: Path) -> Impostor | None:
    """Bind the port; None while a process of the dead engine still holds it."""
    try:
        return Impostor(port, certificate)
    except OSError:
        return None


def test_an_impostor_on_the_port_of_a_dead_engine_receives_no_request(
    serving: Serving, tmp_path: Path
) -> None:
    from primerl_hpc.run.access.keys import run_keys
    from primerl_hpc.run.rundir import RunDir

    endpoint, port = serving.run.endpoint("inference-0"), serving.port("inference-0")
    published = endpoint.read_bytes()
    certificate = run_keys(RunDir(tmp_path)).server_certificate("inference-0", "127.0.0.1")
    serving.kill("inference-0")
    impostor = wait_until(
        lambda: take_port(port, certificate), what="the dead engine's port to be free", timeout_s=PATIENCE_S
    )
    try:
        endpoint.write_bytes(published)  # the supervisor has not detected the exit yet
        impostor.start()
        # the router connects to the published URL
        wait_until(
            lambda: bool(impostor.received), what="the router to try the address", timeout_s=PATIENCE_S
        )
        answers = [serving.post("router-0", "/inference/v1/generate", json.loads(GENERATE)) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503] * 3
        assert set(impostor.received) == {b""}, "bytes of a request reached the impostor"
    finally:
        impostor.listener.close()
        endpoint.unlink()
        serving.start("inference-0")
        serving.wait_for_router()
