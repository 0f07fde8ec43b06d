"""Fork the ranks of a trainer on CPUs from their torchrun agent, after it has imported what they need.

    waiting = fork_ranks(2)         # before the agent starts a thread
    start_by_fork(waiting)          # torchrun then uses these processes instead of starting new ones

The import of torch and transformers takes most of a rank's start and most of its memory. Forked ranks import nothing
again, and share the memory with each other and with the agent. Ranks with GPUs are started by torchrun as usual: a
forked process cannot use CUDA if its parent has initialized it.

A waiting rank ends when its agent ends. It receives what torchrun would have passed to a new process: command,
environment and the files of its output.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import random
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from primerl_hpc.common.node.imports import without_collections
from primerl_hpc.common.node.transformers_folders import read_models_once
from primerl_hpc.common.waiting import Polling

POLL_S = 0.05
MODULES = ("primerl_hpc.trainer.main", "primerl_hpc.trainer.rl_loop")
"""Modules that each rank imports."""


class ForkedRank:
    """A forked process, with those methods of ``subprocess.Popen`` that torchrun uses."""

    def __init__(self, pid: int, orders: IO[bytes]) -> None:
        """``orders``: the pipe on which the process waits."""
        self.pid = pid
        self.returncode: int | None = None
        self._orders = orders

    def begin(
        self, arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str | None]
    ) -> None:
        """Let the process run a command like ``python -m MODULE …``. ``outputs``: files for stdout and stderr."""
        order = {"arguments": list(arguments), "environment": dict(environment), "outputs": list(outputs)}
        with self._orders as orders:
            orders.write(json.dumps(order).encode())

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        for _ in Polling(timeout, POLL_S):
            if (code := self.poll()) is not None:
                return code
        raise subprocess.TimeoutExpired("rank", timeout or 0.0)


def fork_ranks(number: int, modules: Sequence[str] = MODULES) -> list[ForkedRank]:
    """Import what ranks need and fork them; an empty list if this process has threads, which a fork would lose."""
    read_models_once()
    with without_collections():
        for module in modules:
            importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        return []
    gc.freeze()  # a collection in a rank would copy the memory of all imported objects
    ranks: list[ForkedRank] = []
    for _ in range(number):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(write)
            for rank in ranks:  # otherwise these would not notice the end of the agent
                rank._orders.close()
            _wait_and_run(read)
        os.close(read)
        ranks.append(ForkedRank(pid, os.fdopen(write, "wb")))
    return ranks


def start_by_fork(waiting: Sequence[ForkedRank]) -> None:
    """Let torchrun use these ranks in this order. Patches torch 2.13 in this process."""
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    ranks = iter(waiting)

    class ForkedHandler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            rank = next(ranks)
            rank.begin(
                args, env, [None if file is None else file.name for file in (self._stdout, self._stderr)]
            )
            return rank

    api.get_subprocess_handler = ForkedHandler


def _wait_and_run(read: int) -> NoReturn:
    """Run the command that arrives on the pipe, in a process that was just forked."""
    os.setsid()
    with os.fdopen(read, "rb") as pipe:
        order = pipe.read()
    if not order:  # the agent ended
        os._exit(0)
    code = 1
    try:
        code = _run(**json.loads(order))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: list[str], environment: dict[str, str], outputs: list[str | None]) -> int:
    """Run ``[python, -u, -m, MODULE, ARGUMENT, …]`` as if it had been started; return the exit code."""
    for number, path in enumerate(outputs, start=1):
        if path is not None:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(write_through=True)  # as python -u
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    index = arguments.index("-m") + 1
    module, sys.argv = arguments[index], arguments[index:]
    sys.modules.pop(module, None)  # runpy warns of a module that was imported before
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 the process ends here, with the output of an uncaught exception
        traceback.print_exc()
        return 1
    return 0
