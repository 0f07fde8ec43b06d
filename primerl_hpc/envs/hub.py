"""Install environments from an index of the Environments Hub, pinned by version and checksum.

    installed = install_from_hub(parse_package("owner/name@0.1.3"), index)
    installed.pin.url, installed.pin.sha256

The index of an owner is ``INDEX/<owner>/simple`` (PEP 503), with wheels at
``INDEX/<owner>/<name>/@<version>/<file>.whl``.
Only wheels are installed, since building another format would run code of the package. A wheel that does not use
``verifiers.v1`` is refused before it is installed. pip verifies the checksum again and records the URL (PEP 610), by
which `installed_package` recognizes the package later. Dependencies come from pip's own index.

`prefetch`, `bundle`, `doctor` and `submit` call `installed_package` and `install_if_missing` in the interpreter that
serves the environments (`common/interpreters.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import re
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
from packaging.utils import canonicalize_name

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.envs.install import Installed, install_package
from primerl_hpc.recipe.hub import ENVIRONMENTS_INDEX, HubPackage, parse_package

TIMEOUT_S = 30.0
MAX_WHEEL_BYTES = 256 << 20
MAX_PAGE_BYTES = 16 << 20
MAX_SOURCE_BYTES = 64 << 20
"""Limit of the Python files of a wheel after decompression."""


@dataclass(frozen=True)
class Pin:
    """A wheel of the index."""

    package: HubPackage
    """With its exact version."""
    url: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package.name} @ {self.url}#sha256={self.sha256}"


@dataclass(frozen=True)
class HubInstalled:
    pin: Pin
    installed: Installed


def index_of(index: str | None) -> str:
    """Return the index: ``index``, the variable PRIMERL_ENV_INDEX, or the public one."""
    return (index or env.variable(env.ENV_INDEX) or ENVIRONMENTS_INDEX).rstrip("/")


def install_from_hub(
    package: HubPackage,
    index: str | None = None,
    *,
    target: str | None = None,
    pip_arguments: Sequence[str] = (),
) -> HubInstalled:
    """Install a package, by default its newest version. Arguments and errors as in `install_package`.

    Raises NotFoundError if the index does not have it, ConfigError for an environment of verifiers' older interface.
    """
    pin = find_pin(package, index_of(index))
    return HubInstalled(pin, install_package(pin.requirement, target=target, pip_arguments=pip_arguments))


def find_pin(package: HubPackage, index: str) -> Pin:
    """Return the wheel of a package with its checksum, after checking its content; errors as in `install_from_hub`."""
    page = f"{index}/{package.owner}/simple/{canonicalize_name(package.name)}/"
    try:
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client:
            text = _read(client, page, package, index, MAX_PAGE_BYTES).decode(errors="replace")
            version, link = choose_wheel(package, links_of(text, page), index)
            url, fragment = urldefrag(link)
            if urlsplit(index).scheme == "https" and urlsplit(url).scheme != "https":
                raise DataError(f"{index} links to {url}, which is not encrypted")
            data = _read(client, url, package, index, MAX_WHEEL_BYTES)
    except httpx.HTTPError as error:
        raise NotFoundError(
            f"{index} does not respond: {type(error).__name__}: {error}",
            hint="run the command where the internet can be reached, or name another --index",
        ) from error
    sha256 = hashlib.sha256(data).hexdigest()
    if fragment.startswith("sha256=") and fragment.removeprefix("sha256=") != sha256:
        raise DataError(f"{url} differs from the checksum in the index", hint="try again, or tell its owner")
    check_interface(str(package), data)
    return Pin(HubPackage(package.owner, package.name, version), url, sha256)


def _read(client: httpx.Client, url: str, package: HubPackage, index: str, limit: int) -> bytes:
    with client.stream("GET", url) as response:
        if response.status_code in (401, 403, 404):
            raise NotFoundError(
                f"{index} has no package {package.owner}/{package.name}, or it is private "
                f"(HTTP {response.status_code})",
                hint="check owner and name; install a private environment from a folder or a git URL",
            )
        response.raise_for_status()
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > limit:
                raise DataError(f"{url} has more than {limit >> 20} MiB")
    return bytes(data)


class _Links(HTMLParser):
    """Collects (URL, required Python) of the links of a page that are not yanked."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href") and "data-yanked" not in found:
            self.links.append((str(found["href"]), found.get("data-requires-python") or ""))


def links_of(text: str, page: str) -> list[tuple[str, str]]:
    """Return (absolute URL, required Python) of each file on a page of the index."""
    parser = _Links()
    parser.feed(text)
    return [(urljoin(page, link), python) for link, python in parser.links]


