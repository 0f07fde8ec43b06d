"""The evaluator against a real engine, router and environment server: scores of one model, then done."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir
from tests.support import end_role, make_plan, make_tiny_model, process_plan, run_role, start_role

pytestmark = pytest.mark.e2e

SERVERS = ("inference-0", "router-0", "env_server-0")


@pytest.fixture
def eval_run(tmp_path: Path):
    model = make_tiny_model(tmp_path / "tiny", rows=10) / "model"
    recipe = {
        "kind": "eval",
        "name": "tiny-eval",
        "model": {"name": str(model), "dtype": "float32", "renderer": {"name": "chatml"}},
        "seq_len": 128,
        "environments": {
            "eval": [
                {
                    "id": "reverse-text",
                    "name": "held-out",
                    "args": {"split": "test"},
                    "samples": 2,
                    "num_tasks": 8,
                }
            ]
        },
        "rollouts": {"sampling": {"temperature": 1.0, "max_tokens": 12}},
    }
    processes = [
        process_plan(role) for role in (Role.INFERENCE, Role.ROUTER, Role.ENV_SERVER, Role.EVALUATOR)
    ]
    make_plan(tmp_path / "run", recipe, processes=processes, model_path=model)
    run = RunDir(tmp_path / "run")
    servers = [start_role(run, "main", name) for name in SERVERS]
    yield run
    for server in servers:
        end_role(server)


def test_evaluation_of_one_model_writes_its_scores_and_every_rollout(eval_run):
    code, log = run_role(eval_run, "main", "evaluator-0")
    assert code == 0, log
    (row,) = read_steps(eval_run.metrics("eval")).values()
    assert row["step"] == 0
    assert row["eval/held-out/tasks"] == 8
    assert row["eval/held-out/rollouts"] == 16
    assert row["eval/held-out/errors"] == 0
    assert 0 <= row["eval/held-out/avg@2"] <= 1
    assert row["eval/held-out/pass^2"] <= row["eval/held-out/pass@1"] <= row["eval/held-out/pass@2"]
    traces = list(read_jsonl(eval_run.traces("eval")))
    assert len(traces) == 16
    assert len({trace["task"] for trace in traces}) == 8
    assert sum(trace["reward"] for trace in traces) / 16 == pytest.approx(
        row["eval/held-out/reward/mean"], abs=1e-3
    )
