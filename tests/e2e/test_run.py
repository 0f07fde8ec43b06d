"""The real system on CPU, as a user runs it: SFT, asynchronous RL whose reward rises, kills of every role, resume.

vLLM, the router, verifiers, torchrun with two ranks and the supervisor are all real; only the model is tiny.
"""

from __future__ import annotations

import json
import os
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
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.snapshot import take_snapshot
from tests.e2e.accounts import contradictions
from tests.e2e.runs import (
    command,
    events,
    last_step,
    process_of,
    processes_of,
    versions_served,
    wait_for_end,
    wait_in_run,
)
from tests.support import ROOT, is_alive, wait_for

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


def test_reward_rises_though_every_role_is_killed_once(start: Callable[..., RunDir], work: Path) -> None:
    """kill -9 of each role in the middle of one run, which goes on in the same attempt, and the policy learns.

    Servers are started again alone. Trainer and orchestrator go on together after the last checkpoint, with the engine
    that lives: it serves a policy of the lost steps then, and must be brought back to the checkpoint's. The trainer
    runs in a software environment of its own, which the profile names.
    """
    profile, python = profile_with_a_trainers_own_environment(work)
    run = start("killed", profile=str(profile))
    servers = [(1, "env_server-0", 1), (3, "router-0", 2), (5, "inference-0", 1)]
    learners = [(9, "trainer-0", 2), (13, "orchestrator-0", 1)]
    before_kills = []
    for step, name, depth in servers:
        wait_in_run(run, lambda step=step: last_step(run) >= step, f"step {step}")
        before_kills += processes_of(run.root)
        process_of(run.root, name, depth).kill()
    interpreters = [
        process_of(run.root, *which).cmdline()[0] for which in (("trainer-0", 2), ("orchestrator-0",))
    ]
    assert interpreters == [str(python), sys.executable]
    for step, name, depth in learners:
        wait_in_run(run, lambda step=step: step in versions_served(run), f"policy {step} at the engine")
        before_kills += processes_of(run.root)
        process_of(run.root, name, depth).kill()
        wait_for(
            lambda name=name: name in {row["process"] for row in events(run, "recovery_started")},
            f"the recovery from the end of {name}",
        )
    assert wait_for_end(run, 600) == RunState.DONE, run.events.read_text()[-2000:]
    # The supervisor writes the last state and then ends, the batch process after it.
    wait_for(lambda: not processes_of(run.root), "the batch process to end", 10)
    wait_for(lambda: not any(map(is_alive, before_kills)), "every process to end", 10)
    assert not contradictions(run)

    recoveries = events(run, "recovery_started")
    assert [row["after_step"] for row in recoveries] == [8, 12] and recoveries[0]["signal"] == "SIGKILL"
    assert len(events(run, "attempt_started")) == 1 and not run.failure.exists()
    incarnations = {name: each["incarnation"] for name, each in read_json(run.state)["processes"].items()}
    assert incarnations.pop("trainer-0") == incarnations.pop("orchestrator-0") == 2
    assert incarnations == {name: int(name in {each for _, each, _ in servers}) for name in incarnations}
    live = versions_served(run)
    assert [after for before, after in pairwise(live) if after < before] == [8, 12] and live[-1] == 16

    evaluations = read_steps(run.metrics("eval"))
    before, after = (evaluations[version]["eval/held-out/reward/mean"] for version in (0, 16))
    assert before < 0.75 and after > before + 0.2 and after > 0.75, (before, after)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, 17)) and run.latest_checkpoint() == 16
    mismatch = [row["mismatch_kl/all/mean"] for row in steps.values()]
    assert sum(mismatch[-3:]) / 3 <= 0.01 and max(mismatch) <= 0.02
    # the first batch of a recovery was sampled by the checkpoint's own policy: an engine of another one would show
    assert max(steps[after + 1]["mismatch_kl/all/mean"] for after in (8, 12)) <= 1e-6


