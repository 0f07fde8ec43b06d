"""One accelerator for engine and trainer, in turns, with real vLLM: both are killed once, and the run recovers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import RunState
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.turns import read_grant, read_request
from tests.support.helpers import wait_for
from tests.support.hold import Hold
from tests.support.runs import (
    command,
    events,
    last_step,
    process_of,
    processes_of,
    told,
    versions_served,
    wait_for_end,
    wait_in_run,
)

pytestmark = pytest.mark.e2e

ENGINE, TRAINER = "inference-0", "trainer-0"


@pytest.mark.slow
def test_one_slot_is_used_in_turns_and_both_sides_recover_from_kills(
    start: Callable[..., RunDir], work: Path
) -> None:
    """The engine is killed while it sleeps, and must not start before the trainer's turn is over.

    The trainer is killed while the engine serves. Its successor builds its model only when the engine sleeps.
    """
    hold = Hold(work / "runs" / "colocated", after=8, turn=4)
    run = start(
        "colocated",
        hold.environment,
        hold.loss,
        *hold.variables,
        "layout.trainer.ranks=1",
        "layout.colocated=true",
        "environments.eval=[]",
        "rollouts.batch_size=32",
        "rollouts.group_size=4",
        "rollouts.max_off_policy_steps=0",
        "max_steps=12",
        "checkpoint.interval=2",
    )
    plan = read_json(run.plan)
    slots = {process["name"]: process["accelerators"] for process in plan["phases"][0]["processes"]}
    assert slots[ENGINE] == slots[TRAINER] == [0]

    hold.wait_for_turn()
    process_of(run.root, ENGINE).send_signal(signal.SIGKILL)
    wait_in_run(
        run,
        lambda: (request := read_request(run, ENGINE, 1)) is not None and request.incarnation == 1,
        "the engine's successor to ask for its turn",
    )
    assert not [row for row in events(run, "role_ready") if row["process"] == ENGINE][1:]
    hold.end_turn()
    wait_in_run(
        run, lambda: len([row for row in events(run, "role_ready") if row["process"] == ENGINE]) == 2,
        "the engine to serve again",
    )  # fmt: skip

    def is_engines_turn() -> bool:
        grant = read_grant(run)
        return run.latest_checkpoint() == 8 and grant is not None and grant.trainer is None

    wait_in_run(run, is_engines_turn, "the checkpoint of step 8 and a turn of the engine")
    process_of(run.root, TRAINER, 2).send_signal(signal.SIGKILL)
    hold.end()
    assert wait_for_end(run) == RunState.DONE, told(run)

    recoveries = events(run, "recovery_started")
    assert len(recoveries) == 1 and recoveries[0]["signal"] == "SIGKILL" and recoveries[0]["after_step"] == 8
    assert len(events(run, "attempt_started")) == 1 and not events(run, "role_hung")
    incarnations = {name: each["incarnation"] for name, each in read_json(run.state)["processes"].items()}
    assert (incarnations[ENGINE], incarnations[TRAINER], incarnations["orchestrator-0"]) == (1, 1, 1)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, 13)) and versions_served(run)[-1] == 12
    # weights are on-policy in every batch, so the engine woke with those of the trainer's last turn
    assert max(row["mismatch_kl/all/mean"] for row in steps.values()) < 1e-5
    log = (run.attempt_logs(1) / "inference" / "0.log").read_text(errors="replace")
    assert log.count("sleeping; policy version") >= 12 and "waiting until the trainer's turn is over" in log


@pytest.mark.slow
def test_a_turn_of_adapters_is_saved_before_the_walltime_and_fixed_shares_need_no_turns(
    start: Callable[..., RunDir], work: Path
) -> None:
    """SLURM's warning, also of a preemption, arrives while the trainer has the accelerator, and in the second attempt
    while the engine has it.

    Then the same run with fixed shares of the memory: both sides work at the same time.
    """
    hold = Hold(work / "runs" / "adapters-in-turns", after=8, turn=4)
    small = (
        "layout.trainer.ranks=1",
        "environments.eval=[]",
        "rollouts.batch_size=32",
        "rollouts.group_size=4",
        "lora.rank=8",
        "lora.alpha=16",
    )
    run = start(
        "adapters-in-turns",
        hold.environment,
        hold.loss,
        *hold.variables,
        *small,
        "layout.colocated=true",
        "rollouts.max_off_policy_steps=0",
        "max_steps=24",
    )
    hold.wait_for_turn()
    os.kill(read_json(run.state)["pid"], signal.SIGUSR2)
    wait_in_run(run, run.stop_request.exists, "the request to save and stop")
    hold.end_turn()
    assert wait_for_end(run) == RunState.STOPPED, told(run)
    saved = run.latest_checkpoint()
    assert saved is not None and saved == last_step(run) < 12
    wait_for(lambda: not processes_of(run.root), "the batch process to end")
    hold.move(after=saved + 2)
    command("resume", run.root.name, cwd=work)

    def is_engines_turn() -> bool:
        grant = read_grant(run)
        is_of_attempt = grant is not None and grant.attempt == 2 and grant.trainer is None
        return is_of_attempt and last_step(run) > saved

    wait_in_run(run, is_engines_turn, "a turn of the engine in the second attempt")
    os.kill(read_json(run.state)["pid"], signal.SIGUSR2)
    assert wait_for_end(run) == RunState.STOPPED, told(run)
    last = run.latest_checkpoint()
    assert last is not None and saved < last == last_step(run) < 24
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, last + 1)) and len(events(run, "attempt_started")) == 2
    assert max(row["mismatch_kl/all/mean"] for row in steps.values()) < 1e-4
    assert (run.weights_step(last) / "adapter_config.json").is_file()

    shared = start("shared", *small, "layout.colocated={mode: share, engine_share: 0.5}", "max_steps=2")
    assert wait_for_end(shared) == RunState.DONE, told(shared)
    plan = read_json(shared.plan)
    slots = {process["name"]: process["accelerators"] for process in plan["phases"][0]["processes"]}
    assert slots[ENGINE] == slots[TRAINER] == [0] and read_grant(shared) is None
