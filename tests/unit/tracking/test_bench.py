"""The result of a benchmark in W&B, on a local server that speaks its protocol."""

from __future__ import annotations

import json
import sys

import pytest

from primerl_hpc.tracking.bench_result import flatten
from tests.support.helpers import ROOT, captured
from tests.support.wandb_server import API_KEY, serve_wandb

LEVEL = {"loop": "closed", "concurrency": 2, "output_tokens_per_s": 80.0, "ttft_s": {"median": 0.25}}
RESULT = {
    "bench": "inference",
    "model": "m",
    "request": {"requests": 4},
    "levels": [LEVEL, {**LEVEL, "concurrency": 8}],
}


def test_numbers_of_nested_blocks_are_named_by_their_path() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": 2.5, "e": "text", "f": True}) == {"a/b/c": 1, "d": 2.5}


def test_each_level_is_a_row_of_a_finished_run(tmp_path) -> None:
    pytest.importorskip("wandb")
    code = "import json, sys; from primerl_hpc.tracking.bench_result import send_result\n"
    code += "send_result('speed', 'small-bench', json.loads(sys.argv[1]))"
    with serve_wandb() as server:
        environ = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": API_KEY, "HOME": str(tmp_path)}
        done = captured(
            [sys.executable, "-c", code, json.dumps(RESULT)],
            env={**environ, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    (run,) = server.runs.values()
    assert (run.project, run.display_name) == ("speed", "small-bench")
    assert [row["concurrency"] for row in run.history] == [2, 8]
    assert run.history[0]["ttft_s/median"] == 0.25 and run.history[0]["output_tokens_per_s"] == 80.0


def test_a_refused_key_is_an_error_after_the_result(tmp_path) -> None:
    pytest.importorskip("wandb")
    code = "from primerl_hpc.tracking.bench_result import send_result\n"
    code += "from primerl_hpc.common.errors import ConfigError\n"
    code += "try: send_result('speed', 'b', {})\nexcept ConfigError as error: print(error)"
    with serve_wandb() as server:
        environ = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "short", "HOME": str(tmp_path)}
        done = captured(
            [sys.executable, "-c", code],
            env={**environ, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
        )
    assert done.stdout.startswith("W&B refused the result: ") and "set WANDB_API_KEY" in done.stdout, (
        done.stderr
    )
