"""A virtual SLURM cluster, and runs whose roles are one-line programs; plan, script, files and signals are real.

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
from typing import Any, ClassVar, TypeVar

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.files import read_json, read_jsonl, write_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.launch.compose import ONE_JOB, ChainRequest
from primerl_hpc.launch.submit import resume_run
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import Snapshot, take_snapshot
from primerl_hpc.plan.components import plan_components
from primerl_hpc.plan.plan import ComponentPlan, NodePlan, OnExit, Plan, PreflightPlan
from primerl_hpc.plan.split import NodeSplit
from primerl_hpc.render.job import SETUP_SCRIPT, render_engines, render_job, render_setup
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import JobFact, parse_sacct, parse_squeue, sacct_command, squeue_command
from tests.support.cluster_user import ClusterUser
from tests.support.forked_commands import run_command
from tests.support.helpers import PATIENCE_S, ROOT, TOY_RECIPE, captured, make_plan, process_plan, wait_for

T = TypeVar("T")
TOOL = ROOT / "tools" / "virtual-cluster"
NODES = 4
CPU_NODES = 1
USERS = ("alice", "bob")
"""Ordinary users of a cluster."""
WITH_USERS = ("--users", " ".join(USERS), "--open", f"{ROOT} {sys.prefix} {sys.base_prefix}")
"""Options of a cluster that has them, and on which they can start the interpreter of the tests."""


_RUN = """
import os, socket, sys, time
from pathlib import Path
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
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


