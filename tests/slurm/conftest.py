"""One virtual cluster for all tests of a session; each test leaves all its nodes idle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.virtual import NODES, TOOL, Cluster, SlurmToy
from tests.support import ROOT


@pytest.fixture(scope="session")
def disk_of_all_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """64 MiB that every node sees: it must be mounted before the cluster is up."""
    if os.geteuid() != 0:
        pytest.skip("a virtual SLURM cluster needs root")
    folder = tmp_path_factory.mktemp("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(disk_of_all_nodes: Path) -> Iterator[Path]:
    yield disk_of_all_nodes
    for entry in disk_of_all_nodes.iterdir():
        shutil.rmtree(entry)


@pytest.fixture(scope="session")
def virtual_cluster(tmp_path_factory: pytest.TempPathFactory, disk_of_all_nodes: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    size = ["--nodes", str(NODES), "--gpus", "8", "--node-timeout", "6", "--requeue-delay", "8"]
    image = os.environ.get("VIRTUAL_CLUSTER_IMAGE")  # another SLURM: a root file system made by mmdebstrap
    venv = sys.prefix if sys.prefix != sys.base_prefix else ""  # which need not lie in the checkout
    other = ["--image", image, "--bind", f"{ROOT} {venv} {disk_of_all_nodes}"] if image else []
    up = subprocess.run(
        [str(TOOL), "--dir", str(made.folder), "up", *size, *other],
        capture_output=True,
        text=True,
        check=False,
    )
    if up.returncode and not image and shutil.which("slurmctld") is None:
        pytest.skip(f"SLURM cannot be installed here: {up.stderr.strip()}")
    assert up.returncode == 0, up.stdout + up.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{made.folder / 'bin'}:{os.environ['PATH']}")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield made
    made.tool("down", "--purge")


@pytest.fixture
def cluster(virtual_cluster: Cluster) -> Cluster:
    virtual_cluster.wait_until_idle()
    return virtual_cluster


@pytest.fixture
def new_toy(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., SlurmToy]]:
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
