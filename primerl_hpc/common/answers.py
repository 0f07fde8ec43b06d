"""Answer the questions of another process: a program that any Python interpreter runs from its text (`interpreters`).

    stdin   {"function": "primerl_hpc.envs.lookup:find_faults", "arguments": […]}       a line for each question
            {"function": "text:missing", "source": "def missing(…): …", "arguments": […]}
    stdout  {"progress": …}         what the function passes to its argument ``report``, with "reports": true
            {"answer": …}           what it returns
            {"error": {…}}          the PrimerlError that it raises

It ends with the traceback of any other exception, and as soon as stdin ends, also during an answer. It uses the
standard library only: an interpreter may have none of our dependencies, and not this package either. Functions that are
asked are at the end of this module.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Iterable
from typing import Any

_ERROR = ("cause", "location", "hint", "details")


def main() -> None:
    lines, output = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # programs that a function starts may read, as pip does
    os.dup2(2, 1)  # packages may print while they are imported, also from C
    questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, questions), daemon=True).start()

    def send(kind: str, value: Any) -> None:
        output.write(json.dumps({kind: value}) + "\n")
        output.flush()

    try:
        while True:
            question = questions.get()
            options = {"report": lambda value: send("progress", value)} if question.get("reports") else {}
            try:
                answer = _function(question)(*question["arguments"], **options)
            except Exception as error:
                if not isinstance(error, _primerl_error()):
                    raise
                kind = type(error).__name__
                send("error", {"kind": kind, **{name: getattr(error, name) for name in _ERROR}})
            else:
                send("answer", answer)
    except BaseException:  # noqa: BLE001 the process ends
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the thread waits for stdin


def _read(lines: Iterable[str], questions: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in lines:
        questions.put(json.loads(line))
    os._exit(0)


def _function(question: dict[str, Any]) -> Any:
    module, _, name = question["function"].partition(":")
    if "source" not in question:
        return getattr(importlib.import_module(module), name)
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(question["source"], module, "exec"), namespace)  # the text of one of our modules
    return namespace[name]


def _primerl_error() -> Any:
    """Return the base class of errors of this package; nothing if the function does not use them."""
    errors = sys.modules.get("primerl_hpc.common.errors")
    return () if errors is None else errors.PrimerlError


def stamps() -> dict[str, Any]:
    """Return what changes when an answer may: stamps of this interpreter, of the folders in which it finds modules, and
    of the modules that it has imported from elsewhere, such as editable ones.
    """
    files = (str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values()))
    prefixes = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    elsewhere = {file for file in files if os.path.isabs(file) and not file.startswith(prefixes)}
    return stamps_of([sys.executable, *filter(None, sys.path), *sorted(elsewhere)])


def stamps_of(paths: Iterable[str]) -> dict[str, Any]:
    """Return time of change and size of each of the files and folders; None for those that do not exist."""
    found: dict[str, Any] = {}
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            found[path] = None
        else:
            found[path] = [status.st_mtime_ns, status.st_size]
    return found


def missing_modules(names: list[str]) -> list[str]:
    """Return those of the top-level modules ``names`` that this interpreter cannot import."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def versions(names: list[str]) -> dict[str, str]:
    """Return the versions of ``python`` and of these distributions, without those that are not installed."""
    import importlib.metadata  # 20 ms, which other questions do not need

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


if __name__ == "__main__":
    main()
