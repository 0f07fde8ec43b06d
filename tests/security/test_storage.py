"""`prune`, `archive`, `bundle` and images: no planted link is followed, also in folders that other users can write."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.cluster.software_schema import Container
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import private_place, write_text
from primerl_hpc.launch.storage.archive import CHECKSUMS, archive_run, verify
from primerl_hpc.launch.storage.prune import PrunePolicy, choose, delete
from primerl_hpc.offline.bundle.build import build
from primerl_hpc.offline.bundle.environment import PythonEnvironment
from primerl_hpc.offline.bundle.formats import Format
from primerl_hpc.offline.prefetch.images import pull_image
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from tests.support.stranger import as_stranger
from tests.unit.launch.storage.test_storage import run  # noqa: F401 (a fixture)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A project folder in which every user may create, replace and delete files."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)  # pytest's own
    made = tmp_path / "shared"
    made.mkdir()
    made.chmod(0o777)
    return made


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file of the user, which a planted link names."""
    write_text(tmp_path / "home" / "precious", "mine")
    return tmp_path / "home" / "precious"


# -- prune -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["weights/step_1", "logs/attempt_1", "superseded", "rollouts/step_6"])
def test_prune_does_not_follow_a_link_out_of_the_run(
    run: RunDir,  # noqa: F811
    tmp_path: Path,
    place: str,
) -> None:
    elsewhere, path = tmp_path / "elsewhere", run.root / place
    for name in (STABLE, "model.safetensors"):
        write_text(elsewhere / name, "x" * 5000)
    if path.exists():
        path.rename(tmp_path / "before")
    path.symlink_to(elsewhere)
    chosen = choose(run, PrunePolicy(superseded=True, old_logs=True))
    assert path in chosen.paths and chosen.size_bytes < 5000
    delete(chosen)
    assert not path.is_symlink()
    assert {entry.name for entry in elsewhere.iterdir()} == {STABLE, "model.safetensors"}


def test_a_running_run_does_not_follow_a_link_out_of_its_folder(run: RunDir, tmp_path: Path) -> None:  # noqa: F811
    """Deletion by ``weights.keep_last`` removed the marker of the folder that the link names."""
    write_text(tmp_path / "elsewhere" / STABLE, "")
    path = run.weights_step(7)
    path.symlink_to(tmp_path / "elsewhere")
    run.delete_step(path, STABLE)
    assert not path.is_symlink() and (tmp_path / "elsewhere" / STABLE).exists()


# -- temporary names in a shared folder ------------------------------------------------------------


def plant(shared: Path, precious: Path, *names: str) -> None:
    """Create links with all names that the process could use, as another user."""
    as_stranger(lambda: [os.symlink(precious, shared / name) for name in names])


def test_an_archive_in_a_shared_folder_overwrites_nothing_and_is_not_readable(
    run: RunDir,  # noqa: F811
    shared: Path,
    precious: Path,
) -> None:
    plant(shared, precious, f".run.tar.{os.getpid()}.tmp")
    run.root.chmod(0o700)
    path = shared / "run.tar"
    archive_run(run, path)
    assert precious.read_text() == "mine" and verify(path) == []
    with pytest.raises(PermissionError):
        as_stranger(path.read_bytes)
    with tarfile.open(path) as tar:
        first = tar.getmembers()[0]
        assert (first.name, first.mode, first.isdir()) == ("run", 0o700, True)
    run.root.chmod(0o755)
    archive_run(run, shared / "open.tar")
    assert as_stranger((shared / "open.tar").read_bytes)


@pytest.mark.parametrize("kind", [Format.TAR_GZ, Format.TAR_ZST])
def test_a_bundle_in_a_shared_folder_overwrites_nothing(
    tmp_path: Path, shared: Path, precious: Path, kind: Format
) -> None:
    plant(shared, precious, f".env.{kind}.{os.getpid()}")
    write_text(tmp_path / "venv" / "bin" / "python", "")
    prefix = tmp_path / "venv"
    environment = PythonEnvironment(
        prefix=prefix,
        base=prefix,
        executable=prefix / "bin" / "python",
        library="lib/python3.11",
        python="3.11.7",
        arch="x86_64",
        packages={},
        outside={},
    )
    build(environment, shared / f"env.{kind}", kind)
    assert precious.read_text() == "mine"


def test_an_image_in_a_shared_folder_overwrites_nothing(tmp_path: Path, shared: Path, precious: Path) -> None:
    program = tmp_path / "pull"
    program.write_text('#!/bin/bash\necho image > "$2"\n')
    program.chmod(0o755)
    container = Container(kind="apptainer", image="docker://org/image:1", command=str(program))
    (shared / "images").mkdir(mode=0o777)
    (shared / "images").chmod(0o777)
    name = f".docker-org-image-1.{os.getpid()}.sif"
    plant(shared / "images", precious, name)
    pull_image(container, str(shared))
    assert precious.read_text() == "mine"
    assert (shared / "images" / "docker-org-image-1.sif").read_text() == "image\n"


def test_a_private_place_is_private_and_leaves_nothing(shared: Path) -> None:
    with private_place(shared / "x") as place:
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        place.write_text("x")
    assert not list(shared.iterdir())


# -- archives of other users -----------------------------------------------------------------------


def archive_of(path: Path, fill: Callable[[tarfile.TarFile], None]) -> Path:
    with tarfile.open(path, "w") as tar:
        fill(tar)
    return path


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in fields.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def test_a_hostile_archive_is_refused(tmp_path: Path) -> None:
    def dangling(tar: tarfile.TarFile) -> None:
        add(tar, "run/a", type=tarfile.LNKTYPE, linkname="run/missing")

    def itself(tar: tarfile.TarFile) -> None:
        add(tar, "run/a", type=tarfile.LNKTYPE, linkname="run/a")

    def endless(tar: tarfile.TarFile) -> None:
        headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 60), "GNU.sparse.name": "run/a"}
        add(tar, "run/a", pax_headers=headers)

    for fill in (dangling, itself, endless):
        with pytest.raises(DataError, match="not a readable archive"):
            verify(archive_of(tmp_path / f"{fill.__name__}.tar", fill))


def test_the_names_of_a_hostile_archive_stay_on_one_line(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from primerl_hpc.cli.main import cli

    def fill(tar: tarfile.TarFile) -> None:
        add(tar, "run/a\nother.tar is intact\x1b[8m", b"x")
        add(tar, f"run/{CHECKSUMS}", b"")

    path = archive_of(tmp_path / "x.tar", fill)
    shown = CliRunner().invoke(cli, ["archive", "--verify", str(path)], standalone_mode=False).output
    assert shown == "damaged: run/a other.tar is intact\\x1b[8m\n"
