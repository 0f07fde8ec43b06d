#!/usr/bin/env python3
"""Count the operations on shared folders of each process of a run until it is ready; write start_operations.json.

    tools/bench/start_operations.py --model outputs/tiny

A real run of ``recipes/reverse_text/tiny.yaml`` (engine, router, environment servers, orchestrator, trainer of two
ranks, supervisor, guards) starts under strace. An operation is a system call with a path, or that reads the entries of
a folder. Counted are those in the run directory without the copy of the code, in the model's folder and in the home
folder, up to the moment in which the process publishes its endpoint or the times of its start (the supervisor: up to
the last of these moments). Of each kind of process, the one with most operations is listed. Imports are counted
separately: the run's copy of the code and the Python environment. So are operations on one path after the tenth: looks
at files for which the process waits, whose number is that of the seconds, and folders above imported files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import ROOT, describe_machine

OUT = ROOT / "docs" / "measurements" / "start_operations.json"
BUDGET = 200
SAME_PATH = 10
CHANGES = (
    "warmup=null",
    "max_steps=2",
    "environments.eval=[]",
    "rollouts.batch_size=16",
    "rollouts.group_size=4",
    "checkpoint.interval=null",
)
_LINE = re.compile(r"^(\d+) +(?:<\.\.\. )?(\w+)(.*)")
_NEW = re.compile(r"= (\d+)$")
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
_FOLDER = re.compile(r"^\(\d+<([^>]*)>")
_FORKS = ("clone", "clone3", "fork", "vfork")
_ROLE = re.compile(r'"primerl_hpc\.roles\.\w+", "[^"]*", "[^"]*", "([\w-]+)"')
_RANK = re.compile(r'"primerl_hpc\.trainer\.main", "[^"]*", "[^"]*", "([\w-]+)"')


@dataclass
class Started:
    """Operations of one process before it was ready."""

    paths: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By folder (``run directory``, ``model``, ``home``) and path."""
    imports: int = 0

    @property
    def operations(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (where, _), number in self.paths.items():
            found[where] += min(number, SAME_PATH)
        return found

    @property
    def repeated(self) -> int:
        return sum(max(0, number - SAME_PATH) for number in self.paths.values())


def label_of(arguments: str) -> str | None:
    """Return the name of the program that an execve starts; None: not one of the run's."""
    if "primerl_hpc.runtime.steps.guard" in arguments:
        return "guard"
    if match := _RANK.search(arguments):
        return f"{match[1]} rank"
    if match := _ROLE.search(arguments):
        return match[1]
    if "primerl_hpc.trainer.torchrun" in arguments:
        return "torchrun"
    return "supervisor" if "primerl_hpc.runtime.supervisor" in arguments else None


def paths_of(call: str, arguments: str) -> Iterator[str]:
    """Yield the absolute paths of a call."""
    if call == "getdents64":
        if match := _FOLDER.match(arguments):
            yield match[1]
        return
    for folder, name in _PATH.findall(arguments):
        yield name if name.startswith("/") else f"{folder}/{name}".rstrip("/")


def count(trace: Path, shared: dict[str, Path], imports: list[Path]) -> dict[str, Started]:
    """Return the operations of the busiest process of each name.

    ``shared``: folders by name; the first that contains a path counts.
    """
    names: dict[int, str] = {}
    processes: dict[int, int] = {}  # of threads
    starting_thread: set[int] = set()
    found: dict[tuple[str, int], Started] = defaultdict(Started)
    ready: set[str] = set()
    at_last_report: dict[tuple[str, int], Started] = {}
    with trace.open(errors="replace") as lines:
        for line in lines:
            match = _LINE.match(line)
            if match is None:
                continue
            pid, call, arguments = int(match[1]), match[2], match[3]
            if call in _FORKS:
                if (
                    "CLONE_THREAD" in arguments
                ):  # the line with the new number may be a later one, without the flags
                    starting_thread.add(pid)
                if new := _NEW.search(line.rstrip()):
                    if pid in names:
                        names.setdefault(int(new[1]), names[pid])
                    if pid in starting_thread:
                        processes[int(new[1])] = processes.get(pid, pid)
                    starting_thread.discard(pid)
                continue
            if call == "execve" and (label := label_of(arguments)):
                names[pid] = label
            name = names.get(pid)
            if name is None or match[0].split(None, 1)[1].startswith("<..."):  # its first line has the path
                continue
            if call == "rename" and (published := re.search(r'endpoints/([\w-]+)\.json"', arguments)):
                if published[1] not in ready:
                    at_last_report = {
                        key: deepcopy(one) for key, one in found.items() if key[0] == "supervisor"
                    }
                ready.add(published[1])
            if name.removesuffix(" rank") in ready:
                continue
            started = found[name, processes.get(pid, pid)]
            for path in paths_of(call, arguments):
                if any(path == str(folder) or path.startswith(f"{folder}/") for folder in imports):
                    started.imports += 1
                elif where := next((key for key, folder in shared.items() if _is_in(path, folder)), None):
                    started.paths[where, re.sub(r"\.\d+\.\d+\.tmp$", ".tmp", path)] += 1
    busiest: dict[str, Started] = {}
    for (name, _), started in (found | at_last_report).items():
        if name not in busiest or busiest[name].operations.total() < started.operations.total():
            busiest[name] = started
    return busiest


def _is_in(path: str, folder: Path) -> bool:
    return path == str(folder) or path.startswith(f"{folder}/")


def start_run(options: argparse.Namespace, work: Path) -> tuple[Path, Path]:
    """Run the recipe under strace; return the trace and the run directory."""
    trace, run = work / "trace", work / "run"
    recipe = ROOT / "recipes" / "reverse_text" / "tiny.yaml"
    changes = [*CHANGES, f"model.name={options.model.resolve() / 'model'}"]
    submit = [
        sys.executable,
        "-m",
        "primerl_hpc",
        "submit",
        str(recipe),
        "-p",
        "local",
        "--run-dir",
        str(run),
    ]
    submit += [word for change in changes for word in ("--set", change)]
    calls = "trace=%file,getdents64,clone,clone3,fork,vfork"
    # prints 512 characters of a text: the arguments of an execve
    command = ["strace", "-f", "-y", "--seccomp-bpf", "-s", "512", "-e", calls, "-o", str(trace)]
    home = work / "home"
    home.mkdir()
    variables = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PRIMERL_HOME": str(work / "state"),
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    }
    subprocess.run([*command, *submit], env=variables, check=True, timeout=options.limit, cwd=work)
    return trace, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=ROOT / "outputs" / "tiny", help="made by tools/tiny-model"
    )
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for the run")
    parser.add_argument("--trace", type=Path, help="keep the trace in this file")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        trace, run = start_run(options, work)
        imports = [run / "code", Path(sys.prefix), Path(sys.base_prefix), ROOT / "primerl_hpc"]
        shared = {"run directory": run, "model": options.model.resolve(), "home": work / "home"}
        found = count(trace, shared, imports)
        if options.trace:
            options.trace.write_bytes(trace.read_bytes())
    rows: list[dict[str, Any]] = [
        {
            "process": name,
            "operations": one.operations.total(),
            **one.operations,
            "repeated": one.repeated,
            "imports": one.imports,
        }
        for name, one in sorted(found.items())
    ]
    record = {
        "command": "tools/bench/start_operations.py",
        **describe_machine(),
        "budget": BUDGET,
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
