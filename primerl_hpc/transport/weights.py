"""Weights as they cross from the trainer to the engines: policy versions, and how an engine comes to one.

``weights/step_N/`` is an HF model folder (safetensors shards, index, config, tokenizer) plus ``manifest.json``
(every file's size and CRC-32) and, written last, ``STABLE``. With deltas only some versions are such a folder, and
``deltas/step_N/`` links N to the version before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Chain:
    """A version as a whole folder of an earlier one and the links after it.

    An engine applies what is newer than the version it has; only one that has none reads the folder.
    """

    path: str
    base: int
    """Version that ``path`` holds."""
    links: tuple[tuple[int, str], ...] = ()
    """(version, folder), ascending without a gap; the first ones may be older than ``base``."""


@dataclass(frozen=True)
class Announcement:
    """A version that the trainer will send to whoever meets at its store."""

    version: int
    host: str
    port: int
    life: str
    """Of the trainer: another one has another store."""


@dataclass(frozen=True)
class Seats:
    """The places of one engine's workers in a group that meets at the trainer's store."""

    host: str
    port: int
    group: str
    first_rank: int
    size: int


Source = Path | str | Chain | Announcement
"""Where a version comes from: a folder, the id of a model that lies in the hub's cache, a chain, or the trainer itself."""


def to_body(source: Path | str | Chain | Seats, version: int) -> dict[str, Any]:
    """What an engine is told (``POST /update_weights``)."""
    if isinstance(source, Chain):
        links = [list(link) for link in source.links]
        return {"path": source.path, "version": version, "base": source.base, "links": links}
    if isinstance(source, Seats):
        return {"path": "", "version": version, "seats": vars(source)}
    return {"path": str(source), "version": version}


def from_body(body: dict[str, Any]) -> tuple[str | Chain | Seats, int]:
    """The inverse. Raises ValueError when it is nothing that `to_body` makes."""
    path, version = body.get("path"), body.get("version")
    if not isinstance(path, str) or not _is_version(version):
        raise ValueError('expected {"path": "<folder>", "version": <policy version>}')
    if "seats" in body:
        try:
            return Seats(**body["seats"]), version
        except TypeError as error:
            raise ValueError(f"not the seats of an engine: {error}") from error
    if "base" not in body:
        return path, version
    base, links = body["base"], body.get("links")
    if not _is_version(base) or not isinstance(links, list):
        raise ValueError('expected {…, "base": <version of path>, "links": [[<version>, "<folder>"], …]}')
    for link in links:
        if not (
            isinstance(link, list) and len(link) == 2 and _is_version(link[0]) and isinstance(link[1], str)
        ):
            raise ValueError(f'expected [<version>, "<folder>"], not {link!r}')
    return Chain(path, base, tuple((version, folder) for version, folder in links)), version


def describe(source: str | Chain | Seats, version: int) -> str:
    """For a line of a log."""
    if isinstance(source, Seats):
        return f"the trainer, in group {source.group}"
    if not isinstance(source, Chain):
        return str(source)
    return dict(source.links).get(version, source.path)


def _is_version(value: Any) -> bool:
    return type(value) is int and value >= 0


class WeightReader(Protocol):
    def newest(self) -> int | None:
        """Highest policy version that can be opened; None before the first."""

    def has(self, version: int) -> bool:
        """Whether this version can be opened."""

    def open(self, version: int, reader: str) -> Source:
        """Where a version comes from, checked against its manifests' sizes and held by leases until `close`.

        Raises DataError naming file, expected and found size.
        """

    def close(self, version: int, reader: str) -> None:
        """Give the leases back."""

    def renew(self, version: int, reader: str) -> None:
        """Say that this version is still being read, where it is leased: a lease lasts ten minutes."""

    def ask_for_whole(self) -> bool:
        """An engine could not follow the links. Whether the trainer will write a whole version, its newest, for this."""

    def give_up(self, version: int, source: Source) -> None:
        """No engine could load this version from what `open` gave: as it is now, it counts as one that cannot be opened.

        Raises DataError when nothing better will come.
        """
