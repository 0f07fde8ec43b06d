"""The phases of a start cover all of it, from the start of the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from primerl_hpc.common.node.start_phases import StartPhases, phases_sentence

CODE = """
import json, time
begin = time.time()
import decimal, email.message, http.client
from primerl_hpc.common.node.start_phases import own_phases, process_age
own_phases().end("imports")
own_phases().end("rest", {"compile": 0.0})
print(json.dumps([own_phases().seconds, process_age(), time.time() - begin]))
"""


def test_the_first_phase_begins_with_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    seconds, age_s, since_first_line_s = json.loads(done.stdout)
    assert list(seconds) == ["imports", "compile", "rest"] and seconds["compile"] == 0.0
    # the interpreter itself started before its first line; the kernel counts in hundredths
    assert since_first_line_s - 0.05 <= sum(seconds.values()) <= age_s + 0.05


def test_measured_parts_are_taken_from_the_phase_that_contains_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("primerl_hpc.common.node.start_phases.time.monotonic", lambda: now)
    phases = StartPhases(age_s=10.0)
    phases.end("engine", {"model": 2.0, "compile": 3.0})
    assert phases.seconds == {"model": 2.0, "compile": 3.0, "engine": 5.0}
    now += 1.0
    phases.end("first token", {"other clock": 99.0})
    assert phases.seconds["first token"] == 0.0
    assert phases_sentence({"model": 2.04, "compile": 0.0}) == "model 2.0 s, compile 0.0 s"
