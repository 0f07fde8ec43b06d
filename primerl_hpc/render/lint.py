"""Check a rendered script like sbatch and bash do, before it is queued. User-defined templates can be invalid.

check_script(script, location="job.sbatch")     # raises ConfigError with the line
warnings_of(script)                          # ["the batch script does not exec the supervisor: …"]
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from primerl_hpc.common.errors import ConfigError

_SUPERVISOR = "primerl_hpc.runtime.supervisor"
_BASH_ERROR = re.compile(r"line (\d+): (.*)")
_BASH_TIMEOUT_S = 10.0


def check_script(script: str, *, location: str) -> None:
    """Raise ConfigError for a script with directives that sbatch would ignore, or with syntax errors."""
    lines = script.split("\n")
    if not lines[0].startswith("#!"):
        raise ConfigError(
            "a batch script must start with #!",
            location=f"{location}:1",
            hint="start the template with #!/bin/bash",
        )
    _check_directives(lines, location)
    _check_syntax(script, lines, location)


def warnings_of(script: str) -> list[str]:
    """Return warnings about constructs that are allowed but probably unintended."""
    if re.search(rf"^\s*exec .*{re.escape(_SUPERVISOR)}", script, re.M):
        return []
    if re.search(rf"{re.escape(_SUPERVISOR)}(?!.*--setup-failure)", script):
        return [
            "the batch script does not exec the supervisor: the walltime warning and scancel reach the shell instead"
        ]
    return [f"the batch script does not start the supervisor (exec … -m {_SUPERVISOR} RUN_DIR)"]


def _check_directives(lines: list[str], location: str) -> None:
    """Raise ConfigError for directives after the first command, which sbatch silently ignores, and indented ones."""
    command = None
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if line.startswith("#SBATCH") and command is not None:
            raise ConfigError(
                f"{line!r} is after the first command (line {command}), where sbatch ignores it",
                location=f"{location}:{number}",
                hint="move it up, or to scheduler.extra of the profile",
            )
        if re.match(r"\s+#SBATCH", line) and command is None:
            raise ConfigError(
                f"{text!r} is indented, so sbatch treats it as a comment",
                location=f"{location}:{number}",
                hint="remove the indentation",
            )
        if text and not text.startswith("#") and command is None:
            command = number


def is_complete(shell: str) -> bool:
    """True if bash parses this text as complete commands, or bash is unavailable."""
    backslashes = len(shell) - len(shell.rstrip("\\"))
    try:
        return backslashes % 2 == 0 and not _bash_errors(shell)
    except subprocess.TimeoutExpired:
        return True


def _bash_errors(script: str) -> str:
    """Return the syntax errors that bash reports; empty without errors or without bash. Raises TimeoutExpired."""
    if (bash := shutil.which("bash")) is None:
        return ""
    done = subprocess.run(
        [bash, "--norc", "-n"],
        input=script,
        # a missing locale is not an error of the script, and the messages are parsed
        env={"LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=_BASH_TIMEOUT_S,
        check=False,
    )
    return done.stderr.strip()  # for an unterminated here-document bash only warns and exits with 0


def _check_syntax(script: str, lines: list[str], location: str) -> None:
    try:
        fault = _bash_errors(script)
    except subprocess.TimeoutExpired:
        print(
            f"warning: {location} was not checked: bash took more than {_BASH_TIMEOUT_S:g} s", file=sys.stderr
        )
        return
    if not fault:
        return
    found = _BASH_ERROR.search(fault)
    number, message = (int(found[1]), found[2]) if found else (1, fault)
    line = lines[number - 1].strip() if number <= len(lines) else ""
    shown = f" in {line!r}" if line and line not in message else ""
    raise ConfigError(
        f"bash does not accept the script: {message}{shown}",
        location=f"{location}:{number}",
        hint="correct the template or the line of software.setup",
    )
