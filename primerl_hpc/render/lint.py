"""Reads a rendered script as sbatch and bash will, before anything is queued: a user's own template may be anything.

check_script(script, place="job.sbatch")     # raises ConfigError with the line
warnings_of(script)                          # ["the supervisor is not started with exec: …"]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from primerl_hpc.common.errors import ConfigError

_SUPERVISOR = "primerl_hpc.runtime.supervisor"
_BASH_SAYS = re.compile(r"line (\d+): (.*)")
_BASH_TIMEOUT_S = 10.0


def check_script(script: str, *, place: str) -> None:
    """Raises ConfigError for a script that sbatch would take without some of its directives, or bash not at all."""
    lines = script.split("\n")
    if not lines[0].startswith("#!"):
        raise ConfigError(
            "a batch script starts with #!",
            place=f"{place}:1",
            mend="let its template begin with #!/bin/bash",
        )
    _check_directives(lines, place)
    _check_syntax(script, lines, place)


def warnings_of(script: str) -> list[str]:
    """What is allowed and seldom meant."""
    if re.search(rf"^\s*exec .*{re.escape(_SUPERVISOR)}", script, re.M):
        return []
    if _SUPERVISOR in script:
        return [
            "the batch script does not start the supervisor with exec: the walltime's warning and scancel reach "
            "the shell instead of it"
        ]
    return [f"the batch script does not start the supervisor (exec … -m {_SUPERVISOR} RUN_DIR)"]


def _check_directives(lines: list[str], place: str) -> None:
    """sbatch stops at the first line that is neither empty nor a comment, and says nothing about the rest."""
    command = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if line.startswith("#SBATCH") and command is not None:
            raise ConfigError(
                f"{line!r} stands after the first command (line {command}), where sbatch does not read it",
                place=f"{place}:{number}",
                mend="move it up, or into scheduler.extra of the profile",
            )
        if re.match(r"\s+#SBATCH", line) and command is None:
            raise ConfigError(
                f"{text!r} is indented: sbatch takes it for a comment",
                place=f"{place}:{number}",
                mend="let it begin the line",
            )
        if text and not text.startswith("#") and command is None:
            command = number


def _check_syntax(script: str, lines: list[str], place: str) -> None:
    if (bash := shutil.which("bash")) is None:
        return
    try:
        done = subprocess.run(
            [bash, "--norc", "-n"],
            input=script,
            env={
                "LC_ALL": "C"
            },  # a locale that is not there is no fault of the script, and the words are matched
            capture_output=True,
            text=True,
            timeout=_BASH_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"warning: {place} is not checked: bash took over {_BASH_TIMEOUT_S:g} s", file=sys.stderr)
        return
    if not done.stderr.strip():  # of an open here-document bash warns and ends with 0
        return
    said = _BASH_SAYS.search(done.stderr)
    number, words = (int(said[1]), said[2]) if said else (1, done.stderr.strip())
    line = lines[number - 1].strip() if number <= len(lines) else ""
    shown = f" in {line!r}" if line and line not in words else ""
    raise ConfigError(
        f"bash does not accept the script: {words}{shown}",
        place=f"{place}:{number}",
        mend="mend the template or software.setup that this line comes from",
    )
