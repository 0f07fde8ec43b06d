"""Commands of ``primerl-hpc`` without the import of its modules: forked from one process that has imported them.

    python -m tests.support.forked_commands      # a line {"words", "cwd", "environment", "umask", "stdout", "stderr"}
    in, a line with an exit code out

The import takes most of a command's time. A forked command has its own folder, variables, pipes, exit code and end of
the interpreter, and no state of an earlier command: the server imports modules and calls none of their functions.
Tests of imports, of the entry point, of terminals and of signals start an interpreter instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkServer
from tests.support.helpers import ROOT, captured

LOGIN_NODE = ("checks", "cli", "cluster", "common", "export", "launch", "observe", "offline", "plan")
LOGIN_NODE += ("recipe", "render", "run", "slurm")
"""Folders of the package whose modules import neither torch nor huggingface_hub (which reads variables when it is
imported)."""
LIBRARIES = ("anyio", "httpx", "jinja2", "pydantic_config", "renderers", "rich", "submitit", "yaml")
"""Libraries that commands import in functions."""
AT_START = ("PYTHON", "LC_", "LANG")
"""Prefixes of variables that an interpreter reads only when it starts."""


def run_command(
    *words: str, environ: dict[str, str], cwd: Path | None = None, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Return what ``subprocess.run([sys.executable, "-m", "primerl_hpc", *words], …)`` returns.

    It starts an interpreter if ``environ`` has other variables that one reads at its start. Other commands of one
    process of tests run one at a time.
    """
    if read_at_start(environ) != read_at_start({**os.environ, **SERVER.environ}):
        return captured(
            [sys.executable, "-m", "primerl_hpc", *words],
            env=environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
    os.umask(umask := os.umask(0))
    request = {"words": words, "cwd": str(cwd or Path.cwd()), "environment": environ, "umask": umask}
    with Output() as out, Output() as err:
        reply = SERVER.ask({**request, "stdout": out.path, "stderr": err.path}, timeout_s)
    assert reply, f"{words} did not end within {timeout_s} s: {out.text[-3000:]}{err.text[-3000:]}"
    return subprocess.CompletedProcess(words, int(reply), out.text, err.text)


SERVER = ForkServer("tests.support.forked_commands", PYTHONPATH=str(ROOT))


class Output:
    """A pipe that the command opens by its path in /proc, and the text that it wrote there."""

    def __enter__(self) -> Output:
        reading, self.writing = os.pipe()
        self.path = f"/proc/{os.getpid()}/fd/{self.writing}"
        self.text = ""
        self.reader = threading.Thread(target=self._read, args=(reading,))
        self.reader.start()
        return self

    def _read(self, reading: int) -> None:
        with open(reading, encoding="utf-8") as file:
            self.text = file.read()

    def __exit__(self, *_: object) -> None:
        os.close(self.writing)
        self.reader.join()


def read_at_start(environ: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(AT_START)}


def import_all() -> None:
    for name in LIBRARIES:
        importlib.import_module(name)
    for folder in LOGIN_NODE:
        package = importlib.import_module(f"primerl_hpc.{folder}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    assert not {"huggingface_hub", "torch", "transformers"} & sys.modules.keys()


def serve() -> dict[str, Any] | None:
    """Fork a command for each request; return its request in the forked process, and None at the end of stdin."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(request: dict[str, Any]) -> None:
    """Take over what a command gets from the process that starts it."""
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        file = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = open(  # noqa: SIM115
            number, "w" if number else "r", encoding=old.encoding, errors=old.errors, closefd=False
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.stderr.reconfigure(line_buffering=True)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["cwd"]
    sys.argv[1:] = request["words"]


if __name__ == "__main__":
    import_all()
    gc.freeze()  # a collection in a child would copy all that was imported
    if (asked := serve()) is not None:
        become(asked)
        runpy.run_module("primerl_hpc", run_name="__main__", alter_sys=True)
