"""Every role of an RL run started by its own command, as the README shows, without a supervisor.

The run covers what no other test does: a mixture of experts on an engine that distributes them over two ranks,
conversations of two turns with the algorithms opsd and echo, and games against itself with rae and hierarchical_grpo;
new versions are sent to both ranks of the engine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc.common.names import Role, process_name
from primerl_hpc.run.endpoints import publish_endpoint, read_endpoint
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from tests.support.helpers import PATIENCE_S, ROOT, make_tiny_model, wait_for

pytestmark = [pytest.mark.e2e]


def primerl(*words: str, cwd: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    log = (cwd / f"{words[1] if words[0] == 'role' else words[0]}.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "primerl_hpc", *words], cwd=cwd, env=environment, stdout=log, stderr=log
    )


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()


SORTING, PLAYING = (
    "id: alphabet-sort, args: {turns: 2, names_per_turn: 2}",
    "id: nim, args: {max_stones: 5}",
)
ENVIRONMENTS = f"""[
  {{{SORTING}, algorithm: {{type: opsd, demo_key: given}}}},
  {{{PLAYING}, algorithm: {{type: rae}}}},
  {{{SORTING}, name: foreseen, algorithm: {{type: echo, alpha: {{user: 0.1}}}}}},
  {{{PLAYING}, name: compared, algorithm: {{type: hierarchical_grpo, episode_agents: [first]}}}}]"""


def prepare(folder: Path, *overrides: str) -> RunDir:
    """A run directory made by ``submit --dry-run --run-dir``; no process is started."""
    tiny = make_tiny_model(folder / "tiny", task="alphabet-sort", experts=4, rows=500)
    settings = [
        f"model.name={tiny}/model",
        f"warmup.sft.data.path={tiny}/sft.jsonl",
        "warmup.max_steps=5",
        "environments.eval=[]",
        f"environments.train={ENVIRONMENTS}",
        "layout.inference={replicas: 1, tensor_parallel: 2, expert_parallel: true}",
        "inference.max_model_len=512",  # opsd shows the policy more than it saw
        "weights.transport=broadcast",
        "rollouts.batch_size=32",
        "rollouts.group_size=4",
        *overrides,
    ]
    words = [word for text in settings for word in ("--set", text)]
    done = primerl(
        "submit", "alphabet_sort/tiny", "-p", "local", "--dry-run", "--run-dir", "run", *words, cwd=folder
    )
    assert done.wait(timeout=PATIENCE_S) == 0, (folder / "submit.log").read_text()
    return RunDir(folder / "run")


@pytest.mark.slow
def test_every_role_of_a_run_can_be_started_by_its_own_command(tmp_path: Path) -> None:
    run = prepare(tmp_path, "max_steps=3")
    sft = primerl("role", "sft", "run", cwd=tmp_path)
    try:
        assert sft.wait(timeout=PATIENCE_S) == 0, (tmp_path / "sft.log").read_text()[-3000:]
    finally:
        end([sft])
    assert (run.phase("warmup").weights_step(5) / STABLE).exists()

    roles = [
        primerl("role", name, "run", cwd=tmp_path)
        for name in ("inference", "router", "env-server", "orchestrator", "trainer")
    ]
    roles.insert(0, primerl("role", "env-server", "run", "--index", "1", cwd=tmp_path))
    try:
        for index in (0, 1):  # an algorithm is not its server's matter: two environments have each of them
            server, other = (process_name(Role.ENV_SERVER, each) for each in (index, index + 2))
            wait_for(lambda server=server: read_endpoint(run, server), server)
            publish_endpoint(run, other, read_endpoint(run, server)["url"])
        for process, name in ((roles[4], "orchestrator"), (roles[5], "trainer")):
            assert process.wait(timeout=PATIENCE_S) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
        assert all(process.poll() is None for process in roles[:4])
    finally:
        end(roles)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == [1, 2, 3] and run.stable_weights()[-1] == run.latest_checkpoint() == 3
    assert "serving policy version 2 from the trainer, in group" in (tmp_path / "inference.log").read_text()
    # experts that a rank of the engine did not take over would sample tokens of other probability
    assert all(row["mismatch_kl/all/mean"] <= 0.1 for row in steps.values())
    assert all(any(row.get(f"loss/{name}") for row in steps.values()) for name in ("ref_kl", "ce"))
    batches = read_steps(run.metrics("orchestrator")).values()
    for env in ("alphabet-sort", "foreseen"):
        assert {row[name] for row in batches if (name := f"turns/{env}/max") in row} == {2}
    for env in ("nim", "compared"):
        played = [row for row in batches if f"reward/{env}/mean" in row]
        assert played and all(
            row[f"reward/{env}/first/mean"] == -row[f"reward/{env}/second/mean"] for row in played
        )
