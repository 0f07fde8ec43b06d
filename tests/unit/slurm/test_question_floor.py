"""Questions to SLURM of several processes of a run, on a clock of the test."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from primerl_hpc.slurm.question_floor import QuestionFloor


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def floors(folder: Path, count: int, every_s: float = 60.0) -> tuple[Clock, list[QuestionFloor]]:
    clock = Clock()
    return clock, [QuestionFloor(folder, every_s, clock) for _ in range(count)]


def test_many_processes_ask_once_in_the_interval(tmp_path: Path) -> None:
    clock, processes = floors(tmp_path / "questions", 50)
    asked_at = []
    for second in range(600):
        clock.now = float(second)
        asked_at += [second for process in processes if process.may_ask()]
    assert 5 <= len(asked_at) <= 10
    assert min(after - before for before, after in pairwise(asked_at)) >= 60
    assert len(list((tmp_path / "questions").iterdir())) == 1


def test_a_process_asks_again_as_soon_as_the_interval_after_its_own_question_is_over(tmp_path: Path) -> None:
    clock, (process,) = floors(tmp_path, 1)
    asked_at = []
    for second in range(300):
        clock.now = float(second)
        asked_at += [second] if process.may_ask() else []
    assert asked_at == [0, 60, 120, 180, 240]


def test_a_process_that_starts_later_waits_for_the_interval(tmp_path: Path) -> None:
    clock, (first, second) = floors(tmp_path, 2)
    assert first.may_ask()
    clock.now = 30.0
    assert not second.may_ask()
    clock.now = 89.0
    assert not second.may_ask()
    clock.now = 90.0
    assert second.may_ask()


def test_a_question_that_cannot_wait_delays_the_others(tmp_path: Path) -> None:
    clock, (engine, supervisor) = floors(tmp_path, 2)
    assert engine.may_ask()
    clock.now = 50.0
    supervisor.note()
    clock.now = 70.0
    assert not engine.may_ask()
    clock.now = 131.0
    assert engine.may_ask()


def test_an_answer_reaches_all_processes_without_another_question(tmp_path: Path) -> None:
    clock, (first, second) = floors(tmp_path, 2)
    questions: list[str] = []

    def ask(job: str) -> bool:
        questions.append(job)
        return True

    assert first.is_over("7", ask)
    clock.now = 10.0
    assert second.is_over("7", ask) and questions == ["7"]
    clock.now = 20.0
    assert not second.is_over("8", ask) and questions == ["7"]
