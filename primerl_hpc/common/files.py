"""Atomic writes and tolerant reads of files that other processes read at any time, also on network filesystems.

A file is written under a temporary name, fsynced and renamed, so a reader sees all of it or none. A directory is
complete if its marker exists, which is written last. An append is a single ``write`` of one line by one writer.

Each metadata operation is a request to the server of a network filesystem. So a folder is created only if opening a
file in it fails, and files are read and written by file descriptor: Python's file objects ask for the status first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from isal import isal_zlib

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.safety.decoding import parse_json

MAX_JSON_BYTES = 1 << 29
"""Limit of one JSON file. The largest one, the orchestrator's state with a million tasks, has a tenth of this size."""
READ_BYTES = 1 << 17
"""Bytes of one read: Python allocates as many for the smallest file."""
MAX_LINE_BYTES = 1 << 26
"""Limit of one line of a JSON-lines file; longer lines are skipped."""
T = TypeVar("T")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def fsync_dir(path: Path) -> None:
    """Make a rename or create inside ``path`` durable. No-op on filesystems that cannot fsync a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_bytes(
    path: Path, data: bytes, *, mode: int = 0o644, is_durable: bool = True, alias: Path | None = None
) -> None:
    """Write ``data`` atomically: ``path`` is the old file or the complete new one.

    ``is_durable``: False if the old file may return after a crash of the node. ``alias``: a second name of the new
    file in the same folder, which exists when ``path`` does, except on filesystems without hard links. Raises OSError
    (no space, quota, permissions) and leaves the old file unchanged.
    """
    temporary = _temporary_name(path)
    try:
        _open_for(path, lambda: _write_new(temporary, data, mode))
        if alias is not None:
            _link_if_possible(temporary, alias)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if is_durable:
        fsync_dir(path.parent)


def _open_for(path: Path, call: Callable[[], T]) -> T:
    """Return the result of ``call``, which creates a file in the folder of ``path``; the folder if it is missing."""
    try:
        return call()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return call()


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Create the file. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def private_place(path: Path) -> Iterator[Path]:
    """Yield a path on the filesystem of ``path`` where a program can write the file, which is then renamed.

    It is in a new folder of mode 0700: in a folder that others can write, a temporary name that they can guess may be
    a link to a file of this user, which would be overwritten. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name[:80]}.", dir=path.parent))
    try:
        yield folder / path.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_text(path: Path, text: str, *, mode: int = 0o644, is_durable: bool = True) -> None:
    write_bytes(path, text.encode(), mode=mode, is_durable=is_durable)


def write_json(path: Path, value: Any, *, mode: int = 0o644, is_durable: bool = True) -> None:
    """Write deterministic JSON: equal values give equal bytes."""
    text = json.dumps(value, indent=1, sort_keys=False, ensure_ascii=False) + "\n"
    write_text(path, text, mode=mode, is_durable=is_durable)


def read_json(path: Path) -> Any:
    """Return the parsed content. Raises DataError for invalid or too large JSON, and FileNotFoundError."""
    try:
        return parse_json(read_bytes(path).decode())
    except ValueError as error:  # invalid JSON or UTF-8
        raise DataError(f"not valid JSON ({error})", location=str(path)) from error


