"""A key-value store for torch.distributed behind TLS and the API key, in place of torch's TCPStore.

    store = serve_store(keys, "trainer-0", host)           # one process; the server is a thread of it
    store = SecureStore(keys, host, port)                  # every other process
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)

TCPStore listens on every interface and does not authenticate clients, and torch and vLLM unpickle values that they
read from a store: any user who can write to it can run code in the job. Here a client must complete a TLS handshake
under the attempt's certificate authority and send the API key before its first request (docs/security.md).

Each message is a frame: its length, then each part preceded by its length (unsigned 32-bit, big-endian). A request
consists of the name of an operation and its arguments; a response consists of the results, or of one part ``timeout``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import queue
import socket
import ssl
import struct
import threading
from collections import defaultdict
from datetime import timedelta
from typing import Any

import uvloop
from torch.distributed import Store

from primerl_hpc.common.errors import RoleError
from primerl_hpc.run.access.admission import Admission
from primerl_hpc.run.access.keys import RunKeys

MAX_FRAME_BYTES = 64 << 20
DEFAULT_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 30.0
PER_CLIENT = 2
"""Connections that a process may open at once: each request in flight has its own."""
_TIMEOUT = b"timeout"
_ALIVE: list[SecureStore] = []
"""Python objects of all stores. A process group references only the C++ object; without the Python object every
operation fails with "Not implemented"."""


def pack(parts: list[bytes]) -> bytes:
    """Return the frame of ``parts``."""
    body = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return struct.pack("!I", len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """Return the parts of a frame without its length. Raises ValueError for a malformed frame."""
    parts, place = [], 0
    while place < len(body):
        if place + 4 > len(body):
            raise ValueError("the frame ends within a length")
        (length,) = struct.unpack_from("!I", body, place)
        place += 4 + length
        if place > len(body):
            raise ValueError("the frame ends within a part")
        parts.append(body[place - length : place])
    return parts


class StoreServer:
    """Serve one store in a thread until `close`."""

    def __init__(
        self, keys: RunKeys, process: str, host: str, listener: socket.socket, num_clients: int
    ) -> None:
        """``listener``: a bound socket, which the server closes; ``host``: the address that clients connect to.

        ``num_clients``: processes that use the store.
        """
        self.address: tuple[str, int] = host, listener.getsockname()[1]
        self._key = keys.api_key.encode()
        self._tls = keys.server_context(f"store-{process}", host)
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[asyncio.Event]] = defaultdict(set)
        # asyncio's connections have TLS buffers of half a MiB, which strangers would make it allocate
        self._loop = uvloop.new_event_loop()
        self._listener = listener
        self._admission = Admission(expected=PER_CLIENT * num_clients)
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="store", daemon=True)
        self._thread.start()
        started.wait()

    def close(self) -> None:
        """Stop the server and wait for its thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        gate = self._loop.run_until_complete(self._admission.serve(self._protocol, self._listener, self._tls))
        started.set()
        self._loop.run_forever()
        gate.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _protocol(self) -> asyncio.Protocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (key,) = await _read(reader, limit=1024)
            if not hmac.compare_digest(key, self._key):
                return
            self._admission.admit(writer.get_extra_info("peername"))
            while True:
                name, *arguments = await _read(reader)
                operation = self._OPERATIONS[name.decode()]
                writer.write(pack(await operation(self, *arguments)))
                await writer.drain()
        except (OSError, EOFError, ValueError, KeyError, TypeError, TimeoutError, asyncio.CancelledError):
            pass  # the client disconnected or failed to authenticate, or the server is stopping
        finally:
            writer.close()

    # -- operations --------------------------------------------------------------------------------
    async def _set(self, *pairs: bytes) -> list[bytes]:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._values[key] = value
            self._wake(key)
        return []

    async def _get(self, timeout: bytes, *names: bytes) -> list[bytes]:
        if not await self._are_there(float(timeout), names):
            return [_TIMEOUT]
        return [b"values", *(self._values[name] for name in names)]

    async def _wait(self, timeout: bytes, *names: bytes) -> list[bytes]:
        return [b"there" if await self._are_there(float(timeout), names) else _TIMEOUT]

    async def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = int(self._values.get(key, b"0")) + int(amount)
        self._values[key] = str(total).encode()
        self._wake(key)
        return [self._values[key]]

    async def _append(self, key: bytes, value: bytes) -> list[bytes]:
        self._values[key] = self._values.get(key, b"") + value
        self._wake(key)
        return []

    async def _check(self, *names: bytes) -> list[bytes]:
        return [b"1" if all(name in self._values for name in names) else b"0"]

    async def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        """Compare and set as TCPStore does: set an absent key if ``expected`` is empty, else return ``expected``."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = desired
            self._wake(key)
            return [desired]
        return [expected if current is None else current]

    async def _delete(self, key: bytes) -> list[bytes]:
        return [b"0" if self._values.pop(key, None) is None else b"1"]

    async def _count(self) -> list[bytes]:
        return [str(len(self._values)).encode()]

    _OPERATIONS = {  # noqa: RUF012 (constant)
        "set": _set,
        "get": _get,
        "wait": _wait,
        "add": _add,
        "append": _append,
        "check": _check,
        "compare_set": _compare_set,
        "delete": _delete,
        "count": _count,
    }

    async def _are_there(self, timeout_s: float, names: tuple[bytes, ...]) -> bool:
        """Wait until all keys have a value; False if that takes longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                for name in names:
                    while name not in self._values:
                        event = asyncio.Event()
                        self._waiting[name].add(event)
                        try:
                            await event.wait()
                        finally:
                            self._waiting[name].discard(event)
        except TimeoutError:
            return False
        return True

    def _wake(self, key: bytes) -> None:
        for event in self._waiting.pop(key, ()):
            event.set()


