"""Faults of a real cluster: a full disk, two runs on the same nodes, a SLURM that answers slowly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.observe.diagnose.diagnose import diagnose
from primerl_hpc.plan.plan import OnExit
from tests.support.helpers import PATIENCE_S, ROOT, captured, wait_for
from tests.support.virtual_slurm import SAY, SERVE, TRAIN, Cluster, SlurmToy, run_cli

PIECE_BYTES = 4 << 20
# a checkpoint of 4 MiB every moment, until `enough` exists or there is no space, of which it then takes the last byte;
# at least one checkpoint, so that a resumed run with `enough` writes exactly one
GREEDY = (
    SAY
    + f"""
from primerl_hpc.common.files import write_bytes
step = run.latest_checkpoint() or 0
print("goes on after", step, flush=True)
publish_endpoint(run, name, "http://x:1")
is_last = False
while not is_last:
    is_last = (run.root / "enough").exists()
    step += 1
    try:
        write_bytes(run.checkpoint_side(step, "trainer") / "data", bytes([step % 256]) * {PIECE_BYTES})
    except OSError:
        with open(run.root / "rest", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    run.finish_checkpoint_side(step, "trainer", ("trainer",))
    time.sleep(0.05)
"""
)
# a server with a port of its own, which answers with the name of its run
ANSWER = (
    SAY
    + """
from primerl_hpc.run.ports import bind_listener, listen_host
listener = bind_listener(listen_host(2), run.last_port(name))
listener.listen()
publish_endpoint(run, name, "tcp://%s:%d" % listener.getsockname())
while True:
    peer, _ = listener.accept()
    peer.sendall(run.root.name.encode())
    peer.close()
"""
)
ASK = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); print(s.recv(99).decode())"


def check_whole(toy: SlurmToy) -> list[int]:
    """Complete checkpoints, after a check that each contains all its bytes."""
    steps = toy.run.complete_checkpoints()
    for step in steps:
        data = (toy.run.checkpoint_side(step, "trainer") / "data").read_bytes()
        assert len(data) == PIECE_BYTES and set(data) == {step % 256}
    return steps


@pytest.mark.slow
def test_a_full_disk_fails_the_run_with_a_clear_message_and_loses_no_complete_checkpoint(
    cluster: Cluster, small_disk: Path, new_toy: Callable[..., SlurmToy]
) -> None:
    toy = new_toy(root=small_disk / "run")
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, GREEDY, OnExit.ENDS_PHASE, nodes=(1,))
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    failure = read_json(toy.run.failure)
    assert failure["process"] == "trainer-0"
    assert "No space left on device in the run directory" in failure["message"]
    found = diagnose(toy.run)
    assert found.known is not None and found.known.name == "full disk"
    assert found.can_retry and found.next_command == "primerl-hpc resume run"
    steps = check_whole(toy)
    assert len(steps) >= 3
    for path in (toy.run.root / "rest", *map(toy.run.checkpoint, steps[:-1])):  # a person frees space
        subprocess.run(["rm", "-r", str(path)], check=True)
    (toy.run.root / "enough").touch()  # before the second attempt, which would fill the disk again
    toy.submit()
    toy.wait_for_state(RunState.DONE)
    assert f"goes on after {steps[-1]}" in toy.log("trainer-0", attempt=2)
    toy.assert_nothing_is_left()
    assert check_whole(toy) == [steps[-1], steps[-1] + 1] and not toy.run.reserve.exists()


@pytest.fixture
def neighbours(new_toy: Callable[..., SlurmToy]) -> Iterator[tuple[SlurmToy, SlurmToy]]:
    """Two runs of the same shape on the same two nodes, a server on one and a trainer on both, at the same time."""
    shared = {
        "exclusive": False,
        "memory": "4G",
        "extra": ("--gres=gpu:2", "--nodelist=n1,n2", "--cpus-per-task=4"),
    }
    toys = new_toy("first", **shared), new_toy("second", **shared)
    for toy in toys:
        toy.add(Role.INFERENCE, ANSWER, OnExit.RESTART, nodes=(0,))
        toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(0, 1))
        toy.submit()
    for toy in toys:
        toy.wait_until_ready("inference-0", "trainer-0")
    yield toys


@pytest.mark.slow
def test_two_runs_on_the_same_nodes_do_not_interfere(neighbours: tuple[SlurmToy, SlurmToy]) -> None:
    first, second = neighbours
    hosts = [toy.endpoint("inference-0")["host"] for toy in neighbours]
    assert hosts == ["n1", "n1"]
    for toy in neighbours:  # each answers for itself, on a port of its own
        address, port = toy.endpoint("inference-0")["url"].removeprefix("tcp://").split(":")
        said = toy.cluster.on("n2", sys.executable, "-c", ASK, address, port)
        assert said == toy.run.root.name
    served = second.endpoint("inference-0")
    assert run_cli("cancel", str(first.run.root), "--now", "--wait").returncode == 0
    wait_for(lambda: not first.cluster.processes_of(first.run), "the end of the first run's processes")
    assert second.snapshot().state == RunState.RUNNING and not second.snapshot().restarts
    assert second.endpoint("inference-0") == served
    second.finish()
    assert not second.events("role_restarting") and first.snapshot().state.is_final


@pytest.fixture
def slow_slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which squeue and sacct take longer than any command waits."""
    folder = tmp_path / "slow"
    folder.mkdir()
    for name in ("squeue", "sacct"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >>{folder}/asked\nexec sleep 7200\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def test_a_slow_slurm_does_not_block_status(toy: SlurmToy, slow_slurm: dict[str, str]) -> None:
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)
    toy.submit()
    toy.wait_until_ready("trainer-0")
    asked = Path(slow_slurm["PATH"].partition(":")[0], "asked")
    for words, most in ((("status",), 1), (("status", str(toy.run.root)), 2)):
        asked.unlink(missing_ok=True)
        done = captured(
            [sys.executable, "-m", "primerl_hpc", *words, "--json"],
            env=slow_slurm,
            check=True,
            timeout=PATIENCE_S,
        )
        assert 1 <= len(asked.read_text().split()) <= most  # 5 s each
        said = json.loads(done.stdout)
        assert "did not answer within 5 s" in said["slurm_trouble"]
        runs = said.get("runs", [said])
        assert "running" in {run["state"] for run in runs if run["run_dir"] == str(toy.run.root)}
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