def read_bytes(path: Path) -> bytes:
    """Return the content. Raises ValueError if it is larger than `MAX_JSON_BYTES`."""
    fd, chunks, size = os.open(path, os.O_RDONLY), [], 0
    try:
        while chunk := os.read(fd, READ_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_JSON_BYTES:
                raise ValueError(f"{os.fstat(fd).st_size} bytes; the limit is {MAX_JSON_BYTES}")
    finally:
        os.close(fd)
    return b"".join(chunks)


def read_json_or_none(path: Path) -> Any | None:
    """Same as `read_json`, but None for a missing or invalid file."""
    try:
        return read_json(path)
    except (FileNotFoundError, NotADirectoryError, DataError):
        return None


def listed_file(folder: Path, name: object) -> Path:
    """Return ``folder / name`` for a file name from a manifest, an index or a message.

    Raises DataError unless it is a single path component: ``../x`` or ``/x`` would read or write outside the folder.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name or not _fits(name):
        raise DataError(f"lists {str(name)[:80]!r}, which is not a plain file name", location=str(folder))
    return folder / name


def _fits(name: str) -> bool:
    """True if the name is at most 255 bytes of UTF-8; otherwise each system call would raise a different error."""
    try:
        return len(name.encode()) <= 255
    except UnicodeEncodeError:
        return False


def append_line(path: Path, line: str) -> None:
    """Append a line atomically on a local filesystem; on NFS a file must have only one writer.

    An incomplete last line of a killed writer is terminated first, so that only that line is lost.
    """
    fd = _open_for(path, lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644))
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, (("\n" if torn else "") + line.rstrip("\n") + "\n").encode())
    finally:
        os.close(fd)


def open_log(path: Path) -> int:
    """Return a file descriptor that appends to ``path``; its folder is created if necessary."""
    return _open_for(path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def append_json(path: Path, *rows: dict[str, Any]) -> None:
    """Append a line for each row, all of them with one ``write``."""
    lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    append_line(path, "\n".join(lines))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file, without incomplete lines. A missing file has no rows."""
    try:
        with path.open("rb") as file:
            for line in _lines(file):
                if (row := parse_row(line)) is not None:
                    yield row
    except FileNotFoundError:
        return


def read_user_rows(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON-lines file that a user wrote. A line ends at a line feed, with or without a carriage
    return; a byte order mark is skipped. Raises ValueError with file and line for one that cannot be read.
    """
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not JSON ({error})") from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines of at most `MAX_LINE_BYTES`; skip longer ones."""
    is_cut = False
    while line := file.readline(MAX_LINE_BYTES):
        was_cut, is_cut = is_cut, len(line) == MAX_LINE_BYTES and not line.endswith(b"\n")
        if not (was_cut or is_cut):
            yield line


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse one line of a JSON-lines file; None if it is not a complete JSON object."""
    try:
        row = parse_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_last_jsonl(path: Path, count: int, *, block_bytes: int = 1 << 16) -> list[dict[str, Any]]:
    """Return the last ``count`` complete rows of a JSON-lines file, oldest first, reading backwards from its end.

    Rows before a line longer than `MAX_LINE_BYTES` are ignored.
    """
    data = b""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END)
            while start > 0 and data.count(b"\n") <= count:
                first = data.find(b"\n")
                if (first if first >= 0 else len(data)) > MAX_LINE_BYTES:
                    break
                # doubling the block avoids quadratic copies of a long line
                size = min(max(block_bytes, len(data)), start)
                start = file.seek(start - size)
                data = file.read(size) + data
    except FileNotFoundError:
        return []
    lines = data.split(b"\n")[0 if start == 0 else 1 :]
    rows = [row for line in lines[-count - 1 :] if (row := parse_row(line)) is not None]
    return rows[-count:]


def create_exclusive(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """Create a file, or return False if it exists. The only primitive for mutual exclusion.

    The file appears with its content; on filesystems without hard links it is empty for a moment.
    """
    temporary = _temporary_name(path)
    try:
        _open_for(path, lambda: _write_new(temporary, text.encode(), mode))
        return _link(temporary, path)
    except OSError as error:
        if path.exists():  # e.g. the disk is full, but nothing has to be written
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


def _link_if_possible(existing: Path, path: Path) -> None:
    """Link, unless ``path`` exists or the filesystem has no hard links."""
    try:
        os.link(existing, path)
    except OSError as error:
        if error.errno not in (*_NO_LINKS, errno.EEXIST, errno.EMLINK, errno.ENAMETOOLONG):
            raise


def _link(existing: Path, path: Path) -> bool:
    """Link, or return False if ``path`` exists. NFS may report EEXIST for a link that it just created: open(2),
    O_EXCL."""
    try:
        os.link(existing, path)
    except FileExistsError:
        return existing.stat().st_nlink == 2
    return True


def is_there(path: Path) -> bool:
    """True if ``path`` exists on the server of a network filesystem: listing the folder refreshes a cached ENOENT."""
    if path.exists():
        return True
    try:
        os.listdir(path.parent)
    except OSError:
        return False
    return path.exists()


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, none if it does not exist.

    For a file that is usually missing, a listing takes half of the operations of `is_there`, and is as current.
    """
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def crc32_of_file(path: Path, chunk_bytes: int = 1 << 22) -> int:
    """Return the CRC-32 of zlib, computed with ISA-L, which is several times faster."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(chunk_bytes):
            value = isal_zlib.crc32(chunk, value)
    return value
