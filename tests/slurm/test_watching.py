"""`logs -f` and `status` over the life of a run: in the queue, running, requeued, done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.types import OnExit
from tests.slurm.virtual import SERVE, TRAIN, SlurmToy, run_cli, wait_for
from tests.support import ROOT


class FollowedLog:
    """`primerl-hpc logs … -f` as a process, and the lines it has printed."""

    def __init__(self, run: Path, *words: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "primerl_hpc", "logs", str(run), *words, "-f"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for(self, words: str) -> None:
        tell = lambda: f"{self.lines}\nended with {self.process.poll()}"  # noqa: E731
        wait_for(lambda: any(words in line for line in self.lines), words, tell=tell)


@pytest.fixture
def follow() -> Iterator[Callable[..., FollowedLog]]:
    made: list[FollowedLog] = []

    def start(run: Path, *words: str) -> FollowedLog:
        made.append(FollowedLog(run, *words))
        return made[-1]

    yield start
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait()


def status_of(toy: SlurmToy) -> dict:
    done = run_cli("status", str(toy.run.root), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_log_is_followed_from_the_queue_through_a_requeue_to_the_end_and_hours_are_added_up(
    toy: SlurmToy, follow: Callable[..., FollowedLog]
) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.submit()
    log = follow(toy.run.root, "trainer", "--node", "n2")
    toy.wait_until_ready("inference-0", "trainer-0")
    log.wait_for("goes on after 0")
    first = status_of(toy)
    assert first["processes"]["trainer-0"]["hosts"] == ["n2", "n3"]
    assert first["job"]["job_id"] == toy.job and first["state"] == "running"
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)
    toy.wait_until_ready("trainer-0", attempt=2)
    log.wait_for("── attempt 2 ──")
    log.wait_for("goes on after 2")
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    assert log.process.wait(60) == 0
    wait_for(lambda: status_of(toy)["usage"]["source"] == "sacct", "accounting")
    usage = status_of(toy)["usage"]
    assert usage["attempts"] == 2 and usage["node_hours"] > 0
    assert usage["gpu_hours"] == pytest.approx(8 * usage["node_hours"])  # 8 fake GPUs on each of its nodes
    toy.assert_nothing_is_left()
    words = run_cli("logs", str(toy.run.root), "job", "--attempt", "1")
    assert "attempt_started" in words.stdout, words.stderr
