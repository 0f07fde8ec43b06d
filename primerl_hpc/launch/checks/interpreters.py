"""Ask the interpreters of a run's roles, so that a command imports nothing heavy itself.

    with Interpreters() as interpreters:
        answer = interpreters.ask(python, variables, "primerl_hpc.envs.lookup:find_faults", blocks)

All functions run in one process for each interpreter and its variables: what the first question imports, the next ones
need not import again. `answers` is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Any, Self

from primerl_hpc.launch.prepare import package_root

TIMEOUT_S = 60.0
GRACE_S = 5.0
"""Time for a process that has closed its output to say why."""


class Interpreters:
    """The processes that have been asked. They end with the block."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, ...], _Interpreter] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def ask(
        self, python: str, variables: Mapping[str, str], function: str, request: Any
    ) -> dict[str, Any] | str:
        """Return what ``function`` (``module:name``) returns for ``request``, or text that explains why there is none.

        ``variables``: of the role, added to those of this process. Request and answer are JSON.
        """
        key = (python, *(f"{name}={value}" for name, value in sorted(variables.items())))
        if key not in self._started:
            file = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 at the block's end
            errors = self._open.enter_context(file)
            try:
                self._started[key] = _Interpreter(python, variables, errors)
            except OSError as error:
                return f"{python} cannot be run here ({error})"
            self._open.callback(self._started[key].end)
        return self._started[key].ask(function, request)


class _Interpreter:
    def __init__(self, python: str, variables: Mapping[str, str], errors: IO[str]) -> None:
        paths = [package_root(), variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        environ = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
        environ["PYTHONSAFEPATH"] = "1"  # as for roles: modules in the working directory are not imported
        self.python = python
        self.is_late = False
        self.errors = errors
        self.process = subprocess.Popen(
            [python, "-m", "primerl_hpc.launch.checks.answers"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # it may be a script that starts the interpreter
        )

    def ask(self, function: str, request: Any) -> dict[str, Any] | str:
        """See `Interpreters.ask`. After a question without an answer the process has ended."""
        timer = threading.Timer(TIMEOUT_S, self._give_up)
        timer.start()
        try:
            if (answer := self._answer(json.dumps({"function": function, "request": request}))) is not None:
                return answer
        finally:
            timer.cancel()
        if self.is_late:
            return f"{self.python} did not answer within {TIMEOUT_S:.0f} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self._kill()
        self.errors.seek(0)
        last = (self.errors.read().strip().splitlines() or ["no message"])[-1]
        return f"{self.python} cannot be run here ({last})"

    def _answer(self, question: str) -> dict[str, Any] | None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(question, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # what a site prints when any interpreter starts
                row = json.loads(line)
                if isinstance(row, dict) and "answer" in row:
                    return row["answer"]
        return None

    def _give_up(self) -> None:
        self.is_late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self._kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
