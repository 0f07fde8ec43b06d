"""When a job starts its final save: simulated runs over several jobs, and what is learned from rows of metrics."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from primerl_hpc.common.files import append_json, read_json, read_jsonl, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.observe.follow import RunFollower
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation, HostGroup, components_started_together
from primerl_hpc.runtime.engine_host import EngineHost
from primerl_hpc.runtime.job.requeue import WALLTIME, decide_continuation, excluded_hosts
from primerl_hpc.runtime.job.walltime import HEADROOM, LAST_ROWS, RESERVE_S, Deadline
from primerl_hpc.runtime.phase import PhaseRun
from primerl_hpc.runtime.supervisor import Supervisor
from primerl_hpc.slurm.commands import SlurmReply, run_slurm, seconds_left
from primerl_hpc.slurm.question_floor import QuestionFloor
from tests.support.helpers import make_plan, process_plan
from tests.support.slurm_rows import printed, row


def step_row(number: int, /, *, attempt: int = 1, at: float | None = None, **seconds: Any) -> dict[str, Any]:
    """Return the row of step ``number``, written at that time unless ``at`` is given."""
    times = {f"time/{name}": value for name, value in seconds.items()}
    return {"step": number, "time": float(number) if at is None else at, "attempt": attempt, **times}


def learn(deadline: Deadline, *rows: dict[str, Any], attempt: int = 1, **more: Any) -> Deadline:
    values = {"batch": rows[-1]["step"] if rows else 0, "checkpoint": 0, "now": 0.0, **more}
    deadline.learn(rows[-LAST_ROWS:], attempt=attempt, **values)
    return deadline


# -- what is learned -------------------------------------------------------------------------------


def test_a_run_of_which_nothing_is_known_stops_at_the_margin() -> None:
    deadline = learn(Deadline(300))
    assert deadline.is_due(300) and not deadline.is_due(301)


def test_the_slowest_of_the_last_steps_counts_without_its_wait_and_its_save() -> None:
    rows = [step_row(step, step=50.0 + step, wait_for_batch=40.0, save_ckpt=5.0) for step in range(1, 30)]
    rows[20] |= {"time/step": 345.0}
    deadline = learn(Deadline(10), *rows)
    assert (deadline.step_s, deadline.save_s) == (300.0, 5.0)
    assert deadline.need_s == HEADROOM * 305 + RESERVE_S
    rows += [step_row(step, step=60.0) for step in range(30, 45)]
    # saves are rare: none is forgotten
    assert learn(deadline, *rows).step_s == 60.0 and deadline.save_s == 5.0


def test_a_background_save_ends_when_both_sides_are_complete() -> None:
    deadline = learn(Deadline(10), step_row(1, step=2.0, save_ckpt=1.0), now=100.0)
    assert deadline.is_saving
    learn(deadline, step_row(1, step=2.0, save_ckpt=1.0), step_row(2, step=2.0), now=140.0)
    learn(deadline, step_row(2, step=2.0), checkpoint=1, now=160.0)
    assert deadline.save_s == 61.0 and not deadline.is_saving


def test_a_save_that_a_recovery_dropped_is_not_waited_for() -> None:
    deadline = learn(Deadline(10), step_row(5, step=2.0, save_ckpt=1.0), now=100.0)
    learn(deadline, step_row(4, at=9.0, step=2.0), now=500.0)
    learn(deadline, step_row(5, at=10.0, step=2.0), checkpoint=5, now=900.0)
    assert deadline.save_s == 1.0


def test_a_step_under_way_is_known_to_take_as_long_as_it_does() -> None:
    deadline = Deadline(10)
    for now in (0.0, 80.0):
        learn(deadline, now=now, batch=1)
    assert deadline.need_s == HEADROOM * 80 + 10
    assert learn(deadline, step_row(1, step=90.0), now=90.0, batch=1).step_s == 90.0
    learn(deadline, step_row(1, step=90.0), now=9000.0, batch=1)  # it waits for a batch: no step
    assert deadline.step_s == 90.0


def test_numbers_that_are_none_count_for_nothing() -> None:
    assert learn(Deadline(10), step_row(1, step="nan", save_ckpt="inf")).need_s == RESERVE_S


def test_until_a_save_was_seen_it_is_taken_to_need_the_margin() -> None:
    assert learn(Deadline(300), step_row(1, step=50.0)).need_s == HEADROOM * 50 + 300
    assert learn(Deadline(300), step_row(1, step=50.0, save_ckpt=0.0)).need_s == 300


@given(st.floats(1, 1e4), st.floats(0, 1e4), st.floats(0, 1e4))
def test_durations_of_an_earlier_attempt_do_not_end_one_before_its_first_batch(
    margin_s: float, step_s: float, save_s: float
) -> None:
    earlier = step_row(7, attempt=1, step=step_s)
    deadline = learn(Deadline(margin_s, save_s), earlier, attempt=2, batch=0)
    assert not deadline.is_due(margin_s + 1)
    learn(deadline, earlier, attempt=2, batch=8)
    assert deadline.is_due(deadline.need_s) and deadline.need_s >= HEADROOM * (step_s + save_s)


# -- simulated runs --------------------------------------------------------------------------------


@dataclass
class SimulatedRun:
    """Jobs of ``limit_s`` one after another: a trainer of constant steps, and a supervisor that looks every second."""

    limit_s: float
    margin_s: float
    start_s: float
    step_s: float
    save_s: float
    max_steps: int
    interval: int = 10**6
    saved: int = 0
    lost: int = 0
    attempt: int = 0
    asked_at: list[float] = field(default_factory=list)
    """Seconds left when each attempt was asked to stop."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    slowest_save_s: float | None = None

    def run(self) -> str | None:
        """Simulate attempts. Return None if the run finishes, else why no further attempt continues it."""
        while self.saved < self.max_steps:
            before = self.saved
            self._attempt()
            request = {"reason": WALLTIME}
            result = decide_continuation(request, set(), progressed=self.saved > before)
            if self.saved < self.max_steps and not result.is_automatic:
                return result.reason
        return None

    def _attempt(self) -> None:
        self.attempt += 1
        deadline = Deadline(self.margin_s, self.slowest_save_s)
        step, now, ends_at, is_asked = self.saved, self.start_s, self.limit_s, False
        looked_at = 0.0

        def look(until: float) -> None:
            """Let the supervisor poll until then; a batch exists as soon as the trainer has started."""
            nonlocal is_asked, looked_at, ends_at
            while looked_at + 1.0 <= until and not is_asked:
                looked_at += 1.0
                batch = step + 1 if looked_at > self.start_s else 0
                deadline.learn(
                    self.rows[-LAST_ROWS:],
                    attempt=self.attempt,
                    batch=batch,
                    checkpoint=self.saved,
                    now=looked_at,
                )
                if deadline.is_due(self.limit_s - looked_at):
                    is_asked = True
                    self.asked_at.append(self.limit_s - looked_at)
                    ends_at = self.limit_s - RESERVE_S  # PhaseRun's stop deadline

        look(now)
        while not is_asked and step < self.max_steps:
            now += self.step_s
            look(now)
            if now > ends_at:
                break
            step += 1
            seconds = {"step": self.step_s}
            if step % self.interval == 0:
                now += self.save_s
                seconds |= {"step": self.step_s + self.save_s, "save_ckpt": self.save_s}
                if now > ends_at:
                    break
                self.saved = step
            self.rows.append(step_row(step, attempt=self.attempt, at=1e6 * self.attempt + now, **seconds))
        if step > self.saved and now + self.save_s <= ends_at:
            self.saved = step
        self.lost += step - self.saved
        self.slowest_save_s = deadline.save_s


