"""A process of the plan as a SLURM step: ``srun --overlap``, one task per node, named after the process.

Observations behind the command line (measured with SLURM 22.05, 24.11 and 26.05):
- Nothing may be left to defaults: nodes, tasks, CPUs and memory are always given, else srun uses the job's values or 1.
- srun reads options from its environment, and refuses a step that requests GPUs or memory in another way than the job.
- srun forwards SIGUSR1 and SIGUSR2 to the tasks; at SIGUSR1 the guard ends its tree in order. srun itself takes SIGTERM
  as "kill the step now".
- After the first task ends, the others get ``--wait`` seconds: peers of a dead rank would hang in a collective
  operation. ``--kill-on-bad-exit`` would send them SIGTERM, which has another meaning here (see guard.py).
- srun writes to its own output only if something is wrong. The supervisor reads it from a pipe and opens a log file for
  it then: its operations at a start do not grow with the number of processes.
- srun's own exit code is the largest one of its tasks, 137 for peers it killed, and 0 for a step whose node was lost.
  So the guards write their exit codes to files; for a guard that was killed, srun's message about the first exit is
  used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import is_there, open_log, read_json_or_none
from primerl_hpc.common.waiting import in_daemon_thread
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.files.journal import retry_run_directory
from primerl_hpc.runtime.step import ExitStatus, Launch
from primerl_hpc.slurm.command_lines import task_name
from primerl_hpc.slurm.commands import retry_slurm

logger = logging.getLogger(__name__)

PEERS_WAIT_S = 10
"""How long the other tasks of a step run on after the first one exited. The guards of tasks that succeeded wait for
their peers first (`guard.PEERS_S`): a slow node must not turn a finished run into a failed one."""
MAX_OUTPUT_BYTES = 1 << 18
LOST = 128 + signal.SIGKILL
"""Exit code of a task that ended with its node, whatever srun returns."""
_OF_THE_JOB = re.compile(
    r"SLURM_(JOB_\w+|JOBID|HET_SIZE|ARRAY_\w+|CLUSTER\w*|WORKING_CLUSTER|CONF\w*|JWT|SUBMIT_\w+|TOPOLOGY_\w+|DEBUG"
    r"|NETWORK|HINT|THREADS_PER_CORE|MPI_TYPE|UMASK|RLIMIT_\w+|PRIO_PROCESS|RESTART_COUNT)"
)
"""Variables that identify the job or hold its settings for all steps."""
_UNREACHABLE = re.compile(
    r"^srun: error: Task launch for .+ failed on node (\S+): Communication connection failure", re.M
)
_FIRST_END = re.compile(r"^srun: error: (?P<host>[^\s:]+): tasks? [\d,-]+: (?P<how>.+)$", re.M)


def srun_command(launch: Launch, allocation: Allocation, python: str = sys.executable) -> list[str]:
    """Return the srun command that starts a process of the plan. ``python``: the supervisor's interpreter."""
    process = launch.process
    uses_gpus = allocation.has_gpus and bool(process.accelerators)
    hosts = allocation.hosts_of(process.nodes)
    is_subset = uses_gpus and len(process.accelerators) < allocation.gpus_of(hosts)
    devices = ["--devices", ",".join(map(str, process.accelerators))] if is_subset else []
    return [
        *srun_options(process.name, hosts, allocation, uses_gpus=uses_gpus),
        f"--wait={PEERS_WAIT_S}",
        "--unbuffered",
        "--open-mode=append",
        f"--output={_output_pattern(launch)}",
        *process.srun_args,
        # inside the container of a step only the container's interpreter exists
        process.argv[0] if process.container == "step" else python,
        *("-m", "primerl_hpc.runtime.steps.guard"),
        *("--notice", str(launch.run_dir.stop_request)),
        *("--tell", str(exit_file(launch))),
        *devices,
        "--",
        *process.argv,
    ]


