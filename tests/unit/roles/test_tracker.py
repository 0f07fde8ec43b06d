"""The tracker with real wandb, offline and against a local server: each row arrives once, in the same W&B run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import append_json, read_json_or_none, read_jsonl, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe, parse_recipe
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.targets import SOURCES, extras_of, sources_of
from primerl_hpc.tracking.wandb import identity
from tests.support.helpers import PATIENCE_S, ROOT, end_role, make_plan, process_plan, start_role, wait_for
from tests.support.wandb_server import API_KEY, WandbServer, serve_wandb

RECIPE = {
    "kind": "rl",
    "name": "tracked",
    "model": {"name": "some/model"},
    "max_steps": 9,
    "environments": {"train": [{"id": "reverse-text"}]},
}


FAST = {"WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "0.2", "WANDB__FILE_STREAM_RETRY_WAIT_MIN_SECONDS": "0.2"}


def wait_until_sent(run: RunDir, tracker: subprocess.Popen, target: str = "wandb") -> None:
    size = run.metrics("trainer").stat().st_size

    def is_sent() -> bool:
        assert tracker.poll() is None, log_of(run)
        return (read_json_or_none(run.tracker_state(target)) or {}).get("offsets", {}).get("trainer") == size

    wait_for(is_sent, "the rows to be sent", tell=lambda: log_of(run))


def log_of(run: RunDir) -> str:
    return (run.attempt_logs(1) / "tracker-0.log").read_text()


def make_run(folder: Path, *, relay: bool = False, **settings: Any) -> RunDir:
    run = RunDir(folder / "run")
    recipe = {**RECIPE, "tracking": {"wandb": settings, "relay": relay}}
    tracker = process_plan(Role.TRACKER, on_exit=OnExit.OPTIONAL, accelerators=0)
    make_plan(run.root, recipe, processes=[tracker])
    return run


def write(run: RunDir, *steps: int) -> None:
    for step in steps:
        for index in range(3):
            row = {
                "env": "reverse-text",
                "task": str(index),
                "step": step,
                "reward": index,
                "advantage": index - 1,
            }
            row |= {"entropy": 0.25, "output_tokens": 5, "input_tokens": 7}
            append_json(run.traces("train"), {**row, "prompt": f"p{step}", "completion": f"c{index}"})
        MetricsWriter(run.metrics("trainer")).write(step, {"loss/mean": 0.5 / step})
        MetricsWriter(run.metrics("orchestrator")).write(step, {"reward/mean": 1.0})


def start_tracker(run: RunDir, server: WandbServer, name: str = "tracker-0") -> subprocess.Popen:
    return start_role(run, "main", name, WANDB_BASE_URL=server.url, WANDB_API_KEY=API_KEY, **FAST)


def end(tracker: subprocess.Popen) -> None:
    tracker.send_signal(signal.SIGTERM)
    assert tracker.wait(timeout=PATIENCE_S) == 0


def steps_of(history: list[dict[str, Any]], name: str = "trainer/loss/mean") -> list[int]:
    return [row[f"{name.partition('/')[0]}/step"] for row in history if name in row]


def test_offline_attempts_continue_the_same_id_with_new_rows_only(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = make_run(tmp_path, offline=True)
    writer = MetricsWriter(run.metrics("trainer"))
    for step in (1, 2):
        writer.write(step, {"loss/mean": 0.5 / step})
        tracker = start_role(run, "main", "tracker-0")
        try:
            wait_until_sent(run, tracker)
        finally:
            end(tracker)
    folders = sorted((run.root / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    recorded = [next(folder.glob("*.wandb")).read_bytes() for folder in folders]
    assert [data.count(b"trainer/loss/mean") > 0 for data in recorded] == [True, True]
    assert [line["number"] for line in read_jsonl(run.tracker_state("wandb").with_suffix(".jsonl"))] == [0, 1]


def test_online_each_row_table_and_distribution_arrives_once_over_attempts_and_a_cut_network(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    run = make_run(
        tmp_path, name="shown", id="chosen", dir=str(tmp_path / "files"), log_extras={"interval": 2}
    )
    with serve_wandb() as server:
        write(run, 1, 2, 3)
        streams = []

        def cut(path: str) -> str | None:
            if "file_stream" not in path:
                return None
            streams.append(path)
            return (
                "after" if len(streams) == 1 else None
            )  # the client does not know that the rows have arrived

        server.cuts = cut
        tracker = start_tracker(run, server)
        try:
            wait_until_sent(run, tracker)
            wait_for(lambda: len(server.runs["chosen"].lines) == 7, "six rows and a table")
        finally:
            end(tracker)
        server.cuts = lambda path: (
            "before" if "file_stream" in path else None
        )  # rows reach wandb, but not the server
        write(run, 4)
        tracker = start_tracker(run, server)
        try:
            wait_until_sent(run, tracker)
        finally:
            end_role(tracker)  # killed, as by the end of a job
        assert len(server.runs["chosen"].lines) == 7
        server.cuts = lambda path: None
        write(run, 5)
        tracker = start_tracker(run, server)
        try:
            wait_until_sent(run, tracker)
        finally:
            end(tracker)
    assert list(server.runs) == ["chosen"]
    found = server.runs["chosen"]
    assert (found.project, found.display_name) == ("primerl-hpc", "shown")
    assert steps_of(found.history) == steps_of(found.history, "orchestrator/reward/mean") == [1, 2, 3, 4, 5]
    assert [row["_step"] for row in found.history] == list(range(12))
    tables = [
        json.loads(data) for name, data in sorted(found.files.items()) if name.startswith("media/table/")
    ]
    assert tables[0]["columns"] == "step environment task prompt completion reward advantage".split()
    assert {(row[0], row[4]) for table in tables for row in table["data"]} == {
        (step, f"c{index}") for step in (2, 4) for index in range(3)
    }
    for name in ("reward", "advantage", "entropy", "completion_tokens", "prompt_tokens"):
        assert sum(f"distributions/{name}" in row for row in found.history) == 2
    assert (tmp_path / "files" / "wandb").is_dir() and not (run.root / "wandb").exists()
    assert API_KEY not in log_of(run)


def test_a_side_has_a_run_of_its_own_and_its_id_is_refused_to_another_run_directory(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sides = {"trainer": {"name": "loss", "id": "taken"}, "orchestrator": {}}
    with serve_wandb() as server:
        run = make_run(tmp_path / "one", **sides)
        write(run, 1)
        tracker = start_tracker(run, server)
        try:
            wait_until_sent(run, tracker, "wandb-trainer")
        finally:
            end(tracker)
        run = make_run(tmp_path / "two", id="taken")
        write(run, 1)
        tracker = start_tracker(run, server)
        try:
            assert tracker.wait(timeout=PATIENCE_S) == ExitCode.CONFIG, log_of(run)
        finally:
            end_role(tracker)
    assert "tracking.wandb.id: taken is the W&B run of another run" in log_of(run)
    found = server.runs["taken"]
    assert found.display_name == "loss" and steps_of(found.history) == [1]
    assert not any("orchestrator/step" in row for row in found.history)


def test_a_run_that_replaces_another_one_in_its_directory_does_not_continue_its_history(
    tmp_path: Path,
) -> None:
    pytest.importorskip("wandb")
    with serve_wandb() as server:
        for submitted, settings in ((1.0, {}), (2.0, {}), (3.0, {"id": "mine"}), (4.0, {"id": "mine"})):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            run = make_run(tmp_path, **settings)
            write_json(run.provenance, {"time": submitted})
            write(run, 1)
            tracker = start_tracker(run, server)
            try:
                if submitted < 4:
                    wait_until_sent(run, tracker)
                    end(tracker)
                else:
                    assert tracker.wait(timeout=PATIENCE_S) == ExitCode.CONFIG, log_of(run)
            finally:
                end_role(tracker)
    assert "mine is the W&B run of another run" in log_of(run)
    assert [steps_of(found.history) for found in server.runs.values()] == [[1], [1], [1]]


def test_sync_continues_the_wandb_run_after_a_cut_network_and_a_kill_with_each_row_once(
    tmp_path: Path,
) -> None:
    """Rows of the first attempt reach wandb but not the server when `sync` is killed; the second attempt ends."""
    pytest.importorskip("wandb")
    run = make_run(tmp_path, relay=True, id="relayed")
    with serve_wandb() as server:
        words = [sys.executable, "-m", "primerl_hpc", "sync", str(run.root), "--watch"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_BASE_URL": server.url, **FAST}

        def start_sync() -> subprocess.Popen:
            with (run.attempt_logs(1) / "tracker-0.log").open("a") as log:
                return subprocess.Popen(
                    words,
                    env={**environ, "WANDB_API_KEY": API_KEY},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        cut = iter(["after", "before"])  # a reply is lost, then a request
        server.cuts = lambda path: next(cut, None) if "file_stream" in path else None
        write_json(run.state, {"state": "running", "attempt": 1})
        write(run, 1, 2)
        relay = start_sync()
        try:
            wait_until_sent(run, relay)
            wait_for(lambda: len(server.runs["relayed"].lines) == 4, "four rows", tell=lambda: log_of(run))
            server.cuts = lambda path: "before" if "file_stream" in path else None
            write(run, 3)
            wait_until_sent(run, relay)
        finally:
            end_role(relay)
        assert len(server.runs["relayed"].lines) == 4
        server.cuts = lambda path: None
        write_json(run.state, {"state": "done", "attempt": 2})
        write(run, 4)
        relay = start_sync()
        try:
            assert relay.wait(timeout=PATIENCE_S) == 0, log_of(run)
        finally:
            end_role(relay)
    assert list(server.runs) == ["relayed"] and "wandb: 8 rows sent" in log_of(run)
    history = server.runs["relayed"].history
    assert steps_of(history) == steps_of(history, "orchestrator/reward/mean") == [1, 2, 3, 4]
    assert [row["_step"] for row in history] == list(range(8))


def test_sides_divide_the_metrics_and_each_target_has_a_process(tmp_path: Path) -> None:
    recipe = load_recipe(
        "reverse_text/tiny",
        overrides=["tracking={wandb: {name: n, orchestrator: {log_extras: {interval: 5}}}, prime: {}}"],
    ).recipe
    tracking = recipe.tracking
    plan = compile_plan(recipe, load_profile("local").profile, run_dir=str(tmp_path), python="python")
    trackers = [process for process in plan.phases[0].processes if process.role == Role.TRACKER]
    assert [process.log for process in trackers] == [
        "tracker.log",
        "tracker/wandb-orchestrator.log",
        "tracker/prime.log",
    ]
    assert {name: sources_of(name, tracking) for name in tracking.targets} == {
        "wandb": ("sft", "trainer"),
        "wandb-orchestrator": ("orchestrator", "eval"),
        "prime": SOURCES,
    }
    extras = extras_of("wandb-orchestrator", tracking)
    assert extras is not None and extras.interval == 5 and extras_of("wandb", tracking) is None
    assert tracking.wandb is not None
    names = {identity(RunDir(tmp_path), tracking.wandb, side) for side in (None, "trainer", "orchestrator")}
    assert {name for name, _ in names} == {"n", "n-trainer", "n-orchestrator"}
    assert len({run_id for _, run_id in names}) == 3


def test_a_run_that_replaces_another_in_the_same_folder_has_a_wandb_run_of_its_own(tmp_path: Path) -> None:
    settings = parse_recipe(RECIPE | {"tracking": {"wandb": {}}}).tracking.wandb
    assert settings is not None
    run = RunDir(tmp_path)
    ids = []
    for submitted in (1.25, 1.25, 1.5):  # the second time for another attempt
        write_json(run.provenance, {"time": submitted})
        ids.append(identity(run, settings, None)[1])
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize("mode", ["offline", "no-such-mode"])
def test_the_variable_of_wandb_chooses_the_mode_and_a_wrong_one_is_reported(
    tmp_path: Path, mode: str
) -> None:
    pytest.importorskip("wandb")
    run = make_run(tmp_path)
    MetricsWriter(run.metrics("trainer")).write(1, {"loss/mean": 0.5})
    tracker = start_role(run, "main", "tracker-0", WANDB_MODE=mode, WANDB_API_KEY="")
    try:
        if mode == "offline":
            wait_until_sent(run, tracker)
        else:
            assert tracker.wait(timeout=PATIENCE_S) == ExitCode.CONFIG
            assert "wandb failed to start: " in (run.attempt_logs(1) / "tracker-0.log").read_text()
    finally:
        end_role(tracker)
    assert bool(list(run.root.glob("wandb/offline-run-*"))) == (mode == "offline")
