"""Calls in another interpreter: one process for all of them, and an error with the reason if there is no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from primerl_hpc.common import answers
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.interpreters import InterpreterError, Interpreters, UsualAnswer, ask
from tests.support.helpers import ROOT, is_alive, wait_for

QUESTIONS = """
import os, sys, time

print("printed by an import")

def where(request):
    os.write(1, b"printed by C\\n")
    assert sys.stdin.read() == ""
    return {"pid": os.getpid(), "got": request, "variable": os.environ.get("VARIABLE")}

def fails(request):
    raise ValueError("a reason")

def ends(request):
    os._exit(3)

def waits(request):
    time.sleep(900)

def counts(request, report):
    for number in range(request):
        report(number)

def is_odd(request):
    return request % 2 == 1

def refuses(request):
    from primerl_hpc.common.errors import DataError
    print("printed by the function", file=sys.stderr)
    raise DataError("a cause", location="a place", hint="a hint")
"""


ASKER = """
import sys
from primerl_hpc.common import answers
from primerl_hpc.common.errors import DataError
from primerl_hpc.common.interpreters import Interpreters

with Interpreters() as interpreters:
    print(interpreters.ask(sys.executable, {}, "questions:where", None)["pid"], flush=True)
    interpreters.ask(sys.executable, {}, "questions:waits", None)
"""


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "questions.py").write_text(QUESTIONS)
    return {"PYTHONPATH": str(tmp_path)}


def call(
    interpreters: Interpreters, variables: dict[str, str], name: str, request: Any = None, **options: Any
) -> Any:
    return interpreters.ask(sys.executable, variables, f"questions:{name}", request, **options)


def test_one_process_answers_all_questions_and_ends_with_the_block(variables: dict[str, str]) -> None:
    with Interpreters() as interpreters:
        first, second = (call(interpreters, variables, "where", request) for request in ({"a": "ä"}, [1]))
        other = call(interpreters, {**variables, "VARIABLE": "b"}, "where")
        processes = [psutil.Process(each["pid"]) for each in (first, other)]
        assert all(map(is_alive, processes))
    assert (first["got"], second["got"]) == ({"a": "ä"}, [1]) and first["pid"] == second["pid"]
    assert (first["variable"], other["variable"]) == (None, "b") and other["pid"] != first["pid"]
    assert not any(map(is_alive, processes))


def test_an_expected_answer_is_given_again_until_something_changes_on_which_it_depends(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "state"))
    read, other = tmp_path / "data" / "read.json", tmp_path / "modules"
    for folder in (tmp_path / "state", read.parent, other):
        folder.mkdir()
    read.write_text("1")
    module = other / "answering.py"
    module.write_text("def faults(request):\n    return []\n")
    asked: list[Any] = []

    def answer(request: str = "a", **more: str) -> Any:
        path = {**variables, "PYTHONPATH": f"{other}:{variables['PYTHONPATH']}", **more}
        with Interpreters() as interpreters:
            given = interpreters.ask_unless_unchanged(
                sys.executable, path, "answering:faults", request, UsualAnswer([], (str(read),))
            )
            asked.extend(interpreters._started)
        return given

    for _ in range(2):
        assert answer() == []
    assert len(asked) == 1
    changes = (
        lambda: read.write_text("22"),
        lambda: (other / "another.py").write_text(""),  # may be imported in the place of another one
        lambda: module.write_text("def faults(request):\n    return list()\n"),
        read.unlink,
    )
    for number, change in enumerate(changes, 2):
        change()
        assert answer() == answer() == [] and len(asked) == number
    assert answer("b") == answer(VARIABLE="1") == [] and len(asked) == number + 2
    module.write_text("def faults(request):\n    return ['wrong']\n")
    assert (
        answer() == answer() == ["wrong"] and len(asked) == number + 4
    )  # only the expected one is remembered


def test_a_state_folder_that_cannot_be_written_remembers_nothing(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "state"))
    with Interpreters() as interpreters:
        answer = interpreters.ask_unless_unchanged(
            sys.executable, variables, "questions:is_odd", 3, UsualAnswer(True)
        )
    assert answer is True


@pytest.mark.parametrize(
    ("name", "reason"), [("fails", "ValueError: a reason"), ("ends", "printed by an import")]
)
def test_a_process_that_ends_is_explained_by_its_last_line(
    variables: dict[str, str], name: str, reason: str
) -> None:
    with Interpreters() as interpreters:
        for each in (name, "where"):
            with pytest.raises(InterpreterError) as raised:
                call(interpreters, variables, each)
            assert raised.value.cause == f"{sys.executable} cannot be run here ({reason})"


def test_what_does_not_answer_in_time_is_ended(variables: dict[str, str]) -> None:
    with Interpreters() as interpreters, pytest.raises(InterpreterError, match="did not answer within 0 s"):
        call(interpreters, variables, "waits", timeout_s=0.2)


def test_an_error_of_the_function_is_raised_here_and_the_process_answers_on(
    variables: dict[str, str],
) -> None:
    with Interpreters() as interpreters:
        with pytest.raises(DataError) as raised:
            call(interpreters, variables, "refuses")
        assert call(interpreters, variables, "where", 1)["got"] == 1
    error = raised.value
    assert (error.cause, error.location, error.hint) == ("a cause", "a place", "a hint")
    assert error.details.endswith("printed by the function")


def test_progress_arrives_before_the_result(variables: dict[str, str]) -> None:
    progress: list[int] = []
    with Interpreters() as interpreters:
        assert call(interpreters, variables, "counts", 3, on_progress=progress.append) is None
    assert progress == [0, 1, 2]


def test_an_interpreter_without_any_package_answers_what_is_sent_as_text() -> None:
    """``-S``: without site-packages, so that neither this package nor its requirements can be imported."""
    function, source = "text:missing_modules", Path(answers.__file__).read_text()
    names = ["json", "primerl_hpc", "pydantic"]
    question = {"function": function, "source": source, "arguments": [names]}
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", Path(answers.__file__).read_text()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(question), file=process.stdin, flush=True)
        assert json.loads(process.stdout.readline()) == {"answer": ["primerl_hpc", "pydantic"]}
        process.stdin.close()


def test_an_isolated_interpreter_does_not_see_the_variables_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_here.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    function = "primerl_hpc.common.answers:missing_modules"
    for variables, expected in (({}, []), (None, ["found_here"])):
        assert ask(sys.executable, variables, function, ["found_here"], by_source=True) == expected


def test_an_answer_ends_with_the_process_that_asked(variables: dict[str, str]) -> None:
    """Also if it is killed, so that a download does not continue unseen."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), variables["PYTHONPATH"]])}
    with subprocess.Popen(
        [sys.executable, "-c", ASKER], env=environ, stdout=subprocess.PIPE, text=True
    ) as asker:
        assert asker.stdout is not None
        process = psutil.Process(int(asker.stdout.readline()))
        asker.kill()
    wait_for(lambda: not is_alive(process), "the interpreter that was asked to end")


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
    with pytest.raises(InterpreterError) as raised:
        ask(str(python), {}, "questions:where", None)
    assert raised.value.cause.startswith(f"{python} cannot be run here (") and reason in raised.value.cause


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
