"""Keys of an attempt: private files, new for each attempt, and TLS that only servers of this attempt can serve."""

from __future__ import annotations

import multiprocessing
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from primerl_hpc.common.errors import DataError
from primerl_hpc.run.access.keys import own_server, renew_keys, run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S


def answer_of(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "127.0.0.1") -> bytes:
    """Return the bytes that a client reads after the TLS handshake with a server that sends b"hello"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    with server.wrap_socket(connection, server_side=True) as secured:
                        secured.sendall(b"hello")
                except (ssl.SSLError, ConnectionError):
                    pass  # the client refused the certificate

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname()) as connection,
                client.wrap_socket(connection, server_hostname=host) as secured,
            ):
                return secured.recv(16)
        finally:
            thread.join()


def test_a_client_talks_only_to_servers_of_its_own_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    keys, stranger = run_keys(run, 1), run_keys(RunDir(tmp_path / "other"), 1)
    server = keys.server_context("inference-0", "127.0.0.1")
    assert answer_of(server, keys.client_context()) == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        answer_of(stranger.server_context("inference-0", "127.0.0.1"), keys.client_context())
    elsewhere = keys.server_context("inference-0", "10.0.0.7")
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        answer_of(elsewhere, keys.client_context())
    previous = keys.client_context()
    renewed = renew_keys(run, 2)
    with pytest.raises(ssl.SSLCertVerificationError):
        answer_of(renewed.server_context("inference-0", "127.0.0.1"), previous)


def test_a_servers_certificate_cannot_issue_others(tmp_path: Path) -> None:
    keys = run_keys(RunDir(tmp_path))
    pem = keys.server_certificate("router-0", "node7.cluster").read_bytes()
    certificate = x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERTIFICATE") :])
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node7.cluster"]


def test_a_new_attempt_has_new_keys_and_the_old_ones_are_deleted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = run_keys(run, 1)
    key, curve = first.api_key, first.curve("env_server")
    assert curve == run_keys(run, 1).curve("env_server")
    second = renew_keys(run, 2)
    assert second.api_key != key and second.curve("env_server") != curve
    assert not first.folder.exists()


def test_all_key_files_are_private_even_without_a_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys = run_keys(RunDir(tmp_path))
        keys.server_certificate("router-0", "127.0.0.1")
        keys.curve("env_server")
    finally:
        os.umask(before)
    assert keys.folder.parent.stat().st_mode & 0o777 == keys.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in keys.folder.iterdir()} == {0o600}


def ask(root: Path, start: threading.Barrier, keys: multiprocessing.Queue[str]) -> None:
    start.wait()
    keys.put(run_keys(RunDir(root)).api_key)


def test_processes_that_ask_at_once_get_the_same_keys(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, found = context.Barrier(8), context.Queue()
    processes = [context.Process(target=ask, args=(tmp_path, start, found)) for _ in range(8)]
    for process in processes:
        process.start()
    keys = {found.get(timeout=PATIENCE_S) for _ in processes}
    for process in processes:
        process.join()
    assert len(keys) == 1
    assert [path.name for path in RunDir(tmp_path).keys(1).parent.iterdir()] == ["attempt_1"]


def test_keys_that_do_not_exist_are_reported_and_not_created(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert own_server(run, "router-0") is None
    publish_endpoint(run, "router-0", "https://127.0.0.1:1")
    with pytest.raises(DataError, match="attempt 1 of this run has no keys"):
        own_server(run, "router-0")
    assert not run.keys(1).exists()
