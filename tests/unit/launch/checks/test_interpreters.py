"""Questions to the interpreter of a role: one process for all of them, and a sentence where there is no answer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from primerl_hpc.launch.checks import interpreters as module
from primerl_hpc.launch.checks.interpreters import Interpreters
from tests.support.helpers import is_alive, wait_for

QUESTIONS = """
import os, sys, time

print("printed by an import")

def where(request):
    os.write(1, b"printed by C\\n")
    return {"pid": os.getpid(), "got": request, "variable": os.environ.get("VARIABLE")}

def fails(request):
    raise ValueError("a reason")

def ends(request):
    os._exit(3)

def waits(request):
    time.sleep(900)
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "questions.py").write_text(QUESTIONS)
    return {"PYTHONPATH": str(tmp_path)}


def ask(interpreters: Interpreters, variables: dict[str, str], name: str, request: Any = None) -> Any:
    return interpreters.ask(sys.executable, variables, f"questions:{name}", request)


def test_one_process_answers_all_questions_and_ends_with_the_block(variables: dict[str, str]) -> None:
    with Interpreters() as interpreters:
        first, second = (ask(interpreters, variables, "where", request) for request in ({"a": "ä"}, [1]))
        other = ask(interpreters, {**variables, "VARIABLE": "b"}, "where")
        processes = [psutil.Process(each["pid"]) for each in (first, other)]
        assert all(map(is_alive, processes))
    assert (first["got"], second["got"]) == ({"a": "ä"}, [1]) and first["pid"] == second["pid"]
    assert (first["variable"], other["variable"]) == (None, "b") and other["pid"] != first["pid"]
    assert not any(map(is_alive, processes))


@pytest.mark.parametrize(
    ("name", "reason"), [("fails", "ValueError: a reason"), ("ends", "printed by an import")]
)
def test_a_process_that_ends_is_explained_by_its_last_line(
    variables: dict[str, str], name: str, reason: str
) -> None:
    with Interpreters() as interpreters:
        expected = f"{sys.executable} cannot be run here ({reason})"
        assert [ask(interpreters, variables, each) for each in (name, "where")] == [expected] * 2


def test_what_does_not_answer_in_time_is_ended(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    with Interpreters() as interpreters:
        assert ask(interpreters, variables, "waits") == f"{sys.executable} did not answer within {0.2:.0f} s"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "No such file or directory"),
        ("#!/bin/sh\necho no module >&2; exit 1\n", "no module"),
        ("#!/bin/sh\necho '[1]'; echo text\n", "no message"),
    ],
    ids=["absent", "refuses", "says something else"],
)
def test_what_is_no_interpreter_is_explained(tmp_path: Path, script: str | None, reason: str) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(script)
        os.chmod(python, 0o755)
    with Interpreters() as interpreters:
        answer = interpreters.ask(str(python), {}, "questions:where", None)
    assert answer.startswith(f"{python} cannot be run here (") and reason in answer


def test_a_script_that_greets_and_starts_the_interpreter_is_understood(
    variables: dict[str, str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho Welcome to the cluster\n{sys.executable} "$@"\n')
    os.chmod(python, 0o755)
    with Interpreters() as interpreters:
        answer = interpreters.ask(str(python), variables, "questions:where", 1)
        assert answer["got"] == 1
        process = psutil.Process(answer["pid"])
    wait_for(lambda: not is_alive(process), "the interpreter below the script to end")
