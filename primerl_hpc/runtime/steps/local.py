"""A process of the plan as a child process of the supervisor, under a guard, in its own session."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Set

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.runtime.step import ExitStatus, Launch
from primerl_hpc.runtime.steps.guard import GIVE_UP_S, TRACKERS_S, children_of, descendants_of, kill_all


class LocalStep:
    def __init__(self, launch: Launch, *, has_gpus: bool) -> None:
        """``has_gpus``: True if the plan's accelerators are GPUs."""
        self.launch, self.has_gpus = launch, has_gpus
        self.child: asyncio.subprocess.Process | None = None
        self.environment: dict[str, str] = {}

    def prepare(self) -> None:
        self.environment = self.launch.environment

    async def start(self) -> None:
        """Start the process after `prepare`. Raises SchedulerError if that fails (no memory, no such interpreter).

        Its guard opens the log: the operations of the supervisor do not grow with the number of processes.
        """
        launch = self.launch
        visible = visible_accelerators(launch, has_gpus=self.has_gpus)
        guard = [sys.executable, "-m", "primerl_hpc.runtime.steps.guard", "--log", str(launch.log)]
        command = [*guard, "--", *launch.process.argv]
        try:
            self.child = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **visible, **self.environment},
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
            kill_all([*descendants_of(self.child.pid), self.child.pid])


async def end_orphans(living: Iterable[LocalStep], inherited: Set[int]) -> None:
    """Kill all children that are not guards of ``living``: orphans of killed guards are reparented to this process.

    ``inherited``: children that the batch script had before it became this process. No other may be started meanwhile.
    """
    spared = inherited | {step.child.pid for step in living if step.child is not None}
    start = time.monotonic()
    while orphans := [pid for pid in children_of(os.getpid()) if pid not in spared]:
        pids = [pid for orphan in orphans for pid in (orphan, *descendants_of(orphan))]
        kill_all(pids, with_trackers=time.monotonic() > start + TRACKERS_S)
        for pid in orphans:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > start + GIVE_UP_S:
            return
        await asyncio.sleep(0.02)


def visible_accelerators(launch: Launch, *, has_gpus: bool) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES for a process: its part of the node's GPUs, none for a router or orchestrator.

    Entries of an outer list are kept verbatim; without one all GPUs of the node are visible, and the plan's indices
    name them. Empty if the plan has no GPUs.
    """
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = launch.process.accelerators
    if outer is None:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, indices))} if has_gpus else {}
    if not outer:
        return {}
    devices = outer.split(",")
    assigned = [devices[index] for index in indices if index < len(devices)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(assigned)}
