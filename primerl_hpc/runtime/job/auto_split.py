"""Before an attempt with ``layout.auto_split``, replace the plan by that for a faster split of the nodes.

    outcome = await apply_advised_split(run_dir)      # {"sentence": …} if plan.json was replaced

Planner and simulator run in a process of their own (`launch.planning.advice`), so that they can neither fail nor delay
the supervisor.
"""

from __future__ import annotations

import asyncio
import json
import sys

from primerl_hpc.run.rundir import RunDir

MODULE = "primerl_hpc.launch.planning.advice"
TIMEOUT_S = 20.0


async def apply_advised_split(run: RunDir) -> dict[str, str]:
    """Return the sentence of the advice if plan.json was replaced, the reason if it was refused; empty otherwise."""
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, str(run.root)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return {"refused": f"no advice within {TIMEOUT_S:.0f} s"}
        return json.loads(output)
    except (OSError, ValueError) as error:
        return {"refused": f"the advice was not computed: {error}"}
