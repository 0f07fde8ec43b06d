#!/usr/bin/env python3
"""Measure how fast the virtual cluster starts and what it costs, and test the lifecycle of runs on another SLURM
version.

    tools/bench/virtual_cluster.py                     # 4 and 64 nodes, three times each
    tools/bench/virtual_cluster.py --image auto        # and tests/slurm/test_lifecycle.py on Debian 13's SLURM (24.11)
    tools/bench/virtual_cluster.py --image DIR         # the same on your own root file system

`up` is warm: packages are installed and the accounting database was created once. `srun all` starts one task on every
node; memory is the sum of proportional set sizes (PSS) of all processes. `--image auto` creates a Debian 13 tree with
mmdebstrap (once; it is kept next to the clusters). Requires root. Required: 4 nodes up in at most 5 s, 64 nodes idle.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, show

TOOL = ROOT / "tools" / "virtual-cluster"
LIMIT_S = 5.0
# python3 for the libraries that the Python of this machine needs too (libffi, OpenSSL, …)
_PACKAGES = (
    "slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,slurmdbd,slurm-wlm-mysql-plugin,"
    "mariadb-server,mariadb-client,munge,iproute2,procps,python3"
)

_MIRROR = re.compile(r"^(?:URIs:|deb) .*?(https?://\S+/debian)\b", re.M)


def tool(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [str(TOOL), "--dir", str(folder), *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"virtual-cluster {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def measure(nodes: int, folder: Path, repeats: int) -> dict[str, Any]:
    size = ("--nodes", str(nodes))
    tool(folder, "up", *size)  # creates the database once
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        tool(folder, "up", *size)
        times.append(time.perf_counter() - start)
    idle = tool(folder, "exec", "sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle")
    start = time.perf_counter()
    names = tool(folder, "exec", "srun", f"-N{nodes}", "hostname").split()
    srun_s = time.perf_counter() - start
    memory = pss_of(int((folder / "holder.pid").read_text()))
    start = time.perf_counter()
    tool(folder, "down")
    return {
        "nodes": nodes,
        "up s": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "idle": idle,
        "srun all s": srun_s,
        "PSS MiB": memory >> 20,
        "down s": time.perf_counter() - start,
        "fits": idle == nodes == len(set(names)) and (nodes > 4 or statistics.median(times) <= LIMIT_S),
    }


def pss_of(holder: int) -> int:
    root = psutil.Process(holder)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def make_image(path: Path) -> Path:
    """Create a Debian 13 root file system with SLURM 24.11, from the mirror of this machine."""
    if (path / "usr" / "sbin" / "slurmctld").exists():
        return path
    mirror = next(
        (
            match[1]
            for file in sorted(Path("/etc/apt").rglob("*.[ls]*"))
            if file.is_file() and (match := _MIRROR.search(file.read_text()))
        ),
        "http://deb.debian.org/debian",
    )
    new = path.with_name(f"{path.name}.new")  # renamed at the end, so that an interrupted build is not used
    shutil.rmtree(new, ignore_errors=True)
    command = ["mmdebstrap", "--variant=minbase", f"--include={_PACKAGES}", "trixie", str(new), mirror]
    print(f"making {path}: {' '.join(command)}", file=sys.stderr)
    subprocess.run(command, check=True, stdout=sys.stderr)
    return new.rename(path)


def live_on(image: Path) -> dict[str, Any]:
    """Run the lifecycle tests with the SLURM of ``image``."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "slurm" / "test_lifecycle.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VIRTUAL_CLUSTER_IMAGE": str(image)},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stdout)
    count = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    version = subprocess.run(
        ["chroot", str(image), "slurmctld", "-V"], capture_output=True, text=True, check=True
    )
    return {
        "SLURM": version.stdout.split()[-1],
        "passed": count.get("passed", 0),
        "failed": count.get("failed", 0) + count.get("error", 0),
        "wall s": time.perf_counter() - start,
        "fits": done.returncode == 0 and count.get("passed", 0) > 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[4, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--image", help="root file system, or auto")
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as temporary:
        rows = [measure(nodes, Path(temporary) / "cluster", options.repeats) for nodes in options.nodes]
        tool(Path(temporary) / "cluster", "down", "--purge")
    if rows:
        show("virtual cluster with accounting, warm; at most 5 s for 4 nodes", rows, as_json=options.as_json)
    if options.image:
        path = (
            make_image(Path(tempfile.gettempdir()) / "primerl-debian-13")
            if options.image == "auto"
            else Path(options.image)
        )
        rows.append(live_on(path.resolve()))
        show("tests/slurm/test_lifecycle.py on another SLURM", rows[-1:], as_json=options.as_json)
    return 0 if all(row["fits"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
