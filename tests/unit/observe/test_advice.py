"""The advice of `diagnose` for everything that ends a run, with and without a checkpoint: each command is executed."""

from __future__ import annotations

import itertools
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import append_json, read_json, write_json, write_text
from primerl_hpc.common.names import RunState
from primerl_hpc.launch.submit import prepare_run
from primerl_hpc.observe.diagnose.advice import ADVICE, Ending, NextCommand, ending_of
from primerl_hpc.observe.diagnose.diagnose import diagnose, render_diagnosis
from primerl_hpc.observe.diagnose.known_faults import recognize_fault
from primerl_hpc.observe.run_summary import print_summary
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.lock import is_process_alive
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import COMPLETE
from primerl_hpc.runtime.job.chain import NO_PROGRESS
from tests.support.helpers import unusable_sft_recipe, wait_for

TABLE = {
    # what ended the run: (may it be retried, next command) with a checkpoint, without one
    Ending.STOPPED: ((True, NextCommand.RESUME), (True, NextCommand.RESUME)),
    Ending.CANCELLED: ((True, NextCommand.RESUME), (True, NextCommand.RESUME)),
    Ending.BUDGET: ((True, NextCommand.RESUME_WITH_BUDGET), (True, NextCommand.RESUME_WITH_BUDGET)),
    Ending.INTERRUPTED: ((True, NextCommand.RESUME), (True, NextCommand.RESUME)),
    Ending.NO_NEW_CHECKPOINT: ((True, NextCommand.RESUME), (True, NextCommand.RESUME)),
    Ending.SITE: ((True, NextCommand.RESUME), (True, NextCommand.RESUME)),
    Ending.DATA: ((True, NextCommand.RESUME), (False, NextCommand.SUBMIT)),
    Ending.RECIPE: ((False, NextCommand.FORK), (False, NextCommand.SUBMIT)),
    Ending.PROFILE: ((False, NextCommand.FORK), (False, NextCommand.SUBMIT)),
}


def failed(code: int | None = 1, message: str = "RuntimeError: a teapot", **values: Any) -> dict[str, Any]:
    fault = {"attempt": 1, "role": "trainer", "process": "sft-0", "node": "n1", "rank": None, "signal": None}
    fault |= {"reason": "sft-0 exited before its work was done", "log": "sft-0.log", "last_lines": []}
    return {**fault, "exit_code": code, "message": message, **values}


KILLED = failed(None, "killed by signal 9 (SIGKILL)", signal="SIGKILL")
EXAMPLES: dict[Ending, tuple[RunState, dict[str, Any] | None, str | None]] = {
    Ending.STOPPED: (RunState.STOPPED, None, None),
    Ending.CANCELLED: (RunState.CANCELLED, None, None),
    Ending.BUDGET: (RunState.STOPPED, None, "one more step would exceed its budget"),
    Ending.INTERRUPTED: (RunState.FAILED, KILLED, KILLED["message"]),
    Ending.NO_NEW_CHECKPOINT: (RunState.FAILED, None, f"link 2 of 6 was killed and {NO_PROGRESS}"),
    Ending.SITE: (RunState.FAILED, failed(1, "OSError: [Errno 28] No space left on device"), None),
    Ending.DATA: (RunState.FAILED, failed(ExitCode.DATA, "rows.jsonl:2: not JSON"), None),
    Ending.RECIPE: (RunState.FAILED, failed(ExitCode.CONFIG, "no such option"), None),
    Ending.PROFILE: (RunState.FAILED, failed(127, "no such program: /opt/primerl/bin/python"), None),
}
"""Reason for the end → state, control/failure.json and message of such a run."""


