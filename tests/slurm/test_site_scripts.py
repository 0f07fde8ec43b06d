"""The golden scripts of real sites, and the check of sums, with a real SLURM."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit, SumsPlan
from primerl_hpc.slurm.estimate import estimate_start
from tests.slurm.test_doctor import VIRTUAL, findings_of
from tests.support.cluster_user import ClusterUser
from tests.support.helpers import PATIENCE_S, ROOT
from tests.support.virtual_slurm import SlurmToy, preflight
from tests.unit.checks.test_surroundings import CORRUPT

GOLDEN = ROOT / "tests" / "golden"
SCRIPTS = sorted(path for path in GOLDEN.glob("*.sbatch") if path.stem not in ("local", "virtual"))
OF_THE_SITE = ("account", "constraint", "licenses", "qos", "reservation")
"""Options whose values exist at the site only; they are left out."""
HERE = {
    "partition": "main",
    "time": "1:00:00",
    "mem": "0",
    "cpus-per-task": "64",
    "nodes": "1",
    "output": "/dev/null",
}
"""Values of this cluster, in place of the site's."""
GPUS = ("gres", "gpus", "gpus-per-node")


def for_this_cluster(script: str) -> tuple[str, set[str]]:
    """The script with the values of this cluster, and the names of its options."""
    lines, names = [], set()
    for line in script.splitlines():
        option = line.removeprefix("#SBATCH --") if line.startswith("#SBATCH --") else ""
        name = option.partition("=")[0]
        values = HERE | dict.fromkeys(GPUS, "8") | {"gres": "gpu:8"}
        if name not in OF_THE_SITE:
            lines.append(f"#SBATCH --{name}={values[name]}" if name in values else line)
        names |= {name} if name else set()
    return "\n".join(lines) + "\n", names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_accepts_the_options_of_a_sites_script(acting_user: ClusterUser, path: Path) -> None:
    script, names = for_this_cluster(path.read_text())
    assert {"nodes", "signal", "output"} <= names
    assert acting_user.run(lambda: estimate_start(script, timeout_s=PATIENCE_S)).nodes


def test_doctor_compares_sums_over_two_nodes_with_their_known_result(
    acting_user: ClusterUser, tmp_path: Path
) -> None:
    values = load_yaml(VIRTUAL).values | {"preflight": {"sums": "always"}, "runs_dir": str(tmp_path)}
    path = tmp_path / "sums.yaml"
    path.write_text(dump_yaml(values))
    found = findings_of(str(path), "--nodes", "2")
    assert found["nodes: sums"]["is_ok"], found["nodes: sums"]
    assert "sums over 2 ranks on 2 nodes are right" in found["nodes: sums"]["said"]


@pytest.mark.parametrize("is_corrupt", [False, True], ids=["right", "wrong"])
def test_an_attempt_starts_only_if_sums_over_its_nodes_are_right(
    new_toy: Callable[..., SlurmToy], tmp_path: Path, is_corrupt: bool
) -> None:
    """gloo over two nodes; in the second case the rank of the second node corrupts an element."""
    toy = new_toy()
    toy.add(Role.TRAINER, "print('trained')", OnExit.ENDS_PHASE, nodes=(0, 1))
    variables = {"OMP_NUM_THREADS": "1"}
    if is_corrupt:
        (tmp_path / "sitecustomize.py").write_text(CORRUPT)
        variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    sums = SumsPlan(
        argv=(sys.executable,),
        env=variables,
        nodes=(0, 1),
        accelerator="cpu",
        ranks_per_node=1,
        timeout_s=int(PATIENCE_S),
    )
    toy.plan_changes = {"preflight": preflight().model_copy(update={"sums": sums})}
    toy.submit()
    toy.wait_for_state(RunState.FAILED if is_corrupt else RunState.DONE)
    toy.assert_nothing_is_left()
    (checked,) = toy.events("sums_checked")
    assert checked["level"] == ("bad" if is_corrupt else "ok"), checked
    if is_corrupt:
        failure = read_json(toy.run.failure)
        assert failure["exit_code"] == ExitCode.CONFIG and "wrong sums on" in failure["message"], failure
        assert not toy.events("role_started")
