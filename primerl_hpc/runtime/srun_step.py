"""A process of the plan as a SLURM step of the allocation: ``srun --overlap``, one task per node, named after it.

Facts that shaped the command (measured on 22.05, 24.11 and 26.05):
- nothing may be left to inheritance: nodes, tasks, CPUs and memory are always given, or srun takes the job's or 1;
- srun reads how the job asked for GPUs and memory from its environment, and refuses a step that says it in another way;
- srun hands SIGUSR1 and SIGUSR2 on to the tasks; at SIGUSR1 the guard ends its tree in order. It takes SIGTERM as "kill the step now";
- after the first task's end the others get ``--wait`` seconds: peers of a dead rank would hang in a collective.
  ``--kill-on-bad-exit`` would send them SIGTERM, which means something else here (see guard.py);
- srun's own code is the largest one of its tasks, 137 for peers it killed, and 0 for a step whose node was lost. So the
  guards tell their codes in files, and srun's words about who ended first stand in for a guard that was killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import is_there, read_json_or_none
from primerl_hpc.runtime.allocation import Allocation, insist
from primerl_hpc.runtime.journal import patiently
from primerl_hpc.runtime.steps import ExitStatus, Launch

PEERS_WAIT_S = 10
"""How long tasks of a step live on after the first one ended."""
LOST = 128 + signal.SIGKILL
"""Code of a task that ended with its node, whatever srun says."""
_JOB_REQUESTS = frozenset(
    (
        *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"),
        *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"),
    )
)
_FIRST_END = re.compile(r"^srun: error: (?P<host>[^\s:]+): tasks? [\d,-]+: (?P<how>.+)$", re.M)


def srun_command(launch: Launch, allocation: Allocation) -> list[str]:
    """The exact srun line."""
    process = launch.process
    is_contained = any(argument.startswith("--container-image") for argument in process.srun_args)
    uses_gpus = allocation.has_gpus and bool(process.accelerators)
    is_subset = uses_gpus and len(process.accelerators) < allocation.gpus_per_node
    devices = ["--devices", ",".join(map(str, process.accelerators))] if is_subset else []
    return [
        *srun_options(process.name, allocation.hosts_of(process.nodes), allocation, uses_gpus=uses_gpus),
        f"--wait={PEERS_WAIT_S}",
        "--unbuffered",
        "--open-mode=append",
        f"--output={_output_pattern(launch)}",
        *process.srun_args,
        # inside a pyxis container only its own interpreter exists
        process.argv[0] if is_contained else sys.executable,
        *("-m", "primerl_hpc.runtime.guard"),
        *("--notice", str(launch.run_dir.stop_request)),
        *("--tell", str(exit_file(launch))),
        *devices,
        "--",
        *process.argv,
    ]


def without_requests(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _JOB_REQUESTS}


def srun_options(name: str, hosts: list[str], allocation: Allocation, *, uses_gpus: bool) -> list[str]:
    """What every step of ours says: one task on each of ``hosts``."""
    component, cpus = allocation.component(hosts)
    return [
        "srun",
        "--overlap",
        f"--job-name={name}",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(hosts)}",
        *([] if component is None else [f"--het-group={component}"]),
        f"--cpus-per-task={cpus}",
        "--mem=0",
        *([] if uses_gpus else ["--gres=none"]),
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--input=none",
    ]


def _output_pattern(launch: Launch) -> str:
    """SLURM expands % in file names; a step over several nodes writes one file per node (%n counts its nodes)."""
    path = str(launch.log).replace("%", "%%")
    return path if len(launch.process.nodes) == 1 else f"{path.removesuffix('.log')}_%n.log"


def task_log(launch: Launch, task: int) -> Path:
    """The file that SLURM makes of the pattern for one task."""
    log = launch.log
    return log if len(launch.process.nodes) == 1 else log.with_name(f"{log.stem}_{task}.log")


def exit_file(launch: Launch) -> Path:
    """Where the guards of this life tell their exit codes, but for ``.<task>.json``."""
    return launch.scheduler_log.with_name(f"{launch.process.name}.{launch.incarnation}")


class SrunStep:
    def __init__(self, launch: Launch, allocation: Allocation) -> None:
        self.launch, self.allocation = launch, allocation
        self.child: asyncio.subprocess.Process | None = None
        self.said_from = 0  # where this life's words begin in srun's own log

    async def start(self) -> None:
        launch = self.launch
        for folder in (launch.log.parent, launch.scheduler_log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with launch.scheduler_log.open("ab") as log:
            self.said_from = log.tell()
            try:
                self.child = await asyncio.create_subprocess_exec(
                    *srun_command(launch, self.allocation),
                    env={**without_requests(os.environ), **launch.environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise SchedulerError(f"cannot start srun for {launch.process.name}: {error}") from error

    async def wait(self) -> ExitStatus:
        assert self.child is not None
        code = await self.child.wait()
        if code < 0:  # srun itself was killed; its tasks live on without it
            await self._end_lost_step()
        return await patiently(lambda: self._told_exit(code))

    async def terminate(self) -> None:
        self._signal(signal.SIGUSR1)

    async def dump_stacks(self) -> None:
        self._signal(signal.SIGUSR2)

    async def kill(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(number)

    def _told_exit(self, code: int) -> ExitStatus:
        """Code, host and log of the task that failed first; 0 only when every task told it."""
        hosts = self.allocation.hosts_of(self.launch.process.nodes)
        files = [Path(f"{exit_file(self.launch)}.{task}.json") for task in range(len(hosts))]
        told = [read_json_or_none(path) if is_there(path) else None for path in files]
        failed = [(each["time"], task) for task, each in enumerate(told) if each is not None and each["code"]]
        if failed:
            task = min(failed)[1]
            code = told[task]["code"]  # type: ignore[index]
        elif code == 0:
            task = told.index(None) if None in told else 0
            code = LOST if None in told else 0
        else:
            task, code = self._srun_told(hosts, code)
        return ExitStatus(code, hosts[task], task_log(self.launch, task))

    def _srun_told(self, hosts: list[str], code: int) -> tuple[int, int]:
        """(task, code) of the first end that srun mentions."""
        with self.launch.scheduler_log.open("rb") as log:
            log.seek(self.said_from)
            first = _FIRST_END.search(log.read().decode(errors="replace"))
        if first is None:
            return 0, code
        task = hosts.index(first["host"]) if first["host"] in hosts else 0
        return task, code_of(first["how"], code)

    async def _end_lost_step(self) -> None:
        """By its id, which is looked up by name: step numbers do not follow the order of starts."""
        job = ",".join(self.allocation.job_ids) or self.allocation.job_id
        _, steps = await insist("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j")
        for line in steps.splitlines():
            step, _, name = line.strip().partition("|")
            if name == self.launch.process.name:
                await insist("scancel", "--signal=KILL", step)  # some versions complain, and do it


def code_of(how: str, otherwise: int) -> int:
    """srun's words about the end of a task → exit code, 128 + signal for a killed one."""
    if match := re.fullmatch(r"Exited with exit code (\d+)", how):
        return int(match[1])
    words = how.removesuffix(" (core dumped)")
    for number in signal.Signals:
        if signal.strsignal(number) == words:
            return 128 + number
    return otherwise
