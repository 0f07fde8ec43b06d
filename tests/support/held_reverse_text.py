"""reverse-text whose rollouts begin only before the step that a test allows (see `tests.support.hold`).

A real environment package: a run imports it from a folder on PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import verifiers.v1 as vf

from primerl_hpc.envs.shipped.reverse_text import ReverseText, ReverseTextConfig, ReverseTextTask
from primerl_hpc.run.metrics import read_steps

POLL_S = 0.2


def is_held() -> bool:
    try:
        after = int(Path(os.environ["HOLD_FILE"]).read_text())
    except FileNotFoundError:
        return False
    return max(read_steps(Path(os.environ["HOLD_METRICS"])), default=0) >= after


class HeldTask(ReverseTextTask):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        while is_held():
            await asyncio.sleep(POLL_S)


class HeldReverseText(vf.Taskset[HeldTask, ReverseTextConfig]):
    def load(self) -> Iterator[HeldTask]:
        for task in ReverseText(self.config).load():
            yield HeldTask(task.data, task.config)


__all__ = ["HeldReverseText"]
