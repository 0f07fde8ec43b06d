"""`logs`: selection by role, node, rank and attempt, merging by time, and following from the queue to the end."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from primerl_hpc.cli.logs import command
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import append_json, read_json, write_json, write_text
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.log_files import LogFiles
from primerl_hpc.observe.merged_logs import (
    LogFilter,
    LogFollower,
    follow_logs,
    later_start,
    missing_log_error,
    parse_since,
    stamp_lines,
)
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, wait_for
from tests.support.terminal import Terminal

NOW = time.mktime((2026, 11, 21, 15, 0, 0, 0, 0, -1))


def process(name: str, log: str, nodes: list[int], ranks: int = 0) -> dict[str, Any]:
    role = name.rsplit("-", 1)[0]
    return {"name": name, "role": role, "log": log, "nodes": nodes, "accelerators": list(range(ranks))}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """An engine on gpu-a, a trainer of two ranks a node on gpu-b and gpu-c, the rest on gpu-a; attempt 2 has
    started.
    """
    run = RunDir(tmp_path / "math-001")
    processes = [
        process("inference-0", "inference/0.log", [0], 2),
        process("router-0", "inference/router.log", [0]),
        process("env_server-0", "envs/train/reverse-text.log", [0]),
        process("orchestrator-0", "orchestrator.log", [0]),
        process("trainer-0", "trainer.log", [1, 2], 2),
    ]
    phase = {"name": "main", "recipe": {"kind": "rl"}, "processes": processes}
    write_json(run.plan, {"version": 1, "kind": "rl", "phases": [phase]})
    write_json(run.job, {"scheduler": "slurm", "job_id": "17", "attempt": 1, "submitted": time.time()})
    write_json(run.state, {"attempt": 2, "state": "done", "updated": time.time()})
    for attempt, hosts in ((1, "gpu-x gpu-y gpu-z"), (2, "gpu-a gpu-b gpu-c")):
        append_json(run.events, {"time": 0.0, "event": "attempt_started", "attempt": attempt, "job": "17"})
        write_text(run.attempt_hosts(attempt), hosts.replace(" ", "\n"))
    return run


FRAMES = (
    "Exception raised from f at a.cpp:1 (most recent call first):\nframe #0: f() + 1 (0x1 in /x/libc10.so)\n"
)
LONG = "15:00:00 " + " ".join(f"word{number}" for number in range(40))


def test_lines_wrap_next_to_their_label_in_a_terminal_but_not_in_a_pipe(run: RunDir) -> None:
    for name in ("inference/router", "orchestrator"):
        write_text(run.attempt_logs(2) / f"{name}.log", f"{LONG}\n{FRAMES}15:00:01 the end\n")
    piped = CliRunner().invoke(command, [str(run.root)]).output.splitlines()
    assert [line.partition("│ ")[2] for line in piped] == [LONG, LONG, "15:00:01 the end", "15:00:01 the end"]
    with Terminal("primerl_hpc", "logs", str(run.root), cwd=run.root) as terminal:
        assert terminal.end() == 0
    lines = [click.unstyle(line) for line in terminal.shown.splitlines()]
    assert len(lines) > 8 and all(len(line) <= 80 and line[21:23] == "│ " for line in lines)
    texts = " ".join(line[23:] for line in lines)
    assert texts == " ".join([LONG, LONG, "15:00:01 the end", "15:00:01 the end"])


@pytest.mark.parametrize("words", [("-n", "0"), ("-n", "-5"), ("--rank", "-1"), ("--attempt", "0")])
def test_numbers_below_their_minimum_are_refused(run: RunDir, words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(command, [str(run.root), "--grep", "x", *words])
    assert done.exit_code == 2 and "is not in the range" in done.output


def labels(run: RunDir, role: str | None = None, **choice: Any) -> list[str]:
    return [file.label for file in LogFiles(run).choose(role, **choice)]


@pytest.mark.parametrize(
    "role, found",
    [
        ("trainer", ["trainer@gpu-b", "trainer@gpu-c"]),
        ("inference", ["inference/0", "inference/router"]),
        ("inference-0", ["inference/0"]),
        ("inference/0", ["inference/0"]),
        ("router", ["inference/router"]),
        ("env-server", ["envs/train/reverse-text"]),
        ("env_server-0", ["envs/train/reverse-text"]),
        ("envs/train", ["envs/train/reverse-text"]),
    ],
)
def test_logs_are_selected_by_role_process_or_part_of_the_path(
    run: RunDir, role: str, found: list[str]
) -> None:
    assert labels(run, role) == found


def test_a_node_selects_its_processes_in_that_attempt(run: RunDir) -> None:
    assert labels(run, node="gpu-c") == ["trainer@gpu-c"]
    assert labels(run, "trainer", node="gpu-y", attempt=1) == ["trainer@gpu-y"]
    with pytest.raises(NotFoundError, match=r"gpu-x.*attempt 2.*gpu-a, gpu-b"):
        labels(run, node="gpu-x")


def test_a_rank_is_found_on_its_node_in_every_incarnation_of_its_group(run: RunDir) -> None:
    for second, life in enumerate(
        ("none_old", "none_new")
    ):  # both may be written within one tick of the clock
        log = run.torchrun_logs(2, "trainer-0", 1) / life / "attempt_0" / "1" / "stderr.log"
        write_text(log, f"rank 3 of {life}\n")
        os.utime(log, (second, second))
    files = LogFiles(run).choose("trainer", rank=3)
    assert [(file.node, file.rank) for file in files] == [("gpu-c", 3)] * 2
    assert [file.path.parts[-4] for file in files] == ["none_old", "none_new"]
    with pytest.raises(NotFoundError, match="0 to 3"):
        labels(run, "trainer", rank=4)
    with pytest.raises(NotFoundError, match="no ranks"):
        labels(run, "router", rank=0)


def test_the_job_log_contains_its_output_and_the_messages_of_srun(run: RunDir) -> None:
    write_text(run.attempt_logs(2) / "slurm" / "trainer-0.log", "srun: error\n")
    paths = [file.path.name for file in LogFiles(run).choose("job")]
    assert paths == ["slurm-17.out", "17_0_log.out", "trainer-0.log"]


def test_elastic_engines_have_their_own_logs_and_the_output_of_their_jobs(run: RunDir) -> None:
    plan = read_json(run.plan)
    elastic = [process(f"inference-{index}", f"inference/{index}.log", [0], 2) for index in (1, 2)]
    plan["phases"][0]["elastic"] = elastic
    write_json(run.plan, plan)
    publish_endpoint(run, "inference-1", "http://10.0.0.9:8000")
    host = read_json(run.endpoint("inference-1"))["host"]
    files = LogFiles(run).choose("inference")
    assert [(file.process, file.node) for file in files] == [
        ("inference-0", "gpu-a"),
        ("router-0", "gpu-a"),
        ("inference-1", host),
        ("inference-2", None),
    ]
    write_text(run.root / "logs" / "engines-18_1.out", "slurmstepd: error\n")
    assert "engines-18_1" in labels(run, "job")
    joined = {"role": "inference", "state": "joined", "url": "http://10.0.0.9:8000", "incarnation": 0}
    write_json(
        run.state, {"attempt": 2, "state": "done", "hosts": ["gpu-a"], "processes": {"inference-1": joined}}
    )
    assert take_snapshot(run).processes["inference-1"]["hosts"] == ["10.0.0.9"]


def test_the_error_for_an_unknown_role_lists_the_existing_ones(run: RunDir) -> None:
    with pytest.raises(
        NotFoundError, match=r"no 'trainr'.*inference, router, env_server, orchestrator, trainer, job"
    ):
        labels(run, "trainr")


def test_only_a_few_of_hundreds_of_engines_are_shown_by_default(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    engines = [process(f"inference-{index}", f"inference/{index}.log", [0]) for index in range(300)]
    write_json(run.plan, {"phases": [{"name": "main", "processes": engines}]})
    assert len(labels(run)) == 8 and len(labels(run, "inference")) == 300


# -- time ------------------------------------------------------------------------------------------


def clock(stamp: float) -> str:
    return time.strftime("%d %H:%M:%S", time.localtime(stamp))


def test_lines_get_their_date_from_the_file_and_tracebacks_the_time_of_their_first_line() -> None:
    lines = [
        "no clock yet",
        "[0] 23:59:58 step 1",
        "Traceback",
        "  File x",
        "00:00:02 step 2",
        "14:59:00 end",
    ]
    assert [clock(stamp) for stamp in stamp_lines(lines, NOW)] == [
        "20 23:59:58",
        "20 23:59:58",
        "20 23:59:58",
        "20 23:59:58",
        "21 00:00:02",
        "21 14:59:00",
    ]
    assert stamp_lines(["no", "clock"], NOW) == [NOW, NOW]


@pytest.mark.parametrize(
    "text, then",
    [
        ("90s", NOW - 90),
        ("2h", NOW - 7200),
        ("1d", NOW - 86400),
        ("14:30", NOW - 1800),
        ("16:00", NOW - 82800),
    ],
)
def test_since_is_an_age_or_a_clock_time(text: str, then: float) -> None:
    assert parse_since(text, NOW) == then


@pytest.mark.parametrize("text", ["99:99", "24:00", "14:60", "14:30:60", "14"])
def test_an_invalid_clock_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        parse_since(text, NOW)


def show(run: RunDir, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(command, [str(run.root), *words], catch_exceptions=False)
    return done.exit_code, done.output


def test_roles_are_merged_by_time_with_their_names(run: RunDir) -> None:
    logs = run.attempt_logs(2)
    minutes = [time.strftime("%H:%M:%S", time.localtime(time.time() - 60 * ago)) for ago in (5, 4, 3, 2, 1)]
    write_text(logs / "orchestrator.log", f"{minutes[0]} starts\n{minutes[3]} ships batch 1\n")
    write_text(
        logs / "inference/0.log",
        f"{minutes[1]} loads\n{minutes[2]} ERROR of an engine\n         its detail\n",
    )
    code, output = show(run)
    assert code == 0
    assert [line.split("│ ")[1][9:] for line in output.splitlines()] == [
        "starts",
        "loads",
        "ERROR of an engine",
        "its detail",
        "ships batch 1",
    ]
    assert output.startswith("orchestrator ")
    _, output = show(run, "--since", "150s")
    assert [line.split("│ ")[1][9:] for line in output.splitlines()] == ["ships batch 1"]
    _, output = show(run, "inference", "--grep", "ERR|loads", "-n", "1")
    assert "ERROR" in output and "loads" not in output
    _, output = show(run, "--json")
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["process"] for row in rows] == ["orchestrator-0", *["inference-0"] * 3, "orchestrator-0"]
    assert rows[1]["text"].endswith("loads") and (rows[1]["role"], rows[1]["attempt"]) == ("inference", 2)
    assert rows[1]["time"] < rows[-1]["time"] <= time.time()


@pytest.mark.parametrize("words", [("--grep", "("), ("--since", "soon")])
def test_an_invalid_filter_is_a_usage_error(run: RunDir, words: tuple[str, str]) -> None:
    code, output = show(run, *words)
    assert code == 2 and words[0] in output


@pytest.mark.parametrize(("role", "hint"), [("trainer", "logs run job"), ("job", "diagnose run")])
def test_the_hint_about_a_missing_log_is_not_the_command_that_was_run(
    run: RunDir, role: str, hint: str
) -> None:
    assert hint in missing_log_error(run, role=role).hint.replace(run.root.name, "run")


def test_a_role_of_a_later_phase_has_no_log_yet_and_its_phase_is_named(run: RunDir) -> None:
    processes = {
        role: {"name": f"{role}-0", "role": role, "log": f"{role}.log"} for role in ("sft", "trainer")
    }
    phases = {"warmup": [processes["sft"]], "main": [processes["trainer"]]}
    write_json(run.plan, {"phases": [{"name": name, "processes": these} for name, these in phases.items()]})
    write_json(run.state, {"state": "running", "phase": "warmup", "attempt": 1})
    assert "trainer starts with phase main, after phase warmup" in str(missing_log_error(run, role="trainer"))
    assert later_start(run, "sft") == later_start(run, None) == ""


def test_a_missing_log_is_reported_with_the_state_of_the_run(run: RunDir) -> None:
    with pytest.raises(NotFoundError, match="no log yet: the run is done"):
        show(run, "trainer")


def test_an_attempt_that_does_not_exist_is_refused_with_the_last_one(run: RunDir) -> None:
    write_json(run.state, {"state": "done", "attempt": 2})
    with pytest.raises(NotFoundError, match=r"attempt 9 does not exist.*the last attempt is 2"):
        show(run, "--attempt", "9")


# -- following -------------------------------------------------------------------------------------


class Following:
    """`follow_logs` in a thread, and what it has printed."""

    def __init__(self, run: RunDir, role: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.printed: list[str] = []
        self.state = RunState.PENDING
        monkeypatch.setattr("primerl_hpc.observe.merged_logs.POLL_S", 0.02)
        monkeypatch.setattr("primerl_hpc.observe.merged_logs.SLOWEST_POLL_S", 0.05)
        monkeypatch.setattr(
            "primerl_hpc.observe.merged_logs.real_state", lambda *_: (self.state, "Resources")
        )
        monkeypatch.setattr(click, "echo", lambda text, err=False: self.printed.append(click.unstyle(text)))
        follower = LogFollower(LogFiles(run), role, None, None, None, 40, LogFilter())
        jobs = JobWatcher(lambda command: "")
        self.thread = threading.Thread(target=follow_logs, args=(run, follower, jobs), daemon=True)
        self.thread.start()

    def wait_for(self, words: str) -> None:
        wait_for(lambda: any(words in line for line in self.printed), words, tell=lambda: self.printed)


@pytest.fixture
def following(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    write_json(run.state, {})
    made = Following(run, "orchestrator", monkeypatch)
    yield made
    made.state = RunState.DONE
    made.thread.join(PATIENCE_S)
    assert not made.thread.is_alive()


def test_a_follower_waits_in_the_queue_and_continues_with_the_next_attempt(
    run: RunDir, following: Following
) -> None:
    following.wait_for("waiting: the run is pending: Resources")
    following.state = RunState.RUNNING
    write_json(run.state, {"attempt": 1, "state": "running"})
    write_text(run.attempt_logs(1) / "orchestrator.log", "one\ntor")
    following.wait_for("one")
    with (run.attempt_logs(1) / "orchestrator.log").open("a") as log:
        log.write("n line\n")
    following.wait_for("torn line")
    following.state = RunState.PENDING
    write_json(run.state, {"attempt": 2, "state": "running"})
    following.state = RunState.RUNNING
    write_text(run.attempt_logs(2) / "orchestrator.log", "two\n")
    following.wait_for("two")
    lines = [line for line in following.printed if "waiting" not in line]
    assert lines == ["one", "torn line", "── attempt 2 ──", "two"]


def test_a_follower_with_a_filter_searches_complete_files(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = run.attempt_logs(2) / "orchestrator.log"
    write_text(log, "ERROR one\nERROR two\n" + "fine\n" * 100)

    def look(words: str) -> LogFollower:
        chosen = LogFilter(pattern=re.compile(words))
        follower = LogFollower(LogFiles(run), "orchestrator", None, None, None, 1, chosen)
        follow_logs(run, follower, JobWatcher(lambda command: ""))
        return follower

    follower = look("ERROR")
    assert capsys.readouterr().out == "ERROR two\n"
    with log.open("a") as file:
        file.write("ERROR three\nERROR four\n")
    assert [line.text for line in follower.poll()] == ["ERROR three", "ERROR four"]
    look("nothing is like this")  # a log was seen: nothing is missing
    assert capsys.readouterr().out == ""


def test_a_follower_of_a_node_waits_until_the_attempt_has_its_nodes(run: RunDir) -> None:
    follower = LogFollower(LogFiles(run), "trainer", "gpu-b", None, None, 40, LogFilter())
    write_json(run.state, {"attempt": 3, "state": "starting", "host": "gpu-a"})
    assert follower.poll() == []
    write_text(run.attempt_hosts(3), "gpu-a\ngpu-b\ngpu-c\n")
    write_text(run.attempt_logs(3) / "trainer_0.log", "three\n")
    assert [line.text for line in follower.poll()] == ["three"]
    write_text(run.attempt_hosts(4), "gpu-d\ngpu-e\ngpu-f\n")
    write_json(run.state, {"attempt": 4, "state": "running", "host": "gpu-d"})
    assert follower.poll() == []  # a later attempt may get that node again
    with pytest.raises(NotFoundError, match="gpu-e"):
        LogFollower(LogFiles(run), "trainer", "gpu-b", None, None, 40, LogFilter()).poll()
