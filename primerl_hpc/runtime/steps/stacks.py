"""Print state and stacks of every process of a run on this node.

    python -m primerl_hpc.runtime.steps.stacks RUN_DIR SECONDS [blocked]

Nothing here stops a process of the run. Python stacks come from py-spy, which is searched next to the interpreter and
in PATH, and which only reads memory (``--nonblocking``): a tracer that is killed at its time limit may leave a process
stopped. Without py-spy, or if the kernel does not permit it (``kernel.yama.ptrace_scope``), the run's Python processes
are requested to print their Python stacks to their logs (`common/log.py`). A process that is blocked in the kernel
(state D) is not touched: the tool would block too.

The output is one compressed JSON list in short lines, because srun may mix the output of several nodes. Only the
standard library is used, as in the guard.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from primerl_hpc.common.log import STACKS_THREAD
from primerl_hpc.common.safety.printable import one_line
from primerl_hpc.runtime.steps.guard import descendants_of

MARK, LINE_CHARS, MOST_CHARS = "@stacks", 700, 60_000
GUARD, SUPERVISOR = "primerl_hpc.runtime.steps.guard", "primerl_hpc.runtime.supervisor"
AT_ONCE = 8
SAMPLE_S = 0.3
"""A thread that is in state D now and after this time counts as blocked."""
TGKILL = {"x86_64": 234, "aarch64": 131}
"""Number of the system call that signals one thread; glibc has a function for it since 2.30."""
Entry = dict[str, str | int]
_FD_CALLS = {
    "x86_64": (0, 1, 3, 5, 8, 17, 18, 19, 20, 72, 73, 74, 75, 77, 78, 91, 138, 217, 285),
    "aarch64": (25, 32, 44, 46, 52, 57, 61, 62, 63, 64, 65, 66, 67, 68, 80, 82, 83),
}
"""System calls whose first argument is a file descriptor: read, write, close, fstat, fsync, flock, getdents, …"""
# fmt: off
_PATH_CALLS = {
    "x86_64": {
        2: 0, 4: 0, 6: 0, 21: 0, 76: 0, 80: 0, 82: 0, 83: 0, 84: 0, 87: 0, 257: 1, 262: 1, 263: 1, 332: 1,
    },
    "aarch64": {34: 1, 35: 1, 38: 1, 48: 1, 49: 0, 56: 1, 79: 1, 291: 1},
}
# fmt: on
"""System calls with a path, and the index of that argument: open, stat, mkdir, rename, unlink, openat, statx, …"""


def processes_of(run_dir: str) -> dict[int, str]:
    """Return pid → name of the role's process, of all processes of the run on this node, without srun and guards."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid, words = int(folder.name), _words(int(folder.name))
        if run_dir not in words:
            continue
        if words[1:3] == ["-m", GUARD]:
            found |= dict.fromkeys(descendants_of(pid), words[-1])
        elif words[1:3] == ["-m", SUPERVISOR]:
            found[pid] = "supervisor"
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def blocked_threads(pid: int) -> list[int]:
    """Return the threads of a process that are in state D."""
    found = []
    for folder in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        if state_of(folder) == "D":
            found.append(int(folder.name))
    return sorted(found)


def state_of(folder: Path) -> str:
    """Return the state of a process or thread by its folder in /proc; X if it has ended."""
    try:
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def waited_path(pid: int, thread: int) -> str:
    """Return the file of the system call in which a thread waits; empty if it has none or the kernel hides it."""
    folder, machine = Path(f"/proc/{pid}/task/{thread}"), os.uname().machine
    try:
        number, *arguments = (folder / "syscall").read_text().split()
        if int(number) in _FD_CALLS.get(machine, ()):
            return os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")
        if (index := _PATH_CALLS.get(machine, {}).get(int(number))) is None:
            return ""
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(int(arguments[index], 16))
            path = memory.read(512).partition(b"\0")[0].decode(errors="replace")
    except (OSError, ValueError, IndexError, OverflowError):
        return ""
    return path if path.startswith("/") else os.path.join(_cwd(pid), path)


