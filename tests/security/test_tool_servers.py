"""Tool servers of environments and the endpoint of their model calls accept no connection of another user."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from transformers import AutoTokenizer

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.envs.serving import own_user
from primerl_hpc.envs.serving.own_user import accept_own_user, is_own_peer, peer_uid
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.e2e.test_env_server import QWEN3_TOKENS
from tests.support.helpers import PATIENCE_S, end_role, make_plan, make_tiny_model, process_plan, start_role
from tests.support.serving import make_recipe
from tests.support.stranger import NOBODY, as_stranger


def visit(port: int) -> bytes:
    """Connect and send a request; return what the server answers."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        try:
            connection.sendall(b"GET /mcp HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return connection.recv(1000)
        except ConnectionError:
            return b""


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[dict[str, int]]:
    """Ports on which the programs of an environment server with a tool server listen, except for ZMQ's."""
    model, run = make_tiny_model(tmp_path / "tiny", rows=1, hidden=32, layers=1) / "model", RunDir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN3_TOKENS})
    tokenizer.save_pretrained(model)
    recipe = make_recipe(model) | {
        "environments": {"train": [{"id": "calculator", "args": {"num_tasks": 1}}]}
    }
    recipe["model"]["renderer"] = {"name": "qwen3"}
    make_plan(tmp_path, recipe, processes=[process_plan(Role.ENV_SERVER)])
    server = start_role(run, "main", "env_server-0")
    root = psutil.Process(server.pid)

    def listeners() -> dict[str, int]:
        zmq_url = (read_endpoint(run, "env_server-0") or {}).get("url", "")
        found = {}
        for process in (root, *root.children(recursive=True)):
            try:
                words, connections = process.cmdline(), process.net_connections(kind="tcp")
            except psutil.NoSuchProcess:
                continue
            for connection in connections:
                if (
                    connection.status == psutil.CONN_LISTEN
                    and connection.laddr.port != urlsplit(zmq_url).port
                ):
                    name = "tools" if any("calculator" in word for word in words) else "endpoint"
                    found[name] = connection.laddr.port
        return found if zmq_url else {}

    try:
        yield wait_until(
            lambda: found if len(found := listeners()) == 2 else None,
            what="a tool server and an endpoint to listen",
            timeout_s=PATIENCE_S,
        )
    finally:
        end_role(server)


@pytest.mark.e2e
def test_only_the_user_of_the_run_reaches_a_tool_server_and_the_endpoint_of_model_calls(
    ports: dict[str, int],
) -> None:
    for name, port in ports.items():
        assert visit(port).startswith(b"HTTP/1.1 4"), name
        assert as_stranger(lambda port=port: visit(port)) == b"", name


LACKING = {"no sock_diag": ("_NETLINK_SOCK_DIAG", 31), "no tcp_diag": ("_FAMILY", socket.AF_KEY), "all": None}
"""Parts of the kernel that this one does not have, so that it answers as a kernel without sock_diag does."""


@pytest.fixture(params=LACKING)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if (lacking := LACKING[request.param]) is not None:
        monkeypatch.setattr(own_user, *lacking)
    own_user.source.cache_clear()
    yield request.param
    own_user.source.cache_clear()


def test_the_kernel_names_the_user_of_the_other_end(kernel: str) -> None:
    assert (own_user.source() is own_user.ask_kernel) == (kernel == "all")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            with accepted:
                assert is_own_peer(accepted)
                assert peer_uid(("127.0.0.1", port), client.getsockname()) is not None

        def connect_and_hold() -> tuple[bool, int | None]:
            with socket.create_connection(("127.0.0.1", port)) as client:
                accepted, _ = listener.accept()
                with accepted:
                    own, peer = accepted.getsockname(), client.getsockname()
                    return is_own_peer(accepted), peer_uid(own, peer)

        assert as_stranger(connect_and_hold) == (True, NOBODY)
        assert peer_uid(("127.0.0.1", port), ("127.0.0.1", 1)) is None, "no socket has this address"


def test_a_client_with_a_socket_of_ipv6_is_of_the_user_of_the_run(kernel: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as client:
        client.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            assert is_own_peer(accepted)


@pytest.mark.parametrize("kernel", ["no sock_diag", "no tcp_diag"], indirect=True)
def test_where_the_kernel_shows_no_users_nothing_is_served(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_user, "_TABLES", {Path("/proc/net/none"): ""})
    with pytest.raises(ConfigError, match="every user of this node could call tools"):
        accept_own_user()


def test_a_connection_that_a_stranger_has_closed_is_not_taken_for_one_of_root(kernel: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send_and_close(how: int, *, is_reset: bool = False) -> None:
            with socket.create_connection(listener.getsockname()) as client:
                client.sendall(b"POST /mcp HTTP/1.1\r\n\r\n")
                client.shutdown(how)
                if is_reset:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        for how, is_reset in ((socket.SHUT_RD, False), (socket.SHUT_RDWR, False), (socket.SHUT_RD, True)):
            as_stranger(lambda how=how, is_reset=is_reset: send_and_close(how, is_reset=is_reset))
            accepted, _ = listener.accept()
            with accepted:
                assert not is_own_peer(accepted), (how, is_reset)


def test_strangers_do_not_keep_an_event_loop_in_accept() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        listener.setblocking(False)
        script = """
            import socket, sys
            from primerl_hpc.envs.serving.own_user import accept_own_user
            accept_own_user()
            listener = socket.socket(fileno=0)
            listener.setblocking(False)
            for _ in range(int(sys.argv[1])):
                try:
                    listener.accept()
                except BlockingIOError:
                    print("empty")
                except ConnectionAbortedError:
                    print("stranger")
        """

        def connect() -> None:
            for _ in range(3):
                socket.create_connection(listener.getsockname()).close()

        as_stranger(connect)
        command = [sys.executable, "-c", textwrap.dedent(script), "4"]
        done = subprocess.run(command, stdin=listener, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [*["stranger"] * 3, "empty"]
