"""A virtual SLURM cluster and runs on it whose roles are one-line programs: the same plan, script, files and signals.

toy = SlurmToy(cluster, tmp_path / "run")
toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1, 2))
toy.submit()
toy.wait_for_state(RunState.DONE)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.files import read_json, read_jsonl, write_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact, ask, parse_sacct, parse_squeue, sacct_command, squeue_command
from primerl_hpc.launch.chain import ChainRequest
from primerl_hpc.launch.prepare import engines_script, job_script
from primerl_hpc.launch.submit import ONE_JOB, resume_run
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import Snapshot, take_snapshot
from primerl_hpc.plan.types import NodePlan, OnExit, Plan, PreflightPlan
from primerl_hpc.render.job import render_engines, render_job
from tests import support
from tests.support import ROOT, make_plan, process_plan

TOOL = ROOT / "tools" / "virtual-cluster"
NODES = 4
CPU_NODES = 1

RECIPE = {
    "kind": "rl",
    "name": "toy",
    "model": {"name": "some/model"},
    "max_steps": 3,
    "environments": {"train": [{"id": "reverse-text"}]},
    "recovery": {"in_place": False},
}

_RUN = """
import os, socket, sys, time
from pathlib import Path
from primerl_hpc.common.rundir import RunDir, publish_endpoint
run, name = RunDir(Path(sys.argv[1])), sys.argv[3]
print(f"on {socket.gethostname()} node {os.environ.get('SLURM_NODEID')}", flush=True)
"""
SAY = _RUN
# a phase that ends takes its engines along, also one that has not yet spoken: this waits for it
SAY_BESIDE_ENGINE = SAY + "while not run.endpoint('inference-0').exists(): time.sleep(0.05)\n"
SERVE = _RUN + "publish_endpoint(run, name, 'http://x:1')\ntime.sleep(900)\n"
# counts steps in checkpoints on its first node; saves and ends with 75 when asked; ends with 0 after `enough` appeared
TRAIN = (
    _RUN
    + """
step = run.latest_checkpoint() or 0
print("goes on after", step, flush=True)
publish_endpoint(run, name, "http://x:1")
while True:
    is_last, is_stop = (run.root / "enough").exists(), run.stop_request.exists()
    if (is_last or is_stop or step == 0) and os.environ["SLURM_NODEID"] == "0":
        step += 1
        run.finish_checkpoint_side(step, "trainer", ("trainer",))
    if is_last or is_stop:
        sys.exit(0 if is_last else 75)
    time.sleep(0.05)
"""
)


def wait_for(
    condition: Callable[[], object],
    what: str,
    timeout_s: float = 90.0,
    tell: Callable[[], object] = lambda: "",
) -> None:
    """Of things that SLURM does."""
    support.wait_for(condition, what, timeout_s, tell)


def call_down(node: str) -> None:
    """What SLURM does with a silent node after its timeout, at once."""
    subprocess.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"], check=True)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tool(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            [str(TOOL), "--dir", str(self.folder), *words], capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def on(self, node: str, *command: str, check: bool = True) -> str:
        return self.tool("on", node, *command, check=check)

    def idle_nodes(self) -> int:
        return ask(["sinfo", "-h", "-N", "-p", "main,cpu", "-o", "%T"]).split().count("idle")

    def wait_until_idle(self) -> None:
        wait_for(lambda: self.idle_nodes() == NODES + CPU_NODES, "all nodes idle")

    @contextlib.contextmanager
    def without_power(self, *nodes: str) -> Iterator[None]:
        """Silent, and called down at once; tests/slurm/test_virtual_cluster.py waits until SLURM does that itself."""
        for node in nodes:
            self.tool("kill-node", node)
        try:
            for node in nodes:
                call_down(node)
            yield
        finally:
            for node in nodes:
                self.tool("return-node", node)

    def wait_until_saved(self, job: str) -> None:
        """slurmctld writes jobs down seconds after one changed; a job it has not written down is lost with it."""
        before = time.time()
        ask(
            ["scontrol", "update", f"JobId={job}", "Comment=saved"]
        )  # a change, or it may see no need to write
        jobs = self.folder / "state" / "job_state"
        wait_for(lambda: jobs.exists() and jobs.stat().st_mtime > before, "the controller's save")

    def processes_of(self, run: RunDir) -> dict[int, str]:
        """Command lines on any node that name the run directory, by the pid that they have on this machine."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(run.root) in words:
                found[int(folder.name)] = " ".join(words)
        return found