def _cwd(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def entry_of(pid: int, process: str, blocked: list[int]) -> Entry:
    """Return node, state and, for a blocked process, where it waits."""
    entry: Entry = {
        "node": socket.gethostname().split(".")[0],
        "process": process,
        "pid": pid,
        "command": one_line(" ".join(_words(pid)), 120),
        "state": "D" if blocked else state_of(Path(f"/proc/{pid}")),
    }
    if blocked:
        try:
            entry["wchan"] = Path(f"/proc/{pid}/task/{blocked[0]}/wchan").read_text()
        except OSError:
            entry["wchan"] = ""
        entry["path"] = one_line(waited_path(pid, blocked[0]))
    return entry


def is_python(pid: int) -> bool:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return False
    return "libpython" in maps or "/python3" in maps


def stack_of(pid: int, deadline: float) -> tuple[str, str]:
    """Return (stack, note)."""
    if not is_python(pid):
        return "", "not a Python process"
    own = Path(sys.executable).with_name("py-spy")
    spy = str(own) if own.exists() else shutil.which("py-spy")
    if spy is None:
        return "", _request_stacks(pid, "py-spy is not installed (pip install py-spy)")
    stack, note = _run([spy, "dump", "--nonblocking", "--pid", str(pid)], deadline)
    return stack, "" if stack else _request_stacks(pid, note)


def _run(command: list[str], deadline: float) -> tuple[str, str]:
    limit_s = deadline - time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=max(0.1, limit_s), check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"{Path(command[0]).name} did not finish in time"
    except OSError as error:
        return "", f"{Path(command[0]).name}: {error.strerror}"
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return (done.stdout.strip()[:MOST_CHARS], "") if done.returncode == 0 else ("", one_line(last[0]))


def _request_stacks(pid: int, reason: str) -> str:
    """Signal the thread that prints the stacks of its process; return ``reason`` and what was done.

    The signal goes to that thread only, which waits for it. Any other thread would run faulthandler's handler, which
    crashes the process if it walks through the frames of a thread that executes Python.
    """
    thread, status = _stacks_thread(pid), _status(Path(f"/proc/{pid}"))
    if tracer := int(status.get("TracerPid", "0")):
        return f"{reason}; process {tracer} traces it"
    number = TGKILL.get(os.uname().machine)
    if thread is None or number is None:
        return reason
    ctypes.CDLL(None).syscall(number, pid, thread, int(signal.SIGUSR2))  # an error: it has ended
    return f"{reason}; its Python stacks were written to its log"


def _stacks_thread(pid: int) -> int | None:
    """Return the thread of `common.log.dump_stacks_on_signal` that waits for the signal."""
    threads = Path(f"/proc/{pid}/task").glob("[0-9]*")
    return next(
        (int(folder.name) for folder in threads if _status(folder).get("Name") == STACKS_THREAD), None
    )


def _status(folder: Path) -> dict[str, str]:
    """Return the fields of a process or thread in /proc; none if it has ended."""
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def collect(run_dir: str, limit_s: float, *, only_blocked: bool) -> list[Entry]:
    deadline = time.monotonic() + limit_s
    processes = processes_of(run_dir)
    first = {pid: blocked_threads(pid) for pid in processes}
    time.sleep(SAMPLE_S)  # two observations: state D is normal for milliseconds
    blocked = {pid: [thread for thread in first[pid] if thread in blocked_threads(pid)] for pid in processes}
    entries = {pid: entry_of(pid, name, blocked[pid]) for pid, name in processes.items()}
    if only_blocked:
        return [entry for entry in entries.values() if entry["state"] == "D"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = {
            pid: pool.submit(stack_of, pid, deadline)
            for pid, entry in entries.items()
            if entry["state"] not in ("D", "X", "Z")
        }
        for pid, answer in asked.items():
            entries[pid]["stack"], entries[pid]["note"] = answer.result()
    return list(entries.values())


def main(argv: list[str]) -> int:
    run_dir, limit_s, *more = argv
    text = json.dumps(collect(run_dir, float(limit_s), only_blocked=more == ["blocked"]))
    packed, node = base64.b64encode(zlib.compress(text.encode())).decode(), socket.gethostname().split(".")[0]
    for start in range(0, len(packed), LINE_CHARS):
        print(MARK, node, packed[start : start + LINE_CHARS])
    print(MARK, node, ".", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
