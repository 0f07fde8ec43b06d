"""Programs that models drive write log lines: whatever they contain, reading takes time linear in their length."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.files import write_json
from primerl_hpc.observe.diagnose.diagnose import diagnose
from primerl_hpc.observe.diagnose.known_faults import FAULT_PATTERNS, recognize_fault
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime import failures
from tests.support.helpers import PATIENCE_S, captured

try:
    from re import _constants as constants  # type: ignore[attr-defined] (Python 3.11 and newer)
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:
    import sre_constants as constants
    import sre_parse as parser

LENGTH = 64_000
EVERY = [each.regex for each in FAULT_PATTERNS] + [failures._RANK_FAILURE, failures._ENDED_BY_TORCHRUN]


def repeats(parsed: Any) -> Iterator[tuple[int, int]]:
    """Yield (minimum, maximum) of every repetition in a parsed pattern."""
    for operation, argument in parsed:
        if operation in (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT):
            yield argument[0], int(argument[1])
            yield from repeats(argument[2])
        elif isinstance(argument, (tuple, list)):
            for part in argument:
                if isinstance(part, parser.SubPattern):
                    yield from repeats(part)
                elif isinstance(part, (tuple, list)):
                    for inner in part:
                        if isinstance(inner, parser.SubPattern):
                            yield from repeats(inner)
        elif isinstance(argument, parser.SubPattern):
            yield from repeats(argument)


@pytest.mark.parametrize("regex", EVERY, ids=lambda regex: regex.pattern[:40])
def test_every_repetition_in_a_pattern_is_bounded(regex: re.Pattern[str]) -> None:
    assert all(most <= 400 for _, most in repeats(parser.parse(regex.pattern, regex.flags)))


def test_unbounded_repetitions_are_detected() -> None:
    for text in ("a*", "(?:x|b+c)", "(a{3,})", r"([\w.]+)\.so", "(?:(?:a.*?b)|c)"):
        assert any(most > 400 for _, most in repeats(parser.parse(text))), text


def hostile_lines() -> list[str]:
    """Return long repetitions of the start, the end and the repeated part of each pattern."""
    words = [
        "a.so1",
        "a.so",
        ".so.1",
        "a",
        " ",
        ".",
        "-",
        "+.",
        "rank : 1 (local_rank",
        "exitcode : ",
        "max seq len",
    ]
    for regex in EVERY:
        words += [part for part in re.split(r"[\\\[\](){}|.?*+^$]", regex.pattern) if part.strip()]
    return [(word * (LENGTH // len(word) + 1))[:LENGTH] for word in dict.fromkeys(words)]


LOOK = """
import json, sys
from primerl_hpc.observe.diagnose.known_faults import recognize_fault
from primerl_hpc.runtime.failures import _torchrun_report
lines = json.load(sys.stdin)
for line in lines:
    recognize_fault(line)
    _torchrun_report(["Failures:", line])
recognize_fault("ended", lines)
"""


def test_a_long_line_is_searched_in_linear_time() -> None:
    lines = hostile_lines()
    assert "a.so1" * (LENGTH // 5) in lines
    # it takes seconds, or hours if the time per line is quadratic
    subprocess.run(
        [sys.executable, "-c", LOOK], input=json.dumps(lines), text=True, check=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("libcudart.so.12: cannot open shared object file: No such file", "libcudart.so.12"),
        ("OSError: /opt/x/libc++abi-2.so: cannot open shared object file", "libc++abi-2.so"),
        ("ModuleNotFoundError: No module named 'flash_attn.layers'", "flash_attn.layers"),
    ],
)
def test_bounded_patterns_still_find_names(line: str, name: str) -> None:
    found = recognize_fault(line)
    assert found is not None and name in found.what


def test_text_beyond_4_kb_of_a_line_is_not_searched() -> None:
    assert recognize_fault("x" * 5000 + " No space left on device") is None
    assert recognize_fault("ended", ["x" * 5000 + "\n", "No space left on device"]) is not None


def test_diagnose_terminates_on_a_line_of_64_kb(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.control.mkdir()
    state = {"attempt": 1, "state": "failed", "phase": "main", "updated": time.time() - 60}
    write_json(run.state, state)
    line = "a.so1" * 16_000
    failure = {
        "attempt": 1,
        "process": "trainer-0",
        "node": "n",
        "exit_code": 1,
        "signal": None,
        "rank": None,
    }
    write_json(run.failure, failure | {"message": line, "last_lines": [line] * 40, "log": "trainer.log"})
    code = "import sys; from primerl_hpc.cli.main import main; main()"
    words = [sys.executable, "-c", code, "diagnose", str(tmp_path)]
    write_json(run.plan, {"version": 0})
    done = captured(words, timeout=PATIENCE_S)
    assert "Traceback" not in done.stderr
    found = diagnose(run, ask=lambda words: "")
    assert found.failure is not None and found.known is None