async def _read(reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES) -> list[bytes]:
    (length,) = struct.unpack("!I", await reader.readexactly(4))
    if length > limit:
        raise ValueError(f"a frame has {length} bytes, more than the limit of {limit}")
    return unpack(await reader.readexactly(length))


class SecureStore(Store):
    """Thread-safe client of a `StoreServer`. Every request in flight uses a separate connection."""

    def __init__(self, keys: RunKeys, host: str, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Connect to the store. Raises RoleError if no store of this attempt responds at ``host:port``."""
        super().__init__()
        _ALIVE.append(self)
        self.host, self.port = host, port
        self.server: StoreServer | None = None
        """The server, if it runs in this process; it is kept alive by this client."""
        self._keys, self._tls, self._timeout_s = keys, keys.client_context(), timeout_s
        self._idle: queue.LifoQueue[ssl.SSLSocket] = queue.LifoQueue()
        try:
            self._idle.put(self._connect())
        except OSError as error:
            raise RoleError(f"the store at {host}:{port} does not respond: {error}") from error

    def clone(self) -> SecureStore:
        """Return another client of the same store."""
        return SecureStore(self._keys, self.host, self.port, self._timeout_s)

    def _connect(self) -> ssl.SSLSocket:
        connection = socket.create_connection((self.host, self.port), timeout=CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = self._tls.wrap_socket(connection, server_hostname=self.host)
        channel.settimeout(None)
        channel.sendall(pack([self._keys.api_key.encode()]))
        return channel

    def _request(self, name: str, *arguments: bytes) -> list[bytes]:
        """Send a request and return the response. Raises RuntimeError if the server disconnects, as TCPStore does."""
        try:
            try:
                channel = self._idle.get_nowait()
            except queue.Empty:
                channel = self._connect()
            channel.sendall(pack([name.encode(), *arguments]))
            (length,) = struct.unpack("!I", _receive(channel, 4))
            response = unpack(_receive(channel, length))
        except (OSError, EOFError, ValueError) as error:
            raise RuntimeError(
                f"lost the connection to the store at {self.host}:{self.port}: {error}"
            ) from error
        self._idle.put(channel)
        return response

    # -- interface of torch.distributed.Store ------------------------------------------------------
    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set(self, key: Any, value: Any) -> None:
        self._request("set", _bytes(key), _bytes(value))

    def get(self, key: Any) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[Any]) -> list[bytes]:
        return self._wait_for("get", keys, self._timeout_s)[1:]

    def multi_set(self, keys: list[Any], values: list[Any]) -> None:
        pairs = [_bytes(part) for pair in zip(keys, values, strict=True) for part in pair]
        self._request("set", *pairs)

    def add(self, key: Any, amount: int) -> int:
        return int(self._request("add", _bytes(key), str(amount).encode())[0])

    def append(self, key: Any, value: Any) -> None:
        self._request("append", _bytes(key), _bytes(value))

    def check(self, keys: list[Any]) -> bool:
        return self._request("check", *map(_bytes, keys)) == [b"1"]

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        return self._request("compare_set", _bytes(key), _bytes(expected), _bytes(desired))[0]

    def delete_key(self, key: Any) -> bool:
        return self._request("delete", _bytes(key)) == [b"1"]

    deleteKey = delete_key  # the name under which torch's C++ calls it, through a PrefixStore

    def num_keys(self) -> int:
        return int(self._request("count")[0])

    def wait(self, keys: list[Any], timeout: timedelta | None = None) -> None:
        self._wait_for("wait", keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def has_extended_api(self) -> bool:
        return True

    def _wait_for(self, name: str, keys: list[Any], timeout_s: float) -> list[bytes]:
        response = self._request(name, str(timeout_s).encode(), *map(_bytes, keys))
        if response[0] == _TIMEOUT:
            raise RuntimeError(
                f"timed out after {timeout_s:.0f} s waiting for {', '.join(map(str, keys))} in the store"
            )
        return response


def serve_store(
    keys: RunKeys, process: str, host: str, listener: socket.socket | None = None, *, num_clients: int = 64
) -> SecureStore:
    """Serve a store on ``listener`` (default: any free port of ``host``). Returns a client, which owns the server.

    ``num_clients``: processes that use the store.
    """
    listener = listener or socket.create_server((host, 0), backlog=4096)
    server = StoreServer(keys, process, host, listener, num_clients)
    store = SecureStore(keys, *server.address)
    store.server = server
    return store


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _receive(channel: ssl.SSLSocket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = channel.recv(length - len(data))
        if not part:
            raise EOFError("connection closed")
        data += part
    return bytes(data)
