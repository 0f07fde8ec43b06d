"""The real system on CPU, as a user runs it: SFT, asynchronous RL whose reward rises, kills of every role, resume.

vLLM, the router, verifiers, torchrun with two ranks and the supervisor are all real; only the model is tiny.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, read_jsonl
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.snapshot import take_snapshot
from tests.support import ROOT, is_alive, make_tiny_model, wait_for

pytestmark = [pytest.mark.e2e]

START_S = (
    420.0  # engines and environment servers take most of a minute on two cores, minutes on a busy machine
)
RL_RECIPE = """\
base: {tiny}
name: e2e
warmup: null
max_steps: 24
environments:
  eval:
    - {{id: reverse-text, name: held-out, args: {{split: test}}, interval: 12, samples: 2, num_tasks: 32}}
checkpoint: {{interval: 4, keep_last: 2}}
"""

SFT_RECIPE = """\
base: {tiny}
kind: sft
name: warm
warmup: null
max_steps: 300
sft:
  data: {{path: {data}}}
  batch_unit: samples
  batch_size: 64
optimizer: {{type: adamw, lr: 2.0e-3, weight_decay: 0.01, betas: [0.9, 0.98]}}
scheduler: {{type: linear, warmup_steps: 20, decay_steps: 90, min_lr_ratio: 0.1}}
checkpoint: {{interval: 100}}
"""


def command(
    *words: str, cwd: Path, timeout_s: float = 400, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """``primerl-hpc …`` as a user types it."""
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def processes_of(root: Path) -> list[psutil.Process]:
    """Supervisor and guards of a run, and everything below them.

    Engines and environment servers overwrite their command line and environment, so the tree has to be asked.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_ours = any(word.startswith("primerl_hpc.runtime.") for word in words) and str(root) in words
            for each in [process, *process.children(recursive=True)] if is_ours else []:
                found[each.pid] = each
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found.values() if is_alive(process)]


def process_of(root: Path, name: str, depth: int = 1) -> psutil.Process:
    """The process of a role (1), or its first child (2): the router itself, or a rank of the trainer."""
    for process in processes_of(root):
        words = process.cmdline()
        if "primerl_hpc.runtime.guard" in words and words[-1] == name:
            for _ in range(depth):
                process = process.children()[0]  # noqa: PLW2901
            return process
    raise AssertionError(f"no {name} runs")


def events(run: RunDir, name: str) -> list[dict]:
    return [row for row in read_jsonl(run.events) if row["event"] == name]


def versions_served(run: RunDir) -> list[int]:
    """Policy versions that the engine loaded while it served, in order."""
    log = run.attempt_logs(1) / "inference" / "0.log"
    said = log.read_text(errors="replace") if log.exists() else ""
    return [int(version) for version in re.findall(r"serving policy version (\d+) from", said)]


