"""Known faults: a regular expression for a log line, the cause, the fix, and whether another attempt can succeed.

    recognize_fault("OSError: [Errno 28] No space left on device")  → the fault "full disk"

`FAULT_PATTERNS` is searched from the top. The error message of the failure is searched first, then the last lines of
its log. To add a fault, insert a `FaultPattern` before the more general ones, and a log line to
tests/unit/observe/test_diagnose.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LINE_CHARS = 4096
"""Number of characters searched in a line: a line of a log may hold megabytes of data."""
MOST_LINES = 2000
"""Number of lines searched, counted from the end of the log."""

Retry = Literal[
    "as it is", "with more checkpoints", "after a fix", "with another recipe", "with another profile"
]
"""Condition for another attempt to succeed: none, a save before the next interruption, a fix outside of recipe and
profile, a different recipe or profile."""


@dataclass(frozen=True)
class FaultPattern:
    name: str
    regex: re.Pattern[str]
    """Every repetition is bounded, so that the search time is linear in the length of the text."""
    what: str
    hint: str
    """How to fix it. ``{1}`` stands for the first group of the match, in `what` too."""
    retry: Retry


@dataclass(frozen=True)
class KnownFault:
    """A `FaultPattern` that matched, with the groups of the match inserted."""

    name: str
    what: str
    hint: str
    retry: Retry


def _pattern(name: str, regex: str, what: str, hint: str, retry: Retry) -> FaultPattern:
    return FaultPattern(name, re.compile(regex, re.I), what, hint, retry)


NO_CHECKPOINT = r"before a new checkpoint"
FAULT_PATTERNS = (
    *(
        _pattern(
            "interpreter",
            regex,
            "the program {1} cannot be started on the node",
            "correct it in the profile (software.default.python, software.roles, software.modules): outside of a "
            "container, a path must exist on the node, not in the image",
            "with another profile",
        )
        for regex in (
            r"slurm_script: line \d{1,9}: (?:exec: )?([^:\n]{1,400}): (?:No such file or directory|command not found|"
            r"not found|Permission denied|cannot execute)",
            r"no such program: ([^\n]{1,400})",
        )
    ),
    _pattern(
        "engine memory",
        r"No available memory for the cache blocks|max seq(?:uence)? len.{0,40} is larger than the maximum number of "
        r"tokens that can be stored in KV cache|Free memory on device .{0,80} is less than desired",
        "the inference engine has too little GPU memory for its KV cache",
        "adjust inference.gpu_memory_utilization, increase layout.inference.tensor_parallel, or reduce seq_len",
        "with another recipe",
    ),
    _pattern(
        "GPU memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|HIP out of memory|cudaErrorMemoryAllocation",
        "the GPU is out of memory",
        "in the trainer: reduce seq_len, use more trainer nodes, or set trainer.activation_checkpointing "
        "to full (its allocations are in profiles/memory-<attempt>/ of the run directory); in an engine: "
        "reduce inference.gpu_memory_utilization",
        "with another recipe",
    ),
    _pattern(
        "GPU hardware",
        r"\bXid\b|uncorrectable ECC|GPU is lost|fallen off the bus|CUDA error: (?:unspecified launch failure|"
        r"an illegal instruction|uncorrectable)|cudaErrorDevicesUnavailable|CUDA-capable device\(s\) is/are busy",
        "a GPU has a hardware fault, or another process uses it exclusively",
        "exclude the node (scheduler.exclude in the profile) and report it to the site's administrators",
        "as it is",
    ),
    _pattern(
        "GPU driver",
        r"CUDA driver version is insufficient|no kernel image is available|Found no NVIDIA driver|libcuda\.so",
        "the NVIDIA driver, CUDA and PyTorch versions are incompatible",
        "install a PyTorch build that supports the driver of these nodes (see nvidia-smi), or load another CUDA module",
        "after a fix",
    ),
    _pattern(
        "host memory",
        r"oom[_-]kill|Out Of Memory(?!\?)|OUT_OF_MEMORY|Cannot allocate memory|std::bad_alloc",
        "the node, or the job's share of it, is out of host memory",
        "request more memory (scheduler.memory in the profile), or run fewer processes per node",
        "after a fix",
    ),
    _pattern(
        "shared memory",
        r"Bus error|SIGBUS|insufficient shared memory|/dev/shm.{0,60}No space",
        "/dev/shm is full",
        "increase the shared memory of the container, or delete stale files in /dev/shm on the node",
        "after a fix",
    ),
    _pattern(
        "disk quota",
        r"Disk quota exceeded|Errno 122",
        "your disk quota is exhausted",
        "delete checkpoints and weights of old runs, or move runs_dir to another filesystem",
        "after a fix",
    ),
    _pattern(
        "full disk",
        r"No space left on device|Errno 28\b|ENOSPC",
        "the filesystem is full",
        "delete checkpoints and weights of old runs to free space; the complete checkpoints of this run are intact",
        "after a fix",
    ),
    _pattern(
        "filesystem",
        r"Stale file handle|Input/output error|Errno 5\b|Errno 116|Transport endpoint is not connected",
        "the filesystem failed",
        "resume the run; if the error recurs, report it to the site's administrators",
        "as it is",
    ),
    _pattern(
        "collective",
        r"Watchdog caught collective operation timeout|ncclSystemError|ncclRemoteError|ncclInternalError|NCCL error|"
        r"NCCL WARN|Connection closed by peer|Timed out waiting .{0,40} for (?:recv|send) operation",
        "communication between the trainer's ranks failed",
        "if it recurs, check network.env in the profile (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), and check the "
        "nodes with doctor",
        "as it is",
    ),
    _pattern(
        "port",
        r"Address already in use|EADDRINUSE|Errno 98\b",
        "another process uses the port",
        "resume the run; ports are chosen again at each start",
        "as it is",
    ),
    _pattern(
        "missing package",
        r"No module named '([\w.]{1,200})'",
        "the Python package {1} is not installed",
        "install {1} in the Python environment of this role (software in the profile; doctor --profile "
        "checks the environments)",
        "after a fix",
    ),
    _pattern(
        "missing library",
        r"(?<![\w.+-])([\w.+-]{1,200}\.so[.\d]{0,20}): cannot open shared object file",
        "the shared library {1} was not found",
        "load the module that provides it (software.modules in the profile)",
        "after a fix",
    ),
    _pattern(
        "unknown srun option",
        r"srun: unrecognized option '--([\w-]{1,80})",
        "SLURM of this site has no srun option --{1}",
        "remove it from scheduler.srun_extra, or set scheduler.mpi to null; --container-* need pyxis, --environment "
        "and --uenv plug-ins of CSCS (software.default.container.kind)",
        "after a fix",
    ),
    _pattern(
        "architecture",
        r"Exec format error|cannot execute binary file|exec user process caused: exec format error|"
        r"image's architecture .{0,80} could not run on",
        "a program or a container image is built for another architecture than the node",
        "build the environment or image on a node of that architecture, and set node.arch in the profile: submit then "
        "compares them",
        "after a fix",
    ),
    _pattern(
        "proxy",
        r"ProxyError|(?:Unable|Failed) to connect to proxy|Cannot connect to proxy|Tunnel connection failed|"
        r"502 Proxy|407 Proxy Authentication",
        "the HTTP proxy of the nodes does not respond or refuses the request",
        "correct network.proxy in the profile, or fetch everything on the login node before (primerl-hpc prefetch) and "
        "set offline: true",
        "after a fix",
    ),
    _pattern(
        "gated model",
        r"gated repo|401 Client Error|403 Client Error|Invalid user token",
        "the Hugging Face Hub denies access to this model",
        "accept the license of the model on the hub and log in (hf auth login) on the node from which you submit",
        "after a fix",
    ),
    _pattern(
        "unknown model",
        r"is not a local folder and is not a valid model identifier|Repository Not Found for url"
        r"|RepositoryNotFoundError",
        "the Hugging Face Hub has no model with this name",
        "correct model.name (a folder, or owner/name on the hub); a private model requires hf auth login "
        "on the node from "
        "which you submit",
        "with another recipe",
    ),
    _pattern(
        "configuration",
        r"validation errors? for \w{0,80}(?:Config|Args|Settings|Parameters)\b|unrecognized arguments"
        r"|error: argument -|"
        r"(?:refuses|rejects) the engine's arguments|User-specified max_model_len|got an unexpected keyword argument",
        "a setting was rejected",
        "correct the setting named in the message",
        "with another recipe",
    ),
    _pattern(
        "hub offline",
        r"offline mode is enabled|HF_HUB_OFFLINE|LocalEntryNotFoundError|couldn't connect to 'https://huggingface|"
        r"Failed to resolve 'huggingface\.co'|Max retries exceeded with url",
        "the node cannot reach the Hugging Face Hub, and the files are not in the local cache",
        "download the files on the login node first (hf download NAME), or set model.name to a folder",
        "after a fix",
    ),
    _pattern(
        "permission",
        r"Permission denied|Errno 13\b|Operation not permitted",
        "access to a file or device was denied",
        "check the owner and mode of the path in the log lines below",
        "after a fix",
    ),
    _pattern(
        "open files",
        r"Too many open files|Errno 24\b",
        "the process reached its limit of open files",
        "raise the limit in software.setup of the profile: ulimit -n 65536",
        "after a fix",
    ),
    _pattern(
        "no checkpoint",
        NO_CHECKPOINT,
        "the run was interrupted before it saved a new checkpoint",
        "reduce checkpoint.interval, or increase the walltime, so that each attempt saves",
        "with more checkpoints",
    ),
    _pattern(
        "divergence",
        r"not finite|non-finite|overflow float16",
        "the training diverged: a loss or a gradient is not a finite number",
        "check its last steps (primerl-hpc logs RUN trainer), and reduce optimizer.lr or optimizer.max_norm",
        "with another recipe",
    ),
    _pattern(
        "no progress",
        r"without a new step",
        "the run stopped making progress",
        "check what happened at its last step: primerl-hpc logs RUN trainer",
        "after a fix",
    ),
    _pattern(
        "walltime",
        r"DUE TO TIME LIMIT|\bTIMEOUT\b",
        "the walltime expired before the run saved a checkpoint",
        "increase scheduler.signal_margin_s (or the walltime) in the profile, or reduce checkpoint.interval",
        "as it is",
    ),
    _pattern(
        "preempted",
        r"DUE TO PREEMPTION|\bPREEMPTED\b",
        "the job was preempted by another job",
        "resume the run; checkpoint.interval bounds the number of steps that are lost",
        "as it is",
    ),
    _pattern(
        "lost node",
        r"DUE TO NODE FAILURE|Node failure on|NODE_FAIL|BOOT_FAIL",
        "a node failed",
        "resume the run; the next attempt gets other nodes",
        "as it is",
    ),
    _pattern(
        "SLURM silent",
        r"Socket timed out on send/recv|Unable to contact slurm controller|slurm_load_jobs error",
        "SLURM did not respond",
        "retry in a minute",
        "as it is",
    ),
)


def recognize_fault(message: str, last_lines: Sequence[str] = ()) -> KnownFault | None:
    """Return the fault that matches ``message``, or else the one that matches ``last_lines``; None if none does."""
    for text in (_bounded(message.splitlines()), _bounded(last_lines)):
        for pattern in FAULT_PATTERNS:
            if match := pattern.regex.search(text):
                groups = [match[0], *match.groups()]
                return KnownFault(
                    pattern.name, pattern.what.format(*groups), pattern.hint.format(*groups), pattern.retry
                )
    return None


def _bounded(lines: Sequence[str]) -> str:
    return "\n".join(str(line)[:LINE_CHARS] for line in lines[-MOST_LINES:])


SIGNALS = {
    "SIGKILL": "sent from outside the process; the sender is unknown",
    "SIGTERM": "termination requested from outside the process",
    "SIGSEGV": "segmentation fault in compiled code",
    "SIGABRT": "abort in compiled code (a failed assertion, or NCCL's watchdog)",
    "SIGBUS": "a memory-mapped file or /dev/shm ran out of space",
    "SIGFPE": "arithmetic error in compiled code",
    "SIGILL": "illegal instruction: the code was built for another processor",
}