def test_the_table_has_advice_for_every_pair_and_no_other_rule() -> None:
    assert set(ADVICE) == set(itertools.product(Ending, (True, False)))
    found = {
        ending: tuple(
            (ADVICE[ending, has_saved].can_retry, ADVICE[ending, has_saved].next)
            for has_saved in (True, False)
        )
        for ending in Ending
    }
    assert found == TABLE
    assert not any("{step}" in advice.sentence for (_, has_saved), advice in ADVICE.items() if not has_saved)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunDir, Path]]:
    """A run that its trainer completes at once, and a copy of its directory before the first attempt."""
    folder = tmp_path_factory.mktemp("advice")
    recipe = unusable_sft_recipe(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMERL_HOME", str(folder / "home"))
        run, plan = prepare_run(load_recipe(recipe), load_profile("local"), folder / "toy", is_live=True)
        values = plan.model_dump(mode="json")
        for process in values["phases"][0]["processes"]:
            process["argv"] = ["true"]
        write_json(run.plan, values)
        command = ["/venv/bin/primerl-hpc", "submit", recipe, "-p", "local", "--run-dir", str(run.root)]
        write_json(run.provenance, {**read_json(run.provenance), "command": command})
        shutil.copytree(run.root, folder / "before", symlinks=True)
        yield run, folder / "before"


EndedRun = Callable[[Ending, bool], RunDir]


@pytest.fixture
def ended(prepared: tuple[RunDir, Path]) -> EndedRun:
    def make(ending: Ending, has_checkpoint: bool) -> RunDir:
        run, before = prepared
        shutil.rmtree(run.root)
        shutil.copytree(before, run.root, symlinks=True)
        state, failure, message = EXAMPLES[ending]
        then = time.time() - 3600
        write_json(run.job, {"scheduler": "local", "job_id": "999999999", "attempt": 1, "submitted": then})
        phase = read_json(run.plan)["phases"][-1]["name"]
        write_json(
            run.state,
            {"attempt": 1, "state": state.value, "phase": phase, "updated": then, "message": message},
        )
        append_json(run.events, {"event": "attempt_started", "time": then, "attempt": 1, "job": None})
        if failure is not None:
            write_json(run.failure, failure)
        if ending == Ending.BUDGET:
            stop = {"event": "stop_requested", "time": then + 1, "reason": "budget"}
            append_json(run.events, {**stop, "budget_s": 60.0, "need_s": 30.0})
            write_json(run.plan, {**read_json(run.plan), "budget": {"text": "1nodeh", "job_s": 60.0}})
        if has_checkpoint:
            write_text(run.checkpoint_side(2, "trainer") / "state.json", "{}")
            write_text(run.checkpoint(2) / COMPLETE, "")
        return run

    return make


def execute(command: str, *more: str) -> tuple[int, str]:
    program, *words = shlex.split(command)
    assert program == "primerl-hpc"
    done = CliRunner().invoke(cli, [*words, *more])
    return done.exit_code, f"{done.output}{done.exception or ''}"


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["checkpoint", "none"])
@pytest.mark.parametrize("ending", list(Ending), ids=str)
def test_the_next_command_works_for_everything_that_ends_a_run(
    ended: EndedRun, ending: Ending, has_checkpoint: bool
) -> None:
    run = ended(ending, has_checkpoint)
    found, run_point = diagnose(run), "after step 2" if has_checkpoint else "from the beginning"
    advice = ADVICE[ending, has_checkpoint]
    assert found.can_retry == advice.can_retry and found.next_command is not None
    assert found.advice == advice.sentence.format(after=run_point, step=2)
    command = found.next_command
    if advice.next in (NextCommand.SUBMIT, NextCommand.FORK):
        assert ("checkpoint.fork.run" in command) == has_checkpoint and "--run-dir" not in command
        code, text = execute(command, "--dry-run")
        assert code == 0, text
        return
    if advice.next == NextCommand.RESUME_WITH_BUDGET:
        code, text = execute(command.replace(" --budget HOURS", ""))
        assert code != 0 and "has stopped it" in text and "--budget HOURS" in text, text
        command = command.replace("HOURS", "100nodeh")
    code, text = execute(command)
    assert code == 0 and f"continues {run_point}" in text, text
    wait_for(lambda: take_snapshot(run).state == RunState.DONE, "its end", tell=run.events.read_text)
    wait_for(lambda: not is_process_alive(int(read_json(run.job)["job_id"])), "the end of its job")


