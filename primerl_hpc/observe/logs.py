"""``logs``: the file of any role and attempt; followed across restarts of the role and attempts of the run."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

import click

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import log_files, real_state

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red")


def choose_logs(run: RunDir, role: str | None, rank: int | None, attempt: int | None) -> dict[str, Path]:
    """Log files that fit; ``role`` is a role, a process (inference-0) or part of a file's path.

    Raises NotFoundError naming what there is.
    """
    files = log_files(run, attempt)
    if rank is not None:
        found = {
            name: path for name, path in files.items() if f"/{rank}/" in f"/{name}" and "torchrun" in name
        }
        if not found:
            raise NotFoundError(f"no log of rank {rank}", mend="only torchrun's ranks have logs of their own")
        return found
    files = {name: path for name, path in files.items() if "torchrun" not in name}
    if role is None:
        return files
    found = {name: path for name, path in files.items() if _fits(name, role.replace("-", "_"))}
    if not found:
        known = ", ".join(name.removesuffix(".log") for name in files) or "none yet"
        raise NotFoundError(f"no log of '{role}'", mend=f"there are: {known}")
    return found


def _fits(name: str, role: str) -> bool:
    stem = name.removesuffix(".log").replace("-", "_")
    head, _, tail = role.rpartition("_")
    aliases = {role, f"{head}/{tail}", role.replace("env_server", "envs")}
    return any(stem == alias or stem.startswith(alias + "/") for alias in aliases) or (
        role == "router" and stem.endswith("router")
    )


def print_logs(files: dict[str, Path], lines: int) -> None:
    for index, (name, path) in enumerate(files.items()):
        with path.open(errors="replace") as file:
            for line in deque(file, maxlen=lines):
                _emit(name, line, index, len(files))


def follow_logs(
    run: RunDir, role: str | None, rank: int | None, attempt: int | None, lines: int, *, poll_s: float = 0.4
) -> None:
    """Print what is there, then what comes, until the run has ended; new files and attempts are picked up."""
    offsets: dict[Path, int] = {}
    is_first, jobs = True, JobWatcher()
    while True:
        facts = jobs.facts_of([run])
        state, _ = real_state(
            run, read_json_or_none(run.state) or {}, read_json_or_none(run.job) or {}, facts
        )
        try:
            files = choose_logs(run, role, rank, attempt)
        except NotFoundError:
            if state.is_final or state == RunState.UNKNOWN:
                raise
            files = {}
        for index, (name, path) in enumerate(files.items()):
            real = path.resolve()
            if real not in offsets:
                offsets[real] = _start_of_last_lines(real, lines) if is_first else 0
            offsets[real] = _print_from(real, offsets[real], name, index, len(files))
        is_first = is_first and not files
        if state.is_final:
            return
        time.sleep(poll_s)


def _start_of_last_lines(path: Path, lines: int) -> int:
    with path.open("rb") as file:
        last = deque(file, maxlen=lines)
        return file.tell() - sum(map(len, last))


def _print_from(path: Path, offset: int, name: str, index: int, count: int) -> int:
    """Whole lines from ``offset`` on; returns where to go on."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    for line in data[:whole].decode(errors="replace").splitlines():
        _emit(name, line, index, count)
    return offset + whole


def _emit(name: str, line: str, index: int, count: int) -> None:
    prefix = ""
    if count > 1:
        prefix = click.style(f"{name.removesuffix('.log'):<20} │ ", fg=_COLORS[index % len(_COLORS)])
    click.echo(prefix + line.rstrip("\n"))
