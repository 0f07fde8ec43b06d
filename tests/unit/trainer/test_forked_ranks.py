"""Ranks on CPUs are forked from the agent that has imported what they need."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from tests.support.helpers import PATIENCE_S, captured

RUN = """
import json, os, sys
from primerl_hpc.trainer.forked_ranks import fork_ranks
import threading
first, second, third = fork_ranks(3, modules=["fractions"])
assert os.getpgid(first.pid) in (first.pid, os.getpgrp())
command = [sys.executable, "-u", "-m", "ranked"]
first.begin([*command, "7"], {"RANK": "0", "PATH": os.environ["PATH"]}, [sys.argv[1] + "/out", sys.argv[1] + "/err"])
second.begin([*command, "raise"], {"RANK": "1"}, [sys.argv[1] + "/out1", sys.argv[1] + "/err1"])
limit_s = float(sys.argv[2])
print(first.wait(limit_s), second.wait(limit_s), third.poll(), third.pid)
"""
RANKED = """
import os, sys
if sys.argv[1] == "raise":
    raise ValueError("of rank " + os.environ["RANK"])
print(__name__, sys.argv, sorted(os.environ), "fractions" in sys.modules, os.getpid() == os.getsid(0))
sys.exit(int(sys.argv[1]))
"""


def test_a_forked_rank_runs_a_command_as_a_new_process_would(tmp_path: Path) -> None:
    (tmp_path / "ranked.py").write_text(RANKED)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = captured([sys.executable, "-c", RUN, str(tmp_path), str(PATIENCE_S)], env=environment)
    assert done.returncode == 0, done.stderr
    first, second, third, pid = done.stdout.split()
    assert (first, second, third) == ("7", "1", "None")
    name, rest = (tmp_path / "out").read_text().split(" ", 1)
    assert name == "__main__"
    assert "'7'] ['LC_CTYPE', 'PATH', 'RANK'] True True" in rest or "'7'] ['PATH', 'RANK'] True True" in rest
    assert "ValueError: of rank 1" in (tmp_path / "err1").read_text()
    assert not Path(f"/proc/{pid}").exists() or _ends(int(pid)), "a waiting rank outlives its agent"


def _ends(pid: int) -> bool:
    """Wait until a process that is no child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    os.close(descriptor)
    return bool(ready)


def test_a_process_with_threads_forks_no_ranks() -> None:
    script = (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start();"
        "from primerl_hpc.trainer.forked_ranks import fork_ranks; assert fork_ranks(2, modules=[]) == []"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
