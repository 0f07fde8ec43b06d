"""`samples`: which rollouts are picked, and that they can be read at 80 columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import append_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.samples import pick_samples, sample_text


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


def test_the_newest_the_best_or_the_worst_are_picked(run: RunDir) -> None:
    assert tasks(run) == ["0", "1", "2", "3"] and tasks(run, 2) == ["2", "3"]
    assert tasks(run, 2, order="best") == ["1", "2"]
    assert tasks(run, 2, order="worst") == ["3", "0"]
    assert tasks(run, 2, env="words", order="best") == ["2", "0"]


def test_what_is_not_there_is_named(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no finished rollouts of environment nim"):
        pick_samples(run, 1, env="nim")
    with pytest.raises(NotFoundError, match="no finished rollouts of training"):
        pick_samples(RunDir(tmp_path / "other"), 1)
    (tmp_path / "scored").mkdir()
    (tmp_path / "scored" / "plan.json").write_text('{"kind": "eval"}')
    with pytest.raises(NotFoundError, match="no finished rollouts of evaluations"):
        pick_samples(RunDir(tmp_path / "scored"), 1)


def test_a_line_of_each_text_fits_80_columns_and_the_task_of_a_long_prompt_is_in_it(run: RunDir) -> None:
    run_row = {**pick_samples(run, 1)[0], "env": "an-environment-with-a-long-name", "last_version": 12}
    text = sample_text([run_row], is_full=False)
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) == 4
    assert "task 3" in text and "an-environment-with…" in text and "3-12" in text and "cut off" in text
    assert "line one line two 3" in text


def test_full_texts_keep_their_lines(run: RunDir) -> None:
    text = sample_text(pick_samples(run, 1), is_full=True)
    assert max(map(len, text.splitlines())) <= 80
    assert (
        "    completion  line one\n                line two 3" in text
        and " ".join(text.split()).count("Reverse the text.") == 9
    )


def test_the_command_prints_a_table_or_the_rows_as_they_are(run: RunDir) -> None:
    shown = CliRunner().invoke(cli, ["samples", str(run.root), "--best", "-n", "1"])
    assert shown.exit_code == 0 and "sums" in shown.output and "words" not in shown.output
    shown = CliRunner().invoke(cli, ["samples", str(run.root), "-n", "2", "--json"])
    assert [row["task"] for row in json.loads(shown.output)] == ["2", "3"]