def last_step(run: RunDir) -> int:
    return max(read_steps(run.metrics("trainer")), default=0)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a tiny model that SFT has taught both the right and the wrong answer."""
    folder = tmp_path_factory.mktemp("work")
    make_tiny_model(folder / "outputs" / "tiny", rows=20_000)
    return folder


@pytest.fixture(scope="module")
def warm_model(work: Path) -> Path:
    recipe = work / "sft.yaml"
    tiny = ROOT / "recipes" / "reverse_text" / "tiny.yaml"
    recipe.write_text(SFT_RECIPE.format(tiny=tiny, data=work / "outputs" / "tiny" / "sft.jsonl"))
    os.environ["PRIMERL_HOME"] = str(work / "state")
    command("submit", str(recipe), "-p", "local", "--run-dir", "runs/warm", "--follow", cwd=work)
    return work / "runs" / "warm"


@pytest.fixture
def start(work: Path, warm_model: Path, monkeypatch: pytest.MonkeyPatch):
    """Submit an RL run from the warm model; whatever the test does, nothing of it stays alive."""
    monkeypatch.setenv("PRIMERL_HOME", str(work / "state"))
    started: list[RunDir] = []

    def submit(name: str, *overrides: str) -> RunDir:
        recipe = work / "rl.yaml"
        recipe.write_text(RL_RECIPE.format(tiny=ROOT / "recipes" / "reverse_text" / "tiny.yaml"))
        model = warm_model / "weights" / "step_300"
        words = [word for text in (f"model.name={model}", *overrides) for word in ("--set", text)]
        command("submit", str(recipe), "-p", "local", "--run-dir", f"runs/{name}", *words, cwd=work)
        started.append(RunDir(work / "runs" / name))
        return started[-1]

    yield submit
    for run in started:
        for process in processes_of(run.root):
            process.kill()


def follow(
    run: RunDir, cwd: Path, *, words: tuple[str, ...] = ("resume",)
) -> subprocess.CompletedProcess[str]:
    return command(*words, run.root.name, "--follow", cwd=cwd, timeout_s=600, check=False)


def wait_for_end(run: RunDir, timeout_s: float = 420.0) -> RunState:
    wait_for(lambda: take_snapshot(run).state.is_final, f"{run.root.name} to end", timeout_s)
    return take_snapshot(run).state


def test_sft_learns_and_exports_a_model_that_transformers_loads(warm_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = [row["loss/mean"] for row in read_steps(RunDir(warm_model).metrics("sft")).values()]
    assert len(losses) == 300 and losses[-1] < 0.5 < losses[0]
    weights = warm_model / "weights" / "step_300"
    model = AutoModelForCausalLM.from_pretrained(weights)
    assert model.num_parameters() > 300_000 and AutoTokenizer.from_pretrained(weights).chat_template


def test_reward_rises_though_engine_router_and_environment_server_are_killed(
    start: Callable[..., RunDir], work: Path
) -> None:
    """kill -9 of each serving role in the middle of a run: it goes on to the end, and the policy learns."""
    run = start("serving")
    kills = [(2, "env_server-0", 1), (5, "router-0", 2), (8, "inference-0", 1)]
    before_kills = []
    for step, name, depth in kills:
        wait_for(lambda step=step: last_step(run) >= step, f"step {step}", START_S)
        before_kills += processes_of(run.root)
        process_of(run.root, name, depth).kill()
    assert wait_for_end(run, 600) == RunState.DONE, (run.root / "control" / "events.jsonl").read_text()[
        -2000:
    ]
    restarted = {row["process"] for row in events(run, "role_restarting")}
    assert restarted == {name for _, name, _ in kills}
    # The supervisor writes the last state and then ends, the batch process after it.
    wait_for(lambda: not processes_of(run.root), "the batch process to end", 10)
    wait_for(lambda: not any(map(is_alive, before_kills)), "every process to end", 10)

    evaluations = read_steps(run.metrics("eval"))
    before, after = (evaluations[version]["eval/held-out/reward/mean"] for version in (0, 24))
    assert before < 0.75 and after > before + 0.1 and after > 0.75, (before, after)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, 25))
    last = [row["mismatch_kl/all/mean"] for row in list(steps.values())[-3:]]
    assert sum(last) / 3 <= 0.01


def test_a_killed_trainer_stops_the_run_where_recovery_is_off_and_resume_finishes_it(
    start: Callable[..., RunDir], work: Path
) -> None:
    name = "trainer-0"
    run = start(
        "killed",
        "max_steps=8",
        "environments.eval=[]",
        "recovery.in_place=false",
        "environments.train=[{id: reverse-text, curriculum: {type: difficulty_pools}}]",
        "rollouts.adaptive_concurrency.start=64",
    )
    wait_for(
        lambda: run.latest_checkpoint() == 4 and last_step(run) >= 5, "a checkpoint and a step more", START_S
    )
    before = processes_of(run.root)
    process_of(run.root, name, 2).kill()
    killed_at = time.monotonic()
    assert wait_for_end(run, 30) == RunState.FAILED
    assert time.monotonic() - killed_at < 30
    failure = read_json(run.failure)
    assert (failure["process"], failure["signal"]) == (name, "SIGKILL")
    wait_for(lambda: not any(map(is_alive, before)), "every process to end", 10)

    done = follow(run, work)
    assert done.returncode == ExitCode.DONE, done.stdout[-2000:] + done.stderr
    assert "goes on after step 4" in done.stdout
    rows = list(read_jsonl(run.metrics("trainer")))
    assert [row["step"] for row in rows if row["attempt"] == 2] == [5, 6, 7, 8]
    state = read_json(run.checkpoint_side(8, "orchestrator") / "state.json")
    assert state["step"] == 8 and run.latest_checkpoint() == 8
    (curriculum,) = state["sampler"]["curricula"]
    pooled = [task for pool in curriculum["pools"].values() for task in pool]
    assert len(pooled) == len(set(pooled)) > 8
    limits = [row["concurrency/limit"] for row in read_steps(run.metrics("orchestrator")).values()]
    assert len(limits) == 8 and all(8 <= limit <= 1024 for limit in limits)
    wait_for(lambda: not processes_of(run.root), "every process to end", 10)


def test_a_killed_trainer_and_a_killed_orchestrator_go_on_in_place_with_the_same_engine(
    start: Callable[..., RunDir], work: Path
) -> None:
    """The engine serves a policy of the lost steps then: it must be brought back to the checkpoint's."""
    run = start("recovering", "max_steps=12", "environments.eval=[]")
    for step, name, depth in [(5, "trainer-0", 2), (9, "orchestrator-0", 1)]:
        wait_for(lambda step=step: step in versions_served(run), f"policy {step} at the engine", START_S)
        process_of(run.root, name, depth).kill()
        wait_for(
            lambda name=name: name in {row["process"] for row in events(run, "recovery_started")},
            f"the recovery from the end of {name}",
        )
    assert wait_for_end(run, 600) == RunState.DONE
    wait_for(lambda: not processes_of(run.root), "every process to end", 10)

    steps = [row["after_step"] for row in events(run, "recovery_started")]
    assert steps == [4, 8] and len(events(run, "attempt_started")) == 1
    assert events(run, "recovery_started")[0]["signal"] == "SIGKILL" and not run.failure.exists()
    incarnations = {name: each["incarnation"] for name, each in read_json(run.state)["processes"].items()}
    assert incarnations.pop("trainer-0") == incarnations.pop("orchestrator-0") == 2
    assert set(incarnations.values()) == {0}  # engine, router and environment server lived through it
    assert run.latest_checkpoint() == 12
    live = versions_served(run)
    assert [after for before, after in pairwise(live) if after < before] == steps and live[-1] == 12
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, 13))
    assert max(row["mismatch_kl/all/mean"] for row in steps.values()) <= 0.02


