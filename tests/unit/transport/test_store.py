"""The store of process groups: torch's interface, and access only for the run."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.errors import RoleError
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S

torch = pytest.importorskip("torch")

from primerl_hpc.transport.store import SecureStore, pack, serve_store, unpack  # noqa: E402


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return run_keys(RunDir(tmp_path / "run"))


@pytest.fixture
def store(keys: RunKeys) -> Iterator[SecureStore]:
    made = serve_store(keys, "trainer-0", "127.0.0.1")
    yield made
    assert made.server is not None
    made.server.close()


def test_it_behaves_like_torchs_own_store(store: SecureStore) -> None:
    own = torch.distributed.HashStore()
    for each in (own, store):
        each.set("a", "1")
        assert each.get("a") == b"1"
        assert (each.add("n", 5), each.add("n", -2)) == (5, 3)
        assert each.check(["a", "n"]) and not each.check(["a", "b"])
        assert each.compare_set("c", "", "x") == b"x"
        assert each.compare_set("c", "y", "z") == b"x"
        assert each.compare_set("c", "x", "z") == b"z"
        each.append("t", "ab")
        each.append("t", "cd")
        each.multi_set(["k", "l"], ["1", "2"])
        assert each.multi_get(["l", "k", "t"]) == [b"2", b"1", b"abcd"]
        assert each.delete_key("k") and not each.delete_key("k")
        each.wait(["l"], timedelta(seconds=1))
    assert own.num_keys() == store.num_keys()
    prefixed = torch.distributed.PrefixStore("p", store)
    prefixed.set("a", "2")
    assert (prefixed.get("a"), store.get("a")) == (b"2", b"1")


def test_a_wait_ends_with_the_key_or_its_timeout_and_blocks_no_other_client(store: SecureStore) -> None:
    with pytest.raises(RuntimeError, match="timed out after 0 s waiting for missing"):
        store.wait(["missing"], timedelta(seconds=0.01))
    found: list[bytes] = []
    waiter = threading.Thread(target=lambda: found.append(store.get("late")))
    waiter.start()
    assert store.add("meanwhile", 1) == 1
    store.set("late", "there")
    waiter.join(PATIENCE_S)
    assert found == [b"there"]


def test_only_clients_with_the_keys_of_the_attempt_are_served(
    store: SecureStore, keys: RunKeys, tmp_path: Path
) -> None:
    with pytest.raises(RoleError, match="does not respond"):
        SecureStore(run_keys(RunDir(tmp_path / "stranger")), store.host, store.port)
    store.set("a", "1")
    careless = ssl.create_default_context()
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    attempts = [
        pack([b"set", b"a", b"evil"]),  # no key
        pack([b"wrong"]) + pack([b"set", b"a", b"evil"]),
        pack([]) + pack([b"set", b"a", b"evil"]),
        struct.pack("!I", 1 << 31) + b"x" * 64,
    ]
    for data in attempts:
        with (
            socket.create_connection((store.host, store.port), timeout=PATIENCE_S) as connection,
            careless.wrap_socket(connection) as channel,
        ):
            channel.sendall(data)
            assert channel.recv(100) == b""
    with socket.create_connection((store.host, store.port), timeout=PATIENCE_S) as plain:
        # the right key, but no TLS
        plain.sendall(pack([keys.api_key.encode()]) + pack([b"set", b"a", b"evil"]))
        assert b"evil" not in plain.recv(100)
    assert store.get("a") == b"1"


def test_a_malformed_request_of_a_member_ends_only_its_connection(store: SecureStore) -> None:
    with pytest.raises(RuntimeError, match="lost the connection"):
        store._request("eval", b"1")
    with pytest.raises(RuntimeError, match="lost the connection"):
        store._request("add", b"n", b"many")
    assert store.add("n", 1) == 1


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_frames_are_read_as_they_were_written(parts: list[bytes]) -> None:
    assert unpack(pack(parts)[4:]) == parts


@given(st.binary(max_size=100))
def test_malformed_frames_are_refused(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert pack(unpack(body))[4:] == body
