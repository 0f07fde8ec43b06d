"""`status`: what it makes of a run's files, how it looks in 80 columns, and that many runs cost little."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click
import pytest

from primerl_hpc.common import registry
from primerl_hpc.common.files import append_json, read_json, write_json
from primerl_hpc.common.metrics import read_last_steps
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import SEPARATOR
from primerl_hpc.observe.bottleneck import find_bottleneck
from primerl_hpc.observe.catalog import Catalog
from primerl_hpc.observe.depth import OneRun
from primerl_hpc.observe.forecast import make_forecast
from primerl_hpc.observe.screen import SLOWEST_S, fit, next_pause, watch
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.table import AllRuns
from primerl_hpc.observe.text import format_age
from primerl_hpc.observe.usage import Accounting, attempts_of, last_signs, own_usage, parse_use


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


PLAN = {
    "version": 1,
    "kind": "rl",
    "accelerator": "gpu",
    "accelerators_per_node": 8,
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
    """A SLURM run at step ``steps`` of 40: 30 s a step, of which the trainer waits 20."""
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


class Slurm:
    def __init__(self, squeue: str = "", sacct: str = "") -> None:
        self.answers, self.asked = {"squeue": squeue, "sacct": sacct}, []

    def __call__(self, command: list[str]) -> str:
        self.asked.append(command[0])
        return self.answers[command[0]]


def running(job: str) -> str:
    return SEPARATOR.join((job, "RUNNING", "None", "2026-01-01T00:00:00", "gpu-[a-b]")) + "\n"


# -- bottleneck ------------------------------------------------------------------------------------------------------


def sides(wait_for_batch: float, wait_for_policy: float, **engines: float) -> Any:
    trainer = [{"time/step": 10.0, "time/wait_for_batch": wait_for_batch}] * 3
    orchestrator = [{"time/step": 10.0, "time/wait_for_policy": wait_for_policy, **engines}] * 3
    return find_bottleneck(trainer, orchestrator)


@pytest.mark.parametrize(
    "found, side, words",
    [
        (sides(6, 0, **{"inference/running": 50, "inference/waiting": 9}), "inference", "6.0 of 10.0 s"),
        (sides(6, 0, **{"inference/running": 5, "inference/waiting": 0}), "inference", "have room"),
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
def test_the_side_that_keeps_the_other_waiting_is_named_with_its_numbers(
    found: Any, side: str, words: str
) -> None:
    assert found.side == side and words in found.sentence


def test_without_a_step_of_both_sides_there_is_no_bottleneck() -> None:
    assert find_bottleneck([], [{"time/step": 1.0}]) is None
    assert find_bottleneck([{"time/step": 1.0}], []) is None


# -- forecast --------------------------------------------------------------------------------------------------------


def steps_every(seconds: float, first: int, last: int, ended: float) -> dict[int, dict[str, float]]:
    return {step: {"time": ended - seconds * (last - step)} for step in range(first, last + 1)}


def test_a_run_that_ends_before_its_walltime_is_said_to_finish_in_this_job() -> None:
    found = make_forecast(steps_every(10, 1, 20, 1000.0), 50, now=1000.0, started=700.0, ends=1301.0)
    assert found is not None
    assert (found.seconds_left, found.job_seconds_left, found.more_attempts) == (300.0, 301.0, 0)
    assert "it finishes in this job" in found.sentence


def test_the_jobs_still_needed_count_the_start_of_each() -> None:
    # 100 s until the first step, then 10 s a step; a job of 400 s makes 30 steps; 20 more fit into this one
    rows = steps_every(10, 1, 10, 1000.0)
    found = make_forecast(rows, 60, now=1000.0, started=800.0, ends=1200.0)
    assert found is not None and found.more_attempts == 1
    longer = make_forecast(rows, 100, now=1000.0, started=800.0, ends=1200.0)
    assert longer is not None and longer.more_attempts == 3  # (900 - 200) / 300, rounded up


def test_a_job_too_short_for_a_step_is_said_to_be_so() -> None:
    found = make_forecast(steps_every(500, 1, 2, 1000.0), 9, now=1000.0, started=900.0, ends=1100.0)
    assert found is not None and found.more_attempts is None and "too short" in found.sentence


def test_no_forecast_before_two_steps_and_time_since_the_last_step_counts() -> None:
    assert make_forecast(steps_every(10, 1, 1, 0.0), 5, now=0.0) is None
    found = make_forecast(steps_every(10, 1, 2, 0.0), 5, now=4.0)
    assert found is not None and found.seconds_left == 26.0


# -- hours -----------------------------------------------------------------------------------------------------------

EVENTS = [
    {"time": 0.0, "event": "attempt_started", "attempt": 1, "job": "5"},
    {"time": 3600.0, "event": "run_requeued"},
    {"time": 9000.0, "event": "attempt_started", "attempt": 2, "job": "5"},
    {"time": 9100.0, "event": "phase_started", "resumed_from": 7},
]


def test_hours_in_the_queue_are_not_counted_and_a_living_attempt_is_counted_until_now() -> None:
    attempts = attempts_of(EVENTS, is_running=True)
    assert [(each.number, each.end, each.resumed_from) for each in attempts] == [(1, 3600.0, 0), (2, None, 7)]
    used = own_usage(attempts, nodes=2, gpus_per_node=8, now=9000.0 + 1800.0)
    assert (used.node_hours, used.gpu_hours, used.attempts) == (3.0, 24.0, 2)
    ended = own_usage(attempts_of(EVENTS, is_running=False), nodes=2, gpus_per_node=0, now=1e9)
    assert ended.gpu_hours is None and ended.node_hours == pytest.approx(2 * 3700 / 3600)


def test_a_killed_attempt_lasts_until_its_last_sign_of_life_and_an_idle_link_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    append_json(run.metrics("trainer"), {"step": 1, "time": 7200.0, "attempt": 2})
    write_json(run.supervisor_lock, {})
    os.utime(run.supervisor_lock, (9700.0, 9700.0))
    idle = {"time": 90000.0, "event": "link_idle"}, {"time": 90001.0, "event": "run_failed"}
    third = {"time": 9600.0, "event": "attempt_started", "attempt": 3, "job": "6"}
    killed = [EVENTS[0], {**EVENTS[0], "time": 3600.0, "attempt": 2}]
    ends = lambda events: [  # noqa: E731
        each.end for each in attempts_of(events, is_running=False, seen=last_signs(run, 3))
    ]
    assert ends([*killed, *idle]) == [0.0, 7200.0]
    assert ends([*killed, third, *idle]) == [0.0, 7200.0, 9700.0]


def test_engines_in_jobs_of_their_own_are_accounted_for_too() -> None:
    asked = []
    attempts = attempts_of(EVENTS, is_running=True)
    Accounting(lambda command: asked.append(command) or ACCOUNTED).usage(attempts, 8, engines="7")
    assert "--jobs=5,7" in asked[0]


@pytest.mark.parametrize("state, is_over", [("running", False), ("pending", True)])
def test_the_attempt_of_a_run_that_waits_again_has_ended(tmp_path: Path, state: str, is_over: bool) -> None:
    run = live_run(tmp_path / "math-001")
    write_json(run.state, {**read_json(run.state), "state": state})
    slurm = Slurm(running("17") if state == "running" else running("17").replace("RUNNING", "PENDING"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.look()
    (attempt,) = view.attempts
    assert (attempt.end is not None) == is_over


ACCOUNTED = "".join(
    SEPARATOR.join(fields) + "\n"
    for fields in (
        ("5", "REQUEUED", "3600", "2", "billing=2,cpu=128,gres/gpu:h100=16,gres/gpu=16,mem=1T,node=2"),
        ("5", "RUNNING", "1800", "2", "billing=2,cpu=128,gres/gpu=16,mem=1T,node=2"),
        ("6", "CANCELLED by 0", "0", "2", ""),
    )
)


def test_slurms_accounting_counts_every_life_of_a_job_and_is_asked_once_an_attempt() -> None:
    now = [0.0]
    slurm = Slurm(sacct=ACCOUNTED)
    accounting = Accounting(slurm, lambda: now[0])
    attempts = attempts_of(EVENTS, is_running=True)
    used = accounting.usage(attempts, 8)
    assert used is not None and (used.node_hours, used.gpu_hours, used.source) == (3.0, 24.0, "sacct")
    now[0] = 1800.0
    later = accounting.usage(attempts, 8)
    assert later is not None and later.gpu_hours == 32.0 and slurm.asked == ["sacct"]


def test_a_site_that_does_not_account_for_gpus_is_counted_by_the_plan() -> None:
    line = SEPARATOR.join(("5", "COMPLETED", "3600", "3", "cpu=64,node=3"))
    assert [(row.nodes, row.gpus) for row in parse_use(line)] == [(3, None)]
    used = Accounting(Slurm(sacct=line)).usage(attempts_of(EVENTS, is_running=False), 4)
    assert used is not None and used.gpu_hours == 12.0


# -- one run -----------------------------------------------------------------------------------------------------------


def test_one_run_in_depth_says_all_that_is_asked_of_it_in_80_columns(tmp_path: Path) -> None:
    run = live_run(tmp_path / "math-001")
    slurm = Slurm(running("17"))
    view = OneRun(run, JobWatcher(slurm), Accounting(slurm))
    view.look()
    text = click.unstyle(view.text())
    assert max(map(len, text.splitlines()[2:])) <= 80 and len(text.splitlines()) <= 24
    for words in (
        "math-001  running  rl, attempt 1, job 17 (slurm)",
        "step 10/40 (25%)",
        "81.2k tok/s",
        "engines idle 12%",
        "update 0.31 s",
        "bottleneck  inference: the trainer waits 67%",
        "it finishes in this job",
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


def test_a_slurm_that_does_not_answer_is_said_and_the_files_are_shown(tmp_path: Path) -> None:
    from primerl_hpc.common.errors import SchedulerError

    def silent(command: list[str]) -> str:
        raise SchedulerError(f"{command[0]} did not answer within 5 s")

    run = live_run(tmp_path / "math-001")
    one = OneRun(run, JobWatcher(silent), Accounting(silent))
    one.look()
    assert one.snapshot.state == RunState.RUNNING and "did not answer" in one.text()
    everything = AllRuns(JobWatcher(silent), (), None, 20)
    everything.look()
    assert "math-001" in everything.text() and "did not answer" in everything.text()


def test_steps_of_an_earlier_attempt_do_not_count_as_this_ones_pace(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    for attempt, steps in ((1, range(1, 41)), (2, range(31, 34))):
        for step in steps:
            append_json(path, {"step": step, "time": 0.0, "attempt": attempt})
    with path.open("a") as file:
        file.write('{"step": 34, "ti')  # being written
    assert list(read_last_steps(path, 20)) == [31, 32, 33]
    assert read_last_steps(tmp_path / "none.jsonl", 20) == {}


def test_steps_that_a_recovery_lost_are_not_told_as_done(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    for step in (*range(1, 21), 11, 12):
        append_json(path, {"step": step, "time": 0.0, "attempt": 1})
    assert max(read_last_steps(path, 20)) == 12


# -- all runs ----------------------------------------------------------------------------------------------------------


def test_running_ones_come_first_then_waiting_then_the_newest(tmp_path: Path) -> None:
    make_run(tmp_path / "old-done", "done")
    make_run(tmp_path / "waits", None, scheduler="slurm", job_id="18")
    live_run(tmp_path / "lives")
    make_run(tmp_path / "new-failed", "failed")
    waiting = SEPARATOR.join(("18", "PENDING", "Resources", "2026-01-01T10:00:00", "")) + "\n"
    slurm = Slurm(running("17") + waiting)
    view = AllRuns(JobWatcher(slurm), (), None, None)
    view.look()
    assert [brief.name for brief, _ in view.shown] == ["lives", "waits", "new-failed", "old-done"]
    text = click.unstyle(view.text())
    assert "Resources, at 01-01 10:00" in text and max(map(len, text.splitlines())) <= 80
    assert slurm.asked == ["squeue"]


def test_what_does_not_fit_is_counted_and_filters_choose(tmp_path: Path) -> None:
    for number in range(5):
        make_run(tmp_path / f"math-{number}", "done")
    make_run(tmp_path / "code-1", "failed")
    view = AllRuns(JobWatcher(Slurm()), (), None, 2)
    view.look()
    assert len(view.shown) == 2 and "and 4 more (4 done)" in view.text()
    for states, pattern, names in (
        (("failed",), None, ["code-1"]),
        ((), "math-[01]", ["math-1", "math-0"]),
        (("failed",), "math-*", []),
    ):
        view = AllRuns(JobWatcher(Slurm()), states, pattern, None)
        view.look()
        assert [brief.name for brief, _ in view.shown] == names
    assert "--state" in view.text()


def test_a_run_that_is_over_is_remembered_until_it_moves_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "failed")
    catalog = lambda: {brief.name: brief.state for brief in Catalog(JobWatcher(Slurm())).look()}  # noqa: E731
    assert catalog() == {"a": RunState.FAILED}
    os.rename(run.job, tmp_path / "job.json")  # a look at the run's own files would see it now
    assert catalog() == {"a": RunState.FAILED}
    os.rename(tmp_path / "job.json", run.job)
    write_json(run.state, {"attempt": 2, "state": "done", "phase": "main", "updated": time.time()})
    assert catalog() == {"a": RunState.DONE}  # started by hand
    write_json(run.job, {"scheduler": "slurm", "job_id": "9", "attempt": 3, "submitted": time.time()})
    registry.register_run(run)
    assert catalog() == {"a": RunState.PENDING}  # resumed


def test_a_lost_or_spoilt_index_costs_nothing_but_time(tmp_path: Path, home: Path) -> None:
    make_run(tmp_path / "a", "done")
    assert len(Catalog(JobWatcher(Slurm())).look()) == 1
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
        (home / "index.json").write_bytes(spoilt)
        assert [brief.state for brief in Catalog(JobWatcher(Slurm())).look()] == [RunState.DONE]


def test_a_home_that_cannot_be_written_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "file"))
    registry.register_run(RunDir(tmp_path / "a"))
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and f"name it by its path, {tmp_path / 'a'}" in said


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "done")
    unreadable, odd = make_run(tmp_path / "b", "failed"), make_run(tmp_path / "c", "running")
    for path in (unreadable.job, odd.supervisor_lock):  # to read them is an OSError
        path.unlink(missing_ok=True)
        path.mkdir()
    found = {brief.name: (brief.state, brief.message) for brief in Catalog(JobWatcher(Slurm())).look()}
    unknown = RunState.UNKNOWN, "its folder cannot be read: Is a directory"
    assert found == {"a": (RunState.DONE, None), "b": unknown, "c": unknown}
    view = AllRuns(JobWatcher(Slurm()), (), None, None)
    view.look()
    assert "cannot be read" in view.text() and json.dumps(view.as_json())


def test_gone_directories_are_listed_as_gone_and_can_be_forgotten(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "done")
    Catalog(JobWatcher(Slurm())).look()
    os.rename(run.root, tmp_path / "b")
    (brief,) = Catalog(None).look()
    assert not brief.is_there and brief.as_json()["state"] == "gone"
    view = AllRuns(JobWatcher(Slurm()), (), None, None)
    view.look()
    assert "no runs yet" in view.text()
    registry.forget_runs([brief.registered])
    assert registry.registered_runs() == []


def test_two_thousand_runs_are_one_question_and_almost_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make_run(tmp_path / "run-0", "done")
    folder = next((tmp_path / "home" / "runs").iterdir()).parent
    for number in range(1, 2000):
        run = RunDir(tmp_path / f"run-{number}")
        run.control.mkdir(parents=True)
        for path in (template.plan, template.job, template.state):
            os.link(path, run.root / path.relative_to(template.root))
        entry = {"path": str(run.root), "name": run.root.name, "submitted": float(number)}
        (folder / f"{number}.json").write_text(json.dumps(entry))
    live_run(tmp_path / "lives")
    slurm = Slurm(running("17"))
    AllRuns(JobWatcher(slurm), (), None, 20).look()
    opened: list[str] = []
    plain = Path.open
    monkeypatch.setattr(
        Path, "open", lambda self, *args, **kw: opened.append(self.name) or plain(self, *args, **kw)
    )
    view, slurm.asked = AllRuns(JobWatcher(slurm), (), None, 20), []
    start = time.perf_counter()
    view.look()
    assert time.perf_counter() - start < 5.0  # about 0.1; ten thousand in less than a second
    assert slurm.asked == ["squeue"] and len(view.shown) == 20 and view.hidden.total() == 1981
    assert len(opened) < 200


# -- the screen ----------------------------------------------------------------------------------------------------------


def test_a_screen_never_scrolls_and_says_what_it_cuts() -> None:
    screen = "\n".join(f"line {number}" for number in range(30))
    assert len(fit(screen, 80, 24)) == 23 and "8 more" in fit(screen, 80, 24)[-1]
    assert fit("short", 80, 24) == ["short"] and fit("x" * 99, 80, 24) == ["x" * 80]


def test_redraws_become_rarer_while_nothing_happens() -> None:
    pause = 2.0
    for _ in range(20):
        pause = next_pause(pause, 2.0, is_changed=False)
    assert pause == SLOWEST_S and next_pause(pause, 2.0, is_changed=True) == 2.0
    assert next_pause(60.0, 60.0, is_changed=False) == 60.0


def test_a_watched_run_is_a_line_of_json_for_programs_whenever_something_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Steps:
        looks = 0

        def look(self) -> None:
            self.looks += 1
            if self.looks > 6:
                raise KeyboardInterrupt

        def text(self) -> str:
            raise AssertionError("a program does not read it")

        def as_json(self) -> object:
            return {"step": self.mark()}

        def mark(self) -> object:
            return self.looks // 3

    watch(Steps(), 0.0, as_json=True)
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2]


@pytest.mark.parametrize(
    "seconds, text", [(-3, "0s"), (59, "59s"), (130, "2m"), (3 * 3600, "3h"), (9e6, "104d")]
)
def test_ages_are_short(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
