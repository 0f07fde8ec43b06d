"""Write a run directory into one tar file whose last member lists the SHA-256 of every other member.

    archive_run(run, Path("my-run.tar"), without=("rollouts",))
    damaged = verify(Path("my-run.tar"))                       # names whose content differs; empty: intact

Secret keys (an archive may be shared), locks and the reserved disk space (both useless in it) are left out.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, cast

from primerl_hpc.common.errors import DataError, OccupiedError
from primerl_hpc.common.files import private_place, sha256_of
from primerl_hpc.launch.storage.usage import Amount, check_is_mine
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.run.access.elsewhere import files_of_run
from primerl_hpc.run.rundir import RunDir

CHECKSUMS = "SHA256SUMS"
CHUNK_BYTES = 1 << 22
MAX_CHECKSUM_BYTES = 1 << 29
LEFT_OUT = ("control/keys", "control/reserve", "control/supervisor.lock")


class _HashedFile:
    """A file whose SHA-256 is computed while it is read."""

    def __init__(self, path: Path) -> None:
        self.file, self.digest = path.open("rb"), hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.digest.update(data)
        return data


def archive_run(run: RunDir, to: Path, *, without: Collection[str] = ()) -> Amount:
    """Write ``to`` under a temporary name, fsync and rename it. Returns the size of its members.

    Other users can read it only if they can read the run directory. ``without``: names of folders to leave out. Raises
    OccupiedError for another user's run, for one that is running or queued, and if ``to`` exists or is in the run
    directory.
    """
    check_is_mine(run)
    check_not_running(run)
    if os.path.lexists(to):
        raise OccupiedError("the archive exists already", location=str(to), hint="choose another --to")
    if to.resolve().is_relative_to(run.root.resolve()):
        raise OccupiedError(
            "the archive would be inside the directory that it packs",
            location=str(to),
            hint="choose another --to",
        )
    amount, sums = Amount(), list[str]()
    with private_place(to) as temporary:
        with temporary.open("xb") as target:
            os.chmod(target.fileno(), 0o600 | stat.S_IMODE(run.root.stat().st_mode) & 0o044)
            with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
                tar.addfile(tar.gettarinfo(run.root, run.root.name))  # its mode protects what is extracted
                for path in files_of_run(run):
                    name = path.relative_to(run.root).as_posix()
                    if not _is_left_out(name, without):
                        amount.add(_add(tar, path, f"{run.root.name}/{name}", sums))
                text = "".join(sums).encode()
                member = tarfile.TarInfo(f"{run.root.name}/{CHECKSUMS}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
            target.flush()
            os.fsync(target.fileno())
        temporary.rename(to)
    return amount


def _add(tar: tarfile.TarFile, path: Path, name: str, sums: list[str]) -> int:
    """Add a member and its checksum; return the bytes of its content, 0 for a link."""
    member = tar.gettarinfo(path, name)
    if not member.isreg():
        tar.addfile(member)  # a link: versions of the weights share the tokenizer's files
        if member.islnk():
            sums.append(f"{sha256_of(path)}  {name}\n")
        return 0
    source = _HashedFile(path)
    with source.file:
        tar.addfile(member, cast(IO[bytes], source))
    sums.append(f"{source.digest.hexdigest()}  {name}\n")
    return member.size


def _is_left_out(name: str, without: Collection[str]) -> bool:
    parts = name.split("/")
    return any(name == path or name.startswith(f"{path}/") for path in LEFT_OUT) or any(
        part in without for part in parts[:2]
    )


def verify(path: Path) -> list[str]:
    """Return the names of members that are missing or whose content differs from the list of checksums.

    Raises DataError if the file is not a complete archive of `archive_run`.
    """
    found: dict[str, str] = {}
    expected: dict[str, str] | None = None
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.issparse():  # its size may be any number
                    raise ValueError(f"{member.name!r:.80} is a sparse file")
                source = tar.extractfile(member) if member.isreg() or member.islnk() else None
                if source is None:
                    continue
                if member.name.split("/")[1:] == [CHECKSUMS]:
                    if member.size > MAX_CHECKSUM_BYTES:
                        raise ValueError(f"{CHECKSUMS} has {member.size} bytes")
                    lines = filter(
                        None, source.read().decode().split("\n")
                    )  # names may contain other separators
                    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
                    continue
                digest = hashlib.sha256()
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                found[member.name] = digest.hexdigest()
    except (tarfile.TarError, ValueError, KeyError, RecursionError, OverflowError) as error:
        raise DataError(f"not a readable archive: {error}", location=str(path)) from error
    if expected is None:
        raise DataError(
            f"the archive has no {CHECKSUMS}: it is incomplete, or not an archive of a run",
            location=str(path),
        )
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
