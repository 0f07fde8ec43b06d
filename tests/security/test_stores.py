"""The stores where ranks and engines meet hold nothing for another user: no key is read, written or unpickled."""

from __future__ import annotations

import pickle
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

from torch.distributed import TCPStore  # noqa: E402

from primerl_hpc.common.names import Role  # noqa: E402
from primerl_hpc.common.waiting import wait_until  # noqa: E402
from primerl_hpc.run.access.keys import RunKeys, run_keys  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.transport.store import SecureStore, serve_store  # noqa: E402
from primerl_hpc.transport.weights.broadcast_group import connect_store  # noqa: E402
from tests.support.helpers import PATIENCE_S, end_role, start_role  # noqa: E402
from tests.support.serving import Serving  # noqa: E402
from tests.support.stranger import Command, as_stranger  # noqa: E402


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return run_keys(RunDir(tmp_path))


@pytest.fixture
def store(keys: RunKeys) -> Iterator[SecureStore]:
    store = serve_store(keys, "weights", "127.0.0.1")
    store.set("address", "value")
    yield store
    assert store.server is not None
    store.server.close()


def test_torchs_own_client_of_a_stranger_reaches_no_key(
    store: SecureStore, keys: RunKeys, tmp_path: Path
) -> None:
    planted = pickle.dumps(Command(tmp_path / "ran"))

    def attack() -> str:
        try:
            client = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=2))
            client.set("address", planted)
            return client.get("address").decode(errors="replace")
        except RuntimeError:
            return "refused"

    assert as_stranger(attack) == "refused"
    assert connect_store(keys, store.host, store.port).get("address") == b"value"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data", [b"\x00" * 4096, pickle.dumps({"get": "address"}), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_bytes_of_a_stranger_are_not_answered_and_end_nothing(
    store: SecureStore, keys: RunKeys, data: bytes
) -> None:
    def send() -> bytes:
        with socket.create_connection((store.host, store.port), timeout=PATIENCE_S) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := connection.recv(65536):
                    answer += part
            except ConnectionError:
                pass
            return answer

    assert b"value" not in as_stranger(send)
    assert connect_store(keys, store.host, store.port).get("address") == b"value"


# -- stores of real processes ----------------------------------------------------------------------


def listening_ports(pid: int) -> set[int]:
    root = psutil.Process(pid)
    sockets = [each.net_connections(kind="tcp") for each in (root, *root.children(recursive=True))]
    return {each.laddr.port for own in sockets for each in own if each.status == psutil.CONN_LISTEN}


def reads_as_a_store(port: int, limit_s: float = 2) -> bool:
    """True if a stranger with torch's own client can write and read a key behind this port."""

    def attack() -> bool:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(5 * limit_s))  # ends this process if the server, which is none, does not answer
        try:
            client = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit_s))
            client.set("stolen", "value")
            return client.get("stolen") == b"value"
        except RuntimeError:
            return False

    try:
        return as_stranger(attack)
    except AssertionError:  # the alarm
        return False


def test_an_open_store_is_detected() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert reads_as_a_store(store.port, limit_s=PATIENCE_S)


@pytest.mark.e2e
def test_no_port_of_a_trainer_is_an_open_store(tmp_path: Path) -> None:
    serving = Serving(tmp_path, Role.TRAINER)
    trainer = start_role(serving.run, "main", "trainer-0")

    def is_waiting() -> bool:
        """True once the agent serves the store of its rank."""
        return bool(psutil.Process(trainer.pid).children() and listening_ports(trainer.pid))

    try:
        wait_until(is_waiting, what="the trainer's store", timeout_s=PATIENCE_S)
        ports = listening_ports(trainer.pid)
        assert ports and not [port for port in ports if reads_as_a_store(port)]
    finally:
        ranks = psutil.Process(trainer.pid).children(recursive=True)  # in sessions of their own
        end_role(trainer)
        for rank in ranks:
            rank.kill()
