"""Hosts that the processes of a run must reach without the site's HTTP proxy.

A proxy variable also applies to connections between nodes: requests of an environment to the run's router would be
sent to the proxy, which cannot reach compute nodes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping, Sequence

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def no_proxy_variables(
    environ: Mapping[str, str],
    configured: Sequence[str] | None,
    hosts: Iterable[str],
    addresses: Iterable[str],
) -> dict[str, str]:
    """Return ``no_proxy`` and ``NO_PROXY``; empty without a proxy. Pure.

    ``configured``: the profile's entries, None if it has no proxy (the submitting shell may have one). ``hosts``: names
    of the job's nodes. Entries that the environment already has come first.
    """
    has_proxy = any(environ.get(name) or environ.get(name.upper()) for name in PROXIES)
    if configured is None and not has_proxy:
        return {}
    given = [environ.get("no_proxy", ""), environ.get("NO_PROXY", "")]
    entries = [part.strip() for text in given for part in text.split(",")]
    text = ",".join(
        dict.fromkeys(filter(None, (*entries, *(configured or ()), *LOOPBACK, *hosts, *addresses)))
    )
    return {"no_proxy": text, "NO_PROXY": text}


def addresses_of(hosts: Iterable[str]) -> list[str]:
    """Return the IPv4 addresses of the host names that resolve here."""
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(host))
    return found
