"""Call functions in other Python interpreters, so that a command imports nothing heavy itself: the only way to ask one.

    with Interpreters() as interpreters:
        found = interpreters.ask(python, variables, "primerl_hpc.envs.lookup:find_faults", blocks)
    missing = ask(python, variables, "primerl_hpc.common.answers:missing_modules", names, by_source=True)

`Interpreters` calls all functions in one process for each interpreter and its variables: what the first question
imports, the next ones need not import again. `answers` is that process. Arguments and results are JSON. A PrimerlError
of the function is raised here, and InterpreterError if there is no result.

A `UsualAnswer` is remembered in the state folder, so that a second `submit` of a recipe does not import verifiers
again, which takes longer than everything else of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from primerl_hpc.common import env, errors
from primerl_hpc.common.answers import stamps_of
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.package import package_root

TIMEOUT_S = 60.0
GRACE_S = 5.0
"""Time for a process that has closed its output to say why."""
LAST_LINES = 20
"""Lines of the process's own output that an error has as details."""
MAX_KEPT = 200
"""Remembered answers."""


class InterpreterError(PrimerlError):
    """An interpreter cannot be started here, ends without a result, or exceeds the time limit."""


@dataclass(frozen=True)
class UsualAnswer:
    """The usual answer of a function: nothing is wrong. Other answers are not remembered."""

    answer: Any
    files: tuple[str, ...] = ()
    """Files that the function reads, other than its modules."""


class Interpreters:
    """The processes that have been asked. They end with the block."""

    def __init__(self) -> None:
        self._started: dict[tuple[Any, ...], _Interpreter] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def ask(
        self,
        python: str,
        variables: Mapping[str, str] | None,
        function: str,
        *arguments: Any,
        by_source: bool = False,
        timeout_s: float | None = TIMEOUT_S,
        on_progress: Callable[[Any], None] | None = None,
    ) -> Any:
        """Return what ``function`` (``module:name``) returns in the interpreter ``python``.

        ``variables``: added to those of this process; None: the interpreter ignores PYTHONPATH and packages of the
        home folder. ``by_source``: the text of the module is sent, which uses the standard library only; for
        interpreters that may lack this package. ``on_progress``: called with what the function passes to its argument
        ``report``. Raises InterpreterError and the PrimerlErrors of the function.
        """
        key = (python, by_source, None if variables is None else tuple(sorted(variables.items())))
        if key not in self._started:
            file = tempfile.TemporaryFile()  # noqa: SIM115 until the block ends
            output = self._open.enter_context(file)
            try:
                self._started[key] = _Interpreter(python, variables, output, by_source=by_source)
            except OSError as error:
                raise InterpreterError(f"{python} cannot be run here ({error})") from error
            self._open.callback(self._started[key].end)
        question: dict[str, Any] = {"function": function, "arguments": arguments}
        question |= {"source": _source(function.partition(":")[0])} if by_source else {}
        question |= {"reports": True} if on_progress is not None else {}
        return self._started[key].ask(question, timeout_s, on_progress)

    def ask_unless_unchanged(
        self,
        python: str,
        variables: Mapping[str, str],
        function: str,
        argument: Any,
        expected: UsualAnswer,
        *,
        by_source: bool = False,
    ) -> Any:
        """Like `ask`, but an expected answer is given again until something changes on which it depends."""
        place = _place(python, variables, function, argument)
        known = read_json_or_none(place) or {}
        if known and known == {**stamps_of(known), **stamps_of(expected.files)}:
            return expected.answer
        answer = self.ask(python, variables, function, argument, by_source=by_source)
        if answer == expected.answer:
            found = self.ask(python, variables, "primerl_hpc.common.answers:stamps", by_source=by_source)
            _remember(place, {**found, **stamps_of(expected.files)})
        return answer


