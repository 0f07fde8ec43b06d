"""Run code as another user of the same machine, without access to the run's files, with access to its sockets.

as_stranger(lambda: connect("127.0.0.1", port))      # the function's result, or the exception that it raised
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534


def as_stranger(act: Callable[[], Any], uid: int = NOBODY) -> Any:
    """Return the result of ``act()`` in a forked process of another user, or raise its exception."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")

    def become() -> None:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)

    return run_in_child(act, become)


def run_in_child(act: Callable[[], Any], prepare: Callable[[], None]) -> Any:
    """Return the result of ``act()`` in a forked process after ``prepare()``, or raise its exception."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            prepare()
            try:
                told = (True, act())
            except BaseException as error:  # noqa: BLE001 (raised again in the test)
                told = (False, error)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(told, pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the forked process ended with {status}"
    is_result, value = pickle.loads(data)
    if is_result:
        return value
    raise value


class Command:
    """A value that creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)
