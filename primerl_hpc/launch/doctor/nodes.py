"""Run the checks that a run makes before its first process on the site's nodes, through a short srun.

The job requests nodes with the directives of a run. Unlike the rest of `doctor` it waits in the queue, and occupies
nodes for some seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from primerl_hpc.cluster.directives import srun_args
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.findings import Finding
from primerl_hpc.common.package import package_root
from primerl_hpc.launch.doctor.network import check_network
from primerl_hpc.plan.preflight import preflight_plan, sums_of_profile
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.job import own_templates
from primerl_hpc.render.requests import Request, type_request
from primerl_hpc.runtime.job import node_checks, sums
from primerl_hpc.runtime.job.sums import WRONG_HINT, judge_sums, make_sums_request, result_file
from primerl_hpc.slurm.command_lines import srun_command
from primerl_hpc.slurm.refusals import hint_about_option, srun_reason
from primerl_hpc.slurm.sbatch import directives_of

QUEUE_S = 300
"""How long to wait for busy nodes."""
MINUTES = 5
SUMS_HINT = (
    "the trainer's interpreter must have torch (software.roles.trainer); raise preflight.timeout_s if slow"
)
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


def examine_nodes(profile: Profile, count: int, *, has_bandwidth: bool = False) -> Iterator[Finding]:
    """Yield one result for each check over all nodes. Without SLURM the only node is this machine.

    ``has_bandwidth``: also measure all-reduce and file reads.
    """
    if profile.scheduler.type == "slurm" and shutil.which("srun") is None:
        return  # reported by `examine`
    folder = profile.runs_folder().resolve()
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=".doctor-"))
    try:
        yield from _run_checks(profile, count, work / "request.json", has_bandwidth)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # a run was created in it meanwhile
                folder.rmdir()


def _run_checks(profile: Profile, count: int, request: Path, has_bandwidth: bool) -> Iterator[Finding]:
    nonce, is_local = secrets.token_hex(4), profile.scheduler.type == "local"
    request.write_text(json.dumps(node_checks.make_request(wants_of(profile, count), nonce=nonce, head=None)))
    command = [profile.software.python_here, "-m", node_checks.__name__, str(request)]
    asked_at = time.time()
    done = subprocess.run(
        command if is_local else [*node_srun_command(profile, count), *command],
        env=os.environ | {"PYTHONPATH": _python_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    results = [json.loads(path.read_text()) for path in request.parent.glob("*.json") if path != request]
    by_check: dict[str, list[tuple[str, Finding]]] = {}
    for result in sorted(results, key=lambda item: item["node"]):
        found = [Finding.from_json(finding) for finding in result["findings"]]
        found.append(node_checks.judge_clock(result["time"], asked_at, time.time()))
        for finding in found:
            by_check.setdefault(finding.check, []).append((result["node"], finding))
    expected = 1 if is_local else count
    yield _responses(len(results), expected, done.stderr)
    for check, findings in by_check.items():
        yield summarize(check, findings)
    if not is_local and len(results) == expected:
        if count > 1:
            yield from check_network(
                profile,
                request.parent,
                node_srun_command(profile, count),
                num_nodes=count,
                python_path=_python_path(),
                has_bandwidth=has_bandwidth,
            )
        yield from _check_sums(profile, count, request.with_name("sums.json"))


def _check_sums(profile: Profile, count: int, request: Path) -> Iterator[Finding]:
    """Compare an all-reduce over the nodes with its known result, in the trainer's software."""
    wants = sums_of_profile(profile, str(request.parent), sys.executable, num_nodes=count)
    if wants is None:
        return
    nonce = secrets.token_hex(4)
    shape = {"ranks_per_node": wants.ranks_per_node, "accelerator": wants.accelerator}
    request.write_text(json.dumps(make_sums_request(nonce=nonce, timeout_s=wants.timeout_s, **shape)))
    minutes = MINUTES + math.ceil(wants.timeout_s / 60)
    command = [*node_srun_command(profile, count, minutes=minutes), *wants.srun_args]
    done = subprocess.run(
        [*command, *wants.argv, "-m", sums.__name__, str(request)],
        env=os.environ | wants.env | {"PYTHONPATH": _python_path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    results = [read_json_or_none(result_file(request, node)) for node in range(count)]
    level, message = judge_sums(results)
    last = "".join(done.stderr.strip().splitlines()[-1:])
    details = f": {last}" if level == "warn" and last else ""
    yield Finding.judged(
        "nodes: sums", level == "ok", message + details, WRONG_HINT if level == "bad" else SUMS_HINT
    )


def _responses(num_responses: int, expected: int, output: str) -> Finding:
    message = f"{num_responses} of {expected} responded"
    if num_responses == expected:
        return Finding.judged("nodes: answers", True, message)
    reason = srun_reason(output) or "srun printed nothing"
    hint = hint_about_option(f"srun: {reason}") or (
        "runs_dir of the profile must be shared and writable on every node; or the nodes are busy or down"
    )
    return Finding.judged("nodes: answers", False, f"{message}: {reason}", hint)


def summarize(check: str, findings: list[tuple[str, Finding]]) -> Finding:
    """Return one line for all nodes: what they have in common, or the first problem and the nodes that have it."""
    what = f"nodes: {check}"
    for level in ("bad", "warn"):
        if problems := [(node, finding) for node, finding in findings if finding.level == level]:
            node, first = problems[0]
            more = f" (also {', '.join(other for other, _ in problems[1:])})" if len(problems) > 1 else ""
            return Finding(what, level, f"{node}: {first.message}{more}", first.hint)
    messages = {finding.message for _, finding in findings}
    node, first = findings[0]
    is_same = len(messages) == 1
    return Finding.judged(what, True, first.message if is_same else f"all good, e.g. {node}: {first.message}")


def wants_of(profile: Profile, count: int) -> dict[str, object]:
    software = [profile.software.default, *profile.software.roles.values()]
    return preflight_plan(profile, software, sys.executable, num_nodes=count).model_dump(mode="json")


def node_srun_command(
    profile: Profile, count: int, *, request: Request | None = None, minutes: int = MINUTES
) -> list[str]:
    """Return the directives of a run on ``count`` nodes as options of one srun.

    ``request``: scheduler keys and hardware of the nodes; None: those of the profile's ``node``.
    """
    request = request or type_request(profile, None)
    directives = render_template(
        "partials/directives.j2",
        first=own_templates(profile),
        plan=SimpleNamespace(name="doctor", nodes=range(count), spare_nodes=0),
        requests=(replace(request, num_nodes=count),),
        scheduler=request.scheduler,
        node=request.node,
        output=os.devnull,
        batch_options=(),
    )
    wanted = {name: value for name, value in directives_of(directives).items() if name not in _NOT_FOR_SRUN}
    options = [f"--{name}" if value is None else f"--{name}={value}" for name, value in wanted.items()]
    own = [
        "--job-name=doctor",
        f"--time={minutes}",
        f"--immediate={QUEUE_S}",
        "--kill-on-bad-exit=0",
        "--wait=0",
    ]
    return srun_command([*options, *own, *srun_args(profile.scheduler)])


def _python_path() -> str:
    return os.pathsep.join(filter(None, [package_root(), os.environ.get("PYTHONPATH")]))
