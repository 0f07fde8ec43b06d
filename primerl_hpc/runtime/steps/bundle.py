"""Unpack the job's bundle on its other nodes, and delete it when the job ends.

The batch script has unpacked the bundle on the head node, and this process runs from there. The archive is sent to the
other nodes by ``sbcast``, so that the shared filesystem is read once, and unpacked by a SLURM step of one task per node
into the folder with the same name. Nodes that ``sbcast`` does not reach read the archive themselves.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.log import setup_logging
from primerl_hpc.plan.plan import BUNDLE_MANIFEST, BundlePlan, Plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.steps.srun import environ_of_job, srun_options
from primerl_hpc.slurm.command_lines import broadcast_command

NAME = "bundle"
TIMEOUT_S = 1800.0
REMOVE_S = 60
DONE = "bundle is unpacked on"
_FAULT = re.compile(r"^(?:\d+: )?error: bundle on (?P<host>[^\s:]+): (?P<why>.+)$", re.M)

log = setup_logging("bundle")


async def unpack_on_nodes(
    run: RunDir, bundle: BundlePlan, allocation: Allocation, output: Path
) -> dict[str, str]:
    """Unpack the bundle on all nodes except for this one. Return host → reason for nodes that cannot use it.

    ``output``: log of the commands. Raises ConfigError if several nodes fail and none succeeds: no other nodes would.
    """
    here = os.environ.get("SLURMD_NODENAME")
    hosts = [host for host in allocation.all_hosts if host != here]
    if not hosts:
        return {}
    output.parent.mkdir(parents=True, exist_ok=True)
    begin = output.stat().st_size if output.exists() else 0
    folder = Path(sys.prefix)
    archive = f"{folder}.archive"
    groups = allocation.by_component(hosts)

    def steps(*command: str) -> list[list[str]]:
        return [
            [
                *srun_options(NAME, group, allocation, uses_gpus=False),
                "--wait=0",
                *bundle.srun_args,
                *command,
            ]
            for group in groups
        ]

    # sbcast does not create folders
    await asyncio.gather(*(_run(step, output) for step in steps("mkdir", "-p", "--", str(folder.parent))))
    is_sent = await _broadcast(bundle, allocation, archive, output)
    script = run.launch / "unpack-bundle.sh"
    words = [str(script), str(folder), *([archive] if is_sent else [])]
    command = f'bash {shlex.join(words)} && echo "{DONE} ${{SLURMD_NODENAME:-$(uname -n)}}"'
    await asyncio.gather(*(_run(step, output) for step in steps("bash", "-c", command)))
    text = output.read_bytes()[begin:].decode(errors="replace")
    faults = {match["host"]: match["why"] for match in _FAULT.finditer(text)}
    done = set(re.findall(rf"{DONE} (\S+)", text))
    failed = {
        host: faults.get(host, f"no result after {TIMEOUT_S:g} s") for host in hosts if host not in done
    }
    if len(failed) == len(hosts) > 1:
        host, why = next(iter(failed.items()))
        raise ConfigError(
            f"no node can use the bundle; {host}: {why}",
            location=bundle.path,
            hint=f"see {output}, correct software.bundle of the profile, and submit again",
        )
    return failed


async def _broadcast(bundle: BundlePlan, allocation: Allocation, target: str, output: Path) -> bool:
    """Send the archive to all nodes of the job. False if the nodes must read it from the shared folder."""
    jobs = [group.job_id for group in allocation.groups] or [allocation.job_id]
    for job in jobs:
        if await _run(broadcast_command(job, bundle.path, target), output) != 0:
            log.warning("sbcast failed; every node reads %s itself; see %s", bundle.path, output)
            return False
    Path(target).unlink(missing_ok=True)  # on the head node, which needs it no longer
    return True


async def _run(command: Sequence[str], output: Path) -> int:
    """Run a command of SLURM; return its exit code, 127 if it cannot be started or does not end in time."""
    with output.open("ab") as file:
        try:
            child = await asyncio.create_subprocess_exec(
                *command,
                env=environ_of_job(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        except OSError as error:
            file.write(f"{command[0]}: {error.strerror}\n".encode())
            return 127
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
        return 127


def remove_bundle(code: int, plan: Plan, allocation: Allocation | None = None) -> int:
    """Delete the unpacked bundle on all nodes of the job and exit with ``code``; return it if there is none.

    A shell replaces this process, whose interpreter is among the deleted files.
    """
    folder = Path(sys.prefix)
    if plan.bundle is None or not (folder / BUNDLE_MANIFEST).is_file():
        return code
    steps = []
    here = os.environ.get("SLURMD_NODENAME")
    if allocation is not None and (hosts := [host for host in allocation.all_hosts if host != here]):
        for group in allocation.by_component(hosts):
            options = srun_options(f"remove-{NAME}", group, allocation, uses_gpus=False)
            remove = ["rm", "-rf", "--", str(folder), f"{folder}.archive"]
            steps.append(shlex.join([*options, "--wait=0", *plan.bundle.srun_args, *remove]))
    lines = [f"timeout -s KILL {REMOVE_S} {step} >/dev/null 2>&1" for step in steps]
    lines += [f"rm -rf -- {shlex.quote(str(folder))}", f"exit {int(code)}"]
    handled = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    for number in handled:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
    shell = shutil.which("sh") or "/bin/sh"
    os.execve(shell, ["sh", "-c", "\n".join(lines)], environ_of_job(os.environ))
