"""The trainer's ranks without torchrun: forked from one process that has imported everything.

    python -m tests.support.forked_ranks      # a line {"ranks", "environment", "arguments", "log"} in, a line with an
    exit code out

For tests of what ranks compute and write: torchrun and each rank's import of torch take most of a role's start.
Tests with the role itself cover how torchrun starts, monitors and ends ranks.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.torchrun import delete_exit_reports
from primerl_hpc.transport.store import serve_store
from tests.support.fork_server import ForkServer
from tests.support.helpers import PATIENCE_S, role_env


class ForkedRanks:
    """Run a trainer's ranks until they end: ``forked_ranks(run, "sft-0")`` instead of
    ``run_role(run, "main", "sft-0")``."""

    def __init__(self) -> None:
        self.server = ForkServer("tests.support.forked_ranks", OMP_NUM_THREADS="1")

    def __call__(self, run: RunDir, name: str, *, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """Return the first exit code that is not 0, else 0, and the log of all ranks."""
        delete_exit_reports(run, name)
        log = run.attempt_logs(1) / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        group = {
            "ranks": len(load_plan(run).phase("main").process(name).accelerators),
            "environment": role_env(run, "main", name),
            "arguments": [str(run.root), "main", name],
            "log": str(log),
        }
        said = self.server.ask(group, timeout_s)
        told = log.read_text() if log.exists() else ""
        if not said:
            raise AssertionError(
                f"the ranks did not end within {timeout_s} s, or died before they began: {told[-3000:]}"
            )
        return int(said), told

    def stop(self) -> None:
        self.server.stop()


def run_group(group: dict[str, Any]) -> int:
    """When a rank fails, end the others and return its exit code, as torchrun does."""
    from torch.multiprocessing import ProcessExitedException, start_processes

    context = multiprocessing.get_context("fork")
    address, writing = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(group, writing))
    server.start()
    try:
        start_processes(run_rank, (group, address.recv()), nprocs=group["ranks"], start_method="fork")
    except ProcessExitedException as error:
        return error.exit_code
    finally:
        server.kill()
        server.join()
    return 0


def serve(group: dict[str, Any], address: Connection) -> None:
    """Serve the ranks' store, as torchrun's agent does, until this process is killed."""
    os.environ.clear()
    os.environ.update(group["environment"])
    run, name = RunDir(Path(group["arguments"][0])), group["arguments"][2]
    store = serve_store(run_keys(run), name, "127.0.0.1")
    address.send((store.host, store.port))
    threading.Event().wait()


def run_rank(rank: int, group: dict[str, Any], address: tuple[str, int]) -> None:
    """Run the rank. Does not return: the trainer's own ``main`` ends the process."""
    from primerl_hpc.trainer.main import main

    log = os.open(group["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    size, number = str(group["ranks"]), str(rank)
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.clear()
    os.environ.update(group["environment"], **place)
    env.set_store(*address)
    main(group["arguments"])


def import_all() -> None:
    from transformers import AutoModelForCausalLM  # noqa: F401

    import primerl_hpc.trainer.main
    import primerl_hpc.trainer.rl_loop
    import primerl_hpc.trainer.sft_loop  # noqa: F401


if __name__ == "__main__":
    import_all()
    gc.freeze()  # a collection in a child would copy all that was imported
    for line in sys.stdin:
        print(run_group(json.loads(line)), flush=True)
