"""Files that other processes may read at any moment, on filesystems that lag.

A file is written beside its name, fsynced and renamed, so a reader sees all of it or none. A directory is complete
when its marker exists, and the marker is written last. Appends are one ``write`` of one line by one writer.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from isal import isal_zlib

from primerl_hpc.common.errors import DataError, TimeoutWaitingError

T = TypeVar("T")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def fsync_dir(path: Path) -> None:
    """Make a rename or create inside ``path`` durable. Filesystems that cannot fsync a directory are forgiven."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write ``data`` so that ``path`` is the old file or the new one, never a part.

    Raises OSError (no space, quota, permissions) with the old file untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _name_beside(path)
    try:
        _write_new(temporary, data, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def _name_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Raises FileExistsError when it is there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    write_bytes(path, text.encode(), mode=mode)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Deterministic JSON: same value, same bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False, ensure_ascii=False) + "\n", mode=mode)


def read_json(path: Path) -> Any:
    """Parsed content, or DataError naming the file when it is not JSON. FileNotFoundError passes through."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # bad JSON, or bytes that are no UTF-8
        raise DataError(f"not valid JSON ({error})", place=str(path)) from error


def read_json_or_none(path: Path) -> Any | None:
    """For files that come and go while we look."""
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError, DataError):
        return None


def append_line(path: Path, line: str) -> None:
    """One atomic append on a local filesystem; on NFS one writer per file keeps it whole.

    A half-written last line (its writer was killed) is closed first, so that it spoils itself only.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, (("\n" if torn else "") + line.rstrip("\n") + "\n").encode())
    finally:
        os.close(fd)


def append_json(path: Path, value: dict[str, Any]) -> None:
    append_line(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file that is being written: a torn line is left out; a missing file has no rows."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
    except FileNotFoundError:
        return


def read_last_jsonl(path: Path, count: int, *, block_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """The last ``count`` whole rows of a JSON-lines file, oldest first, read from its end backwards."""
    data = b""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END)
            while start > 0 and data.count(b"\n") <= count:
                size = min(block_bytes, start)
                start = file.seek(start - size)
                data = file.read(size) + data
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[0 if start == 0 else 1 :]
    rows = []
    for line in lines[-count - 1 :]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows[-count:]


def create_exclusive(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """True when this call made the file; False when it was there. The one primitive for mutual exclusion.

    The file appears whole, but where the filesystem has no hard links: there it is empty for a moment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _name_beside(path)
    try:
        _write_new(temporary, text.encode(), mode)
        return _link(temporary, path)
    except OSError as error:
        if path.exists():  # the disk is full, and nothing needs to be written
            return False
        if error.errno not in _NO_LINKS:
            raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    try:
        _write_new(path, text.encode(), mode)
    except FileExistsError:
        return False
    return True


def _link(existing: Path, path: Path) -> bool:
    """False when ``path`` is there. NFS may say so of a link that it has just made: open(2), on O_EXCL."""
    try:
        os.link(existing, path)
    except FileExistsError:
        return existing.stat().st_nlink == 2
    return True


def is_there(path: Path) -> bool:
    """Existence as a network filesystem's server knows it: listing the folder refreshes a cached 'no such file'."""
    if path.exists():
        return True
    try:
        os.listdir(path.parent)
    except OSError:
        return False
    return path.exists()


def wait_until(
    look: Callable[[], T | None], *, what: str, timeout_s: float, poll_s: float = 0.1, poll_max_s: float = 1.0
) -> T:
    """The first result of ``look`` that is not None or False, polled with growing pauses.

    Raises TimeoutWaitingError naming ``what`` after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if (found := look()) is not None and found is not False:
            return found
        if time.monotonic() >= deadline:
            raise TimeoutWaitingError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.3, poll_max_s)


def crc32_of_file(path: Path, chunk_bytes: int = 1 << 22) -> int:
    """zlib's CRC-32, by ISA-L: several times as fast."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            value = isal_zlib.crc32(chunk, value)
    return value
