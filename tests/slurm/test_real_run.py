"""The complete system on a real SLURM over several nodes: RL, inference only, evaluation only, with a tiny model.

Nodes have one CPU slot each unless stated otherwise, so that two ranks of an engine or trainer span two nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import WARMUP_PHASE, RunState
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import ask
from tests.support.accounts import contradictions, mismatch_with_and_without_staleness
from tests.support.helpers import PATIENCE_S, ROOT, make_tiny_model, wait_for
from tests.support.hold import Hold
from tests.support.real_slurm import SMALL, RealRun
from tests.support.runs import events
from tests.support.serving import hf_logprobs
from tests.support.virtual_slurm import Cluster, run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("acting_user")]
POST = f"""
import ssl, sys, urllib.request
url, folder, body = sys.argv[1:]
key, context = open(folder + "/api_key").read(), ssl.create_default_context(cafile=folder + "/authority.pem")
headers = {{"Authorization": f"Bearer {{key}}", "Content-Type": "application/json"}}
request = urllib.request.Request(url, body.encode(), headers)
with urllib.request.urlopen(request, timeout={PATIENCE_S}, context=context) as answer:
    print(answer.read().decode())
"""


@pytest.fixture(scope="module")
def model(shared_folder: Path) -> Path:
    folder = make_tiny_model(shared_folder / "tiny", rows=1) / "model"
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read
    return folder


@pytest.fixture
def submit(cluster: Cluster, model: Path, tmp_path: Path) -> Iterator[Callable[..., RealRun]]:
    profile = dict(load_yaml(ROOT / "cluster_profiles" / "virtual.yaml").values)
    made: list[RealRun] = []

    def go(
        name: str,
        recipe: dict[str, Any],
        *more: str,
        slots: int = 1,
        command: str = "submit",
        policy: Path = model,
    ) -> RealRun:
        profile["node"] = {**profile["node"], "cpu_slots": slots}
        (tmp_path / "profile.yaml").write_text(dump_yaml(profile))
        path = tmp_path / f"{name}.yaml"
        path.write_text(dump_yaml({**SMALL, "name": name, **recipe}))
        root = tmp_path / "runs" / name
        words = (command, str(path), "-p", str(tmp_path / "profile.yaml"), "--run-dir", str(root))
        done = run_cli(*words, "--set", f"model.name={policy}", *more)
        if (root / "control" / "job.json").exists():
            made.append(RealRun(root, done.stdout))
        assert done.returncode == 0, done.stderr + "".join(each.words() for each in made)
        return made[-1]

    yield go
    for each in made:
        jobs = [str(id_) for name, id_ in read_json(each.run.job).items() if name.endswith("job_id")]
        subprocess.run(["scancel", "--full", *jobs], check=False, capture_output=True)
    cluster.wait_until_idle()


def test_sft_and_then_rl_with_an_engine_and_a_trainer_over_two_nodes_each(
    submit: Callable[..., RealRun], tmp_path: Path
) -> None:
    """A data-parallel engine on two nodes, each with half of the experts, loads deltas of a trainer on two nodes.

    It starts from the model of an SFT phase over two nodes that saves checkpoints.
    """
    tiny = make_tiny_model(tmp_path / "experts", rows=40, experts=4)
    experts = tiny / "model"
    engine = {"replicas": 1, "data_parallel": 2, "expert_parallel": True}
    layout = {"inference": engine, "trainer": {"ranks": 2}}
    links = {"transport": "delta", "full_interval": 9}
    warmup = {
        "max_steps": 4,
        "sft": {"data": {"path": str(tiny / "sft.jsonl")}, "batch_unit": "samples", "batch_size": 8},
        "checkpoint": {"interval": 2},
    }
    recipe = {"layout": layout, "weights": links, "max_steps": 4, "warmup": warmup}
    real = submit("rl", recipe, "--follow", policy=experts)
    assert real.state == RunState.DONE, real.words()
    assert all(words in real.said for words in ("1/4 reward", "4/4 reward", "run done")), real.said
    steps = read_steps(real.run.metrics("trainer"))
    assert list(steps) == [1, 2, 3, 4]
    log = (real.run.latest_logs / "inference" / "0_0.log").read_text(errors="replace")
    # batch 4 waits until version 2 or 3 is live, and both are links of the chain; the run may end before version 3
    assert any(f"serving policy version {v} from {real.run.delta_step(v)}" in log for v in (2, 3)), log
    # a rank with other weights than the trainer's, or without the other's experts, would sample tokens of other
    # probability
    stale, fresh = mismatch_with_and_without_staleness(real.run)
    assert stale <= 0.1 and fresh <= 1e-6
    assert real.run.latest_checkpoint() == 4
    wait_for(lambda: {"inference-0", "trainer-0"} <= set(real.steps()), "accounting", tell=real.steps)
    nodes = real.steps()
    assert (nodes["inference-0"], nodes["trainer-0"]) == ("n[1-2]", "n[3-4]")
    check_sft(real.run.phase(WARMUP_PHASE), nodes["sft-0"])
    assert nodes["orchestrator-0"] == nodes["router-0"] == "n1"
    assert [path.name for path in sorted(real.run.latest_logs.glob("inference/0_*.log"))] == [
        "0_0.log",
        "0_1.log",
    ]


def check_sft(run: RunDir, nodes: str) -> None:
    assert nodes == "n[3-4]"
    steps = read_steps(run.metrics("sft"))
    assert list(steps) == [1, 2, 3, 4] and steps[4]["loss/mean"] < steps[1]["loss/mean"]
    assert run.complete_checkpoints() == [2, 4]
    for step in (2, 4):
        assert len(list(run.checkpoint_side(step, "trainer").glob("*.safetensors"))) == 2  # of a rank each
    assert list(run.stable_weights()) == [4]


@pytest.mark.slow
def test_a_run_continues_without_its_elastic_engines_and_accepts_new_ones(
    submit: Callable[..., RealRun], tmp_path: Path
) -> None:
    """The trainer's job is preempted: it saves, loses no step, and finds both engines again.

    Then one of them is cancelled and the other requeued: the run waits, accepts the requeued one, and ends.
    """
    engines_of = {"elastic": True, "replicas": 2, "partition": "main"}
    layout = {"inference": engines_of, "trainer": {"ranks": 2}}
    hold = Hold(tmp_path / "runs" / "elastic", after=30)
    changes = [word for text in (hold.environment, *hold.variables) for word in ("--set", text)]
    recipe = {"layout": layout, "max_steps": 40}
    real = submit("elastic", recipe, "--partition", "preemptible", *changes, slots=2)

    def lives(event: str) -> list[tuple[str, int]]:
        return [(row["process"], row["incarnation"]) for row in events(real.run, event)]

    wait_for(lambda: len(lives("engine_joined")) == 2, "two engines", real.words)
    wait_for(lambda: read_steps(real.run.metrics("trainer")), "a step", real.words)
    urgent = ["sbatch", "--parsable", f"--nodelist={read_json(real.run.state)['hosts'][0]}", "--exclusive"]
    taker = ask([*urgent, "--output=/dev/null", "--wrap=sleep 600"]).strip()
    wait_for(lambda: events(real.run, "run_requeued"), "its preemption", tell=real.words)
    subprocess.run(["scancel", taker], check=True)
    wait_for(lambda: len(lives("engine_joined")) == 4, "both engines in attempt 2", tell=real.words)
    engines = read_json(real.run.job)["engines_job_id"]
    subprocess.run(["scancel", f"{engines}_0"], check=True)
    wait_for(lambda: ("inference-0", 1) in lives("engine_left"), "its leave", tell=real.words)
    subprocess.run(["scontrol", "requeue", f"{engines}_1"], check=True)
    wait_for(lambda: ("inference-1", 1000) in lives("engine_joined"), "its return", real.words)
    hold.end()
    real.wait_for_state(RunState.DONE)
    steps = read_steps(real.run.metrics("trainer"))
    assert list(steps) == list(range(1, 41)) and not real.repeated_steps()
    assert {row["attempt"] for row in steps.values()} == {1, 2} and not contradictions(real.run)
    # an engine that served another version than it should would sample tokens of other probability
    stale, fresh = mismatch_with_and_without_staleness(real.run)
    assert stale <= 0.1 and fresh <= 1e-6
    wait_for(lambda: ask(["squeue", "--noheader"]) == "", "an empty queue", tell=lambda: ask(["squeue"]))


@pytest.mark.slow
def test_an_inference_run_reports_its_address_and_serves(
    cluster: Cluster, submit: Callable[..., RealRun], model: Path
) -> None:
    """One engine whose tensor parallel ranks are on two nodes, behind the router."""
    real = submit(
        "serve", {"kind": "inference", "layout": {"inference": {"replicas": 1, "tensor_parallel": 2}}}
    )
    wait_for(lambda: read_endpoint(real.run, "inference-0"), "the engine", real.words)
    endpoint = read_endpoint(real.run, "router-0")
    assert endpoint is not None
    url = endpoint["url"]
    prompt = [1, 5, 103, 40, 41, 42, 2]
    parameters = {"max_tokens": 8, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
    body = json.dumps({"token_ids": prompt, "sampling_params": parameters})
    post = (sys.executable, "-c", POST, f"{url}/inference/v1/generate", str(run_keys(real.run).folder), body)
    answers: list[str] = []

    def ask_for_tokens() -> bool:  # the network of the nodes can be reached from the cluster's login node
        answers.append(cluster.tool("exec", *post, check=False))
        return '"choices"' in answers[-1]

    wait_for(ask_for_tokens, "tokens through the router", tell=lambda: answers[-1:])
    answer = json.loads(answers[-1])
    choice = answer["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx(hf_logprobs(model, prompt, choice["token_ids"]), abs=1e-4)
    chat = ("chat", str(real.run.root), "--prompt", "abc", "--max-tokens", "4", "--json")
    said = json.loads(run_cli(*chat).stdout)
    assert 1 <= said["tokens"] <= 4 and said["versions"] == [0]

    def ready() -> set[str]:
        return {row["process"] for row in events(real.run, "role_ready")}

    # the supervisor records it a moment after the engine has written its address
    wait_for(lambda: ready() == {"inference-0", "router-0"}, "the events", real.words)
    assert url in run_cli("status", str(real.run.root)).stdout
    assert run_cli("cancel", str(real.run.root), "--wait").returncode == 0
    assert real.state == RunState.STOPPED


@pytest.mark.slow
def test_an_evaluation_run_scores_and_ends_and_its_engine_serves_chat(
    cluster: Cluster, submit: Callable[..., RealRun]
) -> None:
    """One node with one engine of two tensor-parallel ranks, which listen only on the loopback of that node."""
    held_out = {
        "id": "reverse-text",
        "name": "held-out",
        "args": {"split": "test"},
        "num_tasks": 8,
        "samples": 2,
    }
    real = submit(
        "measure",
        {
            "environments": {**SMALL["environments"], "eval": [held_out]},
            "layout": {"inference": {"replicas": 1, "tensor_parallel": 2}},
        },
        slots=2,
        command="eval",
    )

    def evaluators() -> list[int]:
        starts = f"{sys.executable} -m primerl_hpc.roles.evaluator"
        return [pid for pid, line in cluster.processes_of(real.run).items() if line.startswith(starts)]

    wait_for(evaluators, "the evaluator", real.words)
    (evaluator,) = evaluators()
    os.kill(evaluator, signal.SIGSTOP)  # its end would end the job before a user could chat
    wait_for(lambda: read_endpoint(real.run, "inference-0"), "the engine", real.words)
    said = run_cli("chat", str(real.run.root), "--prompt", "abc", "--max-tokens", "4", "--json")
    os.kill(evaluator, signal.SIGCONT)
    assert said.returncode == 0 and 1 <= json.loads(said.stdout)["tokens"] <= 4, said.stderr
    real.wait_for_state(RunState.DONE)
    row = read_steps(real.run.metrics("eval"))[0]
    assert 0 <= row["eval/held-out/reward/mean"] <= 1
    (score,) = json.loads(run_cli("scores", str(real.run.root), "--json").stdout)["scores"]
    assert (score["environment"], score["step"]) == ("held-out", 0)
    wait_for(lambda: "evaluator-0" in real.steps(), "accounting", tell=real.steps)
    assert set(real.steps().values()) == {"n1"}
