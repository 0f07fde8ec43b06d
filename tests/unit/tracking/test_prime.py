"""The Prime platform's monitor against a local server: everything arrives once, and a broken server delays only it."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import append_json, read_json_or_none
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import OnExit, load_plan
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.base import TargetUnavailableError
from primerl_hpc.tracking.relay import Relay
from tests.support.helpers import PATIENCE_S, make_plan, process_plan, start_role, wait_for
from tests.support.prime_server import KEY, PrimeServer, serve_prime


@pytest.fixture
def server() -> Iterator[PrimeServer]:
    with serve_prime() as server:
        yield server


def make_run(folder: Path, server: PrimeServer, *, relay: bool = False, **settings: Any) -> RunDir:
    run = RunDir(folder / "run")
    recipe = {
        "kind": "rl",
        "name": "tracked",
        "model": {"name": "some/model"},
        "max_steps": 4,
        "environments": {"train": [{"id": "reverse-text"}]},
        "tracking": {"prime": {"base_url": server.base_url, "team_id": "team", **settings}, "relay": relay},
    }
    tracker = process_plan(Role.TRACKER, on_exit=OnExit.OPTIONAL, accelerators=0)
    make_plan(run.root, recipe, processes=[tracker])
    return run


def write(run: RunDir, *steps: int) -> None:
    for step in steps:
        for index in range(2):
            row = {"env": "reverse-text", "task": str(index), "step": step, "reward": 0.5, "advantage": 0.1}
            row |= {"messages": [{"role": "user", "chars": 1}, {"role": "assistant", "chars": 2}]}
            append_json(run.traces("train"), {**row, "prompt": "p", "completion": f"c{index}"})
        MetricsWriter(run.metrics("trainer")).write(step, {"loss/mean": 0.5, "bad": float("nan")})
        MetricsWriter(run.metrics("orchestrator")).write(step, {"reward/mean": float(step)})


def start(run: RunDir, key: str = KEY) -> subprocess.Popen:
    return start_role(run, "main", "tracker-0", PRIME_API_KEY=key)


def end(tracker: subprocess.Popen) -> None:
    tracker.send_signal(signal.SIGTERM)
    assert tracker.wait(timeout=PATIENCE_S) == 0


def sent(run: RunDir) -> int:
    return (read_json_or_none(run.tracker_state("prime")) or {}).get("number", 0)


def log_of(run: RunDir) -> str:
    return (run.attempt_logs(1) / "tracker-0.log").read_text()


def test_a_run_is_registered_once_and_its_rows_samples_and_end_arrive(
    tmp_path: Path, server: PrimeServer
) -> None:
    run = make_run(tmp_path, server, log_extras={"interval": 2})
    write(run, 1, 2, 3)
    tracker = start(run)
    try:
        wait_for(lambda: sent(run) == 7, "six rows and a table", tell=lambda: log_of(run))
    finally:
        end(tracker)
    assert not server.bodies("/finalize")  # the run continues
    write(run, 4)
    tracker = start(run)
    try:
        wait_for(lambda: sent(run) == 9, "two more rows", tell=lambda: log_of(run))
    finally:
        end(tracker)
    (registration,) = server.bodies("/external-runs")
    assert registration == {
        "base_model": "some/model",
        "max_steps": 4,
        "batch_size": 128,
        "rollouts_per_example": 8,
        "seq_len": 2048,
        "environments": [{"id": "reverse-text"}],
        "name": "tracked",
        "team_id": "team",
    }
    metrics = [body["metrics"] for body in server.bodies("/metrics")]
    assert {body["run_id"] for body in server.bodies("/metrics")} == {"run-1"}
    losses = [row["step"] for row in metrics if "trainer/loss/mean" in row]
    assert (losses, [row["step"] for row in metrics if "orchestrator/reward/mean" in row]) == (
        [1, 2, 3, 4],
    ) * 2
    assert not any("trainer/bad" in row for row in metrics)
    assert [body["step"] for body in server.bodies("/distributions")] == [2, 4]
    assert [body["s3_key"] for body in server.bodies("/samples/confirm")] == ["key-1"] * 2
    for step, table in zip((2, 4), server.tables, strict=True):
        assert len(table) == 2
        for index, row in enumerate(table):
            messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": f"c{index}"}]
            assert (row["step"], row["reward"], row["problem_id"]) == (step, 0.5, index)
            assert json.loads(row["completion"]) == json.loads(row["trajectory"])[0]["messages"] == messages
        assert {row["env_name"] for row in table} == {"reverse-text"}
    assert server.keys_of_storage == {""}  # the storage does not receive the key
    (summary,) = server.bodies("/finalize")
    assert summary["run_id"] == "run-1" and summary["summary"]["trainer/loss/mean"] == 0.5
    assert all(KEY not in path.read_text() for path in run.root.rglob("*") if path.is_file())


def relay_of(run: RunDir, key: str, monkeypatch: pytest.MonkeyPatch) -> Relay:
    monkeypatch.setenv("PRIME_API_KEY", key)
    recipe = load_plan(run).phases[0].recipe
    return Relay(run, recipe, "prime", Event())


@pytest.mark.parametrize("answer", [500, None], ids=["error", "closed"])
def test_rows_wait_for_a_broken_server_and_arrive_once(
    tmp_path: Path, server: PrimeServer, answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, server)
    write(run, 1, 2)
    tries = {"/metrics": 0}

    def status(path: str) -> int | None:
        tries[path] = tries.get(path, 0) + 1
        if path == "/metrics" and 2 <= tries[path] <= 5:  # three tries, then one of the next round
            return answer
        return 201 if path == "/external-runs" else 200

    server.status = status
    relay = relay_of(run, KEY, monkeypatch)
    with pytest.raises(TargetUnavailableError, match="did not accept POST /api/v1/rft/metrics"):
        relay.send()
    relay.send()
    relay.send()
    assert [body["metrics"]["step"] for body in server.bodies("/metrics")] == [1, 2, 1, 2]


def test_a_server_that_never_replies_delays_only_its_own_rows(
    tmp_path: Path, server: PrimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.tracking.prime.TIMEOUT", 0.2)
    monkeypatch.setattr("primerl_hpc.tracking.prime.FIRST_DELAY_S", 0.01)
    run = make_run(tmp_path, server)
    write(run, 1)
    replies = Event()
    server.status = lambda path: 201 if path == "/external-runs" else (replies.wait(PATIENCE_S), 200)[1]
    relay = relay_of(run, KEY, monkeypatch)
    try:
        with pytest.raises(TargetUnavailableError, match="timed out"):
            relay.send()
        relay.ended.set()
        with pytest.raises(TargetUnavailableError):
            relay.send()
        assert relay.stream.sent == 0
    finally:
        replies.set()


@pytest.mark.parametrize(("key", "sentence"), [("", "PRIME_API_KEY is not set"), ("wrong", "refused POST")])
def test_a_refused_or_missing_key_is_one_sentence(
    tmp_path: Path, server: PrimeServer, key: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, server)
    write(run, 1)
    with pytest.raises(ConfigError, match=sentence):
        relay_of(run, key, monkeypatch).send()
    assert server.calls == []


def test_a_failed_run_is_reported_as_failed_and_as_completed_after_it_was_resumed(
    tmp_path: Path, server: PrimeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, server)
    for steps in ((1,), (2, 3, 4)):
        write(run, *steps)
        if steps == (1,):
            run.failure.write_text("{}")
        relay = relay_of(run, KEY, monkeypatch)
        relay.send()
        relay.finish()
        run.failure.unlink(missing_ok=True)
    assert [body for path, body in server.calls if path.endswith("/status")] == [{"status": "failed"}]
    assert len(server.bodies("/finalize")) == len(server.bodies("/external-runs")) == 1