class SlurmToy:
    def __init__(self, cluster: Cluster, root: Path, **scheduler: Any) -> None:
        self.cluster, self.run = cluster, RunDir(root)
        self.recipe: dict[str, Any] = RECIPE
        self.processes: list[Any] = []
        self.elastic: list[Any] = []
        self.has_cpu_node = False
        """Whether the last node is one of the CPU partition, in a heterogeneous job."""
        profile = load_profile("virtual").profile
        settings = {"time": "00:10:00", **scheduler}
        self.profile: Profile = profile.model_copy(
            update={"scheduler": profile.scheduler.model_copy(update=settings)}
        )
        self.recipe: dict[str, Any] = RECIPE
        self.plan_changes: dict[str, Any] = {}
        self.jobs = JobWatcher()
        self.hurried: set[str] = set()
        self.next_hurry = 0.0

    def add(
        self, role: Role, code: str, on_exit: OnExit, *, nodes: tuple[int, ...] = (0,), **changes: Any
    ) -> None:
        index = changes.pop("index", 0)
        name = f"{role.value}-{index}"
        argv = (sys.executable, "-c", textwrap.dedent(code), str(self.run.root), "main", name)
        self.processes.append(
            process_plan(role, index, argv=argv, on_exit=on_exit, **changes).model_copy(
                update={"nodes": nodes}
            )
        )

    def add_elastic(self, code: str) -> None:
        """An engine with a job of its own."""
        name = f"inference-{len(self.elastic)}"
        argv = (sys.executable, "-c", textwrap.dedent(code), str(self.run.root), "main", name)
        self.elastic.append(
            process_plan(Role.INFERENCE, len(self.elastic), argv=argv, on_exit=OnExit.RESTART)
        )

    def prepare(self) -> Plan:
        plan = make_plan(self.run.root, self.recipe, processes=self.processes)
        count = 1 + max(node for process in self.processes for node in process.nodes)
        cpu_node = count - 1 if self.has_cpu_node else None
        nodes = tuple(NodePlan(index=node, roles=(), is_cpu=node == cpu_node) for node in range(count))
        plan = plan.model_copy(
            update={
                "scheduler": "slurm",
                "profile_name": "virtual",
                "nodes": nodes,
                "signal_margin_s": self.profile.scheduler.signal_margin_s,
                **self.plan_changes,
            }
        )
        phase = plan.phases[0].model_copy(update={"elastic": tuple(self.elastic)})
        plan = plan.model_copy(update={"phases": (phase,)})
        write_json(self.run.plan, plan.model_dump(mode="json"))
        if self.elastic:
            engines = render_engines(plan, self.profile, python=sys.executable, package_root=str(ROOT))
            write_text(engines_script(self.run), engines, mode=0o755)
        script = render_job(plan, self.profile, python=sys.executable, package_root=str(ROOT))
        write_text(job_script(self.run), script, mode=0o755)
        return plan

    def submit(self, chain: ChainRequest = ONE_JOB) -> str:
        """Through the very code path of submit and resume; returns the job's id."""
        if not self.run.plan.exists():
            self.prepare()
        return resume_run(self.run, chain).job_id

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        return str(read_json(self.run.job)["job_id"])

    @property
    def engines(self) -> str:
        return str(read_json(self.run.job)["engines_job_id"])

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.run, self.jobs.facts_of([self.run]))

    def fact(self) -> JobFact:
        return parse_squeue(ask(squeue_command([self.job])))[self.job]

    def accounted(self) -> JobFact | None:
        return parse_sacct(ask(sacct_command([self.job]))).get(self.job)

    def steps(self) -> dict[str, str]:
        """Name → state of every step that accounting knows."""
        rows = ask(["sacct", "-n", "-P", "-j", self.job, "-o", "JobName,State"]).splitlines()
        return dict(row.split("|") for row in rows)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run.events) if row["event"] == name]

    def log(self, process: str, attempt: int = 1) -> str:
        return (self.run.attempt_logs(attempt) / f"{process}.log").read_text()

    def endpoint(self, process: str) -> dict[str, Any]:
        return read_json(self.run.endpoint(process))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_until_ready(self, *processes: str, attempt: int = 1) -> None:
        def is_ready() -> bool:
            starts = [row["time"] for row in self.events("attempt_started") if row["attempt"] == attempt]
            ready = {
                row["process"] for row in self.events("role_ready") if starts and row["time"] >= starts[-1]
            }
            if attempt > 1 and not starts:
                self.hurry()
            return set(processes) <= ready

        wait_for(is_ready, f"{processes} ready in attempt {attempt}", tell=self.words)

    def hurry(self) -> None:
        """Spare a requeued job the pause for which SLURM holds it (--requeue-delay). Asked at most once a second.

        Two seconds must stay: slurmd refuses a job ("already killed, do not launch") whose credential is of the
        second in which its life before ended, and the job fails.
        """
        if time.monotonic() < self.next_hurry or not self.run.job.exists():
            return
        self.next_hurry = time.monotonic() + 1.0
        jobs = [self.job, self.engines] if self.elastic else [self.job]
        ask_for = [
            "squeue",
            "--noheader",
            f"--jobs={','.join(jobs)}",
            "--states=PENDING",
            "--format=%i|%r|%V",
        ]
        told = subprocess.run(ask_for, check=False, capture_output=True, text=True).stdout
        for line in set(told.splitlines()) - self.hurried:
            job, reason, _requeued_at = line.strip().split("|")
            if reason == "BeginTime":
                self.hurried.add(line)
                start = ["scontrol", "update", f"JobId={job}", "StartTime=now+2"]
                subprocess.run(start, check=False, capture_output=True)

    def wait_for_words(self, words: str, process: str, attempt: int = 1) -> None:
        """In a log: what a process prints passes srun, and may come later than the files it writes."""
        wait_for(lambda: words in self.log(process, attempt), f"'{words}' of {process}", tell=self.words)

    def wait_for_state(self, state: RunState, timeout_s: float = 90.0) -> None:
        def is_reached() -> bool:
            if state == RunState.DONE:
                self.hurry()
            return self.snapshot().state == state

        wait_for(is_reached, f"state {state}", timeout_s, self.words)

    def wait_for_job(self, state: str, timeout_s: float = 60.0) -> None:
        wait_for(lambda: self.fact().state == state, f"job state {state}", timeout_s, self.words)

    def words(self) -> str:
        """What the job itself printed and what SLURM says of it, for a failing test."""
        printed = [path.read_text() for path in (self.run.root / "logs").glob("slurm-*.out")]
        return "\n".join([*printed, ask(["scontrol", "show", "job", self.job]), ask(["sinfo", "-N", "-l"])])

    def assert_nothing_is_left(self) -> None:
        self.cluster.wait_until_idle()
        wait_for(lambda: not self.cluster.processes_of(self.run), "the end of every process")
        assert not list(self.run.endpoints.glob("*.json"))

    def end(self) -> None:
        if self.run.job.exists():
            content = read_json(self.run.job)
            later = [each["job_id"] for each in content.get("after", {}).values()]
            jobs = [*(content.get("links") or [self.job]), *later]
            subprocess.run(["scancel", *jobs[1:]], check=False, capture_output=True)
            subprocess.run(["scancel", "--full", "--signal=KILL", *jobs], check=False, capture_output=True)
            subprocess.run(["scancel", *jobs], check=False, capture_output=True)
            if self.elastic:
                subprocess.run(["scancel", self.engines], check=False, capture_output=True)


def preflight(**changes: Any) -> PreflightPlan:
    """Fast, and without interpreters to ask."""
    values = {"timeout_s": 40, "pythons": (), "gpus": 0, "scratch": None}
    values |= {"min_scratch_gib": 0, "min_memory_gib": 0, "health_checks": ()}
    return PreflightPlan.model_validate(values | changes)


def not_on(node: str) -> str:
    """A site's health check that one node fails."""
    return f'[ "$SLURMD_NODENAME" != {node} ] || {{ echo the fabric of {node} is down; exit 7; }}'


class Command(subprocess.Popen[str]):
    """``primerl-hpc …``, killed when the block around it raises: subprocess would wait for its own end."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def run_cli(*words: str, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    with start_cli(*words) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_cli(*words: str) -> Command:
    return Command(
        [sys.executable, "-m", "primerl_hpc", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
