"""A complete run without any network: its model and data come from a local hub by `primerl-hpc prefetch`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, ROOT, captured, make_tiny_model
from tests.support.hub import files_of, serve_hub
from tests.support.runs import TINY, kill_processes_of, told

pytestmark = pytest.mark.e2e

RECIPE = """\
base: {tiny}
name: offline
model: {{name: org/tiny}}
max_steps: 2
seq_len: 256
warmup: {{max_steps: 5, sft: {{data: {{path: org/rows}}, batch_size: 8}}}}
environments:
  train: [{{id: reverse-text, args: {{split: train}}}}]
  eval: [{{id: math-problems, args: {{dataset: org/maths}}, interval: 2, samples: 1, num_tasks: 2}}]
rollouts: {{batch_size: 16, group_size: 4}}
checkpoint: {{interval: null}}
"""
ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
"""Command in front of another one that leaves it only the loopback interface."""
MATHS = b'{"problem": "1+1", "answer": "2"}\n{"problem": "2+2", "answer": "4"}\n'


def can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def primerl(
    folder: Path, *words: str, before: tuple[str, ...] = (), hub: str = ""
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    environ |= {"HF_ENDPOINT": hub} if hub else {}
    return captured(
        [*before, sys.executable, "-m", "primerl_hpc", *words], cwd=folder, env=environ, timeout=PATIENCE_S
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="needs the right to create a network namespace")
def test_a_run_needs_no_network_after_prefetch(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", rows=200)
    (tmp_path / "offline.yaml").write_text(RECIPE.format(tiny=TINY))
    datasets = {
        "org/rows": {"train.jsonl": (tiny / "sft.jsonl").read_bytes()},
        "org/maths": {"train.jsonl": MATHS},
    }
    where = ("offline.yaml", "-p", "local", "--profile-set", f"cache={tmp_path}/cache")
    run = RunDir(tmp_path / "run")
    request.addfinalizer(lambda: kill_processes_of(run.root))
    submit = ("submit", *where, "--run-dir", str(run.root), "--follow")

    done = primerl(tmp_path, *submit, before=tuple(ALONE))
    assert (
        done.returncode == 66 and "fetch it first: primerl-hpc prefetch offline.yaml -p local" in done.stderr
    )
    assert not run.root.exists()
    with serve_hub(datasets, models={"org/tiny": files_of(tiny / "model")}) as url:
        done = primerl(tmp_path, "prefetch", *where, "--json", hub=url)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [(item["kind"], item["name"]) for item in json.loads(done.stdout)["items"]]
    assert (
        kinds[:2] == [("model", "org/tiny"), ("dataset", "org/rows")]
        and ("environment", "math-problems") in kinds
    )
    shutil.rmtree(tiny)
    done = primerl(tmp_path, "prefetch", *where, "--check", before=tuple(ALONE))
    assert done.returncode == 0, done.stdout + done.stderr

    done = primerl(tmp_path, *submit, before=tuple(ALONE))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + told(run)
    assert take_snapshot(run).state == RunState.DONE
    assert list(read_steps(run.metrics("trainer"))) == [1, 2] and 2 in read_steps(run.metrics("eval"))
