"""Keys of one attempt: the API key, the certificate authority for TLS, and the keys for ZMQ CURVE.

    keys = run_keys(run)                              # of this process's attempt; created on first use
    keys.api_key                                      # "Authorization: Bearer …" for engines and the router
    keys.server_certificate("inference-0", host)      # PEM file: private key and certificate for this address
    keys.client_context()                             # ssl.SSLContext that trusts only servers of this attempt
    keys.curve("env_server")                          # CurveKeys of the environment servers
    own_server(run, "router-0")                       # for a process outside the run: URL, headers, TLS

The files are in ``control/keys/attempt_K`` (mode 0700, files 0600), so that only processes of the run's owner can read
them. Each attempt creates new keys, so that a leaked key is useless after a requeue. Keys never appear in a plan, a
script, an argument vector or a log. docs/security.md describes the scheme.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import shutil
import ssl
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import create_exclusive, read_bytes, read_json, write_bytes, write_text
from primerl_hpc.common.safety.decoding import parse_json
from primerl_hpc.run.access.ownership import read_own
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:
    import httpx

_VALID_DAYS = 366
"""Longer than any attempt."""
_CLOCK_SKEW = datetime.timedelta(days=1)
"""Start of a certificate's validity before its creation, because clocks of nodes may differ."""


@dataclass(frozen=True)
class CurveKeys:
    """A server's key pair in ZMQ's Z85 text form.

    The public key is secret as well: a client cannot begin a CURVE handshake without it (RFC 26, the HELLO command is
    a box for this key, and no command shows it), so it admits exactly the processes that can read this attempt's
    keys.
    """

    public: str
    secret: str


@dataclass(frozen=True)
class RunKeys:
    folder: Path

    @cached_property
    def api_key(self) -> str:
        return read_bytes(self.folder / "api_key").decode().strip()

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of all requests to an engine or the router of the run."""
        return _headers(self.api_key)

    @property
    def temporary_name(self) -> str:
        """Name of the run's temporary folder on each node, known only to processes that can read the keys.

        It is short because paths of Unix sockets are limited to 107 bytes.
        """
        return f".p{hashlib.sha256(f'tmp {self.api_key}'.encode()).hexdigest()[:12]}"

    @property
    def authority(self) -> Path:
        """PEM certificate that signs the certificates of all servers of this attempt; clients pin it."""
        return self.folder / "authority.pem"

    def client_context(self) -> ssl.SSLContext:
        """TLS for clients: only certificates signed by this attempt's authority are accepted."""
        return _client_context(self.authority.read_text())

    def client(self, **options: Any) -> httpx.Client:
        """Return a client for the servers of the attempt; ``options``: others of httpx."""
        import httpx

        return httpx.Client(**self._of_client(), **options)

    def async_client(self, **options: Any) -> httpx.AsyncClient:
        """Same as `client` on an event loop."""
        import httpx

        return httpx.AsyncClient(**self._of_client(), **options)

    def _of_client(self) -> dict[str, Any]:
        # the site's proxy does not reach the run's own servers
        return {"verify": self.client_context(), "headers": self.headers, "trust_env": False}

    def server_context(self, process: str, host: str) -> ssl.SSLContext:
        """TLS for a server that listens on ``host``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(self.server_certificate(process, host))
        return context

    def server_certificate(self, process: str, host: str) -> Path:
        """Return the PEM file (private key, then certificate) of ``process`` at ``host``, an IP address or a name.

        Each call creates a new key pair, so that the file matches the address of the current incarnation.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        authority = x509.load_pem_x509_certificate(self.authority.read_bytes())
        signer = serialization.load_pem_private_key((self.folder / "authority.key").read_bytes(), None)
        key, certificate = _issue(process, authority.subject, signer, _subject_alternative_name(host))
        path = self.folder / f"{process}.pem"
        write_bytes(path, _pem(key) + certificate.public_bytes(serialization.Encoding.PEM), mode=0o600)
        return path

    def curve(self, purpose: str) -> CurveKeys:
        """ZMQ CURVE keys of all servers of one kind, created on first use. Needs pyzmq."""
        path = self.folder / f"curve_{purpose}.json"
        if not path.exists():
            import zmq

            public, secret = zmq.curve_keypair()
            pair = {"public": public.decode(), "secret": secret.decode()}
            create_exclusive(path, json.dumps(pair), mode=0o600)
        return CurveKeys(**read_json(path))


