"""Run one command and end its process tree: when the command exits, on SIGTERM, and when the supervisor dies.

    python -m primerl_hpc.runtime.steps.guard --grace 5 -- python -m primerl_hpc.roles.router …

Engines and torchrun start grandchildren that survive a kill -9 of their parent. The guard is a *child subreaper*
(prctl(2)), so every orphan below it becomes its child and is found in /proc and killed; and it sets a parent-death
signal, so it ends when its own parent dies. Python's resource trackers are killed last: they delete the shared memory
of the others, which would otherwise occupy the node's memory after the job. The guard exits with the command's code, or
128 + signal. It uses the standard library only, because it must start within milliseconds in every role's interpreter.

In a SLURM step (``--notice FILE``) SIGTERM comes from SLURM, which is about to reclaim the nodes: a preemption signals
the steps long before the batch process. The guard then only creates FILE, a request to save and stop, and leaves the
rest to the supervisor and to SLURM's SIGKILL; the supervisor ends a step with SIGUSR1. ``--tell PATH`` writes the
task's exit code to PATH.<task>.json, because srun returns 0 for a step whose node was lost. After a success it then
waits for the other tasks' files: srun kills them seconds after the first task's end. ``--log FILE`` appends the output
to FILE (srun does so in a SLURM step). ``--devices 0,1`` selects from the GPUs that SLURM makes visible to the step.
SIGUSR2 is forwarded to descendants that handle it: the run's Python processes then print their stacks
(`common/log.py`); it would kill other processes. If the command fails and the kernel killed a process of its control
group for lack of memory, the guard prints that evidence to the log (`oom.py`).
"""

from __future__ import annotations

import ctypes
import errno
import fnmatch
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import MutableMapping

from primerl_hpc.common.node.binding import bind_engine
from primerl_hpc.common.node.limits import raise_limits
from primerl_hpc.run.access.private_tmp import PrivateTmp, delete_abandoned
from primerl_hpc.runtime.steps.oom import OomWatch

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
GIVE_UP_S = 20.0
"""A process that survives SIGKILL this long is blocked in the kernel; the job does not wait for it."""
TRACKERS_S = 5.0
"""How long resource trackers may delete the shared memory of killed processes; it takes milliseconds."""
PEERS_S = 20.0
"""How long a task that succeeded waits for the other tasks of its step to end."""
LOG_RETRY_S = 60.0
"""How long errors of the filesystem are tolerated when the log is opened."""
SUCCESSES = (0, 75)
"""Exit codes of a command that did what it was asked to do: finished, or stopped and saved (`ExitCode`)."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def children_of(pid: int) -> list[int]:
    """Return the direct children of every thread of ``pid``, from /proc."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile
    return found


def descendants_of(pid: int) -> list[int]:
    """Return all processes below ``pid``, nearest first."""
    found: list[int] = []
    queue = children_of(pid)
    while queue:
        child = queue.pop(0)
        found.append(child)
        queue += children_of(child)
    return found


def has_handler(pid: int, number: int) -> bool:
    """True if ``pid`` has a handler for this signal, from /proc."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # it ended, or changed its user (setuid)
            continue


def is_resource_tracker(pid: int) -> bool:
    """True for the process of Python's multiprocessing that deletes shared memory after all its users have ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_all(pids: list[int], *, with_trackers: bool = False) -> None:
    """Send SIGKILL; unless ``with_trackers``, spare resource trackers, which end by themselves after the others."""
    signal_all([pid for pid in pids if with_trackers or not is_resource_tracker(pid)], signal.SIGKILL)


def drop_variables(environ: MutableMapping[str, str]) -> None:
    """Delete variables that match none of the patterns in PRIMERL_KEPT_ENV, if that is set, and those that
    PRIMERL_WITHHELD_ENV names. Both are separated by spaces."""
    patterns = environ.get("PRIMERL_KEPT_ENV", "*").split()
    withheld = environ.pop("PRIMERL_WITHHELD_ENV", "").split()
    for name in list(environ):
        if name in withheld or not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            del environ[name]


