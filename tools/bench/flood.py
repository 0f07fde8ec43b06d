#!/usr/bin/env python3
"""Flood the servers of a run with connections of another user, and measure what that costs them and their members.

    tools/bench/flood.py                       # as root: the stranger is uid 65534; about two minutes
    tools/bench/flood.py --connections 20000 --json > docs/measurements/flood.json

A real engine, router, environment server and store serve a tiny model on loopback. For each server and kind of
connection a process of another user opens the connections and holds them for ten seconds; meanwhile a member opens new
connections and sends requests. Columns: memory and file descriptors in addition to those before, and the median and
longest time of a member's request. To compare two revisions, copy this file and tests/support/flood.py into the other
checkout.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from machine import show  # noqa: E402

from primerl_hpc.run.access.keys import run_keys  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from tests.support.flood import flood  # noqa: E402
from tests.support.serving import Serving  # noqa: E402

HOLD_S = 10.0
TLS = ("idle", "half handshakes", "half headers")
KINDS = {"router": TLS, "engine": TLS, "store": TLS, "environment server": ("idle", "ZMQ greetings")}
PROCESSES = {"router": "router-0", "engine": "inference-0", "environment server": "env_server-0"}
STORE = """
import sys, time
from pathlib import Path
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.store import serve_store
store = serve_store(run_keys(RunDir(Path(sys.argv[1]))), "weights", "127.0.0.1")
print(store.port, flush=True)
sys.stdin.read()
"""
Ask = Callable[[], object]


@contextmanager
def served_store(run: RunDir) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve a store in a process of its own; yield the process and the port."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STORE, str(run.root)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process, int(process.stdout.readline())
        process.stdin.close()


def asks_of(serving: Serving, store_port: int) -> dict[str, Ask]:
    """Return a request of a member on a new connection, by server."""
    from primerl_hpc.transport.store import SecureStore

    def ask_http(name: str) -> None:
        with httpx.Client(
            verify=serving.keys.client_context(), headers=serving.keys.headers, timeout=60, trust_env=False
        ) as client:
            client.get(f"{serving.url(name)}/health").raise_for_status()

    def ask_environment() -> None:
        public, secret = zmq.curve_keypair()
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger, client.curve_publickey, client.curve_secretkey = 0, public, secret
            client.curve_serverkey = serving.keys.curve("env_server").public.encode()
            client.connect(serving.url("env_server-0"))
            client.send_multipart([b"1", b"health", b"\x80"])
            if not client.poll(60_000):
                raise TimeoutError("the environment server does not respond")

    return {
        "router": lambda: ask_http("router-0"),
        "engine": lambda: ask_http("inference-0"),
        "store": lambda: SecureStore(serving.keys, "127.0.0.1", store_port).set("key", "value"),
        "environment server": ask_environment,
    }


def measure(
    server: str, kind: str, process: psutil.Process, port: int, ask: Ask, count: int
) -> dict[str, Any]:
    ask()
    files, memory = process.num_fds(), process.memory_info().rss
    most_files, most_memory, times = 0, 0, []
    failed = 0
    with flood(port, kind, count) as opened:
        until = time.monotonic() + HOLD_S
        while time.monotonic() < until:
            with suppress(psutil.AccessDenied):
                most_files = max(most_files, process.num_fds() - files)
            most_memory = max(most_memory, process.memory_info().rss - memory)
            begun = time.perf_counter()
            try:
                ask()
            except Exception as error:  # noqa: BLE001 (whatever a member sees, it is counted)
                print(f"{server}, {kind}: {type(error).__name__}: {error}", file=sys.stderr)
                failed += 1
            times.append(time.perf_counter() - begun)
            time.sleep(0.05)
    row = {"server": server, "connections": kind, "opened": opened, "memory_mib": most_memory / 2**20}
    row |= {"descriptors": most_files, "requests": len(times), "failed": failed}
    return row | {"median_s": statistics.median(times), "longest_s": max(times)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=20_000)
    parser.add_argument("--servers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-flood-") as name:
        serving = Serving(Path(name))
        store_run = RunDir(Path(name) / "run")
        assert run_keys(store_run).folder == serving.keys.folder
        try:
            serving.start(*PROCESSES.values())
            serving.wait_for_router()
            with served_store(store_run) as (store, store_port):
                asks = asks_of(serving, store_port)
                for server in options.servers:
                    is_store = server == "store"
                    pid = store.pid if is_store else serving.processes[PROCESSES[server]].pid
                    port = store_port if is_store else urlsplit(serving.url(PROCESSES[server])).port
                    assert port is not None
                    for kind in KINDS[server]:
                        count = options.connections
                        row = measure(server, kind, psutil.Process(pid), port, asks[server], count)
                        print(row, file=sys.stderr)
                        rows.append(row)
        finally:
            serving.stop()
    show(f"flood of {options.connections} connections", rows, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
