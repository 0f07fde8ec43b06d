"""``primerl-hpc eval`` of an external model, which is queried by chat completions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores
from tests.support.runs import TINY, command
from tests.support.serving import Serving

pytestmark = pytest.mark.e2e


def test_an_external_model_is_queried_by_chat_completions_and_no_engine_starts(
    tmp_path: Path, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSEWHERE_KEY", serving.keys.api_key)
    monkeypatch.setenv("SSL_CERT_FILE", str(serving.keys.authority))
    server = ("--base-url", f"{serving.url('router-0')}/v1", "--model", str(serving.model))
    words = ("eval", str(TINY), "-p", "local", "--num-tasks", "8", "--env", "held-out", *server)
    done = command(
        *(*words, "--env", "alphabet-sort", "--key-variable", "ELSEWHERE_KEY"),
        *("--run-dir", "runs/elsewhere", "--follow"),
        cwd=tmp_path,
    )
    run = RunDir(tmp_path / "runs" / "elsewhere")
    assert "inference" not in json.loads(run.state.read_text())["processes"]
    scores = read_scores(run)
    assert set(scores) == {(0, "held-out"), (0, "alphabet-sort")}
    assert scores[0, "held-out"]["rollouts"] == 16 and scores[0, "held-out"]["errors"] == 0
    assert scores[0, "held-out"]["completion_tokens/mean"] > 1
    assert "alphabet-sort" in done.stdout and "PASS@K" in done.stdout

    monkeypatch.setenv("WRONG_KEY", "wrong")
    refused = command(
        *(*words, "--key-variable", "WRONG_KEY", "--run-dir", "runs/refused", "--follow"),
        cwd=tmp_path,
        check=False,
    )
    assert refused.returncode == ExitCode.FAILED
    assert "refuses the key in WRONG_KEY" in refused.stdout and "wrong" not in refused.stdout.lower().replace(
        "wrong_key", ""
    )