def is_bearer(authorization: str, api_key: str) -> bool:
    """True if the value of an Authorization header, as any server decodes it, contains the key."""
    scheme, _, key = authorization.partition(" ")
    given = key.encode(errors="surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(given, api_key.encode())


def run_keys(run: RunDir, attempt: int | None = None) -> RunKeys:
    """Return the keys of ``attempt`` (default: the attempt of this process), created by the first call.

    Raises OSError if the folder cannot be read or created.
    """
    keys = RunKeys(run.keys(env.attempt() if attempt is None else attempt))
    if not keys.folder.is_dir():
        _create(keys.folder)
    return keys


def renew_keys(run: RunDir, attempt: int) -> RunKeys:
    """Create the keys of ``attempt`` and delete those of earlier attempts."""
    keys = run_keys(run, attempt)
    for folder in keys.folder.parent.iterdir():
        if folder.name != keys.folder.name:
            shutil.rmtree(folder, ignore_errors=True)
    (run.control / "api_key").unlink(missing_ok=True)  # versions before 0.1 had one key for all attempts
    return keys


@dataclass(frozen=True)
class OwnServer:
    """A server of a run, for a process outside the run (``chat``, ``profile``)."""

    endpoint: dict[str, Any]
    headers: dict[str, str]
    """They contain the attempt's key."""
    tls: ssl.SSLContext
    """It accepts only the servers of the attempt that has this key."""

    @property
    def url(self) -> str:
        return self.endpoint["url"].rstrip("/")

    def client(self, timeout: Any) -> httpx.Client:
        import httpx

        return httpx.Client(
            base_url=self.url, headers=self.headers, verify=self.tls, timeout=timeout, trust_env=False
        )


def own_server(run: RunDir, process: str) -> OwnServer | None:
    """Return the address of ``process`` and the keys of its attempt; None if it has published no address.

    A run directory that another user prepared could name the key of another run, by a link or a path, and a server of
    that user. So both are read with `read_own`, and the key is for HTTPS only. Raises OccupiedError for such a
    directory, DataError if the address or keys are missing or invalid, and OSError if they cannot be read.
    """
    path = run.endpoint(process)
    try:
        endpoint = parse_json(read_own(path, run).decode())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"not valid JSON ({error})", location=str(path)) from error
    if not isinstance(endpoint, dict) or not str(endpoint.get("url")).startswith("https://"):
        raise DataError(f"{process} has no https address, so it gets no key", location=str(path))
    attempt = endpoint.get("attempt")
    if type(attempt) is not int:
        raise DataError(f"attempt {attempt!r} is not a number", location=str(path))
    keys = RunKeys(run.keys(attempt))
    try:
        api_key, authority = (
            read_own(keys.folder / name, run).decode().strip() for name in ("api_key", keys.authority.name)
        )
    except FileNotFoundError:
        raise DataError(f"attempt {attempt} of this run has no keys", location=str(keys.folder)) from None
    return OwnServer(endpoint, _headers(api_key), _client_context(authority))


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"}


def _client_context(authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority)
    return context


def _create(folder: Path) -> None:
    """Create all files in a temporary folder and rename it, so that a reader sees all of them or none."""
    from cryptography.hazmat.primitives import serialization

    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # mode 0700
    try:
        key, certificate = _issue("primerl-hpc run", None, None, None)
        # durable is only what a later attempt needs, which has its own keys
        write_text(temporary / "api_key", secrets.token_urlsafe(32), mode=0o600, is_durable=False)
        write_bytes(temporary / "authority.key", _pem(key), mode=0o600, is_durable=False)
        pem = certificate.public_bytes(serialization.Encoding.PEM)
        write_bytes(temporary / "authority.pem", pem, mode=0o600, is_durable=False)
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process of the run was first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _issue(name: str, issuer: Any, signer: Any, alternative_name: Any) -> tuple[Any, Any]:
    """Return (private key, certificate) on the curve P-256; a self-signed authority if ``issuer`` is None."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    is_authority = issuer is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if is_authority:
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        usage |= {"encipher_only": False, "decipher_only": False, "digital_signature": True}
        key_usage = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage)
        builder = builder.add_extension(key_usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    else:
        builder = builder.add_extension(alternative_name, critical=False)
        authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(authority_id, critical=False)
    return key, builder.sign(signer or key, hashes.SHA256())


def _subject_alternative_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
    except ValueError:
        return x509.SubjectAlternativeName([x509.DNSName(host)])


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