def test_cancel_saves_both_sides_and_resume_continues_there(start: Callable[..., RunDir], work: Path) -> None:
    run = start("cancelled", "max_steps=10", "environments.eval=[]", "checkpoint.interval=null")
    wait_for(lambda: last_step(run) >= 2, "two steps", START_S)
    said = json.loads(command("cancel", run.root.name, "--wait", "--json", cwd=work).stdout)
    assert said["state"] == "stopped"
    saved = run.latest_checkpoint()
    assert saved is not None and saved == last_step(run) < 10
    wait_for(lambda: not processes_of(run.root), "every process to end", 10)
    assert follow(run, work).returncode == ExitCode.DONE
    assert list(read_steps(run.metrics("trainer"))) == list(range(1, 11))


def test_a_killed_supervisor_leaves_no_process_and_the_run_resumes(
    start: Callable[..., RunDir], work: Path
) -> None:
    run = start("orphaned", "max_steps=6", "environments.eval=[]")
    wait_for(lambda: run.latest_checkpoint() == 4, "a checkpoint", START_S)
    before = [each for each in processes_of(run.root) if "submitit" not in " ".join(each.cmdline())]
    os.kill(read_json(run.state)["pid"], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, before)), "every process to end", 30)
    assert take_snapshot(run).state == RunState.FAILED
    assert follow(run, work).returncode == ExitCode.DONE