some_s = st.floats(1, 150)


@settings(max_examples=60)
@given(some_s, some_s, some_s, some_s, some_s)
def test_no_step_is_lost_however_long_steps_are_and_every_attempt_makes_some(
    room_s: float, step_s: float, start_s: float, margin_s: float, save_s: float
) -> None:
    """A margin that holds a save is all that a user has to know; one step with its save must fit into a job."""
    margin_s = max(margin_s, save_s + RESERVE_S + 4)
    limit_s = start_s + step_s + save_s + RESERVE_S + 3 + room_s
    assume(margin_s < limit_s - start_s)
    simulated = SimulatedRun(limit_s, margin_s, start_s, step_s, save_s, max_steps=4)
    assert simulated.run() is None and simulated.lost == 0 and simulated.saved == 4
    # never later than the margin
    assert all(left_s >= min(margin_s, limit_s) - 1 for left_s in simulated.asked_at)


@settings(max_examples=30)
@given(st.floats(100, 400), st.floats(1, 40), some_s, some_s)
def test_a_step_that_is_longer_than_a_job_ends_the_run_with_a_reason(
    limit_s: float, start_s: float, save_s: float, more_s: float
) -> None:
    simulated = SimulatedRun(limit_s, limit_s / 2, start_s, limit_s + more_s, save_s, max_steps=3)
    assert "before a new checkpoint" in (simulated.run() or "") and simulated.attempt == 1


