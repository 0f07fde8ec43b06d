"""Facts about a bundle in ``<bundle>.json``, and the checks of a bundle before submission.

    manifest = read_manifest(path)                   # raises NotFoundError, DataError
    plan_bundle(path, profile)                       # what the plan contains; raises ConfigError if nodes cannot use it

The checksum of the archive is not checked here but on every node, because that reads all of it.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from pydantic import ValidationError

from primerl_hpc.cluster.directives import srun_args
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.block import Block
from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.common.files import read_json
from primerl_hpc.offline.bundle.formats import Format
from primerl_hpc.plan.plan import BundlePlan

FORMAT_VERSION = 1
MIN_PYTHON, MAX_PYTHON = (3, 11), (3, 13)
"""Python versions that the package supports."""
_GIB = 2**30


class Manifest(Block):
    """Content of ``<bundle>.json``."""

    version: int = FORMAT_VERSION
    format: Format
    sha256: str
    """SHA-256 of the archive."""
    size_bytes: int
    """Size of the archive."""
    unpacked_bytes: int
    num_files: int
    python: str
    """Version of the interpreter: ``3.11.7``."""
    arch: str
    """Processor architecture: ``x86_64``, ``aarch64``."""
    glibc: str | None
    """Oldest glibc with which the interpreter starts; None: it uses another C library."""
    base: str | None
    """Folder of the operating system's Python, which every node must have; None: the bundle contains its own."""
    source: str
    """Folder of the environment that was packed."""
    packages: dict[str, str]
    """Version by package."""
    outside: dict[str, str]
    """Package → folder, for packages that are read from outside of the bundle (``pip install -e``)."""
    created: float
    """Time in seconds since 1970."""


def manifest_path(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.name}.json")


def read_manifest(bundle: Path) -> Manifest:
    """Return the facts of a bundle.

    Raises NotFoundError without a bundle, DataError for an incomplete or changed one.
    """
    again = "write it again: primerl-hpc bundle"
    try:
        size = bundle.stat().st_size
        values = read_json(manifest_path(bundle))
    except FileNotFoundError as error:
        raise NotFoundError(f"bundle: {error.filename} does not exist", hint=again) from None
    except OSError as error:
        raise DataError(
            f"the bundle cannot be read: {error.strerror}", location=str(error.filename), hint=again
        ) from error
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise DataError(
            f"the manifest of the bundle is invalid: {'.'.join(map(str, fault['loc']))}: {fault['msg']}",
            location=str(manifest_path(bundle)),
            hint=again,
        ) from None
    if manifest.version != FORMAT_VERSION:
        raise DataError(
            f"the bundle has format {manifest.version}, this primerl-hpc reads format {FORMAT_VERSION}",
            location=str(bundle),
            hint=again,
        )
    if size != manifest.size_bytes:
        raise DataError(
            f"the bundle has {size} bytes, but its manifest names {manifest.size_bytes}",
            location=str(bundle),
            hint=again,
        )
    return manifest


def plan_bundle(bundle: Path, profile: Profile) -> BundlePlan:
    """Return what a plan contains about the bundle.

    Raises NotFoundError or DataError as `read_manifest`, ConfigError for a bundle that the profile's nodes cannot use.
    """
    manifest = read_manifest(bundle)
    location = "software.bundle of the profile"
    if profile.node.arch not in (None, manifest.arch):
        raise ConfigError(
            f"{bundle} is built for {manifest.arch}, but the nodes of profile '{profile.name}' are {profile.node.arch}",
            location=location,
            hint=f"run primerl-hpc bundle on a {profile.node.arch} node",
        )
    if not MIN_PYTHON <= minor_version(manifest.python) <= MAX_PYTHON:
        raise ConfigError(
            f"{bundle} has Python {manifest.python}; primerl-hpc needs 3.11 to 3.13",
            location=location,
            hint="bundle an environment of one of these versions",
        )
    scratch = profile.scratch_folder
    if scratch is not None and scratch.size_gib is not None:
        needed = manifest.unpacked_bytes / _GIB
        if needed > scratch.size_gib:
            raise ConfigError(
                f"{bundle} needs {needed:.1f} GiB on each node, but scratch ({scratch.path}) has "
                f"{scratch.size_gib:g} GiB",
                location=location,
                hint="bundle an environment with fewer packages, or correct scratch.size_gib",
            )
    return planned(manifest, bundle, srun_args(profile.scheduler))


def planned(manifest: Manifest, bundle: Path, srun_args: tuple[str, ...] = ()) -> BundlePlan:
    """Return the facts that a node needs to unpack a bundle."""
    facts = manifest.model_dump(mode="json", include=set(BundlePlan.model_fields))
    return BundlePlan(**facts, path=str(bundle), srun_args=srun_args)


def note_changes(bundle: Path, prefix: Path) -> str | None:
    """Return a warning if the environment ``prefix`` was bundled and has other packages now; None without a change."""
    manifest = read_manifest(bundle)
    if Path(manifest.source) != prefix.resolve():
        return None
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        found.setdefault(distribution.metadata["Name"], distribution.version)
    # a changed checkout of this package changes its version, but runs have their own copy of it
    names = sorted((found.keys() | manifest.packages.keys()) - {"primerl-hpc", "primerl_hpc", None})
    changed = [name for name in names if found.get(name) != manifest.packages.get(name)]
    if not changed:
        return None
    name = changed[0]
    before, now = manifest.packages.get(name, "missing"), found.get(name, "missing")
    return (
        f"{bundle} was written before {len(changed)} packages of {prefix} changed ({name}: {before} in the "
        f"bundle, {now} here); write a new bundle if the run needs them"
    )


def minor_version(version: str) -> tuple[int, int]:
    """``3.11.7`` → (3, 11)"""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
