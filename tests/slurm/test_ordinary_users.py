"""Runs of ordinary users: nothing of the toolkit runs as root, and a second user shares the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.access.keys import run_keys
from tests.support.cluster_user import ClusterUser
from tests.support.virtual_slurm import SERVE, TRAIN, Cluster, SlurmToy, cluster_of_users, run_cli, wait_for

SHARED = {
    "exclusive": False,
    "memory": "4G",
    "extra": ("--gres=gpu:2", "--nodelist=n1,n2", "--cpus-per-task=4"),
}


@pytest.fixture
def users(users_folder: Path, virtual_cluster: Cluster) -> Iterator[list[ClusterUser]]:
    """Two users of a second cluster of two nodes, each with a folder for runs. No job may belong to root."""
    with cluster_of_users(users_folder) as (_, found):
        yield found


def test_runs_of_two_users_on_the_same_nodes_are_private_and_complete(
    users_folder: Path, users: list[ClusterUser], monkeypatch: pytest.MonkeyPatch
) -> None:
    toys = []
    for user in users:
        user.act_here(users_folder / user.name, monkeypatch)
        toy = SlurmToy(Cluster(user.folder, user), users_folder / user.name / "run", **SHARED)
        toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
        toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(0, 1))
        toy.submit()
        toys.append(toy)
    for toy in toys:
        toy.wait_until_ready("inference-0", "trainer-0")
    alice, bob = users
    mine, other = toys
    assert mine.endpoint("inference-0")["host"] == other.endpoint("inference-0")["host"] == "n1"
    for path in (mine.run.root, *mine.run.root.rglob("*")):
        assert path.lstat().st_uid == alice.uid, path
    key = next(path for path in run_keys(mine.run).folder.iterdir() if path.is_file())
    with pytest.raises(PermissionError):
        bob.run(key.read_bytes)
    for words in (("cancel",), ("status",)):
        refused = run_cli(*words, str(mine.run.root), user=bob)
        assert refused.returncode != 0 and refused.stderr.count("\n") == 1, refused.stderr
    stopped = run_cli("cancel", str(other.run.root), "--wait", user=bob)
    assert stopped.returncode == 0 and other.run.latest_checkpoint() == 2, stopped.stderr
    assert mine.snapshot().state == RunState.RUNNING
    (mine.run.root / "enough").touch()
    wait_for(lambda: mine.snapshot().state == RunState.DONE, "the end of the other run", tell=mine.words)
    for toy in toys:
        wait_for(lambda toy=toy: not toy.cluster.processes_of(toy.run), "the end of every process")
