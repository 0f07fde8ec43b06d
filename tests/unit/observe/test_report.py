"""`report`: one self-contained page with all curves, for any content of the run directory."""

from __future__ import annotations

import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.report import command
from primerl_hpc.common.files import append_json, write_json, write_text
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.follow import QUIET_S, RunFollower
from primerl_hpc.observe.report.svg import MOST_POINTS, chart, thin
from primerl_hpc.observe.run_summary import print_summary
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.registry import register_run
from primerl_hpc.run.rundir import RunDir

EVIL = "<script>alert('1')</script> & \"quotes\""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run, now = RunDir(tmp_path / "math-001"), time.time()
    phase = {"name": "main", "recipe": {"kind": "rl", "max_steps": 3}, "processes": []}
    write_json(run.plan, {"version": 1, "kind": "rl", "nodes": [{}], "phases": [phase]})
    write_json(run.job, {"scheduler": "local", "job_id": "1", "attempt": 1, "submitted": now})
    return run


def write(run: RunDir) -> str:
    done = CliRunner().invoke(command, [str(run.root)], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.strip() == str(run.report)
    return run.report.read_text()


def test_a_step_skipped_for_nan_is_shown_and_summarized(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    follower, nan = RunFollower(run), float("nan")
    MetricsWriter(run.metrics("orchestrator")).write(1, {"reward/mean": nan, "off_policy/max": 1.0})
    MetricsWriter(run.metrics("eval")).write(
        1, {"eval/held-out/reward/mean": nan, "eval/policy_version/max": 1}
    )
    MetricsWriter(run.metrics("eval")).write(
        2, {"eval/held-out/reward/mean": 0.5, "eval/policy_version/max": 4}
    )
    for role in ("sft", "trainer"):
        row = {"loss/mean": nan, "mismatch_kl/all/mean": float("-inf"), "perf/throughput": nan}
        MetricsWriter(run.metrics(role)).write(1, row)
    follower.poll()
    print_summary(run, RunState.DONE, None, 5.0)
    shown = capsys.readouterr().out
    assert "1/3 reward nan loss +nan KL -inf lag 1" in shown and "loss nan  nan tok/s" in shown
    assert "policy v1: held-out reward nan" in shown and "policy v2 to v4: held-out reward 0.500" in shown
    assert "mismatch KL     -inf" in shown
    MetricsWriter(run.metrics("trainer")).write(2, {"loss/mean": 0.5})
    charts = re.findall(r"<svg.*?</svg>", write(run), re.S)
    assert charts and "nan" not in "".join(charts)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


HOSTILE = "HarnessError: no tools\x1b[2J\nfor " + "you " * 500


def progress(failures: int = 0, **more: object) -> dict:
    failed = {"reverse-text": {"count": failures, "of_kind": failures, "last": HOSTILE}} if failures else {}
    return {
        "time": time.time(),
        "in_flight": 8,
        "waiting": 2,
        "finished": 40,
        "failed": failures,
        "failures": failed,
        **more,
    }


def test_following_a_run_is_never_silent_for_long(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    def said(after_s: float, state: RunState, message: str | None = None) -> str:
        clock.now += after_s
        follower.poll(state, message)
        return capsys.readouterr().out

    clock = Clock()
    follower = RunFollower(run, clock=clock)
    assert said(1, RunState.PENDING) == ""
    assert "waiting to start: Priority" in said(QUIET_S, RunState.PENDING, "Priority")
    processes = {"inference-0": {"state": "starting"}, "router-0": {"state": "ready"}}
    write_json(run.state, {"attempt": 1, "state": "running", "phase": "main", "processes": processes})
    assert said(1, RunState.RUNNING) == ""
    assert "waiting for inference-0" in said(QUIET_S, RunState.RUNNING)
    processes["inference-0"]["state"] = "ready"
    write_json(run.state, {"attempt": 1, "state": "running", "phase": "main", "processes": processes})
    assert "running, step 0 of 3 is done" in said(QUIET_S, RunState.RUNNING)
    write_json(run.rollout_progress, progress(dropped_batches=1))
    assert "a batch was dropped: no rollout in it had a signal (1 so far)" in said(1, RunState.RUNNING)
    now = said(QUIET_S, RunState.RUNNING)
    assert (
        "8 rollouts in flight, 40 finished, 2 of them waiting for a batch, 0 failed, 1 batch dropped" in now
    )
    for episodes, words in (
        ({"env_server-0": 8}, "in flight (8 on the environment server), 40"),
        ({"env_server-0": 3, "env_server-1": 5}, "in flight (up to 5 on each of 2 environment servers), 40"),
    ):
        write_json(run.rollout_progress, progress(dropped_batches=1, episodes=episodes))
        assert words in said(QUIET_S, RunState.RUNNING)
    write_json(run.rollout_progress, progress(12, dropped_batches=1))
    first = said(1, RunState.RUNNING)
    assert "12 rollouts of reverse-text failed, last error (12 of this kind): HarnessError: no tools" in first
    assert "\x1b" not in first and first.count("\n") == 1 and len(first) < 500
    assert said(1, RunState.RUNNING) == ""
    assert "12 failed" in said(QUIET_S, RunState.RUNNING)
    assert said(QUIET_S, RunState.FAILED) == ""  # the summary follows


def test_a_limit_on_episodes_that_start_processes_is_shown_once(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = RunFollower(run)
    limit = {"episodes": 2, "environments": ["my-tools"]}
    write_json(run.rollout_progress, progress(process_limit=limit))
    follower.poll()
    follower.poll()
    shown = capsys.readouterr().out
    assert (
        shown.count(
            "at most 2 episodes of my-tools run at a time because each episode starts its own processes"
        )
        == 1
    )


def test_a_run_that_never_started_has_a_report_too(run: RunDir) -> None:
    page = write(run)
    assert "math-001" in page and "Attempts" not in page and "<svg" not in page


def test_the_page_shows_curves_evaluations_attempts_faults_recipe_and_versions(run: RunDir) -> None:
    now = time.time()
    write_json(run.state, {"attempt": 2, "state": "failed", "phase": "main", "updated": now})
    write_text(run.recipe, f"name: math\n# {EVIL}\n")
    write_text(run.profile, "name: h100x64\n")
    write_json(
        run.provenance,
        {
            "primerl_hpc": "0.1.0",
            "python": "3.11",
            "packages": {"torch": "2.13.0"},
            "code": {"commit": "0123456789abcdef", "dirty": True},
        },
    )
    for attempt in (1, 2):
        append_json(
            run.events, {"time": now - 100, "event": "attempt_started", "attempt": attempt, "job": "1"}
        )
        append_json(run.events, {"time": now, "event": "role_exited", "process": EVIL})
    for step in (1, 2, 3):
        row = {"step": step, "time": now, "attempt": 2}
        append_json(
            run.metrics("trainer"),
            {**row, "loss/mean": 0.5 / step, "time/step": 3.0, "optim/grad_norm": "nan"},
        )
        append_json(
            run.metrics("orchestrator"), {**row, "reward/mean": step / 3, "completion_tokens/mean": 9.0}
        )
    append_json(
        run.metrics("eval"), {"step": 0, "time": now, "attempt": 1, "eval/held-out/reward/mean": 0.25}
    )
    write_json(
        run.failure,
        {
            "attempt": 2,
            "process": "trainer-0",
            "node": "n1",
            "rank": 1,
            "exit_code": 1,
            "signal": None,
            "message": EVIL,
            "log": "x.log",
            "last_lines": [EVIL],
        },
    )
    page = write(run)
    assert "<script" not in page and "http" not in page.replace("h100x64", "")
    for words in (
        "reward of the training rollouts",
        "held-out reward by policy version",
        "0.25",
        "Attempts",
        "trainer-0 rank 1 on n1",
        "name: math",
        "name: h100x64",
        "0123456789ab, with changes",
        "2.13.0",
        "2 attempts",
    ):
        assert words in page, words
    assert "gradient norm" not in page  # it was never a number
    drawings = re.findall(r"<svg.*?</svg>", page)
    assert len(drawings) == 5
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_long_curves_are_thinned_to_means() -> None:
    points = [(float(x), float(x % 2)) for x in range(100_000)]
    thinned = thin(points)
    assert len(thinned) <= MOST_POINTS and all(y == pytest.approx(0.5) for _, y in thinned)
    assert len(chart("long", {"a": points})) < 20_000


def test_flat_and_single_points_are_drawn_and_an_empty_curve_is_empty() -> None:
    assert chart("none", {"a": []}) == ""
    for points in ([(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)]):
        ElementTree.fromstring(re.search(r"<svg.*</svg>", chart("flat", {"a": points}))[0])  # type: ignore[index]


@pytest.mark.parametrize("role", ["trainer", "sft"])
def test_the_end_of_a_run_names_an_existing_log(
    run: RunDir, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    append_json(run.metrics(role), {"step": 1, "attempt": 1, "time": time.time()})
    register_run(run)
    print_summary(run, RunState.DONE, None, 60)
    assert capsys.readouterr().out.endswith(
        f"next:  primerl-hpc status math-001\n       primerl-hpc logs math-001 {role}\n"
    )