def choose_wheel(package: HubPackage, links: list[tuple[str, str]], index: str) -> tuple[str, str]:
    """Return (version, URL) of the requested version, or of the newest; pre-releases only if there is no other.

    Raises NotFoundError if there is no such wheel for this Python.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.tags import sys_tags
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename
    from packaging.version import InvalidVersion, Version

    here, tags = ".".join(map(str, sys.version_info[:3])), set(sys_tags())
    found: dict[Version, str] = {}
    for link, python in links:
        with contextlib.suppress(InvalidWheelFilename, InvalidVersion, InvalidSpecifier):
            file = unquote(urlsplit(link).path.rsplit("/", 1)[-1])
            name, version, _, supported = parse_wheel_filename(file)
            if (
                name == canonicalize_name(package.name)
                and supported & tags
                and SpecifierSet(python).contains(here)
            ):
                found[version] = link
    if package.version is not None:
        with contextlib.suppress(InvalidVersion):
            if (wanted := Version(package.version)) in found:
                return str(wanted), found[wanted]
    candidates = [version for version in found if not version.is_prerelease] or list(found)
    if package.version is None and candidates:
        return str(max(candidates)), found[max(candidates)]
    what = f"version {package.version}" if package.version else "wheel"
    known = ", ".join(map(str, sorted(found))) or "none"
    raise NotFoundError(
        f"{index} has no {what} of {package.owner}/{package.name} for Python {here}",
        hint=f"versions with a wheel: {known}",
    )


def check_interface(package: str, wheel: bytes) -> None:
    """Raise ConfigError for a wheel without ``verifiers.v1``, which no run can use; DataError if it is not a wheel, or
    if its code is larger than `MAX_SOURCE_BYTES`."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            files = [file for file in archive.infolist() if file.filename.endswith(".py")]
            if (
                sum(file.file_size for file in files) > MAX_SOURCE_BYTES
            ):  # zipfile reads no more than these sizes
                raise DataError(
                    f"the code in the wheel of {package} has more than {MAX_SOURCE_BYTES >> 20} MiB"
                )
            sources = [archive.read(file).decode(errors="replace") for file in files]
    except (zipfile.BadZipFile, RuntimeError) as error:
        raise DataError(f"the wheel of {package} cannot be read: {error}") from error
    if any(re.search(r"\bverifiers\.v1\b|from\s+verifiers\s+import\s+.*\bv1\b", text) for text in sources):
        return
    is_older = any(re.search(r"^(?:async )?def load_environment\(", text, re.M) for text in sources)
    why = "it defines load_environment, the interface of older versions of verifiers" if is_older else ""
    raise ConfigError(
        f"{package} does not use verifiers.v1, which runs need" + (f": {why}" if why else ""),
        hint="use a version of it that exports a vf.Taskset, or convert it: docs/environments.md, 'Write your own'",
    )


def installed_package(text: str) -> dict[str, Any]:
    """Return what this Python has of ``owner/name@version``.

        {"package": "owner/name@0.1.3", "state": "present", "version": "0.1.3", "url": …, "sha256": …, "detail": …}

    ``state``: ``present``, ``other`` (another version, or one of another owner) or ``missing``.
    """
    package = parse_package(text)
    assert package is not None  # the recipe is validated
    try:
        distribution = importlib.metadata.distribution(package.name)
    except importlib.metadata.PackageNotFoundError:
        return {"package": text, "state": "missing", "detail": f"{sys.executable} does not have it"}
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    sha256 = origin.get("archive_info", {}).get("hashes", {}).get("sha256")
    found = {"package": text, "version": distribution.version, "url": url or None, "sha256": sha256}
    if not _is_same(distribution.version, package.version):
        return found | {"state": "other", "detail": f"{sys.executable} has version {distribution.version}"}
    # pip records the URL of a wheel or folder (PEP 610), but nothing for a package of an index such as PyPI
    if not url or (url.startswith("http") and f"/{package.owner}/" not in url):
        return found | {"state": "other", "detail": f"{sys.executable} has it from {url or 'another index'}"}
    return found | {"state": "present", "detail": f"{sys.executable} has it"}


def _is_same(present: str, wanted: str | None) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return wanted is None or Version(present) == Version(wanted)
    except InvalidVersion:
        return present == wanted


def install_if_missing(text: str) -> dict[str, Any]:
    """Install this package unless this Python has it; return `installed_package`. Errors as in `install_from_hub`."""
    found = installed_package(text)
    if found["state"] != "present":
        package = parse_package(text)
        assert package is not None
        install_from_hub(package)
        importlib.invalidate_caches()
        found = installed_package(text)
    return found
