"""The trainer's ranks without torchrun: forked from one process that has imported everything.

    python -m tests.e2e.forked_ranks      # a line {"ranks", "environment", "arguments", "log"} in, a line with an exit code out

For tests of what ranks compute and write: most of a role's start is torchrun's and each rank's import of torch. How
torchrun starts, watches and ends them is tested with the role itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from select import select
from typing import Any

from primerl_hpc.common.listen import free_port
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import load_plan
from primerl_hpc.roles.torchrun import clear_endings
from tests.support import ROOT, role_env


class ForkedRanks:
    """Runs a trainer's ranks to their end: ``forked_ranks(run, "sft-0")`` in place of ``run_role(run, "main", "sft-0")``."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, run: RunDir, name: str, *, timeout_s: float = 240) -> tuple[int, str]:
        """The first exit code that is not 0, else 0; and the log of all ranks."""
        clear_endings(run, name)
        log = run.attempt_logs(1) / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self._process()
        group = {
            "ranks": len(load_plan(run).phase("main").process(name).accelerators),
            "environment": role_env(run, "main", name),
            "arguments": [str(run.root), "main", name],
            "log": str(log),
        }
        print(json.dumps(group), file=process.stdin, flush=True)
        is_over, _, _ = select([process.stdout], [], [], timeout_s)
        said = process.stdout.readline() if is_over else ""
        told = log.read_text() if log.exists() else ""
        if not said:
            self.stop()
            raise AssertionError(
                f"the ranks did not end within {timeout_s} s, or died before they began: {told[-3000:]}"
            )
        return int(said), told

    def _process(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.forked_ranks"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def run_group(group: dict[str, Any]) -> int:
    """As torchrun does: when a rank fails, the others are ended, and its exit code is the group's."""
    from torch.multiprocessing import ProcessExitedException, start_processes

    port = free_port("127.0.0.1")
    try:
        start_processes(run_rank, (group, port), nprocs=group["ranks"], start_method="fork")
    except ProcessExitedException as error:
        return error.exit_code
    return 0


def run_rank(rank: int, group: dict[str, Any], port: int) -> None:
    """Does not return: the trainer's own ``main`` ends the process."""
    from primerl_hpc.trainer.main import main

    log = os.open(group["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    size, number = str(group["ranks"]), str(rank)
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.clear()
    os.environ.update(group["environment"], **address, **place)
    main(group["arguments"])


def import_all() -> None:
    from transformers import AutoModelForCausalLM  # noqa: F401

    import primerl_hpc.trainer.main
    import primerl_hpc.trainer.rl
    import primerl_hpc.trainer.sft  # noqa: F401


if __name__ == "__main__":
    import_all()
    gc.freeze()  # a collection in a child would copy all that was imported
    for line in sys.stdin:
        print(run_group(json.loads(line)), flush=True)
