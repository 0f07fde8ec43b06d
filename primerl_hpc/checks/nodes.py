"""Run the checks that a run makes before its first process on the site's nodes, through a short srun.

The job requests nodes with the directives of a run. Unlike the rest of `doctor` it waits in the queue, and occupies
nodes for some seconds. `work_folder` and `node_srun_command` also serve `calibrate`.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from primerl_hpc.checks import network, node, ranks, sums
from primerl_hpc.checks.findings import Finding, judged
from primerl_hpc.cluster.directives import srun_args
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.files import write_json
from primerl_hpc.common.package import with_package
from primerl_hpc.plan.env import network_variables
from primerl_hpc.plan.plan import SumsPlan
from primerl_hpc.plan.preflight import preflight_plan, sums_of_profile
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.job import own_templates
from primerl_hpc.render.requests import Request, type_request
from primerl_hpc.slurm.command_lines import srun_command
from primerl_hpc.slurm.refusals import hint_about_option, srun_reason
from primerl_hpc.slurm.sbatch import directives_of

QUEUE_S = 300
"""How long to wait for busy nodes."""
MINUTES = 5
_NOT_FOR_SRUN = frozenset(
    "job-name time signal requeue no-requeue open-mode output error begin dependency".split()
)


def examine_nodes(profile: Profile, count: int, *, has_bandwidth: bool = False) -> Iterator[Finding]:
    """Yield one result for each check over all nodes. Without SLURM the only node is this machine.

    ``has_bandwidth``: also measure all-reduce and file reads.
    """
    if profile.scheduler.type == "slurm" and shutil.which("srun") is None:
        return  # reported by `cluster`
    with work_folder(profile, ".doctor-") as folder:
        yield from _NodesCheck(profile, count, folder).findings(has_bandwidth)


@contextlib.contextmanager
def work_folder(profile: Profile, prefix: str) -> Iterator[Path]:
    """Create a folder for one command in the folder of runs, which nodes share; remove it at the end."""
    folder = profile.runs_folder().resolve()
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=prefix))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # a run was created in it meanwhile
                folder.rmdir()


@dataclass(frozen=True)
class _NodesCheck:
    profile: Profile
    count: int
    folder: Path

    @property
    def is_local(self) -> bool:
        return self.profile.scheduler.type == "local"

    def findings(self, has_bandwidth: bool) -> Iterator[Finding]:
        results, asked_at, output = self._ask_nodes()
        by_check: dict[str, list[tuple[str, Finding]]] = {}
        for result in sorted(results, key=lambda item: item["node"]):
            for finding in node.findings_of_result(result, asked_at):
                by_check.setdefault(finding.check, []).append((result["node"], finding))
        expected = 1 if self.is_local else self.count
        yield _responses(len(results), expected, output)
        for check, findings in by_check.items():
            yield summarize(check, findings)
        if self.is_local or len(results) != expected:
            return
        if self.count > 1:
            yield from self._check_network(has_bandwidth)
        if (wants := self._ranks(is_due=None)) is not None:
            found, output = self._run_ranks(sums.MODULE, wants)
            judgment = sums.judge_sums(found)
            last = "".join(output.strip().splitlines()[-1:])
            details = f": {last}" if judgment.level == "warn" and last else ""
            yield judged(
                judgment.level == "ok", judgment.message + details, judgment.hint, check="nodes: sums"
            )

    def _ask_nodes(self) -> tuple[list[dict[str, Any]], float, str]:
        """Run the checks of each node; return the results, the time before, and what the step printed."""
        profile, request = self.profile, self.folder / "request.json"
        software = [profile.software.default, *profile.software.roles.values()]
        wants = preflight_plan(profile, software, sys.executable, num_nodes=self.count)
        nonce = secrets.token_hex(4)
        write_json(request, node.make_request(wants.model_dump(mode="json"), nonce=nonce, head=None))
        asked_at = time.time()
        output = self._run([profile.software.python_here, "-m", node.__name__, str(request)], {})
        results = [json.loads(path.read_text()) for path in self.folder.glob("*.json") if path != request]
        return results, asked_at, output

    def _check_network(self, has_bandwidth: bool) -> Iterator[Finding]:
        wants = self._ranks(is_due=True)
        assert wants is not None  # it is due
        if not has_bandwidth:  # needs no torch
            python = (self.profile.software.python_here,)
            changes = {"argv": python, "srun_args": (), "env": network_variables(self.profile)}
            wants = wants.model_copy(update=changes)
        found, output = self._run_ranks(network.MODULE, wants, has_bandwidth=has_bandwidth)
        results = [result for result in found if result is not None]
        yield from network.judge_network(results, self.count, output, has_bandwidth=has_bandwidth)

    def _ranks(self, is_due: bool | None) -> SumsPlan | None:
        folder, python = str(self.folder), sys.executable
        return sums_of_profile(self.profile, folder, python, num_nodes=self.count, is_due=is_due)

    def _run_ranks(
        self, module: str, wants: SumsPlan, **more: Any
    ) -> tuple[list[dict[str, Any] | None], str]:
        """Run a step with the trainer's software; return the result of each node, and what the step printed."""
        request, nonce = self.folder / f"{module.rpartition('.')[2]}.json", secrets.token_hex(4)
        write_json(request, ranks.make_request(wants, nonce) | more)
        minutes = MINUTES + math.ceil(wants.timeout_s / 60)
        command = [*wants.srun_args, *wants.argv, "-m", module, str(request)]
        output = self._run(command, wants.env, minutes)
        return ranks.read_results(request, self.count, nonce), output

    def _run(self, command: Sequence[str], variables: Mapping[str, str], minutes: int = MINUTES) -> str:
        """Run a command once on each node; return what srun and the nodes have printed."""
        srun = [] if self.is_local else node_srun_command(self.profile, self.count, minutes=minutes)
        done = subprocess.run(
            [*srun, *command],
            env=with_package(os.environ | variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        return done.stderr


def _responses(num_responses: int, expected: int, output: str) -> Finding:
    message = f"{num_responses} of {expected} responded"
    if num_responses == expected:
        return judged(True, message, check="nodes: answers")
    reason = srun_reason(output) or "srun printed nothing"
    hint = hint_about_option(f"srun: {reason}") or (
        "runs_dir of the profile must be shared and writable on every node; or the nodes are busy or down"
    )
    return judged(False, f"{message}: {reason}", hint, "nodes: answers")


def summarize(check: str, findings: list[tuple[str, Finding]]) -> Finding:
    """Return one line for all nodes: what they have in common, or the first problem and the nodes that have it."""
    what = f"nodes: {check}"
    for level in ("bad", "warn"):
        if problems := [(name, finding) for name, finding in findings if finding.level == level]:
            name, first = problems[0]
            more = f" (also {', '.join(other for other, _ in problems[1:])})" if len(problems) > 1 else ""
            return Finding(level, f"{name}: {first.message}{more}", first.hint, check=what)
    name, first = findings[0]
    is_same = len({finding.message for _, finding in findings}) == 1
    return judged(True, first.message if is_same else f"all good, e.g. {name}: {first.message}", check=what)


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
    own = ["--job-name=doctor", f"--time={minutes}", f"--immediate={QUEUE_S}", "--kill-on-bad-exit=0"]
    return srun_command([*options, *own, "--wait=0", *srun_args(profile.scheduler)])