def test_saves_longer_than_the_margin_are_learned_at_the_interval() -> None:
    simulated = SimulatedRun(1000, 40, start_s=20, step_s=30, save_s=200, max_steps=60, interval=3)
    assert simulated.run() is None and simulated.lost == 0


def test_a_followed_run_reports_why_it_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path)
    for reason in ("walltime", "cancel"):
        append_json(run.events, {"time": 0.0, "event": "stop_requested", "reason": reason, "left_s": 43})
    RunFollower(run).poll()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("the job ends in 43 s: saving a checkpoint") and second.endswith(
        "stop requested: saving a checkpoint"
    )


# -- asking SLURM ----------------------------------------------------------------------------------


def left(time: str) -> str:
    """A squeue that reports the time left of job 7, and that of another task of its array."""
    return printed(row("6", "7_1", "9-00:00:00"), row("7", "7_2", time))


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a squeue with this body. tests/slurm asks a real one."""

    def make(body: str) -> None:
        command = tmp_path / "bin" / "squeue"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{command.parent}:/usr/bin:/bin")

    return make


def test_squeue_takes_precedence_over_the_environment_variable(
    squeue: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable has the limit from the start of the job, by the clock of the host that set it."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1")
    squeue(left("1:00:05"))
    assert asyncio.run(seconds_left("7")) == 3605.0
    squeue(left("UNLIMITED"))
    assert asyncio.run(seconds_left("7")) == math.inf
    squeue("echo 'squeue: error: Socket timed out' >&2; exit 1")
    assert (asyncio.run(seconds_left("7")) or 0) < -1e9


def test_a_limit_that_was_taken_away_ends_no_attempt_and_no_answer_changes_none(
    squeue: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    recipe = {"kind": "rl", "name": "toy", "model": {"name": "some/model"}, "max_steps": 3}
    recipe["environments"] = {"train": [{"id": "reverse-text"}]}
    make_plan(tmp_path, recipe, processes=[process_plan(Role.TRAINER)])
    supervisor = Supervisor(RunDir(tmp_path))
    supervisor.journal.state = {"state": "running"}
    supervisor.use_allocation(Allocation(("n1",), 1, False, 0, job_id="7"))
    for answer, is_limited in ((left("1:00"), True), ("exit 1", True), (left("UNLIMITED"), False)):
        squeue(answer)
        asyncio.run(supervisor.clock.refresh())
        supervisor.journal.catch_up()
        assert math.isfinite(supervisor.clock.seconds_left()) == is_limited
        assert (read_json(supervisor.run_dir.state)["ends_at"] is not None) == is_limited


def test_a_users_formats_do_not_change_the_output_that_is_parsed(
    squeue: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    squeue('echo "${SQUEUE_STATES-none} ${SLURM_TIME_FORMAT-none}"')
    assert asyncio.run(run_slurm("squeue")) == SlurmReply(0, "none none")
    assert asyncio.run(run_slurm("squeue", environment={"SLURM_TIME_FORMAT": "%s"})) == SlurmReply(
        0, "none %s"
    )


def test_an_elastic_engine_leaves_before_its_job_ends_though_no_warning_came(
    squeue: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"kind": "rl", "name": "toy", "model": {"name": "some/model"}, "max_steps": 3}
    recipe["environments"] = {"train": [{"id": "reverse-text"}]}
    make_plan(tmp_path, recipe, processes=[process_plan(Role.TRAINER)])
    host = EngineHost(RunDir(tmp_path), 0)
    squeue(left("0:31"))
    assert not asyncio.run(host._is_time_over())  # outside of a job SLURM is not asked
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not asyncio.run(host._is_time_over())
    squeue(left("0:29"))
    host.next_walltime_check, host.questions = 0.0, QuestionFloor(tmp_path / "later", every_s=0.0)
    assert asyncio.run(host._is_time_over())


NOTICE = "echo 'slurm_load_partitions: Access/permission denied' >&2\n"


def toy_supervisor(folder: Path, **changes: Any) -> Supervisor:
    """In job 7 on n1, in a phase with a trainer, warned 60 s before the walltime; nothing was started."""
    recipe = {"kind": "rl", "name": "toy", "model": {"name": "some/model"}, "max_steps": 3}
    recipe["environments"] = {"train": [{"id": "reverse-text"}]}
    plan = make_plan(folder, recipe, processes=[process_plan(Role.TRAINER)])
    plan = plan.model_copy(update={"signal_margin_s": 60, **changes})
    write_json(RunDir(folder).plan, plan.model_dump(mode="json"))
    supervisor = Supervisor(RunDir(folder))
    supervisor.journal.state = {"state": "running", "processes": {}}
    nodes = supervisor.use_allocation(Allocation(("n1",), 1, False, 0, job_id="7"))
    supervisor.current = PhaseRun(supervisor.context, plan.phases[0], nodes)
    return supervisor


async def warn(supervisor: Supervisor) -> None:
    supervisor._on_signal(signal.SIGUSR2)
    assert supervisor.warning is not None
    await supervisor.warning


def stop_of(supervisor: Supervisor) -> dict[str, Any]:
    supervisor.journal.catch_up()
    return next(row for row in read_jsonl(supervisor.run_dir.events) if row["event"] == "stop_requested")


def test_notices_on_stderr_do_not_hide_the_output_of_a_slurm_command(
    squeue: Callable[[str], None], tmp_path: Path
) -> None:
    squeue(NOTICE + left("2:56"))
    assert asyncio.run(seconds_left("7")) == 176.0
    squeue("echo 'Welcome to the cluster'\n" + left("2:56"))
    assert asyncio.run(seconds_left("7")) == 176.0
    squeue(NOTICE + printed(row("7", "7", "7", "c[1-2]")))
    assert asyncio.run(excluded_hosts("7")) == {"7": "c[1-2]"}
    squeue(NOTICE + printed(row("7", "7+0", "200", "100"), row("8", "7+1", "90", "100")))
    groups = tuple(HostGroup(frozenset((host,)), 1, 0, "7") for host in ("n2", "n1"))
    job = Allocation(("n1", "n2"), 1, False, 0, job_id="7", groups=groups)
    assert not asyncio.run(components_started_together(job))
    squeue(NOTICE + printed(row("7", "7", "n1", "RUNNING")))
    for name, answer in (("scontrol", "echo n1"), ("sinfo", "echo 'n1 mixed'")):
        command = tmp_path / "bin" / name
        command.write_text(f"#!/bin/sh\n{NOTICE}{answer}\n")
        command.chmod(0o755)
    nodes = toy_supervisor(tmp_path / "run").nodes
    assert nodes is not None and asyncio.run(nodes.find_lost(["n1", "n2"])) == {
        "n2": "lost: it is no longer part of the job"
    }


def test_at_slurms_warning_a_shortened_walltime_is_seen(
    squeue: Callable[[str], None], tmp_path: Path
) -> None:
    supervisor = toy_supervisor(tmp_path)
    squeue(left("20:00"))
    asyncio.run(supervisor.clock.refresh())
    squeue(left("0:45"))  # scontrol update TimeLimit; the next regular look is ten minutes away
    asyncio.run(warn(supervisor))
    assert stop_of(supervisor)["left_s"] <= 60  # known at once, before SLURM has answered
    assert supervisor.clock.seconds_left() <= 45
    assert supervisor.current is not None and supervisor.current.stop_deadline is not None
    assert supervisor.current.stop_deadline - time.monotonic() <= 45 - RESERVE_S + 5


def test_at_slurms_warning_no_answer_leaves_the_margin(squeue: Callable[[str], None], tmp_path: Path) -> None:
    supervisor = toy_supervisor(tmp_path)
    squeue("echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    asyncio.run(warn(supervisor))
    stop = stop_of(supervisor)
    assert (stop["left_s"], stop["limit_s"]) == (60, 30)
    assert read_json(supervisor.run_dir.state)["ends_at"] is not None


def test_after_slurms_warning_a_later_end_is_not_believed(
    squeue: Callable[[str], None], tmp_path: Path
) -> None:
    supervisor = toy_supervisor(tmp_path)
    squeue(left("20:00"))
    asyncio.run(warn(supervisor))
    assert supervisor.clock.seconds_left() <= 60