def ask(
    python: str, variables: Mapping[str, str] | None, function: str, *arguments: Any, **options: Any
) -> Any:
    """Ask one question, in a process that ends with it. See `Interpreters.ask`."""
    with Interpreters() as interpreters:
        return interpreters.ask(python, variables, function, *arguments, **options)


def _place(python: str, variables: Mapping[str, str], function: str, argument: Any) -> Path:
    """Return the file about the question, which also depends on where modules and models are found."""
    paths = {name: value for name, value in os.environ.items() if name.startswith(("HF_", "PYTHON"))}
    question = json.dumps([python, dict(variables), function, argument, paths], sort_keys=True)
    return env.state_home() / "answers" / f"{hashlib.sha256(question.encode()).hexdigest()}.json"


def _remember(place: Path, found: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a home folder that is full or read-only
        write_json(place, found)
        for path in sorted(place.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
            path.unlink()


def _source(module: str) -> str:
    """Return the text of a module, which may be in a zip file."""
    package, _, name = module.rpartition(".")
    return resources.files(package).joinpath(f"{name}.py").read_text("utf-8")


class _Interpreter:
    def __init__(
        self, python: str, variables: Mapping[str, str] | None, output: IO[bytes], *, by_source: bool
    ) -> None:
        is_isolated = variables is None
        own = variables or {}
        root = None if by_source else package_root()
        path = env.join_pythonpath(root, own.get(env.PYTHONPATH), os.environ.get(env.PYTHONPATH))
        # PYTHONSAFEPATH as for roles: modules in the working directory are not imported
        environ = {**os.environ, **own, env.PYTHONPATH: path, "PYTHONSAFEPATH": "1"}
        self.python, self.output = python, output
        self.reason = ""
        """Why it was ended; empty otherwise."""
        self.process = subprocess.Popen(
            [python, *(["-I"] if is_isolated else []), "-c", _source("primerl_hpc.common.answers")],
            env=environ,
            cwd="/" if by_source else None,  # Python 3.10 does not know PYTHONSAFEPATH
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # it may be a script that starts the interpreter
        )

    def ask(
        self, question: dict[str, Any], timeout_s: float | None, on_progress: Callable[[Any], None] | None
    ) -> Any:
        """See `Interpreters.ask`. After a question without a result the process has ended."""
        timer = threading.Timer(timeout_s or threading.TIMEOUT_MAX, self._give_up, [timeout_s])
        timer.daemon = True
        timer.start()
        try:
            reply = self._reply(json.dumps(question), on_progress)
        finally:
            timer.cancel()
        if "answer" in reply:
            return reply["answer"]
        if "error" in reply:
            self._raise(reply["error"])
        if not self.reason:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            self._kill()
            self.reason = f"cannot be run here ({(self._printed() or ['no message'])[-1]})"
        raise InterpreterError(f"{self.python} {self.reason}", details=self._last_lines())

    def _reply(self, question: str, on_progress: Callable[[Any], None] | None) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(question, file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            try:
                reply = json.loads(line)
            except ValueError:  # what a site prints when any interpreter starts
                continue
            if not isinstance(reply, dict):
                continue
            if "answer" in reply or "error" in reply:
                return reply
            if "progress" in reply and on_progress is not None:
                on_progress(reply["progress"])
        return {}

    def _raise(self, error: dict[str, str]) -> NoReturn:
        """Raise the PrimerlError of the function, with what it printed as details."""
        kind = getattr(errors, error.pop("kind"), PrimerlError)
        details = error.pop("details") or self._last_lines()
        raise kind(error.pop("cause"), details=details, **error)

    def _last_lines(self) -> str:
        return "\n".join(self._printed()[-LAST_LINES:])

    def _printed(self) -> list[str]:
        """Return the lines of its own output. The process writes at the position of the file, which stays."""
        descriptor = self.output.fileno()
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return text.decode(errors="replace").strip().splitlines()

    def _give_up(self, timeout_s: float) -> None:
        self.reason = f"did not answer within {timeout_s:.0f} s"
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self._kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
