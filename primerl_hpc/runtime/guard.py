"""Runs one command and ends its whole process tree: when it exits, on SIGTERM, and when the supervisor dies.

    python -m primerl_hpc.runtime.guard --grace 5 -- python -m primerl_hpc.roles.router …

Engines and torchrun start grandchildren that outlive a kill -9 of their parent. The guard is a *child subreaper*
(prctl(2)), so every orphan below it becomes its child and is found in /proc and ended; and it has a parent-death
signal, so it ends when its own parent is gone. Exits with the command's code, or 128 + signal. Standard library only,
because it must start in milliseconds in every role's interpreter.

In a SLURM step (``--notice FILE``) SIGTERM comes from SLURM, which is about to take the nodes: a preemption tells the
steps alone, long before it tells the batch process. The guard then only makes FILE, a request to save and stop, and
leaves the rest to the supervisor and to SLURM's own SIGKILL; the supervisor ends a step with SIGUSR1. ``--tell PATH``
leaves the task's exit code at PATH.<task>.json: srun itself says 0 for a step whose node was lost. ``--devices 0,1``
narrows the GPUs that SLURM shows to the whole step. SIGUSR2 is handed on to those below that handle it: the run's own
Python processes print their stacks then (`common/log.py`), others would die of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
GIVE_UP_S = 20.0
"""A process that does not end so long after SIGKILL is held by the kernel; the job must not wait for it."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def children_of(pid: int) -> list[int]:
    """Direct children of every thread of ``pid``, from /proc."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended while we looked
    return found


def descendants_of(pid: int) -> list[int]:
    """All processes below ``pid``, nearest first."""
    found: list[int] = []
    queue = children_of(pid)
    while queue:
        child = queue.pop(0)
        found.append(child)
        queue += children_of(child)
    return found


def handles(pid: int, number: int) -> bool:
    """Whether ``pid`` has a handler for this signal, from /proc."""
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
        except (ProcessLookupError, PermissionError):  # it is gone, or became another user's (setuid)
            continue


def reap_all() -> None:
    """Collect every dead child without waiting."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_descendants(grace_s: float, give_up_s: float = GIVE_UP_S) -> list[int]:
    """SIGTERM to everything below this process, SIGKILL after ``grace_s``; what is left ``give_up_s`` after that."""
    signal_all(descendants_of(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while left := descendants_of(os.getpid()):
        reap_all()
        now = time.monotonic()
        if now >= deadline:
            signal_all(left, signal.SIGKILL)
        if now >= deadline + give_up_s:
            return left
        time.sleep(0.02)
    reap_all()
    return []


def tell_survivors(pids: list[int]) -> None:
    """The kernel holds them (state D: a device or filesystem that does not answer), or they are another user's."""
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
        self.is_told = False

    def on_term(self, number: int, frame: object) -> None:
        """First the command alone, which may end its own children in order; the rest when the grace is over."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.grace_s
            self.tell_child()

    def tell_child(self) -> None:
        """Once: the signal may have come while the child was being made."""
        if self.kill_at is not None and self.child is not None and not self.is_told:
            self.is_told = True
            signal_all([self.child.pid], signal.SIGTERM)

    def on_stacks(self, number: int, frame: object) -> None:
        below = descendants_of(os.getpid())
        signal_all([pid for pid in below if handles(pid, signal.SIGUSR2)], signal.SIGUSR2)

    def on_notice(self, number: int, frame: object) -> None:
        """SLURM will take the nodes: ask the run to save, once."""
        assert self.notice is not None
        try:
            fd = os.open(self.notice, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError:
            return  # it has been asked for already, or the run directory cannot be written
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is the supervisor's business
        prctl(PR_SET_PDEATHSIG, ending)
        if os.getppid() != parent:  # it died before the signal was armed
            return 128 + signal.SIGTERM
        self.child = subprocess.Popen(
            self.command,
            start_new_session=True,
            preexec_fn=_die_with_guard,  # noqa: PLW1509 - the guard has one thread
        )
        self.tell_child()
        code = self.wait()
        tell_survivors(end_descendants(grace_s=1.0))
        return code if code >= 0 else 128 - code

    def wait(self) -> int:
        assert self.child is not None
        while True:
            try:
                return self.child.wait(timeout=0.5 if self.kill_at is None else 0.05)
            except subprocess.TimeoutExpired:
                self.reap_orphans()
            if self.kill_at is not None and time.monotonic() > self.kill_at:
                signal_all(descendants_of(os.getpid()), signal.SIGKILL)
                if time.monotonic() > self.kill_at + GIVE_UP_S:
                    return -signal.SIGKILL

    def reap_orphans(self) -> None:
        """Dead grandchildren that became ours must not pile up as zombies."""
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
    """Keep these of the devices that are visible to this process: names from the outer list, verbatim.

    A site whose GRES sets no list shows all the node's devices to every step: their indices name them.
    """
    if not any(name in os.environ for name in DEVICE_VARIABLES):
        os.environ[DEVICE_VARIABLES[0]] = ",".join(map(str, indices))
        return
    for name in DEVICE_VARIABLES:
        if outer := os.environ.get(name):
            devices = outer.split(",")
            os.environ[name] = ",".join(devices[index] for index in indices if index < len(devices))


def tell_exit(path: str, code: int) -> None:
    told = {"code": code, "time": time.time(), "host": socket.gethostname()}
    path = f"{path}.{os.environ.get('SLURM_PROCID', '0')}.json"
    try:
        with open(path + ".tmp", "w") as file:
            json.dump(told, file)
        os.replace(path + ".tmp", path)
    except OSError as error:
        print(f"cannot tell how this task ended: {error}", file=sys.stderr)


def main(argv: list[str]) -> int:
    grace_s, notice, telling = 5.0, None, None
    while argv[:1] in (["--grace"], ["--notice"], ["--devices"], ["--tell"]):
        (option, value), argv = argv[:2], argv[2:]
        if option == "--grace":
            grace_s = float(value)
        elif option == "--notice":
            notice = value
        elif option == "--tell":
            telling = value
        else:
            narrow_devices([int(index) for index in value.split(",")])
    if argv[:1] == ["--"]:
        argv = argv[1:]
    try:
        code = Guard(argv, grace_s, notice).run()
    except FileNotFoundError:
        print(f"no such program: {argv[0]}", file=sys.stderr)
        code = 127
    if telling is not None:
        tell_exit(telling, code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
