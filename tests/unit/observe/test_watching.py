"""Values and ends of runs in `--follow` and `status`; the commands that they print can be copied into a shell."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.observe.diagnose.diagnose import diagnose
from primerl_hpc.observe.follow import RunFollower, follow_run
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A finished SFT run with a validation loss at every second of six steps; its last event is not yet written."""
    run = RunDir(tmp_path / "my runs" / "sft 1")
    recipe = {"kind": "sft", "max_steps": 6, "sft": {"validation": {"interval": 2}}}
    write_json(run.plan, {"version": 1, "kind": "sft", "phases": [{"name": "main", "recipe": recipe}]})
    write_json(run.job, {"scheduler": "local", "job_id": "1", "attempt": 1, "submitted": time.time()})
    write_json(run.state, {"attempt": 1, "state": "done", "phase": "main", "updated": time.time()})
    append_json(run.events, {"time": 1.0, "event": "attempt_started", "attempt": 1, "host": "vm"})
    append_json(run.events, {"time": 1.0, "event": "phase_started", "phase": "main", "kind": "sft"})
    writer = MetricsWriter(run.metrics("sft"))
    for step in range(1, 7):
        more = {"val/initial_loss": 4.5} if step == 1 else {}
        more |= {"val/loss": 2.5 / step} if step in (2, 4) else {}
        writer.write(step, {"loss/mean": 3.0 / step, "perf/throughput": 1000.0, **more})
    return run


def test_follow_shows_each_validation_loss_and_ends_with_the_run(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow_run(run) == 0
    shown = capsys.readouterr().out
    steps = shown.partition("\n\n")[0].splitlines()
    assert [line for line in steps if "validation loss before the first step 4.500" in line]
    assert [
        line.partition("] ")[2][:44] for line in steps if " validation " in line and "before" not in line
    ] == ["sft    2/6  loss 1.500  validation 1.250  1.", "sft    4/6  loss 0.750  validation 0.625  1."]
    assert steps[-1].endswith("] run done") and all(len(line) <= 80 for line in steps)


def test_the_end_of_the_run_is_shown_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    append_json(run.events, {"time": 2.0, "event": "run_done"})
    follow_run(run)
    assert capsys.readouterr().out.count("run done") == 1


def test_rows_that_are_not_trained_are_counted_wherever_a_run_is_watched(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    MetricsWriter(run.metrics("sft")).write(7, {"loss/mean": 1.0, "progress/total_skipped": 3})
    expected = "rows skipped without a trained token, in all epochs: 3"
    follow_run(run)
    assert capsys.readouterr().out.count(expected) == 1
    for command in ("status", "diagnose"):
        shown = CliRunner().invoke(cli, [command, str(run.root)]).output
        assert f"{expected}; the first one is in primerl-hpc logs 'sft 1' sft" in " ".join(shown.split())


def test_status_shows_the_last_validation_loss_with_its_step(run: RunDir) -> None:
    assert take_snapshot(run).metrics["val/loss"] == 0.625
    shown = CliRunner().invoke(cli, ["status", str(run.root)]).output
    assert "validation loss 0.6250 (step 4)" in " ".join(shown.split())


def test_a_process_that_was_given_up_is_named_with_the_reason(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {
        "time": 2.0,
        "event": "role_given_up",
        "process": "tracker-0",
        "message": "wandb failed to start: no key",
    }
    append_json(run.events, event)
    RunFollower(run).poll()
    assert "the run continues without tracker-0: wandb failed to start: no key" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {
                "event": "node_excluded",
                "node": "n3",
                "why": "lost: it accepts no connection of srun",
                "spare": "n5",
            },
            "node n3 is excluded (lost: it accepts no connection of srun); n5 replaces it",
        ),
        (
            {"event": "node_excluded", "node": "n3", "why": "memory: 2 GiB are free", "spare": None},
            "node n3 is excluded (memory: 2 GiB are free)",
        ),
        (
            {
                "event": "role_hung",
                "process": "inference-0",
                "message": "inference-0 did not respond for 60 s",
            },
            "inference-0 did not respond for 60 s",
        ),
        (
            {"event": "role_not_ready", "process": "router-0", "after_s": 300},
            "router-0 was not ready after 300 s",
        ),
        (
            {"event": "run_requeued", "after_step": 7, "without": ["n3", "n4"]},
            "back in the queue without n3, n4, continues after step 7",
        ),
        (
            {"event": "run_requeued", "after_step": 7, "without": None},
            "back in the queue, continues after step 7",
        ),
    ],
    ids=["replaced", "no spare", "hung", "not ready", "requeued without nodes", "requeued"],
)
def test_what_happened_to_a_node_or_process_is_shown_with_its_reason(
    run: RunDir, capsys: pytest.CaptureFixture[str], event: dict[str, object], line: str
) -> None:
    append_json(run.events, {"time": 2.0, **event})
    RunFollower(run).poll()
    assert line in [shown.partition("] ")[2] for shown in capsys.readouterr().out.splitlines()]


def test_names_with_spaces_are_quoted_in_the_commands_to_copy(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    register_run(run)
    follow_run(run)
    lines = [line.strip().removeprefix("next:").strip() for line in capsys.readouterr().out.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("primerl-hpc ")]
    assert len(commands) == 2 and all(words[2] == "sft 1" for words in commands)
    for state in ("failed", "stopped"):
        write_json(run.state, {"attempt": 1, "state": state, "phase": "main", "updated": time.time()})
        found = diagnose(run)
        assert found.next_command is not None
        assert shlex.split(found.next_command)[:3] == ["primerl-hpc", "resume", "sft 1"]
        follow_run(run)
        assert "primerl-hpc resume 'sft 1'" in capsys.readouterr().out