def test_a_run_resumes_after_a_killed_trainer_a_cancel_and_a_killed_supervisor(
    start: Callable[..., RunDir], work: Path
) -> None:
    """Three ends and three resumes of one run, each from its last checkpoint; no end leaves a process behind."""
    run = start(
        "resumed",
        "max_steps=16",
        *SMALL,
        "recovery.in_place=false",
        "environments.train=[{id: reverse-text, curriculum: {type: difficulty_pools}}]",
        "rollouts.adaptive_concurrency.start=64",
    )

    # recovery inside the allocation is off: the death of a trainer's rank is the end of the attempt
    wait_in_run(
        run, lambda: run.latest_checkpoint() == 4 and last_step(run) >= 5, "a checkpoint and a step more"
    )
    before = processes_of(run.root)
    process_of(run.root, "trainer-0", 2).kill()
    assert wait_for_end(run, 30) == RunState.FAILED
    failure = read_json(run.failure)
    assert (failure["process"], failure["signal"]) == ("trainer-0", "SIGKILL")
    wait_for(lambda: not any(map(is_alive, before)), "every process to end", 10)

    # a cancel saves both sides
    command("resume", run.root.name, cwd=work)
    wait_in_run(run, lambda: 7 in steps_of(run, attempt=2), "two steps more")
    said = json.loads(command("cancel", run.root.name, "--wait", "--json", cwd=work).stdout)
    assert said["state"] == "stopped"
    cancelled_at = run.latest_checkpoint()
    assert cancelled_at is not None and cancelled_at == last_step(run) < 12
    wait_for(lambda: not processes_of(run.root), "every process to end", 10)

    # without its supervisor a run ends
    command("resume", run.root.name, cwd=work)
    wait_in_run(run, lambda: (run.latest_checkpoint() or 0) > cancelled_at, "a checkpoint")
    before = [each for each in processes_of(run.root) if "submitit" not in " ".join(each.cmdline())]
    os.kill(read_json(run.state)["pid"], signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, before)), "every process to end", 30)
    assert take_snapshot(run).state == RunState.FAILED
    last_saved = run.latest_checkpoint()

    done = command("resume", run.root.name, "--follow", cwd=work, timeout_s=600, check=False)
    assert done.returncode == ExitCode.DONE, done.stdout[-2000:] + done.stderr
    assert f"goes on after step {last_saved}" in done.stdout
    assert [steps_of(run, attempt)[0] for attempt in (1, 2, 3, 4)] == [
        *(1, 5, cancelled_at + 1, last_saved + 1)
    ]
    assert steps_of(run, 4)[-1] == run.latest_checkpoint() == 16
    state = read_json(run.checkpoint_side(16, "orchestrator") / "state.json")
    (curriculum,) = state["sampler"]["curricula"]
    pooled = [task for pool in curriculum["pools"].values() for task in pool]
    assert state["step"] == 16 and len(pooled) == len(set(pooled)) > 8
    limits = [row["concurrency/limit"] for row in read_steps(run.metrics("orchestrator")).values()]
    assert len(limits) == 16 and all(8 <= limit <= 1024 for limit in limits)
    assert not contradictions(run)
    wait_for(lambda: not processes_of(run.root), "every process to end", 10)


def steps_of(run: RunDir, attempt: int) -> list[int]:
    """Steps that the trainer finished in one attempt."""
    return [row["step"] for row in read_jsonl(run.metrics("trainer")) if row["attempt"] == attempt]


def profile_with_a_trainers_own_environment(folder: Path) -> tuple[Path, Path]:
    """A profile of this machine that names another interpreter for the trainer, and that interpreter.

    Its packages are those of this environment: what is shown is that the two need not be one.
    """
    venv.create(folder / "trainer-venv", symlinks=True, with_pip=False)
    (packages,) = (folder / "trainer-venv" / "lib").glob("python*/site-packages")
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    python = folder / "trainer-venv" / "bin" / "python"
    profile = folder / "two-environments.yaml"
    software = f"software: {{roles: {{trainer: {{python: {python}}}}}}}\n"
    profile.write_text((ROOT / "cluster_profiles" / "local.yaml").read_text() + software)
    return profile, python
