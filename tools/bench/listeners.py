#!/usr/bin/env python3
"""List the sockets on which the processes of complete runs listen, from `ss -tlnp`: the table of docs/security.md.

    tools/bench/listeners.py                     # every case, about two minutes each on two cores
    tools/bench/listeners.py --cases rl dp2      # prints a line per role and interface, and JSON with --json

Each case is a run of the tiny recipe with two steps and a random model. Its processes are polled every 0.2 s. Exits
with 1 if a run fails, or if a process of a single-node run listens on anything but the loopback interface.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from machine import describe_machine  # noqa: E402

from primerl_hpc.common.files import read_json_or_none  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402

RL = "reverse_text/tiny"
CASES: dict[str, tuple[str, ...]] = {
    "rl": (),
    "lora": ("lora={}",),
    "delta": ("weights.transport=delta",),
    "broadcast": ("weights.transport=broadcast",),
    "tp2": ("layout.inference.tensor_parallel=2", "layout.inference.replicas=1"),
    "dp2": ("layout.inference.data_parallel=2", "layout.inference.replicas=1"),
    "distillation": ("algorithm.type=opd", "teacher={model: {name: outputs/tiny/model}}"),
}
SMALL = (
    "warmup=null",
    "max_steps=2",
    "environments.eval=[]",
    "rollouts.batch_size=16",
    "rollouts.group_size=4",
)
Row = tuple[str, str, str]
"""(role, interface, program)"""


def listeners(root: Path) -> set[Row]:
    """Return the sockets on which the processes of the run listen now."""
    found: set[Row] = set()
    for guard in psutil.process_iter():
        try:
            words = guard.cmdline()
            if str(root) not in words:
                continue
            role = next(
                (word.rsplit(".", 1)[1] for word in words if word.startswith("primerl_hpc.roles.")), None
            )
            role = role or ("supervisor" if "primerl_hpc.runtime.supervisor" in words else None)
            if role is None:
                continue
            tree = [guard] if role == "supervisor" else [guard, *guard.children(recursive=True)]
            for process in tree:
                for socket in process.net_connections(kind="tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        found.add((role, interface_of(socket.laddr.ip), program_of(process)))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def interface_of(address: str) -> str:
    ip = ipaddress.ip_address(address)
    if ip.is_unspecified:
        return "every interface"
    return "loopback" if ip.is_loopback or address == "::ffff:127.0.0.1" else address


def program_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = next((words[place + 1] for place, word in enumerate(words[:-1]) if word == "-m"), None)
    return module or (words[0].split(" ")[0] if words else process.name())


def watch(case: str, folder: Path) -> tuple[set[Row], str]:
    """Return all listeners of one run from start to end, and its final state."""
    words = [word for text in (*SMALL, *CASES[case]) for word in ("--set", text)]
    command = [
        sys.executable,
        "-m",
        "primerl_hpc",
        "submit",
        RL,
        "-p",
        "local",
        "--run-dir",
        f"runs/{case}",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=sys.stderr)
    run, found = RunDir(folder / "runs" / case), set()
    while (state := (read_json_or_none(run.state) or {}).get("state")) in (
        None,
        "pending",
        "running",
        "starting",
    ):
        found |= listeners(run.root)
        time.sleep(0.2)
    return found, str(state)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result: dict[str, object] = {}
    is_bad = False
    with tempfile.TemporaryDirectory(prefix="bench-listeners-") as name:
        folder = Path(name)
        subprocess.run(
            [str(ROOT / "tools" / "tiny-model"), "outputs/tiny"], cwd=folder, check=True, stdout=sys.stderr
        )
        for case in options.cases:
            found, state = watch(case, folder)
            rows = defaultdict(set)
            for role, interface, program in found:
                rows[role, interface].add(program)
            result[case] = {
                "state": state,
                "listeners": [
                    {"role": role, "interface": interface, "programs": sorted(programs)}
                    for (role, interface), programs in sorted(rows.items())
                ],
            }
            is_bad |= state != "done" or any(interface != "loopback" for _, interface in rows)
            if not options.json:
                print(f"{case}: {state}")
                for (role, interface), programs in sorted(rows.items()):
                    print(f"  {role:13} {interface:16} {', '.join(sorted(programs))}")
    if options.json:
        print(json.dumps({"bench": "listeners", "machine": describe_machine(), "cases": result}, indent=1))
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
