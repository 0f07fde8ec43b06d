"""What the site's nodes say of themselves: the checks that a run makes before its first process, through a short srun.

The job asks for nodes with the very directives that a run would have. Unlike the rest of `doctor` it waits in the
queue, and takes nodes for some seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.sbatch import directives_of
from primerl_hpc.launch.finding import Finding
from primerl_hpc.launch.prepare import package_root, runs_folder
from primerl_hpc.plan.planner import preflight_plan
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.job import own_templates
from primerl_hpc.runtime import node_checks

QUEUE_S = 300
"""Busy nodes are waited for this long."""
MINUTES = 5
_NOT_FOR_SRUN = frozenset(
    (
        "job-name",
        "time",
        "signal",
        "requeue",
        "no-requeue",
        "open-mode",
        "output",
        "error",
        "begin",
        "dependency",
    )
)


def examine_nodes(profile: Profile, count: int) -> Iterator[Finding]:
    """One finding per check over all nodes. Without SLURM the one node is this machine."""
    if profile.scheduler.type == "slurm" and shutil.which("srun") is None:
        return  # `examine` has said so
    folder = runs_folder(profile).resolve()
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=".doctor-"))
    try:
        yield from _ask(profile, count, work / "request.json")
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if made:
            with contextlib.suppress(OSError):  # somebody's run is in it by now
                folder.rmdir()


def _ask(profile: Profile, count: int, request: Path) -> Iterator[Finding]:
    nonce, is_local = secrets.token_hex(4), profile.scheduler.type == "local"
    request.write_text(json.dumps(node_checks.make_request(wants_of(profile), nonce=nonce, head=None)))
    command = [profile.software.default.python or sys.executable, "-m", node_checks.__name__, str(request)]
    asked_at = time.time()
    done = subprocess.run(
        command if is_local else [*srun_command(profile, count), *command],
        env=os.environ | {"PYTHONPATH": _python_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    results = [json.loads(path.read_text()) for path in request.parent.glob("*.json") if path != request]
    by_check: dict[str, list[tuple[str, node_checks.Finding]]] = {}
    for result in sorted(results, key=lambda each: each["node"]):
        found = [node_checks.Finding(**each) for each in result["findings"]]
        found.append(node_checks.judge_clock(result["time"], asked_at, time.time()))
        for each in found:
            by_check.setdefault(each.check, []).append((result["node"], each))
    expected = 1 if is_local else count
    yield _answers(len(results), expected, done.stderr)
    for check, told in by_check.items():
        yield summarize(check, told)


def _answers(answers: int, expected: int, words: str) -> Finding:
    said = f"{answers} of {expected} answered"
    if answers == expected:
        return Finding("nodes: answers", True, said)
    last = words.strip().splitlines()[-1:] or ["srun said nothing"]
    mend = "runs_dir of the profile must be shared and writable on every node; or the nodes are busy or down"
    return Finding("nodes: answers", False, f"{said}: {last[0].removeprefix('srun: ')}", mend)


def summarize(check: str, told: list[tuple[str, node_checks.Finding]]) -> Finding:
    """One line for all nodes: what they agree on, or the first that differs and how many do."""
    what = f"nodes: {check}"
    for level in ("bad", "warn"):
        if mine := [(node, each) for node, each in told if each.level == level]:
            node, first = mine[0]
            more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
            return Finding(what, level == "warn", f"{node}: {first.said}{more}", first.mend)
    words = {each.said for _, each in told}
    node, first = told[0]
    return Finding(what, True, first.said if len(words) == 1 else f"all good, e.g. {node}: {first.said}")


def wants_of(profile: Profile) -> dict[str, object]:
    software = [profile.software.default, *profile.software.roles.values()]
    return preflight_plan(profile, software, sys.executable).model_dump(mode="json")


def srun_command(profile: Profile, count: int) -> list[str]:
    """The directives of a run of ``count`` nodes as options of one srun."""
    directives = render_template(
        "partials/directives.j2",
        first=own_templates(profile),
        plan=SimpleNamespace(name="doctor", nodes=range(count), spare_nodes=0),
        scheduler=profile.scheduler,
        node=profile.node,
        output=os.devnull,
    )
    wanted = {name: value for name, value in directives_of(directives).items() if name not in _NOT_FOR_SRUN}
    options = [f"--{name}" if value is None else f"--{name}={value}" for name, value in wanted.items()]
    own = [
        "--job-name=doctor",
        f"--time={MINUTES}",
        f"--immediate={QUEUE_S}",
        "--kill-on-bad-exit=0",
        "--wait=0",
    ]
    return ["srun", *options, *own, *profile.scheduler.srun_extra]


def _python_path() -> str:
    return os.pathsep.join(filter(None, [package_root(), os.environ.get("PYTHONPATH")]))
