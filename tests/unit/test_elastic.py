"""Elastic engines without SLURM: who is there by what their files say, and when a host thinks that its run is over."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.common.rundir import RunDir, publish_endpoint
from primerl_hpc.runtime.elastic import SILENT_S, ElasticEngines
from primerl_hpc.runtime.engine_host import EngineHost
from tests.support import make_plan, process_plan

RECIPE = {
    "kind": "rl",
    "name": "toy",
    "model": {"name": "some/model"},
    "max_steps": 3,
    "environments": {"train": [{"id": "reverse-text"}]},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    plan = make_plan(tmp_path, RECIPE, processes=[process_plan(Role.TRAINER)])
    phase = plan.phases[0].model_copy(update={"elastic": (process_plan(Role.INFERENCE),)})
    plan = plan.model_copy(update={"phases": (phase,)})
    run = RunDir(tmp_path)
    write_json(run.plan, plan.model_dump(mode="json"))
    write_text(run.supervisor_lock, "{}")
    return run


def told(engines: ElasticEngines) -> list[tuple[str, str]]:
    return [(name, change["state"]) for name, change in engines.changes()]


def test_engines_join_leave_and_return_as_others(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = ElasticEngines(run, ["inference-0", "inference-1"])
    assert told(engines) == []
    publish_endpoint(run, "inference-1", "http://h:1")
    assert told(engines) == [("inference-1", "joined")]
    assert told(engines) == []
    monkeypatch.setenv("PRIMERL_INCARNATION", "1000")
    publish_endpoint(run, "inference-1", "http://h:2")  # so fast that nobody saw it leave
    assert told(engines) == [("inference-1", "left"), ("inference-1", "joined")]
    run.endpoint("inference-1").unlink()
    assert told(engines) == [("inference-1", "left")]


def test_an_engine_that_nobody_vouches_for_is_dropped_until_its_host_is_back(run: RunDir) -> None:
    engines = ElasticEngines(run, ["inference-0"])
    publish_endpoint(run, "inference-0", "http://h:1")
    assert told(engines) == [("inference-0", "joined")]
    silent = time.time() + SILENT_S + 5
    os.utime(run.supervisor_lock, (silent, silent))
    assert told(engines) == [("inference-0", "left")]
    assert not run.endpoint("inference-0").exists()
    publish_endpoint(run, "inference-0", "http://h:1")
    os.utime(run.endpoint("inference-0"), (silent, silent))
    assert told(engines) == [("inference-0", "joined")]


@pytest.mark.parametrize(
    ("state", "attempt", "engines", "is_over"),
    [
        (RunState.RUNNING, 2, "7", False),
        (RunState.DONE, 2, "7", True),
        (RunState.STOPPED, 2, "7", True),
        (RunState.PENDING, 2, "7", False),  # requeued: it will want its engines again
        (RunState.STOPPED, 1, "7", False),  # the attempt before the one that was submitted
        (RunState.RUNNING, 2, "8", False),  # the submitter has not written us down yet
    ],
)
def test_a_host_ends_with_its_run_and_not_before(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    state: RunState,
    attempt: int,
    engines: str,
    is_over: bool,
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    write_json(run.state, {"state": state.value, "attempt": attempt, "phase": "main"})
    write_json(run.job, {"scheduler": "slurm", "attempt": 2, "engines_job_id": engines})
    host = EngineHost(run, 0)
    assert host._is_run_over() == is_over
    is_wanted = host._is_wanted(host.plan.phase("main"))
    assert is_wanted == (state == RunState.RUNNING and engines == "7")
    host.started_at -= 3600
    assert host._is_run_over() == (is_over or engines == "8")


def test_the_host_of_no_run_ends_with_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from primerl_hpc.runtime.engine_host import main

    assert main([str(tmp_path / "none"), "0"]) == 66
    assert "plan.json" in capfd.readouterr().err
    assert main(["x"]) == 2
