"""A node dies, and SLURM notices it minutes later: after SlurmdTimeout, by default 300 s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from tests.support.helpers import TOY_RECIPE, wait_for
from tests.support.virtual_slurm import SERVE, TRAIN, Cluster, SlurmToy, cluster_of_users

# rank 0 fails when the node of its peer has died, as collective operations over InfiniBand do
PEERS = TRAIN.replace(
    "while True:\n",
    """while True:
    dead = run.root / "dead"
    if os.environ["SLURM_NODEID"] == "0" and dead.exists() and dead.read_text() == os.environ["SLURM_STEP_NODELIST"]:
        sys.exit("lost the connection to its peer")
""",
)


@pytest.fixture(scope="module")
def slow_cluster(users_folder: Path, virtual_cluster: Cluster) -> Iterator[Cluster]:
    """Four nodes and their user; SLURM waits for 300 s before it marks a node down."""
    options = ("--nodes", "4", "--node-timeout", "300", "--requeue-delay", "8")
    with cluster_of_users(users_folder, *options) as (made, users):
        yield Cluster(made.folder, users[0])


@pytest.mark.slow
def test_a_run_leaves_a_dead_node_before_slurm_marks_it_down(
    slow_cluster: Cluster, users_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert slow_cluster.user is not None
    home = users_folder / slow_cluster.user.name
    slow_cluster.user.act_here(home, monkeypatch)
    toy = SlurmToy(slow_cluster, home / "run")
    toy.recipe = TOY_RECIPE | {"recovery": {"in_place": True}}
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, PEERS, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    toy.cluster.tool("kill-node", "n3")
    try:
        (toy.run.root / "dead").write_text("n[2-3]")
        decisions = lambda: toy.events("run_requeued") + toy.events("run_failed")  # noqa: E731
        wait_for(decisions, "its decision", tell=toy.words)
        assert [(row["event"], row.get("without")) for row in decisions()] == [("run_requeued", ["n3"])]
        assert toy.events("recovery_started") == []
        assert (toy.snapshot().message or "").startswith("requeued without n3, continues after step ")
        # SLURM's notice, which ends the job's last step and lets it return to the queue
        toy.cluster.admin("scontrol", "update", "nodename=n3", "state=down", "reason=test")
        toy.wait_until_ready("inference-0", "trainer-0", attempt=2)
        toy.wait_for_words("goes on after 1", "trainer-0_0", attempt=2)
        (toy.run.root / "enough").touch()
        toy.wait_for_state(RunState.DONE)
    finally:
        toy.end()
        toy.cluster.tool("return-node", "n3")
    toy.assert_nothing_is_left()
