"""Scripts of Python without the import of libraries: forked from one process that has imported them.

    python -m tests.support.script_server      # a line {"words", "cwd", "environment", "output"} in, a line with an
    exit code out

For scripts that run with a copy of the package: this module imports nothing of it. ``words`` are those after `python`:
``-c CODE`` or ``-m MODULE`` and its arguments.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys

LIBRARIES = ("torch", "torch._dynamo", "transformers", "verifiers", "datasets", "renderers", "httpx", "yaml")
LIBRARIES += ("anyio", "jinja2", "pydantic_config", "rich", "submitit")


def import_all() -> None:
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # a script that needs it fails
            importlib.import_module(name)
    from transformers import AutoModelForCausalLM  # noqa: F401  most of transformers loads at the first use

    assert "primerl_hpc" not in sys.modules


def serve() -> list[str] | None:
    """Fork a process for each request; return the words in the forked process, and None at the end of stdin."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return become(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(words: list[str], cwd: str, environment: dict[str, str], output: str) -> list[str]:
    """Take over what a script gets from the process that starts it."""
    for number, path in enumerate((os.devnull, output)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY, 0o644)
        os.dup2(file, number)
    os.dup2(1, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [cwd, *(path for path in sys.path if path not in (cwd, ROOT))]
    return words


ROOT = os.getcwd()
"""The folder of the package that a script must not import instead of its own copy."""

if __name__ == "__main__":
    import_all()
    gc.freeze()  # a collection in a child would copy all that was imported
    if (asked := serve()) is not None:
        kind, what, *sys.argv[1:] = asked
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
