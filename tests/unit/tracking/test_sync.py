"""``primerl-hpc sync``: rows reach the trackers from a login node, each once, also through a cut network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ExitCode, OccupiedError
from primerl_hpc.common.files import write_json
from primerl_hpc.run.lock import SupervisorLock
from tests.support.prime_server import KEY, PrimeServer, serve_prime
from tests.unit.tracking.test_prime import make_run, write


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_API_KEY", KEY)
    monkeypatch.setattr("primerl_hpc.tracking.prime.FIRST_DELAY_S", 0.01)


def steps(server: PrimeServer, name: str) -> list[int]:
    return [body["metrics"]["step"] for body in server.bodies("/metrics") if name in body["metrics"]]


def test_watching_sends_every_row_once_through_a_cut_network_until_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.tracking.sync.TOUCH_EVERY_S", 0.01)
    monkeypatch.setattr("primerl_hpc.tracking.sync.POLL_S", 0.01)
    with serve_prime() as server:
        run = make_run(tmp_path, server, relay=True)
        write(run, 1)
        write_json(run.state, {"state": "running", "attempt": 1})
        outage = iter(range(8))

        def status(path: str) -> int | None:
            if path == "/metrics" and len(server.bodies("/metrics")) == 1 and next(outage, None) is not None:
                return None
            if (
                path == "/metrics"
                and len(server.bodies("/metrics")) == 3
                and steps(server, "trainer/step")[-1] == 1
            ):
                write(run, 2, 3, 4)  # the run continues in its second attempt, and ends
                write_json(run.state, {"state": "done", "attempt": 2})
            return 201 if path == "/external-runs" else 200

        write(run, 1)
        server.status = status
        done = CliRunner().invoke(cli, ["sync", str(run.root), "--watch"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "prime: 1 rows sent; the rest waits: the Prime platform did not accept POST" in done.output
    assert done.output.splitlines()[-1] == "prime: 10 rows sent"
    assert steps(server, "trainer/loss/mean") == steps(server, "orchestrator/reward/mean") == [1, 1, 2, 3, 4]
    assert len(server.bodies("/finalize")) == len(server.bodies("/external-runs")) == 1


def test_a_single_pass_reports_what_waits_and_the_next_one_continues(tmp_path: Path) -> None:
    with serve_prime() as server:
        run = make_run(tmp_path, server, relay=True)
        write(run, 1, 2)
        server.status = lambda path: 500 if path == "/metrics" else 201
        broken = CliRunner().invoke(cli, ["sync", str(run.root), "--json"], standalone_mode=False)
        assert broken.return_value == ExitCode.UNAVAILABLE
        (target,) = json.loads(broken.stdout)["targets"]
        assert (target["sent"], target["is_complete"]) == (0, False) and "HTTP 500" in target["error"]
        server.status = lambda path: 201
        assert CliRunner().invoke(cli, ["sync", str(run.root)], standalone_mode=False).return_value == 0
    assert steps(server, "trainer/loss/mean") == [1, 2]


def test_only_one_process_sends(tmp_path: Path) -> None:
    with serve_prime() as server:
        run = make_run(tmp_path, server)
        write_json(run.state, {"state": "running"})
        with pytest.raises(OccupiedError, match=r"tracking\.relay=true"):
            CliRunner().invoke(cli, ["sync", str(run.root)], catch_exceptions=False)
        write_json(run.state, {"state": "done"})
        lock = SupervisorLock(run.tracker_state("sync").with_suffix(".lock"))
        lock.acquire()
        with pytest.raises(OccupiedError, match="another sync"):
            CliRunner().invoke(cli, ["sync", str(run.root)], catch_exceptions=False)
        lock.release()
    assert server.calls == []
