"""Policy versions on their way from the trainer to the engines, and the interface of a transport.

``weights/step_N/`` is a model folder in Hugging Face format (safetensors shards, index, config, tokenizer) plus
``manifest.json`` (size and CRC-32 of every file) and ``STABLE``, which is written last. With transport ``delta`` only
some versions are such folders, and ``deltas/step_N/`` holds the differences between versions N - 1 and N. With
transport ``broadcast`` the trainer offers a version (`BroadcastOffer`) and sends it from memory.

How to add a transport:

1. Recipe: add its name to the literal ``weights.transport`` in `primerl_hpc.recipe.schema.training`.
2. Trainer: implement `primerl_hpc.trainer.weights.publisher.Publisher` in a module of that folder and return it from
   ``make_publisher`` there.
3. Orchestrator: implement `WeightReader` in a module of this folder and add it to ``make_reader`` in
   `primerl_hpc.orchestrator.setup`. Subclass `filesystem.FilesystemWeightReader` to serve the full versions in
   ``weights/`` too.
4. Engines: if `WeightReader.open` returns a form that `Source` does not have yet, add the form to `Source`, `to_body`,
   `from_body` and `describe` in this module, and load it in `primerl_hpc.inference.worker.extension`. If engines do not
   load it independently of each other, also add a `Delivery` (and its `is_repeatable` case) to
   `primerl_hpc.orchestrator.engines.delivery`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard


@dataclass(frozen=True)
class DeltaChain:
    """A version given as the full folder of an earlier version and the links that follow it.

    An engine applies the links that are newer than its version. It reads the folder only if it has no version yet.
    """

    path: str
    base: int
    """Version that ``path`` holds."""
    links: tuple[tuple[int, str], ...] = ()
    """(version, folder) of each link, ascending without a gap. The first ones may be older than ``base``."""


@dataclass(frozen=True)
class BroadcastOffer:
    """A version that the trainer sends to the members of a group that meets at its store."""

    version: int
    host: str
    port: int
    store_id: str
    """Identifies the trainer's store: every incarnation of the trainer starts a new one."""


@dataclass(frozen=True)
class RankAssignment:
    """Consecutive ranks of one engine's workers in a group that meets at the trainer's store."""

    host: str
    port: int
    group: str
    first_rank: int
    size: int
    """Number of members of the group, the trainer included."""


Source = Path | str | DeltaChain | BroadcastOffer
"""Where a version is read from: a folder, a model id in the Hugging Face cache, a chain, or the trainer's memory."""


def to_body(source: Path | str | DeltaChain | RankAssignment, version: int) -> dict[str, Any]:
    """Return the body of ``POST /update_weights``."""
    if isinstance(source, DeltaChain):
        links = [list(link) for link in source.links]
        return {"path": source.path, "version": version, "base": source.base, "links": links}
    if isinstance(source, RankAssignment):
        return {"path": "", "version": version, "seats": vars(source)}
    return {"path": str(source), "version": version}


def from_body(body: dict[str, Any]) -> tuple[str | DeltaChain | RankAssignment, int]:
    """Parse the body of ``POST /update_weights``: the inverse of `to_body`. Raises ValueError for any other body."""
    path, version = body.get("path"), body.get("version")
    if not isinstance(path, str) or not _is_version(version):
        raise ValueError('expected {"path": "<folder>", "version": <policy version>}')
    if "seats" in body:
        try:
            return RankAssignment(**body["seats"]), version
        except TypeError as error:
            raise ValueError(f"seats is not a rank assignment: {error}") from error
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
    return DeltaChain(path, base, tuple((version, folder) for version, folder in links)), version


def describe(source: str | DeltaChain | RankAssignment, version: int) -> str:
    """Return a short description of the source for log lines."""
    if isinstance(source, RankAssignment):
        return f"the trainer, in group {source.group}"
    if not isinstance(source, DeltaChain):
        return str(source)
    return dict(source.links).get(version, source.path)


def _is_version(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


class WeightReader(Protocol):
    """The orchestrator's side of a transport: which versions exist and where engines read them."""

    def newest(self) -> int | None:
        """Return the highest policy version that can be opened; None before the first."""

    def has(self, version: int) -> bool:
        """True if this version can be opened."""
        ...

    def open(self, version: int, reader: str) -> Source:
        """Return the source of a version, checked against the sizes in its manifests and leased until `close`.

        Raises DataError naming the file, its expected size and its actual size.
        """
        ...

    def close(self, version: int, reader: str) -> None:
        """Release the leases that `open` took."""

    def renew(self, version: int, reader: str) -> None:
        """Renew the leases that `open` took. A lease expires after ten minutes."""

    def request_full(self) -> bool:
        """Request that the trainer write its newest version as a full folder.

        Used when an engine cannot apply the links, or missed a broadcast.
        Returns False if this transport never writes anything but full folders.
        """
        ...

    def give_up(self, version: int, source: Source) -> None:
        """Exclude this version as it is now, because no engine could load it from what `open` returned.

        Raises DataError if the transport cannot provide the version in another form.
        """