@pytest.mark.parametrize("ending", list(Ending), ids=str)
def test_the_summary_of_a_followed_run_names_the_same_command(
    ended: EndedRun, ending: Ending, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (state, _, message) = ended(ending, True), EXAMPLES[ending]
    print_summary(run, state, message, 1.0)
    found, printed = diagnose(run), capsys.readouterr().out
    assert (found.next_command or "-") in printed or not found.can_retry


def test_a_run_that_stopped_as_it_was_asked_to_has_not_failed_in_slurm(ended: EndedRun) -> None:
    """The job's exit code is 75, and SLURM calls every exit code except 0 a failure."""
    run = ended(Ending.STOPPED, True)
    write_json(run.job, {**read_json(run.job), "scheduler": "slurm", "job_id": "17"})
    for code, is_shown in (("75:0", False), ("76:0", False), ("0:15", False), ("1:0", True)):
        fields = ("17", "17", "toy", "FAILED", code, "n1", "None", "2026-01-01T00:00:00")
        text = render_diagnosis(diagnose(run, lambda _, line="\x1f".join(fields): line), 3)  # type: ignore[misc]
        assert "nothing failed" in text and ("FAILED" in text) == is_shown, text


@pytest.mark.parametrize(
    "line",
    [
        "/var/spool/slurmd/job00007/slurm_script: line 25: /opt/primerl/bin/python: No such file or directory",
        "slurm_script: line 9: exec: python3.13: not found",
        "/tmp/slurm_script: line 3: /venv/bin/python: Permission denied",
        "no such program: /opt/primerl/bin/python",
    ],
)
def test_an_interpreter_that_does_not_exist_is_a_fault_of_the_profile(line: str) -> None:
    """`resume` would fail in the same way, each time after a queue."""
    known = recognize_fault(line)
    assert known is not None and known.name == "interpreter" and "python" in known.what
    assert ending_of(RunState.FAILED, None, known, is_over_budget=False) == Ending.PROFILE


@pytest.mark.parametrize(
    ("failure", "ending"),
    [
        (failed(126, "Permission denied"), Ending.PROFILE),
        (failed(ExitCode.CONFIG, "module load nccl failed", role="supervisor"), Ending.PROFILE),
        (failed(ExitCode.USAGE, "unrecognized arguments"), Ending.RECIPE),
        (failed(ExitCode.NO_CONTINUE, "the loss is not finite"), Ending.RECIPE),
        (failed(ExitCode.NO_CONTINUE, "three batches without a signal"), Ending.RECIPE),
        (failed(ExitCode.BAD_NODE, "n1 was lost", role="supervisor"), Ending.INTERRUPTED),
        (failed(1, "No module named 'flash_attn'"), Ending.SITE),
        (failed(1, "torch.OutOfMemoryError: CUDA out of memory"), Ending.RECIPE),
        (failed(), Ending.INTERRUPTED),
        (None, Ending.INTERRUPTED),
    ],
)
def test_the_exit_code_and_the_message_decide_what_ended_a_failed_run(
    failure: dict[str, Any] | None, ending: Ending
) -> None:
    known = recognize_fault(failure["message"]) if failure else None
    assert ending_of(RunState.FAILED, failure, known, is_over_budget=False) == ending


def test_a_walltime_that_ended_before_the_first_checkpoint_is_explained(ended: EndedRun) -> None:
    run = ended(Ending.STOPPED, False)
    message = (
        "the walltime ended before a new checkpoint: another attempt of this length would end the same way"
    )
    write_json(run.state, {**read_json(run.state), "message": message})
    found = diagnose(run)
    assert found.known is not None and "checkpoint.interval" in found.advice and found.can_retry is True


def test_a_run_that_ended_in_its_warm_up_continues_after_its_checkpoint(ended: EndedRun) -> None:
    run = ended(Ending.STOPPED, False)
    plan = read_json(run.plan)
    write_json(run.plan, {**plan, "phases": [{**plan["phases"][0], "name": "warmup"}, *plan["phases"]]})
    write_text(run.phase("warmup").checkpoint(8) / COMPLETE, "")
    assert diagnose(run).advice == "nothing failed; resume continues after step 8 of phase warmup"


def test_a_run_whose_name_is_not_unique_is_named_by_its_path(ended: EndedRun, tmp_path: Path) -> None:
    run = ended(Ending.STOPPED, True)
    copy = tmp_path / "toy"
    shutil.copytree(run.root, copy, symlinks=True)
    assert diagnose(RunDir(copy)).next_command == f"primerl-hpc resume {copy}"