def reap_all() -> None:
    """Reap all dead children without waiting."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_descendants(grace_s: float, give_up_s: float = GIVE_UP_S) -> list[int]:
    """Send SIGTERM to all descendants, SIGKILL after ``grace_s``; return what is left ``give_up_s`` after that."""
    signal_all(descendants_of(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left := descendants_of(os.getpid()):
        reap_all()
        now = time.monotonic()
        if now >= deadline:
            kill_all(left, with_trackers=now >= deadline + TRACKERS_S)
        if now >= deadline + give_up_s:
            return left
        time.sleep(0.02)
    reap_all()
    return []


def report_survivors(pids: list[int]) -> None:
    """Print the processes that could not be killed: blocked in the kernel (state D), or of another user."""
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            continue
        print(f"guard: cannot end {pid} ({name}, state {rest.split()[0]})", file=sys.stderr, flush=True)


class Guard:
    def __init__(self, command: list[str], grace_s: float, notice: str | None = None) -> None:
        self.command, self.grace_s, self.notice = command, grace_s, notice
        self.child: subprocess.Popen[bytes] | None = None
        self.kill_at: float | None = None
        self.is_signaled = False
        self.oom = OomWatch()

    def on_term(self, number: int, frame: object) -> None:
        """Signal the command only, which may end its children in order; kill the rest when the grace time is over."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s
            self.terminate_child()

    def terminate_child(self) -> None:
        """Send SIGTERM to the command once; the guard's own signal may have arrived before the command was started."""
        is_running = self.child is not None and self.child.returncode is None
        if self.kill_at is not None and is_running and not self.is_signaled:
            assert self.child is not None
            self.is_signaled = True
            signal_all([self.child.pid], signal.SIGTERM)

    def on_stacks(self, number: int, frame: object) -> None:
        pids = descendants_of(os.getpid())
        signal_all([pid for pid in pids if has_handler(pid, signal.SIGUSR2)], signal.SIGUSR2)

    def on_notice(self, number: int, frame: object) -> None:
        """SLURM is about to reclaim the nodes: request a save and stop, once."""
        assert self.notice is not None
        try:
            fd = os.open(self.notice, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            return  # already requested, or the run directory is not writable
        os.write(fd, b'{"reason": "scheduler"}\n')
        os.close(fd)

    def run(self) -> int:
        parent = os.getppid()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        ending = signal.SIGTERM if self.notice is None else signal.SIGUSR1
        for number in (signal.SIGTERM, signal.SIGHUP, ending):
            signal.signal(number, self.on_term)
        if self.notice is not None:
            signal.signal(signal.SIGTERM, self.on_notice)
        signal.signal(signal.SIGUSR2, self.on_stacks)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C in a terminal is handled by the supervisor
        prctl(PR_SET_PDEATHSIG, ending)
        if os.getppid() != parent:  # the parent died before the signal was armed
            return 128 + signal.SIGTERM
        tmp = PrivateTmp.create(os.environ)
        for folder in delete_abandoned(tmp.folder.parent) if tmp is not None else ():
            print(f"guard: deleted {folder}, which a killed run left", file=sys.stderr, flush=True)
        drop_variables(os.environ)
        self.child = subprocess.Popen(
            self.command,
            start_new_session=True,
            preexec_fn=_die_with_guard,  # noqa: PLW1509 - the guard has one thread
        )
        self.terminate_child()
        code = self.wait()
        self.oom.check()
        if code != 0 and (evidence := self.oom.evidence()):
            print(f"guard: {evidence}", file=sys.stderr, flush=True)
        report_survivors(end_descendants(grace_s=1.0))
        if tmp is not None:
            tmp.release()
        return code if code >= 0 else 128 - code

    def wait(self) -> int:
        assert self.child is not None
        while True:
            try:
                return self.child.wait(timeout=0.5 if self.kill_at is None else 0.05)
            except subprocess.TimeoutExpired:
                self.reap_orphans()
            pids = () if self.oom.path else (self.child.pid, *children_of(self.child.pid))
            self.oom.check(pids)
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                kill_all(descendants_of(os.getpid()))
                if time.monotonic() > self.kill_at + GIVE_UP_S:
                    return -signal.SIGKILL

    def await_peers(self, exit_path: str) -> None:
        """Wait until all tasks of the step have written their exit codes, at most `PEERS_S`; a signal ends the wait."""
        folder, name = os.path.split(exit_path)
        num_tasks, deadline = int(os.environ.get("SLURM_NTASKS", "1")), time.monotonic() + PEERS_S
        while num_tasks > 1 and self.kill_at is None and time.monotonic() < deadline:
            try:
                ended = fnmatch.filter(os.listdir(folder), f"{name}.*.json")
            except OSError:
                return
            if len(ended) >= num_tasks:
                return
            time.sleep(0.2)

    def reap_orphans(self) -> None:
        """Reap dead grandchildren that were reparented to the guard, so that no zombies accumulate."""
        assert self.child is not None
        for pid in children_of(os.getpid()):
            if pid != self.child.pid:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue


def _die_with_guard() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def narrow_devices(indices: list[int]) -> None:
    """Restrict this process to these of its visible devices; entries of the outer list are kept verbatim.

    A site whose GRES sets no such list makes all devices of the node visible; the indices then name them directly.
    """
    if not any(name in os.environ for name in DEVICE_VARIABLES):
        os.environ[DEVICE_VARIABLES[0]] = ",".join(map(str, indices))
        return
    for name in DEVICE_VARIABLES:
        if outer := os.environ.get(name):
            devices = outer.split(",")
            os.environ[name] = ",".join(devices[index] for index in indices if index < len(devices))


def append_output_to(path: str) -> None:
    """Redirect stdout and stderr to the file. Raises OSError: at once if the disk is full, else after `LOG_RETRY_S`."""
    deadline = time.monotonic() + LOG_RETRY_S
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            break
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except OSError as error:
            if time.monotonic() > deadline or error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            time.sleep(0.25)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def write_exit(path: str, code: int) -> None:
    """Write exit code, time and host to ``PATH.<task>.json``."""
    report = {"code": code, "time": time.time(), "host": socket.gethostname()}
    path = f"{path}.{os.environ.get('SLURM_PROCID', '0')}.json"
    try:
        with open(path + ".tmp", "w") as file:
            json.dump(report, file)
        os.replace(path + ".tmp", path)
    except OSError as error:
        print(f"cannot write the exit code of this task: {error}", file=sys.stderr)


def main(argv: list[str]) -> int:
    # as run/access/ownership.py: other users may not write what a role creates
    os.umask(os.umask(0o022) | 0o022)
    grace_s, notice, exit_path = 5.0, None, None
    while argv[:1] in (["--grace"], ["--notice"], ["--log"], ["--devices"], ["--tell"]):
        (option, value), argv = argv[:2], argv[2:]
        if option == "--grace":
            grace_s = float(value)
        elif option == "--notice":
            notice = value
        elif option == "--log":
            append_output_to(value)
        elif option == "--tell":
            exit_path = value
        else:
            narrow_devices([int(index) for index in value.split(",")])
    if argv[:1] == ["--"]:
        argv = argv[1:]
    raise_limits()
    bind_engine()
    guard = Guard(argv, grace_s, notice)
    try:
        code = guard.run()
    except FileNotFoundError as error:
        if error.filename == argv[0]:
            print(f"no such program: {argv[0]}", file=sys.stderr)
        else:
            print(
                f"guard: {error.strerror}: {error.filename}; correct scratch of the profile", file=sys.stderr
            )
        code = 127
    if exit_path is not None:
        write_exit(exit_path, code)
        if code in SUCCESSES:
            guard.await_peers(exit_path)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
