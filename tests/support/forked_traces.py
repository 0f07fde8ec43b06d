"""Tools that trace on a GPU that does not exist, forked from one process that has compiled and imported what they need.

python -m tests.support.forked_traces      # a line {"words", "stdout", "stderr"} in, a line with an exit code out
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkServer
from tests.support.helpers import ROOT

BENCH = ROOT / "tools/bench"


class ForkedTraces:
    """Run a tool of tools/bench: ``forked_traces(folder, "trainer_trace.py", "--json")``."""

    def __init__(self) -> None:
        self.server = ForkServer("tests.support.forked_traces")

    def __call__(self, folder: Path, tool: str, *words: str) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr. Their files are in ``folder``."""
        out, err = folder / "stdout", folder / "stderr"
        request = {"words": [str(BENCH / tool), *words], "stdout": str(out), "stderr": str(err)}
        reply = self.server.ask(request, None)
        assert reply, "the process that forks traces died"
        return int(reply), out.read_text(), err.read_text()

    def stop(self) -> None:
        self.server.stop()


def run_tool(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.argv = request["words"]
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:  # noqa: BLE001  the child must not read the next request
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(1)  # a tool that ends without an error does not come here


if __name__ == "__main__":
    sys.path.insert(0, str(BENCH))
    import trainer_trace  # pyright: ignore[reportMissingImports]

    trainer_trace.load()
    gc.freeze()  # a collection in a child would copy all that was imported
    for line in sys.stdin:
        print(run_tool(json.loads(line)), flush=True)
