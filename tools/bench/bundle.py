#!/usr/bin/env python3
"""Count what the start of ranks costs the shared filesystem, with loose files and with a bundle; write bundle.json.

    tools/bench/bundle.py --imports vllm.entrypoints.openai.api_server --nodes 16 --ranks-per-node 4

The environment of this interpreter is the loose one, and is packed for the other case. A rank imports ``--imports``
under strace; operations are system calls with a path in the environment, or in the folder of the bundle. The head node
reads the archive and sbcast sends it on, so all other nodes and all ranks read node-local files. Ranks of one node are
not started at once: their CPU time on a small machine would hide what they wait for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import ROOT, describe_machine

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.launch.bundle.build import build
from primerl_hpc.launch.bundle.environment import inspect_environment
from primerl_hpc.launch.bundle.formats import choose_format
from primerl_hpc.launch.bundle.manifest import plan_bundle
from primerl_hpc.render.bundle import render_unpack

OUT = ROOT / "docs" / "measurements" / "bundle.json"
_CALL = re.compile(r"^(?:\d+ +)?\w+\(")


def count_operations(trace: Path, folders: list[str]) -> int:
    """Count the calls of a trace of strace -y that name one of ``folders``."""
    with trace.open(errors="replace") as lines:
        return sum(1 for line in lines if _CALL.match(line) and any(folder in line for folder in folders))


def traced(command: list[str], folders: list[str], work: Path, text: str | None = None) -> int:
    """Run a command; return the number of its operations in ``folders``."""
    trace = work / "trace"
    options = ["-f", "-y", "-e", "trace=%file,getdents64,read,pread64", "-o", str(trace)]
    subprocess.run(
        ["strace", *options, *command], input=text, text=True, check=True, stdout=subprocess.DEVNULL
    )
    return count_operations(trace, folders)


def timed(command: list[str]) -> float:
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return round(time.monotonic() - begin, 2)


def time_ratio(record: dict[str, Any]) -> float:
    """Return the start of ranks on many nodes divided by that on one, from measured parts, without the transfer.

    The head node unpacks, then the other nodes at once, then all ranks import.
    """
    unpack_s, import_s = record["unpacked_in_s"], record["import_s"]["from the bundle, cached"]
    return round((2 * unpack_s + import_s) / (unpack_s + import_s), 2)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    environment = inspect_environment(sys.executable)
    shared, local = work / "shared", work / "local"
    shared.mkdir()
    local.mkdir()
    target = shared / f"env.{options.format}"
    begin = time.monotonic()
    made = build(environment, target, choose_format(options.format, target.name))
    written_s = round(time.monotonic() - begin, 1)
    script = render_unpack(
        plan_bundle(target, load_profile("virtual").profile), owner="the benchmark", scratch=None
    )
    begin = time.monotonic()
    subprocess.run(["bash", "-s", str(local / "once")], input=script, text=True, check=True)
    unpacked_s = round(time.monotonic() - begin, 1)
    reads = traced(["bash", "-s", str(local / "traced")], [str(shared)], work, script)

    code = ["-c", f"import {options.imports}"]
    loose, bundled = [sys.executable, *code], [str(local / "once" / "bin" / "python"), *code]
    folders = [str(environment.prefix), str(environment.base)]
    timed(loose)  # fills the page cache
    timed(bundled)
    ranks = options.nodes * options.ranks_per_node
    one, all_ranks = traced(loose, folders, work), traced(bundled, [str(shared), *folders], work)
    return {
        "bundle": made.model_dump(include={"format", "size_bytes", "unpacked_bytes", "num_files", "python"}),
        "written_in_s": written_s,
        "unpacked_in_s": unpacked_s,
        "import_s": {"loose, cached": timed(loose), "from the bundle, cached": timed(bundled)},
        "operations on the shared filesystem": {
            "loose, 1 rank": one,
            f"loose, {ranks} ranks": one * ranks,
            "bundle, 1 rank": reads + all_ranks,
            f"bundle, {ranks} ranks": reads + all_ranks * ranks,
        },
        f"{ranks} ranks / 1 rank": {
            "loose": ranks,
            "bundle": round((reads + all_ranks * ranks) / (reads + all_ranks), 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--imports", default="vllm.entrypoints.openai.api_server")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--ranks-per-node", type=int, default=4)
    parser.add_argument("--format", default="tar.zst")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"  # programs are not searched in the environment
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    settings = {key: value for key, value in vars(options).items() if key != "out"}
    record = {"command": "tools/bench/bundle.py", "settings": settings, **describe_machine(), **found}
    record["many nodes / one node, time without sbcast"] = time_ratio(record)
    options.out.write_text(json.dumps(record, indent=1, default=str) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
