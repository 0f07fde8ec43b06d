"""Distillation on CPU, as a user runs it: a policy that copies half of the words learns from a teacher that reverses
them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import RunState
from primerl_hpc.inference.worker.mirror import Mirror
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.weights.sources import DeltaChain
from tests.support.accounts import contradictions
from tests.support.api import Request, chat_completion, serve
from tests.support.helpers import PATIENCE_S
from tests.support.hold import Hold
from tests.support.runs import (
    SFT_RECIPE,
    TINY,
    command,
    events,
    process_of,
    versions_served,
    wait_for_end,
    wait_in_run,
)

pytestmark = pytest.mark.e2e
STEPS = 10
SHORT = (
    f"max_steps={STEPS}",
    f"environments.eval=[{{id: reverse-text, name: held-out, args: {{split: test}}, interval: {STEPS}, num_tasks: 64}}]",  # noqa: E501
    "checkpoint.interval=null",
    "optimizer.lr=1.0e-3",
    "scheduler.warmup_steps=0",
)


@pytest.fixture(scope="module")
def better_model(work: Path, warm_model: Path) -> Path:
    """The warm model after further SFT on correct demonstrations only."""
    rows = map(json.loads, (work / "outputs" / "tiny" / "sft.jsonl").read_text().splitlines())
    right = [json.dumps(row) for row in rows if row["completion"] == row["prompt"][::-1]]
    (work / "right.jsonl").write_text("\n".join(right))
    recipe = work / "better.yaml"
    recipe.write_text(SFT_RECIPE.format(tiny=TINY, data=work / "right.jsonl"))
    changes = [f"model.name={warm_model}/weights/step_300", "max_steps=100"]
    words = [word for text in changes for word in ("--set", text)]
    command("submit", str(recipe), "-p", "local", "--run-dir", "runs/better", *words, "--follow", cwd=work)
    return RunDir(work / "runs" / "better").weights_step(100)


def assert_it_learnt(run: RunDir, loss: str) -> None:
    assert wait_for_end(run) == RunState.DONE, run.events.read_text()[-2000:]
    evaluations = read_steps(run.metrics("eval"))
    before, after = (evaluations[version]["eval/held-out/reward/mean"] for version in (0, STEPS))
    assert before < 0.75 and after > before + 0.1, (before, after)
    rows = read_steps(run.metrics("trainer"))
    assert list(rows) == list(range(1, STEPS + 1))
    for row in rows.values():
        assert {name for name in ("ce", "ref_kl") if f"loss/{name}" in row} == {loss}, row


def test_opd_learns_from_a_teacher_that_is_restarted_and_its_engine_follows_deltas(
    start: Callable[..., RunDir], better_model: Path, work: Path, tmp_path: Path
) -> None:
    teacher = f"{{model: {{name: {better_model}, dtype: float32}}, inference: {{kv_cache_gib: 0.125}}}}"
    weights = "weights={transport: delta, full_interval: 4, keep_last: 20}"
    hold = Hold(work / "runs" / "opd", after=3)
    run = start(
        "opd",
        hold.environment,
        *hold.variables,
        *SHORT,
        "algorithm={type: opd}",
        f"teacher={teacher}",
        weights,
    )
    wait_in_run(run, lambda: 1 in versions_served(run), "policy 1 at the engine")
    run.full_weights_request.touch()
    process_of(run.root, "teacher-0").kill()
    hold.end()
    assert_it_learnt(run, "ref_kl")
    assert not contradictions(run)
    assert_links_lead_to_the_whole_versions(run, tmp_path)
    assert [row["process"] for row in events(run, "role_restarting")] == ["teacher-0"]
    assert [row["process"] for row in events(run, "role_ready")].count("teacher-0") == 2
    assert read_json(run.state)["processes"]["teacher-0"]["log"] == "teacher/0.log"
    said = command("logs", run.root.name, "teacher", "--lines", "2000", cwd=work).stdout
    assert f"serving {better_model}" in said and "serving policy version" not in said


def assert_links_lead_to_the_whole_versions(run: RunDir, node: Path) -> None:
    """An engine with the first version obtains the bytes of the last one from deltas only, as the run's engine did."""
    whole = run.stable_weights()
    assert {1, 4, 8, STEPS} <= set(whole) < set(range(1, STEPS + 1))
    assert run.list_steps(run.deltas, STABLE) == list(range(2, STEPS + 1))
    assert not run.full_weights_request.exists()
    links = tuple((version, str(run.delta_step(version))) for version in range(2, STEPS + 1))
    folder = Mirror(node).update_to(DeltaChain(str(run.weights_step(1)), 1, links), STEPS)
    for shard in folder.glob("*.safetensors"):
        assert shard.read_bytes() == (run.weights_step(STEPS) / shard.name).read_bytes(), shard.name
    assert versions_served(run)[-1] == STEPS
    log = (run.attempt_logs(1) / "inference" / "0.log").read_text(errors="replace")
    assert f"from {run.delta_step(STEPS)}" in log and "; copying policy version" not in log


@dataclass
class Api:
    url: str
    is_open: Event
    """Until then it responds to health checks of the run, and rollouts wait."""


@pytest.fixture
def reversing_api() -> Iterator[Api]:
    """An external chat API whose model reverses words; its key is ``theirs``."""
    is_open = Event()

    def answer(request: Request) -> tuple[int, dict]:
        body = request.body
        is_open.wait(0 if body.get("max_tokens") == 1 else PATIENCE_S)
        is_theirs = request.headers["authorization"] == "Bearer theirs" and body["model"] == "reverser"
        reply = str(body["messages"][-1]["content"])[::-1]
        return 200 if is_theirs else 401, chat_completion({"content": reply}, body["model"])

    with serve(answer) as url:
        yield Api(f"{url}/v1", is_open)
        is_open.set()


@pytest.mark.slow
def test_sft_distill_learns_from_any_chat_api_and_updates_an_engine_that_is_killed(
    start: Callable[..., RunDir], work: Path, reversing_api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "theirs")
    teacher = f"{{base_url: '{reversing_api.url}', model: {{name: reverser}}, key_variable: THEIR_KEY}}"
    weights = "weights={transport: broadcast, full_interval: 100}"
    kind = ("algorithm={type: sft_distill}", "rollouts.batch_size=64")
    hold = Hold(work / "runs" / "distilled", after=4)
    run = start("distilled", hold.environment, *hold.variables, *SHORT, *kind, f"teacher={teacher}", weights)
    wait_in_run(run, lambda: 0 in read_steps(run.metrics("eval")), "the evaluation of the untaught policy")
    reversing_api.is_open.set()
    wait_in_run(run, lambda: 2 in versions_served(run), "policy 2 at the engine")
    process_of(run.root, "inference-0").kill()
    hold.end()
    assert_it_learnt(run, "ce")
    assert {row["process"] for row in events(run, "role_restarting")} == {"inference-0"}
    log = (run.attempt_logs(1) / "inference" / "0.log").read_text(errors="replace")
    sent = re.findall(r"serving policy version (\d+) from the trainer, in group (\w+)", log)
    assert sent[0][0] == "1" and sent[-1][0] == str(STEPS)
    assert len({group for _, group in sent}) == 2, sent  # another one after the engine's death
    assert STEPS in run.stable_weights() and len(run.stable_weights()) < STEPS / 2
