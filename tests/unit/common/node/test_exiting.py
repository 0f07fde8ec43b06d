"""A process that exits immediately: its code, its output, and nothing after."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys
from primerl_hpc.common.node.exiting import exit_process
atexit.register(print, "torn down")
print("the result")
print("a warning", end="", file=sys.stderr)
exit_process(7)
"""


def test_a_process_ends_with_its_code_and_output_and_without_teardown():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "the result\n", "a warning")
