"""The stores where ranks and engines meet hold nothing for another user: no key is read, written or unpickled."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 (a forked user may not be able to read this installation)
import pickle
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402

from primerl_hpc.common import env  # noqa: E402
from primerl_hpc.common.names import Role  # noqa: E402
from primerl_hpc.common.waiting import wait_until  # noqa: E402
from primerl_hpc.inference.stores import secure_stores  # noqa: E402
from primerl_hpc.run.access.keys import RunKeys, run_keys  # noqa: E402
from primerl_hpc.run.ports import free_port  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.transport.store import SecureStore, serve_store  # noqa: E402
from primerl_hpc.transport.weights.broadcast_group import connect_store  # noqa: E402
from tests.security.test_sockets import exchange  # noqa: E402
from tests.support.helpers import PATIENCE_S, end_role, make_tiny_model, start_role  # noqa: E402
from tests.support.serving import Serving  # noqa: E402
from tests.support.stranger import Command, as_stranger, run_in_child  # noqa: E402


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
    assert b"value" not in as_stranger(lambda: exchange(store.port, data))
    assert connect_store(keys, store.host, store.port).get("address") == b"value"


def test_the_store_of_torchs_rendezvous_is_a_secure_one_in_an_engine(
    keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm.distributed.utils")
    monkeypatch.setenv(env.RUN_DIR, str(tmp_path))
    monkeypatch.setenv(env.PROCESS, "inference-0")

    def form() -> str:
        secure_stores()
        store, _, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{free_port('127.0.0.1')}", 0, 1))
        return type(store).__name__

    assert run_in_child(form, lambda: None) == SecureStore.__name__


# -- stores of real processes ----------------------------------------------------------------------


VALUE = b"value of a stranger"
QUERY = (
    struct.pack("<BI", 0, 0x3C85F7CE)  # torch's TCPStoreBackend.hpp: validate, set and get
    + b"\1" + struct.pack("<Q6sQ", 6, b"stolen", len(VALUE)) + VALUE
    + b"\3" + struct.pack("<Q6s", 6, b"stolen")
)  # fmt: skip
ZMQ_GREETING = b"\xff"


def listeners(pid: int) -> tuple[set[tuple[str, int]], set[Path]]:
    """Return the TCP addresses on which a process and its children listen, and their Unix sockets."""
    root = psutil.Process(pid)
    sockets = [each for one in (root, *root.children(recursive=True)) for each in one.net_connections("all")]
    tcp = {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}
    return tcp, {Path(str(each.laddr)) for each in sockets if each.family == socket.AF_UNIX and each.laddr}


def answers_to_a_stranger(ports: Iterable[int], limit_s: float = 5) -> dict[int, bytes]:
    """Write a key into the store that each port may have, as torch's client does, and read it.

    Return what the server sent, including its first bytes if it speaks first, as ZMQ does. torch's own client waits
    much longer for a server that does not answer, such as a listener of gloo.
    """

    def attack(port: int) -> bytes:
        answer = b""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(65536)
                connection.settimeout(limit_s)
                connection.sendall(QUERY)
                while VALUE not in answer and (part := connection.recv(65536)):
                    answer += part
        except OSError:
            pass
        return answer

    def attack_all() -> dict[int, bytes]:
        with ThreadPoolExecutor(64) as pool:
            return dict(zip(ports, pool.map(attack, ports), strict=True))

    return as_stranger(attack_all)


def test_an_open_store_is_detected() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert VALUE in answers_to_a_stranger([store.port], limit_s=PATIENCE_S)[store.port]


@pytest.mark.e2e
def test_no_port_of_a_trainer_is_an_open_store(tmp_path: Path) -> None:
    serving = Serving(tmp_path, Role.TRAINER)
    trainer = start_role(serving.run, "main", "trainer-0")

    def is_waiting() -> bool:
        """True once the agent serves the store of its rank."""
        return bool(psutil.Process(trainer.pid).children() and listeners(trainer.pid)[0])

    try:
        wait_until(is_waiting, what="the trainer's store", timeout_s=PATIENCE_S)
        ports = {port for _, port in listeners(trainer.pid)[0]}
        assert ports and not any(VALUE in answer for answer in answers_to_a_stranger(ports).values())
    finally:
        ranks = psutil.Process(trainer.pid).children(recursive=True)  # in sessions of their own
        end_role(trainer)
        for rank in ranks:
            rank.kill()


@pytest.mark.slow
def test_strangers_reach_neither_the_store_nor_the_sockets_of_an_engine_with_two_data_parallel_ranks(
    tmp_path: Path,
) -> None:
    pytest.importorskip("vllm")
    # data-parallel ranks of models without experts do not communicate, so vLLM creates no store
    model = make_tiny_model(tmp_path / "experts", rows=1, experts=4) / "model"
    layout = {"data_parallel": 2, "expert_parallel": True}
    engine = Serving(tmp_path, Role.INFERENCE, layout=layout, model=model)
    tcp: set[tuple[str, int]] = set()
    local: set[Path] = set()
    try:
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(engine.start, "inference-0")
            while not starting.done():
                with contextlib.suppress(KeyError, psutil.Error):  # a process that has just ended
                    now = listeners(engine.processes["inference-0"].pid)
                    tcp, local = tcp | now[0], local | now[1]
                time.sleep(0.05)
            starting.result()
        assert {address for address, _ in tcp} == {"127.0.0.1"}, tcp
        # vLLM's ZMQ sockets
        assert local and {stat.S_IMODE(path.parent.stat().st_mode) for path in local} == {0o700}
        for path in filter(Path.exists, local):
            with pytest.raises(PermissionError):
                as_stranger(lambda path=path: socket.socket(socket.AF_UNIX).connect(str(path)))

        ports = {port for _, port in listeners(engine.processes["inference-0"].pid)[0]}
        answers = answers_to_a_stranger(ports)
        assert not any(VALUE in answer or answer.startswith(ZMQ_GREETING) for answer in answers.values())
        with ThreadPoolExecutor(64) as pool:
            num_own = sum(pool.map(lambda port: is_of_run(engine.keys, port), ports))
        assert num_own > 1, "only the API listens, so nothing was shown about stores"
        assert len(engine.generate([5, 6, 7], 4, name="inference-0")["token_ids"]) == 4
    finally:
        engine.stop()


def is_of_run(keys: RunKeys, port: int, limit_s: float = 5) -> bool:
    """True if a server with a certificate of the run listens on this port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=limit_s) as connection:
            keys.client_context().wrap_socket(connection, server_hostname="127.0.0.1").close()
        return True
    except OSError:
        return False