def environ_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with only those variables of SLURM that describe the job.

    srun takes others as options: how the job requested GPUs and memory, which it compares with a step's, and, in a
    shell that is itself a step (``srun --pty bash``), the CPUs, tasks and nodes of that step.
    """
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("SLURM_") or _OF_THE_JOB.fullmatch(name)
    }


def srun_options(name: str, hosts: list[str], allocation: Allocation, *, uses_gpus: bool) -> list[str]:
    """Return the srun options common to all steps: one task on each of ``hosts``."""
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
        *(["--mem=0"] if allocation.step_memory else []),
        *(["--gres=none"] if allocation.step_gres and not uses_gpus else []),
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--input=none",
    ]


def _output_pattern(launch: Launch) -> str:
    """Return the --output pattern. SLURM expands %; a step on several nodes writes one file each (%n: node rank)."""
    path = str(launch.log).replace("%", "%%")
    return path if len(launch.process.nodes) == 1 else f"{path.removesuffix('.log')}_%n.log"


def task_log(launch: Launch, task: int) -> Path:
    """Return the file that SLURM creates from the output pattern for one task."""
    log = launch.log
    return log if len(launch.process.nodes) == 1 else log.with_name(f"{log.stem}_{task}.log")


def exit_file(launch: Launch) -> Path:
    """Return the prefix of the exit code files of this incarnation; guards append ``.<task>.json``."""
    return launch.scheduler_log.with_name(f"{launch.process.name}.{launch.incarnation}")


@cache
def _make_folder(folder: Path) -> None:
    """Create the folder into which the guards write their exit codes, once for all steps of an attempt."""
    folder.mkdir(parents=True, exist_ok=True)


class SrunStep:
    def __init__(self, launch: Launch, allocation: Allocation) -> None:
        self.launch, self.allocation = launch, allocation
        self.child: asyncio.subprocess.Process | None = None
        self.environment: dict[str, str] = {}
        self.output = b""
        """The beginning of srun's output, at most `MAX_OUTPUT_BYTES`."""
        self.reader: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        _make_folder(self.launch.scheduler_log.parent)
        self.environment = self.launch.environment

    async def start(self) -> None:
        launch = self.launch
        try:
            self.child = await asyncio.create_subprocess_exec(
                *srun_command(launch, self.allocation),
                env={**environ_of_job(os.environ), **self.environment},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise SchedulerError(f"cannot start srun for {launch.process.name}: {error}") from error
        self.reader = asyncio.create_task(self._keep_output())

    async def _keep_output(self) -> None:
        """Keep the beginning of srun's output, and append all of it to its log as far as the disk has room."""
        assert self.child is not None and self.child.stdout is not None
        while chunk := await self.child.stdout.read(MAX_OUTPUT_BYTES):
            self.output = (self.output + chunk)[:MAX_OUTPUT_BYTES]
            try:
                await in_daemon_thread(partial(self._append_to_log, chunk))
            except OSError as error:
                logger.warning("Cannot write output of srun to its log: %s", error)

    def _append_to_log(self, chunk: bytes) -> None:
        log = open_log(self.launch.scheduler_log)
        try:
            os.write(log, chunk)
        finally:
            os.close(log)

    async def wait(self) -> ExitStatus:
        assert self.child is not None and self.reader is not None
        code = await self.child.wait()
        await self.reader
        if code < 0:  # srun itself was killed; its tasks are still running
            await self._end_lost_step()
        return await retry_run_directory(lambda: self._read_exit(code))

    async def terminate(self) -> None:
        self._signal(signal.SIGUSR1)

    async def dump_stacks(self) -> None:
        self._signal(signal.SIGUSR2)

    async def kill(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(number)

    def _read_exit(self, code: int) -> ExitStatus:
        """Return code, host and log of the task that failed first; 0 only if every task reported 0."""
        hosts = self.allocation.hosts_of(self.launch.process.nodes)
        files = [Path(f"{exit_file(self.launch)}.{task}.json") for task in range(len(hosts))]
        reports = [read_json_or_none(path) if is_there(path) else None for path in files]
        failed = [
            (report["time"], task, report["code"])
            for task, report in enumerate(reports)
            if report is not None and report["code"]
        ]
        if failed:
            _, task, code = min(failed)
        elif code == 0:
            task = reports.index(None) if None in reports else 0
            code = LOST if None in reports else 0
        else:
            task, code = self._first_exit_in_log(hosts, code)
        unreachable = frozenset(_UNREACHABLE.findall(self._output_text))
        return ExitStatus(code, hosts[task], task_log(self.launch, task), unreachable)

    @property
    def _output_text(self) -> str:
        return self.output.decode(errors="replace")

    def _first_exit_in_log(self, hosts: list[str], code: int) -> tuple[int, int]:
        """Return (task, code) of the first exit that srun logged."""
        first = _FIRST_END.search(self._output_text)
        if first is None:
            return 0, code
        task = hosts.index(first["host"]) if first["host"] in hosts else 0
        return task, code_of(first["how"], code)

    async def _end_lost_step(self) -> None:
        """Kill the step by its id, which is looked up by name: step numbers do not follow the order of starts."""
        jobs = [group.job_id for group in self.allocation.groups] or [self.allocation.job_id]
        listing = ("--noheader", f"--jobs={','.join(jobs)}", "--format=%i|%j")
        reply = await retry_slurm("squeue", "--steps", *listing)
        own = {*jobs, task_name(self.allocation.job_id, os.environ)}
        for line in reply.output.splitlines():
            step, _, name = line.strip().partition("|")
            # the number of an array lists the steps of all its tasks
            if name == self.launch.process.name and step.partition(".")[0].partition("+")[0] in own:
                # some versions print an error although they succeed
                await retry_slurm("scancel", "--signal=KILL", step)


def code_of(how: str, otherwise: int) -> int:
    """Convert srun's message about the exit of a task to an exit code, 128 + signal for a killed task."""
    if match := re.fullmatch(r"Exited with exit code (\d+)", how):
        return int(match[1])
    message = how.removesuffix(" (core dumped)")
    for number in signal.Signals:
        if signal.strsignal(number) == message:
            return 128 + number
    return otherwise
