"""`samples`: selection of rollouts, and their display in 80 columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import append_json
from primerl_hpc.observe.report.samples import pick_samples, sample_text
from primerl_hpc.orchestrator.rollout_data import Rollout
from primerl_hpc.orchestrator.rollouts.traces import TraceWriter
from primerl_hpc.orchestrator.rollouts.trajectories import _plain
from primerl_hpc.run.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Four rollouts of two environments and one that failed, oldest first."""
    run = RunDir(tmp_path / "run")
    for number, (env, reward) in enumerate([("words", 0.5), ("sums", 1.0), ("words", 0.9), ("words", 0.1)]):
        row = {"env": env, "task": str(number), "version": number, "last_version": number, "reward": reward}
        row |= {"advantage": reward - 0.5, "turns": 1, "output_tokens": 14, "truncated": number == 3}
        row |= {
            "prompt": "Reverse the text. " * 9 + f"task {number}",
            "completion": f"line one\nline two {number}",
        }
        append_json(run.traces("train"), row)
    append_json(run.traces("train"), {"env": "words", "task": "9", "version": 4, "error": "EnvError: no"})
    run.plan.write_text("{}")
    return run


def tasks(run: RunDir, count: int = 8, **more) -> list[str]:
    return [row["task"] for row in pick_samples(run, count, **more)]


def test_the_newest_best_or_worst_rollouts_are_selected(run: RunDir) -> None:
    assert tasks(run) == ["0", "1", "2", "3"] and tasks(run, 2) == ["2", "3"]
    assert tasks(run, 2, order="best") == ["1", "2"]
    assert tasks(run, 2, order="worst") == ["3", "0"]
    assert tasks(run, 2, env="words", order="best") == ["2", "0"]


def test_missing_rollouts_are_reported_with_their_environment(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no finished rollouts of environment nim"):
        pick_samples(run, 1, env="nim")
    with pytest.raises(NotFoundError, match="no finished rollouts of training"):
        pick_samples(RunDir(tmp_path / "other"), 1)
    (tmp_path / "scored").mkdir()
    (tmp_path / "scored" / "plan.json").write_text('{"kind": "eval"}')
    with pytest.raises(NotFoundError, match="no finished rollouts of evaluations"):
        pick_samples(RunDir(tmp_path / "scored"), 1)


def test_a_line_of_each_text_fits_80_columns_and_the_task_of_a_long_prompt_is_in_it(run: RunDir) -> None:
    run_row = {**pick_samples(run, 1)[0], "env": "an-environment-with-a-long-name"}
    run_row |= {"version": 1000, "last_version": 1001}
    text = sample_text([run_row], is_full=False)
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) == 4
    assert "task 3" in text and "an-environment-with…" in text and "1000-1001" in text and "cut off" in text
    assert "line one line two 3" in text


def test_full_texts_keep_their_lines(run: RunDir) -> None:
    text = sample_text(pick_samples(run, 1), is_full=True)
    assert max(map(len, text.splitlines())) <= 80
    assert (
        "    completion  line one\n                line two 3" in text
        and " ".join(text.split()).count("Reverse the text.") == 9
    )


def test_full_texts_show_every_message_with_its_role_and_tool_calls(tmp_path: Path) -> None:
    """From the trajectory through the file to the screen; a reply with only tool calls is not an empty line."""
    types = pytest.importorskip("verifiers.v1.types")
    call = types.ToolCall(id="1", name="add", arguments='{"a": 1, "b": 2}')
    messages = [
        types.SystemMessage(content="Use the\ntools."),
        types.UserMessage(content="1 + 2?"),
        types.AssistantMessage(content="I will add.", tool_calls=[call]),
        types.ToolMessage(tool_call_id="1", content="3"),
        types.AssistantMessage(reasoning_content="sure?", tool_calls=[call, call]),
    ]
    rollout = Rollout(1.0, [], 9, 9, 2, False, text=[_plain(message) for message in messages])
    run = RunDir(tmp_path / "run")
    writer = TraceWriter(run.traces("train"))
    writer.add(rollout, env="sums", task="0", version=1)
    writer.flush()
    run.plan.write_text("{}")
    shown = CliRunner().invoke(cli, ["samples", str(run.root), "--full"]).output
    calls = 'add({"a": 1, "b": 2})'
    assert [line.strip().split(maxsplit=1) for line in shown.splitlines()[2:]] == [
        ["system", "Use the"],
        ["tools."],
        ["user", "1 + 2?"],
        ["assistant", "I will add."],
        ["→", calls],
        ["tool", "3"],
        ["assistant", "(reasoning) sure?"],
        ["→", calls],
        ["→", calls],
    ]
    shown = CliRunner().invoke(cli, ["samples", str(run.root)]).output
    assert "completion" in shown and f"→ {calls}" in " ".join(shown.split())


def test_the_command_prints_a_table_or_the_raw_rows(run: RunDir) -> None:
    shown = CliRunner().invoke(cli, ["samples", str(run.root), "--best", "-n", "1"])
    assert shown.exit_code == 0 and "sums" in shown.output and "words" not in shown.output
    shown = CliRunner().invoke(cli, ["samples", str(run.root), "-n", "2", "--json"])
    assert [row["task"] for row in json.loads(shown.output)] == ["2", "3"]
