"""The complete system on CPU, as a user runs it: SFT, asynchronous RL whose reward rises, kills of every role, resume.

vLLM, the router, verifiers, torchrun with two ranks and the supervisor are all real; only the model is tiny.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import sysconfig
import venv
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.common.package import MODULES
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.accounts import contradictions, mismatch_with_and_without_staleness
from tests.support.helpers import PATIENCE_S, ROOT, is_alive, wait_for
from tests.support.hold import Hold
from tests.support.runs import (
    command,
    events,
    find_process,
    kill_processes_of,
    last_step,
    process_of,
    processes_of,
    told,
    versions_served,
    wait_for_end,
    wait_in_run,
)
from tests.support.terminal import Terminal

pytestmark = pytest.mark.e2e

# for runs that need not learn
SMALL = ("environments.eval=[]", "rollouts.batch_size=32", "rollouts.group_size=4")


def test_sft_learns_and_exports_a_model_that_transformers_loads(warm_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = [row["loss/mean"] for row in read_steps(RunDir(warm_model).metrics("sft")).values()]
    assert len(losses) == 300 and losses[-1] < 0.5 < losses[0]
    weights = warm_model / "weights" / "step_300"
    model = AutoModelForCausalLM.from_pretrained(weights)
    assert model.num_parameters() > 300_000 and AutoTokenizer.from_pretrained(weights).chat_template


@pytest.mark.slow
def test_ctrl_c_in_a_following_terminal_does_not_end_the_local_run(
    work: Path, warm_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("PRIMERL_HOME", str(work / "state"))
    run = RunDir(work / "runs" / "watched")
    words = ("submit", "sft.yaml", "-p", "local", "--set", "max_steps=40", "--follow")
    request.addfinalizer(lambda: kill_processes_of(run.root))
    with Terminal("primerl_hpc", *words, "--run-dir", str(run.root), cwd=work) as terminal:
        terminal.wait_for("starting sft")
        wait_in_run(run, lambda: find_process(run.root, "sft-0"), "the trainer's process")
        before = processes_of(run.root)
        terminal.press("\x03")
        terminal.wait_for("the run continues")
        assert terminal.end() == ExitCode.DONE, terminal.shown
    assert wait_for_end(run) == RunState.DONE, told(run)
    assert len(events(run, "attempt_started")) == 1 and not events(run, "stop_requested")
    assert max(read_steps(run.metrics("sft"))) == 40
    wait_for(lambda: not any(map(is_alive, before)), "every process to end")


def test_reward_rises_when_every_role_is_killed_once(
    start: Callable[..., RunDir], work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL for each role during one run, which continues in the same attempt, and the policy learns.

    Servers restart individually. Trainer and orchestrator restart together from the last checkpoint, with the running
    engine: it serves a policy of the lost steps and must be reset to that of the checkpoint. The trainer has its own
    software environment, which the profile names. The site has set a proxy for everyone, which does not respond: no
    request of the run may use it.
    """
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    profile, python = profile_with_a_trainers_own_environment(work)
    hold = Hold(work / "runs" / "killed", after=9)
    run = start("killed", hold.environment, *hold.variables, profile=str(profile))
    servers = [(1, "env_server-0", 1), (3, "router-0", 1), (5, "inference-0", 1)]
    learners = [(9, "trainer-0", 2), (13, "orchestrator-0", 1)]
    before_kills = []
    for step, name, depth in servers:
        wait_in_run(run, lambda step=step: last_step(run) >= step, f"step {step}")
        before_kills += processes_of(run.root)
        process_of(run.root, name, depth).kill()
    served = len(versions_served(run))
    wait_in_run(run, lambda: len(versions_served(run)) > served, "a policy at the engine's successor")
    interpreters = [
        process_of(run.root, *which).cmdline()[0] for which in (("trainer-0", 2), ("orchestrator-0",))
    ]
    assert interpreters == [str(python), sys.executable]
    for step, name, depth in learners:

        def is_served_and_saved(step: int = step) -> bool:
            return step in versions_served(run) and run.latest_checkpoint() == step - 1

        wait_in_run(run, is_served_and_saved, f"policy {step} at the engine, and a checkpoint before it")
        before_kills += processes_of(run.root)
        process_of(run.root, name, depth).kill()
        wait_for(
            lambda name=name: name in {row["process"] for row in events(run, "recovery_started")},
            f"the recovery from the end of {name}",
        )
        hold.move(after=step + 4)
    assert wait_for_end(run) == RunState.DONE, run.events.read_text()[-2000:]
    # The supervisor writes the last state and then ends, the batch process after it.
    wait_for(lambda: not processes_of(run.root), "the batch process to end")
    wait_for(lambda: not any(map(is_alive, before_kills)), "every process to end")
    assert not contradictions(run)

    recoveries = events(run, "recovery_started")
    assert [row["after_step"] for row in recoveries] == [8, 12] and recoveries[0]["signal"] == "SIGKILL"
    assert len(events(run, "attempt_started")) == 1 and not run.failure.exists()
    incarnations = {name: each["incarnation"] for name, each in read_json(run.state)["processes"].items()}
    assert incarnations.pop("trainer-0") == incarnations.pop("orchestrator-0") == 2
    assert incarnations == {name: int(name in {each for _, each, _ in servers}) for name in incarnations}
    starts = {row["process"]: row["phases"] for row in events(run, "role_ready") if row.get("phases")}
    assert {"launch", "imports and arguments", "model", "engine", "first token"} <= starts[
        "inference-0"
    ].keys()
    assert list(starts["trainer-0"]) == ["launch", "imports", "process group", "model"]
    assert list(starts["orchestrator-0"])[-2:] == ["engines and environments", "first rollout"]
    live = versions_served(run)
    assert [after for before, after in pairwise(live) if after < before] == [8, 12] and live[-1] == 16

    evaluations = read_steps(run.metrics("eval"))
    before, after = (evaluations[version]["eval/held-out/reward/mean"] for version in (0, 16))
    assert before < 0.75 and after > before + 0.2 and after > 0.75, (before, after)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, 17)) and run.latest_checkpoint() == 16
    # the first batch of a recovery may contain rollouts that waited in the checkpoint's queue
    stale, fresh = mismatch_with_and_without_staleness(run)
    assert stale <= 0.1 and fresh <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_slow_trainer_trains_no_token_that_is_older_than_the_level(
    start: Callable[..., RunDir], tmp_path: Path, level: int
) -> None:
    """``max_off_policy_steps`` is 8, which bounds the age only with ``async_level: auto``."""
    shutil.copy(ROOT / "tests" / "support" / "slow_loss.py", tmp_path)
    run = start(
        f"level-{level}",
        *SMALL,
        f"rollouts.async_level={level}",
        "rollouts.max_off_policy_steps=8",
        "max_steps=8",
        "checkpoint.interval=null",
        "loss={type: custom, import_path: 'slow_loss:slow_dppo'}",
        f"env.PYTHONPATH={tmp_path}",
    )
    assert wait_for_end(run) == RunState.DONE, told(run)
    ages = [row["off_policy/max"] for row in read_steps(run.metrics("orchestrator")).values()]
    assert len(ages) == 8 and max(ages) == level
    if level == 0:
        mismatch = [row["mismatch_kl/all/mean"] for row in read_steps(run.metrics("trainer")).values()]
        assert max(mismatch) < 1e-5  # float32 on both sides


