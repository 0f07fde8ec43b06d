"""One virtual cluster for all tests of a session; each test leaves all its nodes idle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_user import ClusterUser
from tests.support.helpers import ROOT, captured
from tests.support.virtual_slurm import (
    NODES,
    TOOL,
    USERS,
    WITH_USERS,
    Acting,
    Cluster,
    SlurmToy,
    check_that_nothing_ran_as_root,
)


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    """A folder that all users can reach: only root may enter those of pytest."""
    with tempfile.TemporaryDirectory(prefix="primerl-slurm-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def tmp_path(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=shared_folder))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def disk_of_all_nodes(shared_folder: Path) -> Iterator[Path]:
    """64 MiB that every node sees: it must be mounted before the cluster is up."""
    if os.geteuid() != 0:
        pytest.skip("a virtual SLURM cluster needs root")
    folder = shared_folder / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(disk_of_all_nodes: Path, acting_user: ClusterUser) -> Iterator[Path]:
    acting_user.own(disk_of_all_nodes)
    yield disk_of_all_nodes
    for entry in disk_of_all_nodes.iterdir():
        shutil.rmtree(entry)


@pytest.fixture(scope="session")
def virtual_cluster(shared_folder: Path, disk_of_all_nodes: Path) -> Iterator[Cluster]:
    folder = shared_folder / "cluster"
    made = Cluster(folder, ClusterUser(USERS[0], folder))
    size = ["--nodes", str(NODES), "--gpus", "8", "--node-timeout", "6", "--requeue-delay", "8"]
    image = os.environ.get("VIRTUAL_CLUSTER_IMAGE")  # another SLURM: a root file system made by mmdebstrap
    venv = sys.prefix if sys.prefix != sys.base_prefix else ""  # which need not lie in the checkout
    other = ["--image", image, "--bind", f"{ROOT} {venv} {disk_of_all_nodes}"] if image else []
    up = captured([str(TOOL), "--dir", str(made.folder), "up", *size, *WITH_USERS, *other])
    if up.returncode and not image and shutil.which("slurmctld") is None:
        pytest.skip(f"SLURM cannot be installed here: {up.stderr.strip()}")
    assert up.returncode == 0, up.stdout + up.stderr
    yield made
    made.tool("down", "--purge")


@pytest.fixture(autouse=True)
def commands_of_cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the cluster are found first, unless a module has another one.

    In its tests only: others of this process must not ask it about jobs.
    """
    found = shutil.which("sinfo")
    has_other = found is not None and (Path(found).parents[1] / "holder.pid").exists()
    if "virtual_cluster" in request.fixturenames and not has_other:
        folder = request.getfixturevalue("virtual_cluster").folder
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def cluster(virtual_cluster: Cluster, commands_of_cluster: None, tmp_path: Path) -> Iterator[Cluster]:
    """The idle cluster. Fails if SLURM has had a run of the test as a job of root."""
    virtual_cluster.wait_until_idle()
    yield virtual_cluster
    scripts = virtual_cluster.admin("squeue", "--noheader", "--states=all", "--user=root", "--format=%o")
    assert str(tmp_path) not in scripts, "the test submitted a run as root: use the fixture acting_user"


@pytest.fixture(autouse=True)
def nothing_runs_as_root() -> Iterator[None]:
    """Fails if the test has run a command of the toolkit as root, as no user of a cluster can."""
    Acting.done_by_root.clear()
    yield
    check_that_nothing_ran_as_root()


@pytest.fixture
def acting_user(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterUser:
    """The ordinary user who runs the toolkit in this test; the test itself is root, the administrator."""
    assert cluster.user is not None
    Acting.let(cluster.user, tmp_path, monkeypatch)
    return cluster.user


@pytest.fixture
def new_toy(cluster: Cluster, acting_user: ClusterUser, tmp_path: Path) -> Iterator[Callable[..., SlurmToy]]:
    made: list[SlurmToy] = []

    def make(name: str = "run", root: Path | None = None, **scheduler: Any) -> SlurmToy:
        made.append(SlurmToy(cluster, root or tmp_path / name, **scheduler))
        return made[-1]

    yield make
    for toy in made:
        toy.end()


@pytest.fixture
def toy(new_toy: Callable[..., SlurmToy]) -> SlurmToy:
    return new_toy()


@pytest.fixture(scope="module")
def users_folder(shared_folder: Path) -> Iterator[Path]:
    """A folder for a cluster of its own and its users."""
    folder = Path(tempfile.mkdtemp(prefix="users-", dir=shared_folder))
    folder.chmod(0o755)
    yield folder
