"""A process of the plan as a child process of the supervisor, under a guard, in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Set

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.runtime.guard import GIVE_UP_S, children_of, descendants_of, signal_all
from primerl_hpc.runtime.steps import ExitStatus, Launch


class LocalStep:
    def __init__(self, launch: Launch, *, has_gpus: bool) -> None:
        """``has_gpus``: whether the plan's accelerators are GPUs."""
        self.launch, self.has_gpus = launch, has_gpus
        self.child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises SchedulerError when the process cannot be started (no memory, no such interpreter)."""
        launch = self.launch
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        visible = visible_accelerators(launch, has_gpus=self.has_gpus)
        command = [sys.executable, "-m", "primerl_hpc.runtime.guard", "--", *launch.process.argv]
        with launch.log.open("ab") as log:
            try:
                self.child = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **visible, **launch.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise SchedulerError(f"cannot start {launch.process.name}: {error}") from error

    async def wait(self) -> ExitStatus:
        assert self.child is not None
        return ExitStatus(await self.child.wait())

    async def terminate(self) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(signal.SIGTERM)

    async def dump_stacks(self) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(signal.SIGUSR2)

    async def kill(self) -> None:
        if self.child is not None and self.child.returncode is None:
            signal_all([*descendants_of(self.child.pid), self.child.pid], signal.SIGKILL)


async def end_orphans(living: Iterable[LocalStep], inherited: Set[int]) -> None:
    """End what is below this process and not below a guard of ``living``: we are subreaper of those whose guard was killed.

    ``inherited``: children that the job's script had before it became this process. No other may be started meanwhile.
    """
    spared = inherited | {step.child.pid for step in living if step.child is not None}
    deadline = time.monotonic() + GIVE_UP_S
    while orphans := [pid for pid in children_of(os.getpid()) if pid not in spared]:
        signal_all([below for pid in orphans for below in (pid, *descendants_of(pid))], signal.SIGKILL)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.02)


def visible_accelerators(launch: Launch, *, has_gpus: bool) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for a process that takes some of the node's GPUs; a router or orchestrator sees none.

    Names from the outer list, verbatim; where nobody set one the node shows all its GPUs, and the plan's own indices name
    them. Nothing without GPUs in the plan.
    """
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = launch.process.accelerators
    if outer is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))} if has_gpus else {}
    if not outer:
        return {}
    devices = outer.split(",")
    mine = [devices[index] for index in indices if index < len(devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
