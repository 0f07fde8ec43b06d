"""Faults that have a face: what a log says → what it is, how to mend it, and whether trying again can help.

The list is read from the top; the first that fits the fault's own sentence wins, then the first that fits its last lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Retry = Literal["as it is", "after the mend", "with another recipe"]


@dataclass(frozen=True)
class Pattern:
    name: str
    regex: re.Pattern[str]
    what: str
    mend: str
    """May hold groups of the match as ``{1}``."""
    retry: Retry


@dataclass(frozen=True)
class Known:
    """A fault that was recognised."""

    name: str
    what: str
    mend: str
    retry: Retry


def _pattern(name: str, regex: str, what: str, mend: str, retry: Retry) -> Pattern:
    return Pattern(name, re.compile(regex, re.I), what, mend, retry)


PATTERNS = (
    _pattern(
        "engine memory",
        r"No available memory for the cache blocks|max seq(?:uence)? len.{0,40} is larger than the maximum number of "
        r"tokens that can be stored in KV cache|Free memory on device .{0,80} is less than desired",
        "the engine finds too little GPU memory for its KV cache",
        "change inference.gpu_memory_utilization, raise layout.inference.tensor_parallel, or lower seq_len",
        "with another recipe",
    ),
    _pattern(
        "GPU memory",
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|HIP out of memory|cudaErrorMemoryAllocation",
        "the GPU's memory is full",
        "lower seq_len, give the trainer more nodes, or set trainer.activation_checkpointing to full; of an engine, lower "
        "inference.gpu_memory_utilization",
        "with another recipe",
    ),
    _pattern(
        "GPU hardware",
        r"\bXid\b|uncorrectable ECC|GPU is lost|fallen off the bus|CUDA error: (?:unspecified launch failure|"
        r"an illegal instruction|uncorrectable)|cudaErrorDevicesUnavailable|CUDA-capable device\(s\) is/are busy",
        "a GPU is broken, or taken by somebody else",
        "leave the node out (scheduler.exclude of the profile) and tell the site",
        "as it is",
    ),
    _pattern(
        "GPU driver",
        r"CUDA driver version is insufficient|no kernel image is available|Found no NVIDIA driver|libcuda\.so",
        "driver, CUDA and PyTorch do not fit together",
        "install the PyTorch build for the driver of these nodes (nvidia-smi shows it), or load another module",
        "after the mend",
    ),
    _pattern(
        "host memory",
        r"oom[_-]kill|Out Of Memory|OUT_OF_MEMORY|Cannot allocate memory|std::bad_alloc",
        "the node's memory ran out, or the job's share of it",
        "ask for more memory (scheduler.memory of the profile), or run fewer processes a node",
        "after the mend",
    ),
    _pattern(
        "shared memory",
        r"Bus error|SIGBUS|insufficient shared memory|/dev/shm.{0,60}No space",
        "/dev/shm is full",
        "give the container more shared memory, or clear /dev/shm on the node",
        "after the mend",
    ),
    _pattern(
        "disk quota",
        r"Disk quota exceeded|Errno 122",
        "your quota on the filesystem is used up",
        "free space (old runs' checkpoints and weights), or move runs_dir to another filesystem",
        "after the mend",
    ),
    _pattern(
        "full disk",
        r"No space left on device|Errno 28\b|ENOSPC",
        "the filesystem is full",
        "free space (old runs' checkpoints and weights); complete checkpoints are untouched",
        "after the mend",
    ),
    _pattern(
        "filesystem",
        r"Stale file handle|Input/output error|Errno 5\b|Errno 116|Transport endpoint is not connected",
        "the filesystem had a fault",
        "none of yours; if it comes back, tell the site",
        "as it is",
    ),
    _pattern(
        "collective",
        r"Watchdog caught collective operation timeout|ncclSystemError|ncclRemoteError|ncclInternalError|NCCL error|"
        r"NCCL WARN|Connection closed by peer|Timed out waiting .{0,40} for (?:recv|send) operation",
        "the trainer's ranks lost each other",
        "if it comes back: check network.env of the profile (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) and the nodes with doctor",
        "as it is",
    ),
    _pattern(
        "port",
        r"Address already in use|EADDRINUSE|Errno 98\b",
        "a port was taken by somebody else",
        "nothing: ports are chosen anew at each start",
        "as it is",
    ),
    _pattern(
        "missing package",
        r"No module named '([\w.]+)'",
        "the Python package {1} is missing",
        "install {1} into the interpreter of this role (software of the profile; doctor --profile compares them)",
        "after the mend",
    ),
    _pattern(
        "missing library",
        r"([\w.+-]+\.so[.\d]*): cannot open shared object file",
        "the library {1} is missing",
        "load the module that brings it (software.modules of the profile)",
        "after the mend",
    ),
    _pattern(
        "gated model",
        r"gated repo|401 Client Error|403 Client Error|Invalid user token",
        "the hub does not give this model to you",
        "accept its licence on the hub and log in (huggingface-cli login) where you submit",
        "after the mend",
    ),
    _pattern(
        "hub offline",
        r"offline mode is enabled|HF_HUB_OFFLINE|LocalEntryNotFoundError|couldn't connect to 'https://huggingface|"
        r"Failed to resolve 'huggingface\.co'|Max retries exceeded with url",
        "the node cannot reach the model hub and the files are not in the cache",
        "download on the login node first (huggingface-cli download NAME), or give model.name a folder",
        "after the mend",
    ),
    _pattern(
        "permission",
        r"Permission denied|Errno 13\b|Operation not permitted",
        "a file or device may not be used",
        "look at the owner and mode of the path in the lines below",
        "after the mend",
    ),
    _pattern(
        "open files",
        r"Too many open files|Errno 24\b",
        "the limit of open files is too low",
        "raise it in the profile's software.setup: ulimit -n 65536",
        "after the mend",
    ),
    _pattern(
        "no progress",
        r"without a new step|before a new checkpoint|not finite|non-finite",
        "the run makes no progress",
        "see what happened at its last step: primerl-hpc logs RUN trainer",
        "with another recipe",
    ),
    _pattern(
        "walltime",
        r"DUE TO TIME LIMIT|\bTIMEOUT\b",
        "the walltime was over before the run could save",
        "raise scheduler.signal_margin_s (or the walltime) of the profile, or lower checkpoint.interval",
        "as it is",
    ),
    _pattern(
        "preempted",
        r"DUE TO PREEMPTION|\bPREEMPTED\b",
        "another job took the nodes",
        "nothing; checkpoint.interval bounds what is lost",
        "as it is",
    ),
    _pattern(
        "lost node",
        r"DUE TO NODE FAILURE|Node failure on|NODE_FAIL|BOOT_FAIL",
        "a node was lost",
        "nothing: another attempt gets other nodes",
        "as it is",
    ),
    _pattern(
        "SLURM silent",
        r"Socket timed out on send/recv|Unable to contact slurm controller|slurm_load_jobs error",
        "SLURM did not answer",
        "try again in a minute",
        "as it is",
    ),
)


def recognise(sentence: str, last_lines: Sequence[str] = ()) -> Known | None:
    """The known fault of this sentence, else of the last lines."""
    for text in (sentence, "\n".join(last_lines)):
        for pattern in PATTERNS:
            if match := pattern.regex.search(text):
                words = [match[0], *match.groups()]
                return Known(
                    pattern.name, pattern.what.format(*words), pattern.mend.format(*words), pattern.retry
                )
    return None


SIGNALS = {
    "SIGKILL": "killed without a word: out of host memory, by the scheduler, or by hand",
    "SIGTERM": "asked to end, by the scheduler or by hand",
    "SIGSEGV": "a crash in compiled code",
    "SIGABRT": "a compiled library gave up (a failed assertion, or NCCL's watchdog)",
    "SIGBUS": "a memory-mapped file or /dev/shm could not grow",
    "SIGFPE": "an arithmetic fault in compiled code",
    "SIGILL": "an instruction that this processor does not have: built for another one",
}