def test_a_run_resumes_after_a_killed_trainer_a_cancel_and_a_killed_supervisor(
    start: Callable[..., RunDir], work: Path
) -> None:
    """End one run three times and resume it from its last checkpoint each time; no process remains after an end.

    Its checkpoints and policy versions are in another folder than the run directory. No process compiles a module.
    """
    profile = work / "with-storage.yaml"
    storage = "storage: {project: {path: $PRIMERL_HOME/project, holds: [checkpoints, weights]}}\n"
    profile.write_text((ROOT / "cluster_profiles" / "local.yaml").read_text() + storage)
    hold = Hold(work / "runs" / "resumed", after=5)
    run = start(
        "resumed",
        "max_steps=16",
        *SMALL,
        "layout.trainer.ranks=1",
        "recovery.in_place=false",
        "environments.train=[{id: held-reverse-text, curriculum: {type: difficulty_pools}}]",
        *hold.variables,
        "rollouts.adaptive_concurrency.start=64",
        profile=str(profile),
    )

    # recovery inside the allocation is off: the death of a trainer's rank is the end of the attempt
    wait_in_run(
        run, lambda: run.latest_checkpoint() == 4 and last_step(run) >= 5, "a checkpoint and a step more"
    )
    before = processes_of(run.root)
    process_of(run.root, "trainer-0", 2).kill()
    assert wait_for_end(run) == RunState.FAILED
    failure = read_json(run.failure)
    assert (failure["process"], failure["signal"]) == ("trainer-0", "SIGKILL")
    wait_for(lambda: not any(map(is_alive, before)), "every process to end")

    # a cancel saves both sides
    hold.move(after=9)  # not every step that the first attempt made is in its checkpoint
    command("resume", run.root.name, cwd=work)
    wait_in_run(run, lambda: 7 in steps_of(run, attempt=2), "two steps more")
    said = json.loads(command("cancel", run.root.name, "--wait", "--json", cwd=work).stdout)
    assert said["state"] == "stopped"
    cancelled_at = run.latest_checkpoint()
    assert cancelled_at is not None and cancelled_at == last_step(run) < 12
    wait_for(lambda: not processes_of(run.root), "every process to end")

    # without its supervisor a run ends
    hold.move(after=13)
    command("resume", run.root.name, cwd=work)
    wait_in_run(run, lambda: (run.latest_checkpoint() or 0) > cancelled_at, "a checkpoint")
    before = [each for each in processes_of(run.root) if "submitit" not in " ".join(each.cmdline())]
    os.kill(read_json(run.state)["pid"], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, before)), "every process to end")
    assert take_snapshot(run).state == RunState.FAILED
    last_saved = run.latest_checkpoint()

    hold.end()
    done = command("resume", run.root.name, "--follow", cwd=work, timeout_s=PATIENCE_S, check=False)
    assert done.returncode == ExitCode.DONE, done.stdout[-2000:] + done.stderr
    assert f"continues after step {last_saved}" in done.stdout
    assert [steps_of(run, attempt)[0] for attempt in (1, 2, 3, 4)] == [
        *(1, 5, cancelled_at + 1, last_saved + 1)
    ]
    assert steps_of(run, 4)[-1] == run.latest_checkpoint() == 16
    (elsewhere,) = (work / "state" / "project").iterdir()
    assert (elsewhere / "checkpoints" / "step_16").is_dir() and (elsewhere / "weights" / "step_16").is_dir()
    state = read_json(run.checkpoint_side(16, "orchestrator") / "state.json")
    (curriculum,) = state["sampler"]["curricula"]
    pooled = [task for pool in curriculum["pools"].values() for task in pool]
    assert state["step"] == 16 and len(pooled) == len(set(pooled)) > 8
    limits = [row["concurrency/limit"] for row in read_steps(run.metrics("orchestrator")).values()]
    assert len(limits) == 16 and all(8 <= limit <= 1024 for limit in limits)
    assert not contradictions(run)
    wait_for(lambda: not processes_of(run.root), "every process to end")
    compiled = [path for path in run.code_copy(1).rglob("*.pyc") if MODULES not in path.parts]
    assert not compiled, "no process compiles modules of the package"


def steps_of(run: RunDir, attempt: int) -> list[int]:
    """Steps that the trainer finished in one attempt."""
    return [row["step"] for row in read_jsonl(run.metrics("trainer")) if row["attempt"] == attempt]


def profile_with_a_trainers_own_environment(folder: Path) -> tuple[Path, Path]:
    """A profile of this machine with another interpreter for the trainer, and that interpreter.

    It uses the packages of this environment; the test shows that the interpreters may differ.
    """
    venv.create(folder / "trainer-venv", symlinks=True, with_pip=False)
    (packages,) = (folder / "trainer-venv" / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    python = folder / "trainer-venv" / "bin" / "python"
    profile = folder / "two-environments.yaml"
    software = f"software: {{roles: {{trainer: {{python: {python}}}}}}}\n"
    profile.write_text((ROOT / "cluster_profiles" / "local.yaml").read_text() + software)
    return profile, python
