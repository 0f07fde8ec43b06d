"""``primerl-hpc eval`` of a live run: its versions on one engine, with a kill in between."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections import Counter
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_jsonl, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.lock import process_start_time
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores
from tests.support.helpers import PATIENCE_S, end_role, start_role, wait_for
from tests.support.runs import command

pytestmark = pytest.mark.e2e

SERVERS = ("inference-0", "router-0", "env_server-0")
NUM_ROLLOUTS = 32  # of a version: 16 tasks, 2 samples


@pytest.fixture
def home(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMERL_HOME", str(work / "state"))
    return work


def rollouts_by_version(run: RunDir) -> Counter[int]:
    return Counter(row["version"] for row in read_jsonl(run.traces("eval")) if "reward" in row)


class LiveRun:
    """A run that appears to be in progress and publishes versions of another run on request."""

    def __init__(self, folder: Path, trained: Path) -> None:
        self.run, self.trained = RunDir(folder), RunDir(trained)
        self.run.control.mkdir(parents=True)
        for path in (self.run.plan, self.run.recipe, self.run.profile):
            shutil.copy(trained / path.name, path)
        pid = os.getpid()
        owner = {"host": socket.gethostname(), "pid": pid, "started": process_start_time(pid)}
        write_json(self.run.supervisor_lock, owner)
        write_json(self.run.state, {"state": RunState.RUNNING, "attempt": 1})

    def publish(self, step: int) -> None:
        making = self.run.weights / f"step_{step}.tmp"
        shutil.copytree(self.trained.weights_step(step), making)
        making.rename(self.run.weights_step(step))

    def end(self) -> None:
        write_json(self.run.state, {"state": RunState.DONE, "attempt": 1})


def test_versions_are_scored_as_they_appear_and_after_a_kill_only_missing_ones(
    home: Path, warm_model: Path
) -> None:
    live = LiveRun(home / "runs" / "live", warm_model)
    live.publish(100)
    words = ("eval", "runs/live", "--num-tasks", "16", "--run-dir", "runs/scored")
    one_by_one = ("--set", "rollouts.max_in_flight=1", "--set", "inference.kv_cache_gib=0.0625")
    command(*words, *one_by_one, "--dry-run", cwd=home)
    run = RunDir(home / "runs" / "scored")
    run.attempt_logs(1).mkdir(parents=True)
    servers = [start_role(run, "main", name, **engine_env("cpu")) for name in SERVERS]
    try:
        for name in SERVERS:
            wait_for(lambda name=name: read_endpoint(run, name), name)
        evaluator = start_role(run, "main", "evaluator-0")
        wait_for(lambda: (0, "held-out") in read_scores(run), "the base model's scores")
        end_role(evaluator)  # one rollout at a time: version 100 has hardly begun

        # in the same directory again, to the end of the run that makes the versions
        command(*words, "--watch", "--dry-run", cwd=home)
        evaluator = start_role(run, "main", "evaluator-0")
        servers.append(evaluator)
        for step in (100, 300):
            wait_for(lambda step=step: (step, "held-out") in read_scores(run), f"{step}")
            assert evaluator.poll() is None, "the run that it watches goes on"
            if step == 100:
                live.publish(300)
        assert [lease.name.partition(".")[0] for lease in (live.run.weights / ".leases").glob("[!.]*")] == [
            "step_300"
        ]
        live.end()
        assert evaluator.wait(PATIENCE_S) == 0
    finally:
        for server in servers:
            end_role(server)
    rows = [(row["step"], row["environment"]) for row in read_jsonl(run.scores)]
    assert rows[0] == (0, "held-out") and sorted(rows) == [(step, "held-out") for step in (0, 100, 300)]
    assert rollouts_by_version(run) == {0: NUM_ROLLOUTS, 100: NUM_ROLLOUTS, 300: NUM_ROLLOUTS}
    scores = {step: row for (step, _), row in read_scores(run).items()}
    assert scores[300]["avg@2"] > scores[0]["avg@2"] + 0.05, scores
    assert all(row["errors"] == 0 and row["tasks"] == 16 for row in scores.values())
    assert set(read_steps(run.metrics("eval"))) >= {100, 300}
    engine = (run.attempt_logs(1) / "inference-0.log").read_text()
    assert engine.count("starting vLLM on") == 1
    served = re.findall(r"serving policy version (\d+) from", engine)
    assert set(served) == {"100", "300"} and len(served) <= 3, served

    # with nothing missing the scores are shown at once, and nothing is started
    again = command(*words, cwd=home)
    assert "the evaluation is complete" in again.stdout and not run.job.exists()
    assert [line.split()[:2] for line in again.stdout.splitlines() if line.startswith("held-out ")] == [
        ["held-out", "base"],
        ["held-out", "100"],
        ["held-out", "300"],
    ]
    assert max(map(len, again.stdout.splitlines())) <= 80
    shown = command("scores", "runs/scored", "--json", "--svg", str(home / "scores.svg"), cwd=home)
    assert [row["step"] for row in json.loads(shown.stdout)["scores"]] == [0, 100, 300]
    assert (home / "scores.svg").read_text().count("<polyline") == 1


@pytest.mark.slow
def test_an_sft_run_is_evaluated_while_it_trains(home: Path) -> None:
    """The shipped recipe with fewer steps: the base model, one version in between and the last one are evaluated, and
    only the kept versions remain on disk."""
    changes = (
        "max_steps=60",
        "evaluation.every=20",
        "environments.eval.0.num_tasks=16",
        "checkpoint.interval=30",
    )
    words = [word for text in changes for word in ("--set", text)]
    place = ("-p", "local", "--run-dir", "runs/evaluated")
    shown = command("submit", "reverse_text/sft_evaluated", *place, *words, "--follow", cwd=home).stdout
    run = RunDir(home / "runs" / "evaluated")
    scores = {step: row for (step, _), row in read_scores(run).items()}
    assert list(scores) == [0, 20, 40, 60] and all(row["errors"] == 0 for row in scores.values())
    assert rollouts_by_version(run) == dict.fromkeys(scores, NUM_ROLLOUTS)
    assert scores[60]["avg@2"] > scores[0]["avg@2"] + 0.05, scores
    assert set(read_steps(run.metrics("eval"))) == set(scores)
    assert set(read_steps(run.metrics("sft"))) == set(range(1, 61))
    assert all(f"evaluation of policy v{step}: held-out reward" in shown for step in scores)
    assert run.stable_weights() == [40, 60]
    status = command("status", "runs/evaluated", cwd=home).stdout
    assert "step 60/60" in status and re.search(r"^held-out +60 ", status, re.MULTILINE)
    samples = command("samples", "runs/evaluated", "-n", "1", "--full", cwd=home).stdout
    assert re.search(r"^    user ", samples, re.MULTILINE)
