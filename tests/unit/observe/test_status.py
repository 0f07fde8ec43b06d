"""`status`: its evaluation of a run's files, its display in 80 columns, and its cost for many runs."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import pytest

from primerl_hpc.common.files import append_json, read_json, write_json
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.diagnose.diagnose import diagnose, render_diagnosis
from primerl_hpc.observe.status.all_runs import AllRuns, list_table
from primerl_hpc.observe.status.bottleneck import find_bottleneck
from primerl_hpc.observe.status.forecast import make_forecast
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.one_run import OneRun
from primerl_hpc.observe.status.run_catalog import RunCatalog
from primerl_hpc.observe.status.screen import SLOWEST_S, fit, next_pause, watch
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.observe.status.usage import Accounting, parse_usage, usage_from_events
from primerl_hpc.observe.text import format_age
from primerl_hpc.run import registry
from primerl_hpc.run.ledger.attempts import attempts_from_events, last_activity
from primerl_hpc.run.metrics import HighErrorRate, read_last_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.slurm_rows import Slurm, queue_row, usage_row
from tests.support.terminal import Terminal

PLAN = {
    "version": 1,
    "kind": "rl",
    "accelerator": "gpu",
    "accelerators_per_node": 8,
    "allocated_gpus": 16,
    "nodes": [{"index": 0}, {"index": 1}],
    "phases": [
        {
            "name": "main",
            "recipe": {"kind": "rl", "max_steps": 40},
            "processes": [
                {"name": "inference-0", "nodes": [0], "ready_timeout_s": 600},
                {"name": "trainer-0", "nodes": [1], "ready_timeout_s": 0},
            ],
        }
    ],
}


def make_run(folder: Path, state: str | None, *, age_s: float = 7200.0, **job: Any) -> RunDir:
    """A registered run whose files say ``state``, last written ``age_s`` ago."""
    run, then = RunDir(folder), time.time() - age_s
    write_json(run.plan, PLAN)
    write_json(run.job, {"scheduler": "local", "job_id": "1", "attempt": 1, "submitted": then, **job})
    if state is not None:
        write_json(
            run.state, {"attempt": 1, "state": state, "phase": "main", "started": then, "updated": then}
        )
    registry.register_run(run)
    return run


def live_run(folder: Path, *, steps: int = 10, ends_in_s: float = 3600.0) -> RunDir:
    """A SLURM run at step ``steps`` of 40 with 30 s per step, of which the trainer waits 20 s."""
    now = time.time()
    run = make_run(folder, None, scheduler="slurm", job_id="17")
    processes = {
        "inference-0": {
            "state": "ready",
            "incarnation": 2,
            "role": "inference",
            "url": "http://gpu-a:1",
            "log": "i",
        },
        "trainer-0": {"state": "starting", "incarnation": 0, "role": "trainer", "log": "t"},
    }
    started = now - 30 * steps - 60
    state = {"attempt": 1, "state": "running", "phase": "main", "started": started, "processes": processes}
    write_json(run.state, {**state, "hosts": ["gpu-a", "gpu-b"], "ends_at": now + ends_in_s, "updated": now})
    write_json(run.supervisor_lock, {"host": "gpu-a", "pid": 1, "started": "1", "job": "17", "restart": "0"})
    append_json(
        run.events, {"time": started, "event": "attempt_started", "attempt": 1, "job": "17", "host": "gpu-a"}
    )
    for step in range(1, steps + 1):
        row = {"step": step, "time": now - 30 * (steps - step), "attempt": 1}
        append_json(
            run.metrics("trainer"),
            {**row, "time/wait_for_batch": 20.0, "time/step": 30.0, "perf/throughput": 81234.0},
        )
        append_json(
            run.metrics("orchestrator"),
            {
                **row,
                "reward/mean": 0.5,
                "time/step": 30.0,
                "time/wait_for_policy": 0.0,
                "dispatcher/in_flight": 64,
                "inference/running": 60.0,
                "inference/waiting": 4.0,
                "inference/kv_usage/max": 0.97,
                "inference/idle": 0.12,
                "time/weight_update": 0.31,
            },
        )
    return run


def running(job: str) -> str:
    return queue_row(job, "RUNNING", "None", "2026-01-01T00:00:00", "gpu-[a-b]")


# -- bottleneck ------------------------------------------------------------------------------------


def sides(wait_for_batch: float, wait_for_policy: float, **engines: float) -> Any:
    trainer = [{"time/step": 10.0, "time/wait_for_batch": wait_for_batch}] * 3
    orchestrator = [{"time/step": 10.0, "time/wait_for_policy": wait_for_policy, **engines}] * 3
    return find_bottleneck(trainer, orchestrator)


@pytest.mark.parametrize(
    "found, side, words",
    [
        (sides(6, 0, **{"inference/running": 50, "inference/waiting": 9}), "inference", "6.0 of 10.0 s"),
        (sides(6, 0, **{"inference/running": 5, "inference/waiting": 0}), "inference", "have free capacity"),
        (
            sides(6, 0, **{"inference/running": 2, "dispatcher/in_flight": 64}),
            "environments",
            "of 64 rollouts",
        ),
        (sides(6, 0, **{"event_loop_lag/max": 3.0}), "orchestrator", "3.0 s late"),
        (sides(0.5, 4), "trainer", "40%"),
        (sides(0.5, 0.2), "none", "waits 5%"),
    ],
)
def test_the_bottleneck_is_named_with_its_figures(found: Any, side: str, words: str) -> None:
    assert found.side == side and words in found.sentence


def test_without_a_step_of_both_sides_no_bottleneck_is_reported() -> None:
    assert find_bottleneck([], [{"time/step": 1.0}]) is None
    assert find_bottleneck([{"time/step": 1.0}], []) is None


# -- forecast --------------------------------------------------------------------------------------


def steps_every(seconds: float, first: int, last: int, ended: float) -> dict[int, dict[str, float]]:
    return {step: {"time": ended - seconds * (last - step)} for step in range(first, last + 1)}


def test_a_run_that_ends_before_its_walltime_finishes_in_this_job() -> None:
    found = make_forecast(steps_every(10, 1, 20, 1000.0), 50, now=1000.0, started=700.0, ends=1301.0)
    assert found is not None
    assert (found.seconds_left, found.job_seconds_left, found.more_attempts) == (300.0, 301.0, 0)
    assert "the run finishes in this job" in found.sentence


def test_the_number_of_needed_jobs_includes_the_start_time_of_each() -> None:
    # 100 s until the first step, then 10 s a step; a job of 400 s makes 30 steps; 20 more fit into this one
    rows = steps_every(10, 1, 10, 1000.0)
    found = make_forecast(rows, 60, now=1000.0, started=800.0, ends=1200.0)
    assert found is not None and found.more_attempts == 1
    longer = make_forecast(rows, 100, now=1000.0, started=800.0, ends=1200.0)
    assert longer is not None and longer.more_attempts == 3  # (900 - 200) / 300, rounded up


def test_a_job_too_short_for_a_step_is_reported() -> None:
    found = make_forecast(steps_every(500, 1, 2, 1000.0), 9, now=1000.0, started=900.0, ends=1100.0)
    assert found is not None and found.more_attempts is None and "too short" in found.sentence


def test_no_forecast_before_two_steps_and_time_since_the_last_step_counts() -> None:
    found = make_forecast(
        steps_every(10, 1, 20, 1000.0), 50, now=1000.0, started=700.0, ends=1301.0, phase="warmup"
    )
    assert found is not None and "left in phase warmup, the job ends in" in found.sentence, (
        "not that of the run"
    )
    assert make_forecast(steps_every(10, 1, 1, 0.0), 5, now=0.0) is None
    found = make_forecast(steps_every(10, 1, 2, 0.0), 5, now=4.0)
    assert found is not None and found.seconds_left == 26.0


# -- hours -----------------------------------------------------------------------------------------


def at(seconds: float) -> str:
    """A time as sacct prints it: in the time zone of this machine."""
    return datetime.fromtimestamp(seconds).isoformat()


EVENTS = [
    {"time": 0.0, "event": "attempt_started", "attempt": 1, "job": "5"},
    {"time": 3600.0, "event": "run_requeued"},
    {"time": 9000.0, "event": "attempt_started", "attempt": 2, "job": "5"},
    {"time": 9100.0, "event": "phase_started", "resumed_from": 7},
]


def test_queue_time_is_not_counted_and_a_running_attempt_is_counted_until_now() -> None:
    attempts = attempts_from_events(EVENTS, is_running=True)
    assert [(each.number, each.end, each.resumed_from) for each in attempts] == [(1, 3600.0, 0), (2, None, 7)]
    used = usage_from_events(attempts, nodes=2, gpus_per_node=8, now=9000.0 + 1800.0)
    assert (used.node_hours, used.gpu_hours, used.attempts) == (3.0, 24.0, 2)
    ended = usage_from_events(
        attempts_from_events(EVENTS, is_running=False), nodes=2, gpus_per_node=0, now=1e9
    )
    assert ended.gpu_hours is None and ended.node_hours == pytest.approx(2 * 3700 / 3600)


def test_a_killed_attempt_lasts_until_its_last_heartbeat_and_an_idle_link_is_not_an_attempt(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path)
    append_json(run.metrics("trainer"), {"step": 1, "time": 7200.0, "attempt": 2})
    write_json(run.supervisor_lock, {})
    os.utime(run.supervisor_lock, (9700.0, 9700.0))
    idle = {"time": 90000.0, "event": "link_idle"}, {"time": 90001.0, "event": "run_failed"}
    third = {"time": 9600.0, "event": "attempt_started", "attempt": 3, "job": "6"}
    killed = [EVENTS[0], {**EVENTS[0], "time": 3600.0, "attempt": 2}]
    ends = lambda events: [  # noqa: E731
        each.end for each in attempts_from_events(events, is_running=False, activity=last_activity(run, 3))
    ]
    assert ends([*killed, *idle]) == [0.0, 7200.0]
    assert ends([*killed, third, *idle]) == [0.0, 7200.0, 9700.0]


def test_elastic_engines_are_accounted_for_too() -> None:
    asked = []
    attempts = attempts_from_events(EVENTS, is_running=True)
    Accounting(lambda command: asked.append(command) or ACCOUNTED).usage(attempts, 8, engines="7")
    assert "--jobs=5,7" in asked[0]


@pytest.mark.parametrize("state, is_over", [("running", False), ("pending", True)])
def test_the_attempt_of_a_requeued_run_has_ended(tmp_path: Path, state: str, is_over: bool) -> None:
    run = live_run(tmp_path / "math-001")
    write_json(run.state, {**read_json(run.state), "state": state})
    slurm = Slurm(running("17") if state == "running" else running("17").replace("RUNNING", "PENDING"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.refresh()
    (attempt,) = view.attempts
    assert (attempt.end is not None) == is_over


ACCOUNTED = "".join(
    (
        usage_row("5", "REQUEUED", "3600", "2", "cpu=128,gres/gpu:h100=16,gres/gpu=16,node=2", at(0)),
        usage_row("5", "RUNNING", "1800", "2", "cpu=128,gres/gpu=16,node=2", at(9000)),
        usage_row("6", "CANCELLED by 0", "0", "2", "", "Unknown"),
    )
)


def test_slurm_accounting_counts_every_restart_of_a_job_and_is_queried_once_per_attempt() -> None:
    now = [0.0]
    slurm = Slurm(sacct=ACCOUNTED)
    accounting = Accounting(slurm, lambda: now[0])
    attempts = attempts_from_events(EVENTS, is_running=True)
    used = accounting.usage(attempts, 8)
    assert used is not None and (used.node_hours, used.gpu_hours, used.source) == (3.0, 24.0, "sacct")
    now[0] = 1800.0
    later = accounting.usage(attempts, 8)
    assert later is not None and later.gpu_hours == 32.0 and slurm.asked == ["sacct"]


def test_hours_of_other_jobs_with_the_number_of_a_run_are_not_its_hours() -> None:
    """sacct lists all tasks of an array, and all jobs that had a number in the past."""
    others = (
        usage_row("3", "COMPLETED", "36000", "64", "gres/gpu=512", at(0), listed="5_3"),
        usage_row("5", "COMPLETED", "90000", "64", "gres/gpu=512", at(-30 * 86400)),
        usage_row("5", "COMPLETED", "90000", "64", "gres/gpu=512", at(30 * 86400)),
    )
    engines = usage_row("8", "COMPLETED", "3600", "1", "gres/gpu=8", at(60), listed="7_1")
    attempts = attempts_from_events(EVENTS, is_running=False)
    accounting = Accounting(Slurm(sacct=ACCOUNTED + "".join(others) + engines))
    used = accounting.usage(attempts, 8, engines="7")
    assert used is not None and (used.node_hours, used.gpu_hours) == pytest.approx((4.0, 32.0))


def test_without_gpu_accounting_the_plan_determines_gpu_hours() -> None:
    line = usage_row("5", "COMPLETED", "3600", "3", "cpu=64,node=3", at(0))
    assert [(row.nodes, row.gpus) for row in parse_usage(line)] == [(3, None)]
    used = Accounting(Slurm(sacct=line)).usage(attempts_from_events(EVENTS, is_running=False), 4)
    assert used is not None and used.gpu_hours == 12.0


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_status_quotes_the_last_error_of_rollouts_and_its_count(tmp_path: Path, state: str) -> None:
    run = live_run(tmp_path / "math-001")
    write_json(run.state, {**read_json(run.state), "state": state})
    error = "HarnessError: ChatMLRenderer does not support tools"
    failures = {"calculator": {"count": 80, "of_kind": 79, "last": error}}
    write_json(run.rollout_progress, {"in_flight": 8, "finished": 0, "failed": 80, "failures": failures})
    slurm = Slurm(running("17"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.refresh()
    text = " ".join(click.unstyle(view.text()).split())
    assert f"80 rollouts of calculator failed, last error (79 of this kind): {error}" in text
    assert ("8 rollouts in flight, 0 finished, 80 failed" in text) == (state == "running")
    assert view.as_json()["rollouts"]["failures"] == failures


def test_status_and_diagnose_warn_of_an_environment_whose_rollouts_fail_and_show_log_levels(
    tmp_path: Path,
) -> None:
    run = live_run(tmp_path / "math-001")
    plan = read_json(run.plan)
    plan["phases"][0]["recipe"]["log"] = {
        "level": "debug",
        "roles": {"trainer": "warning", "router": "debug"},
    }
    write_json(run.plan, plan)
    kinds = {"HarnessError": 70, "TimeoutError": 9, "ToolError": 1}
    rate = HighErrorRate("calculator", 0.3, kinds, str(run.latest_logs / "env_server-0.log"))
    write_json(run.rollout_progress, {"in_flight": 8, "high_error_rates": [rate.as_json()]})
    slurm = Slurm(running("17"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.refresh()
    text = " ".join(click.unstyle(view.text()).split())
    assert "log level level debug, trainer warning" in text and "router debug" not in text
    for words in (
        rate.sentence.split("; see")[0],
        "30% of the rollouts",
        "HarnessError ×70, TimeoutError ×9",
    ):
        assert words in text, text
    assert view.as_json()["warnings"] == [rate.sentence] and rate.log in rate.sentence
    found = diagnose(run, slurm)
    assert found.as_json()["warnings"] == [rate.sentence]
    assert "30% of the rollouts" in render_diagnosis(found, num_lines=5)


# -- one run ---------------------------------------------------------------------------------------


def test_the_detailed_status_of_one_run_fits_80_columns(tmp_path: Path) -> None:
    run = live_run(tmp_path / "math-001")
    slurm = Slurm(running("17"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.refresh()
    text = click.unstyle(view.text())
    assert max(map(len, text.splitlines()[2:])) <= 80 and len(text.splitlines()) <= 24
    for words in (
        "math-001  running  rl, attempt 1, job 17 (slurm)",
        "step 10/40 (25%)",
        "81.2k tok/s",
        "engines idle 12%",
        "update 0.31 s",
        "bottleneck  inference: the trainer waits 67%",
        "the run finishes in this job",
        "GPU-hours",
        "restarts    inference-0 ×2",
        "gpu-b",
        "ago  attempt_started",
    ):
        assert words in text, text
    said = json.loads(json.dumps(view.as_json()))
    assert said["bottleneck"]["side"] == "inference" and said["forecast"]["more_attempts"] == 0
    assert said["processes"]["trainer-0"]["hosts"] == ["gpu-b"]
    assert said["processes"]["trainer-0"]["state"] == "running"  # it publishes no endpoint
    assert said["usage"]["source"] == "events" and said["restarts"] == {"inference-0": 2}


def test_the_bottleneck_is_also_named_after_the_run(tmp_path: Path) -> None:
    run = live_run(tmp_path / "math-001")
    write_json(run.state, {**json.loads(run.state.read_text()), "state": "done", "ended": time.time()})
    write_json(run.job, {**json.loads(run.job.read_text()), "scheduler": "local"})
    snapshot = take_snapshot(run)
    assert snapshot.state == RunState.DONE and snapshot.forecast is None
    assert snapshot.bottleneck is not None and snapshot.bottleneck.side == "inference"


def test_a_long_event_is_truncated_but_keeps_its_time_and_name(tmp_path: Path) -> None:
    run = live_run(tmp_path / "math-001")
    event = {"event": "role_restart_requested", "process": "router-0", "reason": "x" * 90}
    append_json(run.events, {"time": time.time() - 7200, **event})
    slurm = Slurm(running("17"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.refresh()
    line = click.unstyle(view.text()).splitlines()[-1]
    assert "2h ago  role_restart_requested process=router-0 reason=xxx" in line
    assert len(line) == 80 and line.endswith("x…")


def test_if_slurm_does_not_answer_status_reports_it_and_shows_the_files(tmp_path: Path) -> None:
    from primerl_hpc.common.errors import SchedulerError

    def silent(command: list[str]) -> str:
        raise SchedulerError(f"{command[0]} did not answer within 5 s")

    run = live_run(tmp_path / "math-001")
    one = OneRun(run, JobWatcher(silent), Accounting(silent))
    one.refresh()
    assert one.snapshot.state == RunState.RUNNING and "did not answer" in one.text()
    everything = AllRuns(JobWatcher(silent), (), None, 20)
    everything.refresh()
    assert "math-001" in everything.text() and "did not answer" in everything.text()


def test_steps_of_an_earlier_attempt_do_not_affect_the_step_rate(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    for attempt, steps in ((1, range(1, 41)), (2, range(31, 34))):
        for step in steps:
            append_json(path, {"step": step, "time": 0.0, "attempt": attempt})
    with path.open("a") as file:
        file.write('{"step": 34, "ti')  # being written
    assert list(read_last_steps(path, 20)) == [31, 32, 33]
    assert read_last_steps(tmp_path / "none.jsonl", 20) == {}


def test_steps_lost_by_a_recovery_are_not_shown_as_done(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    for step in (*range(1, 21), 11, 12):
        append_json(path, {"step": step, "time": 0.0, "attempt": 1})
    assert max(read_last_steps(path, 20)) == 12


# -- all runs --------------------------------------------------------------------------------------


def test_running_runs_come_first_then_waiting_ones_then_the_newest(tmp_path: Path) -> None:
    make_run(tmp_path / "old-done", "done")
    make_run(tmp_path / "waits", None, scheduler="slurm", job_id="18")
    live_run(tmp_path / "lives")
    make_run(tmp_path / "new-failed", "failed")
    waiting = queue_row("18", "PENDING", "Resources", "2026-01-01T10:00:00", "")
    slurm = Slurm(running("17") + waiting)
    view = AllRuns(JobWatcher(slurm), (), None, None)
    view.refresh()
    assert [brief.name for brief, _ in view.shown] == ["lives", "waits", "new-failed", "old-done"]
    text = click.unstyle(view.text())
    assert "Resources, at 01-01 10:00" in text and max(map(len, text.splitlines())) <= 80
    assert slurm.asked == ["squeue"]


def test_names_are_shown_as_they_are_and_directories_are_never_shortened(tmp_path: Path) -> None:
    """Square brackets are not interpreted as markup of rich."""
    folder = tmp_path / ("deep-" * 30) / "[red]math"
    make_run(folder, "done")
    view = AllRuns(JobWatcher(Slurm()), (), None, None)
    view.refresh()
    assert "[red]math" in view.text()
    (line,) = list_table(RunCatalog(None).list_runs())
    assert line.startswith("[red]math ") and line.endswith(f" {folder}")


def test_omitted_runs_are_counted_and_filters_select(tmp_path: Path) -> None:
    for number in range(5):
        make_run(tmp_path / f"math-{number}", "done")
    make_run(tmp_path / "code-1", "failed")
    view = AllRuns(JobWatcher(Slurm()), (), None, 2)
    view.refresh()
    assert len(view.shown) == 2 and "and 4 more (4 done)" in view.text()
    for states, pattern, names in (
        (("failed",), None, ["code-1"]),
        ((), "math-[01]", ["math-1", "math-0"]),
        (("failed",), "math-*", []),
    ):
        view = AllRuns(JobWatcher(Slurm()), states, pattern, None)
        view.refresh()
        assert [brief.name for brief, _ in view.shown] == names
    assert "--state" in view.text()


def test_a_finished_run_is_cached_until_it_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "failed")
    slurm = Slurm(queue_row("9", "PENDING", "Priority", "N/A", ""))
    catalog = lambda: {brief.name: brief.state for brief in RunCatalog(JobWatcher(slurm)).list_runs()}  # noqa: E731
    assert catalog() == {"a": RunState.FAILED}
    os.rename(run.job, tmp_path / "job.json")  # reading the run's own files would show it now
    assert catalog() == {"a": RunState.FAILED}
    os.rename(tmp_path / "job.json", run.job)
    write_json(run.state, {"attempt": 2, "state": "done", "phase": "main", "updated": time.time()})
    assert catalog() == {"a": RunState.DONE}  # started by hand
    write_json(run.job, {"scheduler": "slurm", "job_id": "9", "attempt": 3, "submitted": time.time()})
    registry.register_run(run)
    assert catalog() == {"a": RunState.PENDING}  # resumed


def test_the_list_asks_slurm_as_rarely_as_the_site_of_a_run_allows(tmp_path: Path) -> None:
    run, now, asked = make_run(tmp_path / "a", "running"), [1000.0], []

    def ask(command: list[str]) -> str:
        asked.append(now[0])
        return queue_row("9", "RUNNING")

    write_json(run.job, {"scheduler": "slurm", "job_id": "9", "attempt": 1, "ask_every_s": 60.0})
    catalog = RunCatalog(JobWatcher(ask, lambda: now[0]))
    for _ in range(180):
        catalog.list_runs()
        now[0] += 1.0
    assert len(asked) == 3 and asked[2] - asked[1] >= 60


def test_a_lost_or_damaged_index_is_rebuilt(tmp_path: Path, own_state_home: Path) -> None:
    make_run(tmp_path / "a", "done")
    assert len(RunCatalog(JobWatcher(Slurm())).list_runs()) == 1
    key = registry.registered_runs()[0].key
    broken: list[Any] = [
        None,
        [],
        {key: 3},
        {key: {"path": 1}},
        {key: {"path": "/", "name": "a", "stamp": 0}},
    ]
    shapes = [json.dumps({"version": 1, "runs": runs}).encode() for runs in broken]
    for spoilt in (b"", b"{", b"\xff", b"[]", b'{"version": 99}', *shapes):
        (own_state_home / "index.json").write_bytes(spoilt)
        assert [brief.state for brief in RunCatalog(JobWatcher(Slurm())).list_runs()] == [RunState.DONE]


def test_a_home_that_cannot_be_written_does_not_prevent_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "file"))
    registry.register_run(RunDir(tmp_path / "a"))
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and f"use its path: {tmp_path / 'a'}" in said


def test_an_unreadable_run_does_not_hide_others(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "done")
    unreadable, odd = make_run(tmp_path / "b", "failed"), make_run(tmp_path / "c", "running")
    for path in (unreadable.job, odd.supervisor_lock):  # to read them is an OSError
        path.unlink(missing_ok=True)
        path.mkdir()
    found = {
        brief.name: (brief.state, brief.message) for brief in RunCatalog(JobWatcher(Slurm())).list_runs()
    }
    unknown = RunState.UNKNOWN, "the run directory cannot be read: Is a directory"
    assert found == {"a": (RunState.DONE, None), "b": unknown, "c": unknown}
    view = AllRuns(JobWatcher(Slurm()), (), None, None)
    view.refresh()
    assert "cannot be read" in view.text() and json.dumps(view.as_json())


def test_removed_directories_are_listed_as_such_and_can_be_unregistered(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "done")
    RunCatalog(JobWatcher(Slurm())).list_runs()
    os.rename(run.root, tmp_path / "b")
    (brief,) = RunCatalog(None).list_runs()
    assert not brief.exists and brief.as_json()["state"] == "gone"
    view = AllRuns(JobWatcher(Slurm()), (), None, None)
    view.refresh()
    assert "no runs yet" in view.text()
    registry.forget_runs([brief.registered])
    assert registry.registered_runs() == []


def test_two_thousand_runs_need_one_query_and_few_reads(
    tmp_path: Path, own_state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make_run(tmp_path / "run-0", "done")
    folder = next((own_state_home / "runs").iterdir()).parent
    for number in range(1, 2000):
        run = RunDir(tmp_path / f"run-{number}")
        run.control.mkdir(parents=True)
        for path in (template.plan, template.job, template.state):
            os.link(path, run.root / path.relative_to(template.root))
        entry = {"path": str(run.root), "name": run.root.name, "submitted": float(number)}
        (folder / f"{number}.json").write_text(json.dumps(entry))
    live_run(tmp_path / "lives")
    slurm = Slurm(running("17"))
    AllRuns(JobWatcher(slurm), (), None, 20).refresh()
    opened: list[str] = []
    plain = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **kw: opened.append(self.name) or plain(self, *args, **kw)
    )
    view, slurm.asked = AllRuns(JobWatcher(slurm), (), None, 20), []
    start = time.process_time()
    view.refresh()
    assert time.process_time() - start < 5.0  # of CPU; about 0.1, ten thousand in less than a second
    assert slurm.asked == ["squeue"] and len(view.shown) == 20 and view.hidden.total() == 1981
    assert len(opened) < 200


# -- the screen ------------------------------------------------------------------------------------


def test_a_screen_never_scrolls_and_counts_omitted_lines() -> None:
    screen = "\n".join(f"line {number}" for number in range(30))
    assert len(fit(screen, 80, 24)) == 23 and "8 more" in fit(screen, 80, 24)[-1]
    assert fit("short", 80, 24) == ["short"] and fit("x" * 99, 80, 24) == ["x" * 80]


def test_watch_redraws_the_alternate_screen_and_leaves_the_last_state(tmp_path: Path) -> None:
    run = make_run(tmp_path / "watched", RunState.DONE)
    with Terminal("primerl_hpc", "status", str(run.root), "--watch", cwd=tmp_path) as terminal:
        terminal.wait_for("\x1b[?1049h")
        terminal.wait_for("watched")
        terminal.press("\x03")
        assert terminal.end() == 0
    screen, _, remaining = terminal.shown.partition("\x1b[?1049l")
    assert "watched" in screen and "watched" in click.unstyle(remaining)
    assert "\x1b[?25h" in screen + remaining  # the cursor is visible again


def test_redraws_become_less_frequent_without_changes() -> None:
    pause = 2.0
    for _ in range(20):
        pause = next_pause(pause, 2.0, is_changed=False)
    assert pause == SLOWEST_S and next_pause(pause, 2.0, is_changed=True) == 2.0
    assert next_pause(60.0, 60.0, is_changed=False) == 60.0


def test_watch_with_json_prints_a_line_after_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    class Steps:
        looks = 0

        def refresh(self) -> None:
            self.looks += 1
            if self.looks > 6:
                raise KeyboardInterrupt

        def text(self) -> str:
            raise AssertionError("a program does not read it")

        def as_json(self) -> object:
            return {"step": self.change_key()}

        def change_key(self) -> object:
            return self.looks // 3

    watch(Steps(), 0.0, as_json=True)
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    "seconds, text", [(-3, "0s"), (59, "59s"), (130, "2m"), (3 * 3600, "3h"), (9e6, "104d")]
)
def test_ages_have_a_short_form(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