def set_node_state(node: str, state: str) -> None:
    subprocess.run(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=test"], check=True)


def call_down(node: str) -> None:
    """Mark a node down at once, as SLURM does after its timeout. Its next answer to a ping returns it to service."""
    set_node_state(node, "down")


def take_out_of_service(node: str) -> None:
    """Mark a node down, and drain it, because an answer to a ping may still be on its way.

    SLURM evaluates the answers to a ping of all nodes when the slowest has failed. Without draining, the answer of a
    node that lost its power a moment later returned it to service up to 10 s after its end, and a run started there.
    """
    set_node_state(node, "drain")
    call_down(node)


def resume_nodes(*nodes: str) -> None:
    """Return nodes to service; those that are in service stay there."""
    for node in nodes:
        command = ["scontrol", "update", f"nodename={node}", "state=resume"]
        subprocess.run(command, check=False, capture_output=True)


def start_of_slurmd(node: str) -> str:
    """When the slurmd that a node registered last was started."""
    return ask(["scontrol", "show", "node", node]).partition("SlurmdStartTime=")[2].split()[0]


class Acting:
    """The user who runs the commands of the current test, and the folder of the test; no user: that of the tests."""

    user: ClusterUser | None = None
    folder: Path = Path()
    done_by_root: ClassVar[list[str]] = []
    """Actions of the toolkit in the current test that had no user."""

    @classmethod
    def let(cls, user: ClusterUser, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``user`` run the commands of the current test, whose files are in ``folder``."""
        user.own(folder)
        (folder / "state").mkdir()
        monkeypatch.setenv("PRIMERL_HOME", str(folder / "state"))
        monkeypatch.setattr(cls, "user", user)
        monkeypatch.setattr(cls, "folder", folder)

    @classmethod
    def enter(cls) -> ClusterUser | None:
        """Return the user, who owns all files of the test from now on."""
        if cls.user is not None:
            cls.user.take_over(cls.folder)
        return cls.user


class Cluster:
    def __init__(self, folder: Path, user: ClusterUser | None = None) -> None:
        """``user``: the user who prepares and submits runs; None for the user of the tests."""
        self.folder, self.user = folder, user

    def admin(self, *command: str, check: bool = True) -> str:
        """Run a command of SLURM as its administrator."""
        return self.tool("exec", *command, check=check)

    def jobs_of(self, user: str) -> list[str]:
        """Ids of the user's jobs in SLURM's memory, also of those that ended in the last minutes."""
        return self.admin("squeue", "--noheader", "--states=all", f"--user={user}", "--format=%i").split()

    def tool(self, *words: str, check: bool = True) -> str:
        done = captured([str(TOOL), "--dir", str(self.folder), *words])
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
        """Cut the power of nodes and mark them down at once; tests/slurm/test_virtual_cluster.py waits until SLURM does
        so."""
        started = {node: start_of_slurmd(node) for node in nodes}
        for node in nodes:
            self.tool("kill-node", node)
        try:
            for node in nodes:
                take_out_of_service(node)
            yield
        finally:
            for node in nodes:
                self.tool("return-node", node)
                wait_for(lambda node=node: start_of_slurmd(node) != started[node], f"{node}'s return")
                set_node_state(node, "undrain")

    def wait_until_saved(self, job: str) -> None:
        """Wait until slurmctld has saved its jobs, seconds after a change; it loses unsaved jobs when it is killed."""
        before = time.time()
        # a change, or it may see no need to write
        ask(["scontrol", "update", f"JobId={job}", "Comment=saved"])
        jobs = self.folder / "state" / "job_state"
        wait_for(lambda: jobs.exists() and jobs.stat().st_mtime > before, "the controller's save")

    def processes_of(self, run: RunDir) -> dict[int, str]:
        """Return pid on this machine → command line, for processes on any node that name the run directory."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if str(run.root) in words:
                found[int(folder.name)] = " ".join(words)
        return found


@contextlib.contextmanager
def cluster_of_users(folder: Path, *options: str) -> Iterator[tuple[Cluster, list[ClusterUser]]]:
    """Start a second cluster of two nodes without accounting; its users have a folder for runs in ``folder``.

    Afterwards, fails if SLURM has had a job of root: what these tests start, an ordinary user starts.
    """
    made = Cluster(folder / "cluster")
    made.tool("up", "--no-accounting", "--nodes", "2", *WITH_USERS, *options)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{made.folder / 'bin'}:{os.environ['PATH']}")
            found = [ClusterUser(name, made.folder, number) for number, name in enumerate(USERS)]
            for user in found:
                (folder / user.name).mkdir()
                user.own(folder / user.name)
            yield made, found
        assert made.jobs_of("root") == [], "a test ran the toolkit as root"
    finally:
        made.tool("down", "--purge")


class SlurmToy:
    def __init__(self, cluster: Cluster, root: Path, **scheduler: Any) -> None:
        self.cluster, self.run = cluster, RunDir(root)
        self.recipe: dict[str, Any] = TOY_RECIPE
        self.processes: list[Any] = []
        self.elastic: list[Any] = []
        self.has_cpu_node = False
        """True if the last node is in the CPU partition, in a heterogeneous job."""
        self.node_types: tuple[str | None, ...] = ()
        """Node type of each node; empty: the profile's `node`."""
        profile = load_profile("virtual").profile
        settings = {"time": "00:10:00", **scheduler}
        self.profile: Profile = profile.model_copy(
            update={"scheduler": profile.scheduler.model_copy(update=settings)}
        )
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
        """Add an engine with its own job."""
        name = f"inference-{len(self.elastic)}"
        argv = (sys.executable, "-c", textwrap.dedent(code), str(self.run.root), "main", name)
        self.elastic.append(
            process_plan(Role.INFERENCE, len(self.elastic), argv=argv, on_exit=OnExit.RESTART)
        )

    def prepare(self) -> Plan:
        """Write plan and scripts as the user."""
        return self.as_user(self._prepare)

    def _prepare(self) -> Plan:
        plan = make_plan(self.run.root, self.recipe, processes=self.processes)
        count = 1 + max(node for process in self.processes for node in process.nodes)
        nodes = tuple(NodePlan(index=node, roles=()) for node in range(count))
        plan = plan.model_copy(
            update={
                "scheduler": "slurm",
                "profile_name": "virtual",
                "nodes": nodes,
                "components": self._components(count),
                "spare_nodes": self.profile.scheduler.spare_nodes,
                "signal_margin_s": self.profile.scheduler.signal_margin_s,
                **self.plan_changes,
            }
        )
        phase = plan.phases[0].model_copy(update={"elastic": tuple(self.elastic)})
        plan = plan.model_copy(update={"phases": (phase,)})
        write_json(self.run.plan, plan.model_dump(mode="json"))
        if self.elastic:
            engines = render_engines(plan, self.profile, python=sys.executable, package_root=str(ROOT))
            write_text(self.run.engines_script, engines, mode=0o755)
        script = render_job(plan, self.profile, python=sys.executable, package_root=str(ROOT))
        write_text(self.run.job_script, script, mode=0o755)
        write_text(self.run.launch / SETUP_SCRIPT, render_setup(self.profile))
        return plan

    def _components(self, count: int) -> tuple[ComponentPlan, ...]:
        """The CPU node, if there is one, is the last node of the plan and the first component of the job."""
        node_types = self.node_types or (None,) * (count - self.has_cpu_node)
        split = NodeSplit(
            count, (), None, 0, (), cpu_node=count - 1 if self.has_cpu_node else None, node_types=node_types
        )
        components = plan_components(split, self.profile)
        return components if len(components) > 1 else ()

    def submit(self, chain: ChainRequest = ONE_JOB) -> str:
        """Submit as the user by the code of submit and resume; return the job's id."""

        def submit() -> str:
            if not self.run.plan.exists():
                self._prepare()
            return resume_run(self.run, chain).job_id

        return self.as_user(submit)

    def as_user(self, act: Callable[[], T]) -> T:
        """Return the result of ``act()``, done by the user."""
        Acting.enter()
        if self.cluster.user is None:
            Acting.done_by_root.append(f"a part of {self.run.root.name}")
            return act()
        return self.cluster.user.run(act)

    def ask(self, *command: str) -> str:
        """Return the output of a SLURM command of the user."""
        return self.as_user(lambda: ask(list(command)))

    # -- looking -----------------------------------------------------------------------------------

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
        """Step name → state, for every step in accounting."""
        rows = ask(["sacct", "-n", "-P", "-j", self.job, "-o", "JobName,State"]).splitlines()
        return dict(row.split("|") for row in rows)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run.events) if row["event"] == name]

    def log(self, process: str, attempt: int = 1) -> str:
        return (self.run.attempt_logs(attempt) / f"{process}.log").read_text()

    def endpoint(self, process: str) -> dict[str, Any]:
        return read_json(self.run.endpoint(process))

    # -- waiting -----------------------------------------------------------------------------------

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
        """Shorten the pause for which SLURM holds a requeued job (--requeue-delay). Called at most once a second.

        Two seconds must remain: slurmd refuses a job ("already killed, do not launch") whose credential is of the
        second in which its previous start ended, and the job fails.
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
        told = captured(ask_for).stdout
        for line in set(told.splitlines()) - self.hurried:
            job, reason, _requeued_at = line.strip().split("|")
            if reason == "BeginTime":
                self.hurried.add(line)
                start = ["scontrol", "update", f"JobId={job}", "StartTime=now+2"]
                subprocess.run(start, check=False, capture_output=True)

    def wait_for_words(self, words: str, process: str, attempt: int = 1) -> None:
        """Wait for a text in a log: output of a process passes through srun and may arrive after the files it
        writes."""
        wait_for(lambda: words in self.log(process, attempt), f"'{words}' of {process}", tell=self.words)

    def wait_for_state(self, state: RunState) -> None:
        def is_reached() -> bool:
            if state == RunState.DONE:
                self.hurry()
            return self.snapshot().state == state

        wait_for(is_reached, f"state {state}", self.words)

    def wait_for_job(self, state: str) -> None:
        wait_for(lambda: self.fact().state == state, f"job state {state}", self.words)

    def words(self) -> str:
        """Output of the job and its state in SLURM, for a failing test."""
        printed = [path.read_text() for path in (self.run.root / "logs").glob("slurm-*.out")]
        return "\n".join([*printed, ask(["scontrol", "show", "job", self.job]), ask(["sinfo", "-N", "-l"])])

    def finish(self) -> None:
        """Let the training process end by itself, and check that nothing of the run remains."""
        (self.run.root / "enough").touch()
        self.wait_for_state(RunState.DONE)
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self) -> None:
        self.cluster.wait_until_idle()
        wait_for(lambda: not self.cluster.processes_of(self.run), "the end of every process")
        assert not list(self.run.endpoints.glob("*.json"))

    def end(self) -> None:
        if self.run.job.exists():
            if self.cluster.user is not None:
                owner = self.cluster.admin(
                    "squeue", "--noheader", "--states=all", f"--jobs={self.job}", "--format=%u", check=False
                )
                assert set(owner.split()) <= {self.cluster.user.name}, f"the toolkit ran as {owner}"
            content = read_json(self.run.job)
            later = [each["job_id"] for each in content.get("after", {}).values()]
            jobs = [*(content.get("links") or [self.job]), *later]
            subprocess.run(["scancel", *jobs[1:]], check=False, capture_output=True)
            subprocess.run(["scancel", "--full", "--signal=KILL", *jobs], check=False, capture_output=True)
            subprocess.run(["scancel", *jobs], check=False, capture_output=True)
            if self.elastic:
                subprocess.run(["scancel", self.engines], check=False, capture_output=True)


def preflight(**changes: Any) -> PreflightPlan:
    """A node check that is fast and starts no interpreters."""
    values = {"timeout_s": int(PATIENCE_S) // 2, "pythons": (), "gpus": 0, "scratch": None}
    values |= {"min_scratch_gib": 0, "min_memory_gib": 0, "health_checks": ()}
    return PreflightPlan.model_validate(values | changes)


def not_on(node: str) -> str:
    """A site's health check that one node fails."""
    return f'[ "$SLURMD_NODENAME" != {node} ] || {{ echo the fabric of {node} is down; exit 7; }}'


class Command(subprocess.Popen[str]):
    """Run ``primerl-hpc …`` in the block, and kill it if the block raises: subprocess would wait for its end."""

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def run_cli(
    *words: str, timeout_s: float = PATIENCE_S, user: ClusterUser | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run ``primerl-hpc`` as the user of the tests, or as a user of the cluster on its login node."""
    user = user or Acting.enter()
    if user is None:
        Acting.done_by_root.append(" ".join(words))
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        return run_command(*words, environ=variables, timeout_s=timeout_s)
    with start_cli(*words, user=user, **environ) as process:
        out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def check_that_nothing_ran_as_root() -> None:
    """Fail if the current test has run the toolkit as root, as no user of a cluster can."""
    found = Acting.done_by_root
    assert not found, f"the test ran the toolkit as root; use the fixture acting_user: {found}"


def start_cli(*words: str, user: ClusterUser | None = None, **environ: str) -> Command:
    user = user or Acting.enter()
    if user is None:
        Acting.done_by_root.append(" ".join(words))
    return Command(
        [sys.executable, "-m", "primerl_hpc", *words],
        env={**(user.environ if user else os.environ), "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=user.enter if user else None,
    )
