"""Write a bundle: an archive of a Python environment, and its manifest.

    made = build(inspect_environment(sys.executable), Path("/shared/me/env.tar.zst"), Format.TAR_ZST)
    try_bundle(Path("/shared/me/env.tar.zst"))           # unpacks it as a node does, and starts its Python

The archive is written under a temporary name and renamed when it is complete, so that no job reads a part of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.files import private_place, sha256_of, write_json
from primerl_hpc.offline.bundle.environment import BundleEntry, PythonEnvironment, entries, needed_glibc
from primerl_hpc.offline.bundle.formats import WRITERS, Format
from primerl_hpc.offline.bundle.manifest import Manifest, manifest_path, planned, read_manifest
from primerl_hpc.plan.plan import BUNDLE_MANIFEST
from primerl_hpc.render.bundle import render_unpack

TRY_S = 3600.0
_PRIVATE = 0o755


def build(environment: PythonEnvironment, target: Path, kind: Format) -> Manifest:
    """Write ``target`` and its manifest. Raises ConfigError if a file cannot be read or the archive not be written."""
    inside = {"python": environment.python, "arch": environment.arch, "packages": environment.packages}
    with private_place(target) as temporary:
        with _writer(kind, temporary) as stream:
            num_files, num_bytes = _write_tar(environment, stream, inside)
        manifest = Manifest(
            format=kind,
            sha256=sha256_of(temporary),
            size_bytes=temporary.stat().st_size,
            unpacked_bytes=num_bytes,
            num_files=num_files,
            python=environment.python,
            arch=environment.arch,
            glibc=needed_glibc(environment),
            base=str(environment.base) if environment.uses_os_python else None,
            source=str(environment.prefix),
            packages=environment.packages,
            outside=environment.outside,
            created=round(time.time(), 3),
        )
        manifest_path(target).unlink(missing_ok=True)
        temporary.replace(target)
    write_json(manifest_path(target), manifest.model_dump(mode="json"))
    return manifest


@contextlib.contextmanager
def _writer(kind: Format, target: Path) -> Iterator[IO[bytes]]:
    """Yield the input of the program that writes the archive. Raises ConfigError if it fails."""
    command, output = [*WRITERS[kind]], subprocess.DEVNULL
    with contextlib.ExitStack() as stack:
        if kind == Format.TAR_GZ:
            output = stack.enter_context(target.open("wb"))
        else:
            command.append(str(target))
        log = stack.enter_context(tempfile.TemporaryFile())
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=log)
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # its exit code and message say why
                yield child.stdin
                child.stdin.close()
        except BaseException:
            child.kill()
            raise
        finally:
            code = child.wait()
        if code != 0:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
            raise ConfigError(
                f"{command[0]} cannot write the bundle: {lines[-1]}",
                location=str(target.parent.parent),
                hint="check the free space and the quota of this folder",
            )


def _write_tar(
    environment: PythonEnvironment, stream: IO[bytes], inside: dict[str, object]
) -> tuple[int, int]:
    """Write all entries, then the manifest by which a complete folder is known; return numbers of files and bytes."""
    seen: set[str] = set()
    num_files = num_bytes = 0
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries(environment):
            if entry.name in seen:
                continue
            seen.add(entry.name)
            info = _info(archive, entry)
            if info.isreg():
                num_files, num_bytes = num_files + 1, num_bytes + info.size
                _add_file(archive, info, entry)
            else:
                archive.addfile(info)
        text = json.dumps(inside, indent=1).encode()
        last = tarfile.TarInfo(BUNDLE_MANIFEST)
        last.size, last.mtime, last.mode = len(text), int(time.time()), 0o644
        archive.addfile(last, io.BytesIO(text))
    return num_files + 1, num_bytes + len(text)


def _info(archive: tarfile.TarFile, entry: BundleEntry) -> tarfile.TarInfo:
    """Return the header of an entry, without owner and without rights of other users to write."""
    if entry.link is not None:
        info = tarfile.TarInfo(entry.name)
        info.type, info.linkname, info.mtime = tarfile.SYMTYPE, entry.link, int(time.time())
        return info
    try:
        found = entry.source.stat()
    except OSError as error:
        raise _unreadable(entry, error) from error
    info = tarfile.TarInfo(entry.name)
    info.mtime, info.mode = int(found.st_mtime), found.st_mode & _PRIVATE
    if entry.source.is_dir():
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size = found.st_size if entry.content is None else len(entry.content)
    return info


def _add_file(archive: tarfile.TarFile, info: tarfile.TarInfo, entry: BundleEntry) -> None:
    if entry.content is not None:
        archive.addfile(info, io.BytesIO(entry.content))
        return
    try:
        with entry.source.open("rb") as file:
            archive.addfile(info, file)
    except BrokenPipeError:
        raise
    except (OSError, tarfile.TarError) as error:
        raise _unreadable(entry, error) from error


def _unreadable(entry: BundleEntry, error: Exception) -> ConfigError:
    return ConfigError(
        f"a file of the environment cannot be read: {getattr(error, 'strerror', None) or error}",
        location=str(entry.source),
        hint="bundle an environment that is complete and not being changed",
    )


def try_bundle(target: Path, folder: Path | None = None) -> float:
    """Unpack a bundle as a node does, start its Python, and delete the copy. Return the seconds that this took.

    ``folder``: parent of the copy; None: the temporary folder. Raises DataError if it fails.
    """
    manifest = read_manifest(target)
    work = Path(tempfile.mkdtemp(prefix="primerl-bundle-", dir=folder))
    script = render_unpack(planned(manifest, target), owner="a test", scratch=None)
    start = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-s", str(work / "env")],
            input=script,
            capture_output=True,
            text=True,
            timeout=TRY_S,
            check=False,
        )
        if done.returncode != 0:
            lines = [line.removeprefix("error: ") for line in done.stderr.strip().splitlines()]
            raise DataError(
                f"the bundle does not work: {lines[-1] if lines else 'no message'}", location=str(target)
            )
        return time.monotonic() - start
    finally:
        shutil.rmtree(work, ignore_errors=True)
