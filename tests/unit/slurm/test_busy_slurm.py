"""SLURM's controller is too busy to answer at the end of a job, at submission and at cancellation: requests are
repeated, never create two jobs, and no run loses its folder.

SLURM's commands are shell scripts here: the first call of each times out as SLURM's own do, before or after the work.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.launch.cancel import cancel_run
from primerl_hpc.launch.submit import check_not_running, still_queued
from primerl_hpc.run.job_chain import JobChain
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.job.chain import QueuedLink, queue_next_link, waiting_links
from primerl_hpc.runtime.job.nodes import Nodes
from primerl_hpc.runtime.job.requeue import explain_refused_requeue, requeue
from primerl_hpc.runtime.phase import PhaseRun
from primerl_hpc.runtime.process_state import ProcessState
from primerl_hpc.runtime.step import ExitStatus, Launch, PhaseEnd
from primerl_hpc.runtime.steps.srun import SrunStep
from primerl_hpc.runtime.supervisor import Supervisor
from primerl_hpc.slurm import commands as slurm_commands
from primerl_hpc.slurm.commands import UnansweredError
from primerl_hpc.slurm.sbatch import find_jobs
from tests.support.helpers import make_plan, process_plan
from tests.support.slurm_rows import SUBMITTED, printed, queue_row, row
from tests.unit.cli.test_cli import folder  # noqa: F401

BUSY = '{ echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1; }'
FAILED = ExitStatus(1)
CHAIN = JobChain(("1", "2"), is_until_done=True)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Install commands at the front of PATH; their bodies may use ``$call``. Return the file with a line per call."""
    monkeypatch.setattr(slurm_commands, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def make(**bodies: str) -> Path:
        (tmp_path / "bin").mkdir()
        calls = tmp_path / "calls"
        for name, body in {"sacct": "exit 0", **bodies}.items():
            command = tmp_path / "bin" / name
            count = f'echo "{name} $*" >>{calls}; call=$(grep -c "^{name} " {calls})'
            command.write_text(f"#!/bin/bash\n{count}\n{body}\n")
            command.chmod(0o755)
        return calls

    return make


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BUSY, "exit 0"),
        (BUSY, 'echo "Job is pending execution for job 7" >&2; exit 1'),
        ("kill -TERM $$", 'echo "Job is pending execution for job 7" >&2; exit 1'),
    ],
    ids=["not taken", "taken", "taken, and what it does to a job began with scontrol"],
)
def test_a_requeue_that_appears_to_time_out_is_repeated(
    commands: Callable[..., Path], first: str, second: str
) -> None:
    calls = commands(scontrol=f"[ $call = 1 ] && {first}\n{second}", squeue="sleep 60")
    assert asyncio.run(requeue("7")) is None
    assert calls.read_text().splitlines() == ["scontrol requeue 7"] * 2  # and no question without use


def test_a_refused_requeue_is_not_repeated(commands: Callable[..., Path]) -> None:
    calls = commands(scontrol='echo "Requested operation is presently disabled"; exit 1')
    assert asyncio.run(requeue("7")) == "Requested operation is presently disabled"
    assert len(calls.read_text().splitlines()) == 1


def test_a_slurm_that_never_answers_is_abandoned_in_time(
    commands: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_commands, "ANSWER_S", 2.0)
    monkeypatch.setattr(slurm_commands, "PATIENCE_S", 5.0)
    calls = commands(scontrol="exec sleep 60")
    assert "did not answer" in (asyncio.run(requeue("7")) or "")
    assert len(calls.read_text().splitlines()) > 1


def test_every_component_of_a_heterogeneous_job_excludes_bad_hosts(
    commands: Callable[..., Path], tmp_path: Path
) -> None:
    """squeue prints a line per component, each with its own hosts."""
    before = printed(row("7", "7+0", "7+0", "c[1-2]"), row("8", "7+1", "7+1", ""))
    excluded = f"{before}; [ ! -e {tmp_path}/0 ] || cat {tmp_path}/0 {tmp_path}/1"
    after = """printf '7\\037%s\\037%s\\037%s\\n' $job $job "${3#ExcNodeList=}" """
    update = f'job="${{2#JobId=}}"; {after} >{tmp_path}/"${{job#7+}}"'
    calls = commands(squeue=excluded, scontrol=f"[ $1 = requeue ] || {{ {update}; }}")
    assert asyncio.run(requeue("7", ["n1"])) is None
    assert asked_of(calls, "scontrol") == [
        "scontrol requeue 7",
        "scontrol update JobId=7+0 ExcNodeList=c[1-2],n1",
        "scontrol update JobId=7+1 ExcNodeList=n1",
    ]


def test_the_task_of_an_array_is_requeued_alone_and_ends_only_its_own_steps(
    commands: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last task of an array has the array's number: ``scontrol requeue 1`` would requeue all tasks."""
    for name, value in (("JOB_ID", "1"), ("ARRAY_JOB_ID", "1"), ("ARRAY_TASK_ID", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    hosts = printed(row("3", "1_3", "1_3", "n9"), row("1", "1_4", "1_4", "n8"))
    steps = "printf '1_4.0|trainer-0\\n1_3.0|trainer-0\\n'"
    squeue = f"case $1 in --steps) {steps} ;; *) {hosts} ;; esac"
    calls = commands(squeue=squeue, scontrol="exit 0", scancel="exit 0")
    assert asyncio.run(requeue("1", ["n1"], may_poll=False)) is None
    assert asked_of(calls, "scontrol") == [
        "scontrol requeue 1_4",
        "scontrol update JobId=1_4 ExcNodeList=n8,n1",
    ]
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path / "toy"), "main", 1, 0)
    asyncio.run(SrunStep(launch, Allocation(("n1",), 1, False, 0, job_id="1"))._end_lost_step())
    assert asked_of(calls, "scancel") == ["scancel --signal=KILL 1_4.0"]


def test_a_component_of_a_heterogeneous_job_is_not_another_job_of_its_script(
    commands: Callable[..., Path], tmp_path: Path
) -> None:
    """Jobs that an uncertain submission left are cancelled, also by the number of one component."""
    script = tmp_path / ".submission_file_1.sh"
    listed = (("7", "7+0"), ("8", "7+1"), ("9", "9"))
    commands(squeue=printed(*(row(*numbers, str(script)) for numbers in listed)))
    assert find_jobs(script) == ["7", "9"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.launch.mkdir(parents=True)
    (run.launch / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1\ntrue\n")
    write_json(run.job, {"job_id": "1", "links": ["1", "2"], "until_done": True})
    return run


@pytest.mark.parametrize(
    "first, calls_of_sbatch", [(BUSY, 2), (f"{{ take; {BUSY} }}", 1)], ids=["not taken", "taken"]
)
def test_the_next_link_is_queued_once_if_sbatch_appears_to_time_out(
    commands: Callable[..., Path],
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    calls_of_sbatch: int,
) -> None:
    queue = tmp_path / "queue"
    queue.touch()
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    monkeypatch.setenv("SBATCH_NODES", "7")
    monkeypatch.setenv("SLURM_NTASKS", "7")
    calls = commands(
        sbatch=(
            f"env >{tmp_path}/environ\n"
            f'take() {{ printf "%s\\x1f%s\\x1f%s\\n" $((40 + call)) $((40 + call)) "$script" >>{queue}; }}\n'
            'script="${@: -1}"\n'
            f'[ $call = 1 ] && {first}\ntake; echo "Submitted batch job $((40 + call))"'
        ),
        squeue=f"[ $call = 1 ] && {BUSY}\ncat {queue}",
    )
    result = asyncio.run(queue_next_link(run, CHAIN, "2"))
    link, refused = result.job_id, result.refused
    (queued,) = queue.read_text().splitlines()
    assert queued.startswith(f"{link}\x1f") and refused == ""
    assert read_json(run.job)["links"] == ["1", "2", link]
    assert (run.launch / "submitit" / f"{link}_submission.sh").exists()
    sbatch = [line for line in calls.read_text().splitlines() if line.startswith("sbatch ")]
    assert len(sbatch) == calls_of_sbatch and all("--dependency=afterany:2 " in line for line in sbatch)
    environ = (tmp_path / "environ").read_text()
    assert "SBATCH_PARTITION=debug" in environ  # a default of the site, which the script leaves open
    assert "SBATCH_NODES" not in environ and "SLURM_NTASKS" not in environ


@pytest.mark.parametrize("falters_s, noted", [(60.0, ["1", "2", "41"]), (0.2, ["1", "2"])])
def test_a_queued_link_continues_the_run_despite_transient_errors_of_the_run_directory(
    commands: Callable[..., Path],
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    falters_s: float,
    noted: list[str],
) -> None:
    faults = itertools.count()

    def falter(path: Path, value: object) -> None:
        if next(faults) < 3:
            raise OSError(errno.EIO, "Input/output error")
        write_json(path, value)

    monkeypatch.setattr("primerl_hpc.common.waiting.IO_RETRY_LIMIT_S", falters_s)
    monkeypatch.setattr("primerl_hpc.runtime.job.chain.write_json", falter)
    commands(sbatch="echo Submitted batch job 41", squeue="exit 0")
    assert asyncio.run(queue_next_link(run, CHAIN, "2")) == QueuedLink("41")
    assert read_json(run.job)["links"] == noted


def test_a_link_with_unknown_submission_result_is_found_by_resume(
    commands: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.runtime.job.chain.PATIENCE_S", 0.2)
    commands(sbatch=BUSY, squeue=BUSY)
    result = asyncio.run(queue_next_link(run, CHAIN, "2"))
    assert result.job_id is None and "did not report" in result.refused
    assert len(list((run.launch / "submitit").glob(".submission_file_*.sh"))) == 1
    assert read_json(run.job)["links"] == ["1", "2"]


@pytest.mark.parametrize(
    "words, waiting", [("Invalid job id specified", ()), ("Socket timed out on send/recv operation", ("2",))]
)
def test_a_link_unknown_to_slurm_no_longer_counts_as_waiting(
    commands: Callable[..., Path], words: str, waiting: tuple[str, ...]
) -> None:
    commands(squeue=f'echo "slurm_load_jobs error: {words}" >&2; exit 1')
    assert asyncio.run(waiting_links(JobChain(("1", "2")), "1")) == waiting


TAKES = {"sbatch": 'echo "Submitted batch job $((40 + call))"', "srun": "", "squeue": ""}


def submit_chain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:  # noqa: F811
    """Return the error of ``submit --chain 2`` in ``folder/run``."""
    monkeypatch.chdir(folder)
    Path("site.yaml").write_text("name: site\nnodes: 2\nnode: {gpus: 8}\nscheduler: {time: 60}\n")
    words = ["submit", "recipe.yaml", "-p", "site.yaml", "--run-dir", "run", "--chain", "2"]
    return CliRunner().invoke(cli, words).exception


def asked_of(calls: Path, *names: str) -> list[str]:
    return [line for line in calls.read_text().splitlines() if line.startswith(names)]


@pytest.mark.parametrize(
    "second",
    ["exit 0", 'echo "slurm_suspend error: Job has already finished" >&2; exit 1'],
    ids=["not taken", "taken, and the job has ended"],
)
def test_a_release_that_appears_to_time_out_is_repeated(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    second: str,
) -> None:
    calls = commands(**TAKES, scontrol=f"[ $call = 1 ] && {BUSY}\n{second}", scancel="")
    assert submit_chain(folder, monkeypatch) is None
    assert asked_of(calls, "scontrol", "scancel") == ["scontrol release 41"] * 2
    assert read_json(folder / "run" / "control" / "job.json")["links"] == ["41", "42"]


def test_a_chain_with_unknown_release_keeps_its_jobs_and_its_folder(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl_hpc.launch.queue.PATIENCE_S", 0.3)
    calls = commands(**TAKES, scontrol=BUSY, scancel="")
    error = submit_chain(folder, monkeypatch)
    assert isinstance(error, UnansweredError) and "scontrol release 41" in error.hint
    assert not asked_of(calls, "scancel") and (folder / "run" / "plan.json").is_file()


def test_held_jobs_that_cannot_be_cancelled_keep_their_folder_and_are_named(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuses = '[ $call = 2 ] && { echo "sbatch: error: no training on Sundays" >&2; exit 1; }\n'
    monkeypatch.setattr("primerl_hpc.launch.queue.PATIENCE_S", 0.3)
    commands(**{**TAKES, "sbatch": refuses + TAKES["sbatch"]}, scontrol="", scancel=BUSY)
    error = submit_chain(folder, monkeypatch)
    assert isinstance(error, UnansweredError)
    assert "no training on Sundays" in error.cause and error.hint.endswith("scancel 41")
    assert (folder / "run" / "plan.json").is_file()


def test_a_refused_chain_leaves_no_job_if_scancel_appears_to_time_out(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = commands(
        **TAKES, scontrol='echo "Access denied" >&2; exit 1', scancel=f"[ $call = 1 ] && {BUSY}\nexit 0"
    )
    assert "Access denied" in str(submit_chain(folder, monkeypatch))
    assert asked_of(calls, "scancel") == ["scancel 41 42"] * 2 and not (folder / "run").exists()


def test_a_running_chain_gets_a_stop_request_if_slurm_does_not_answer(
    commands: Callable[..., Path],
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("primerl_hpc.launch.queue.PATIENCE_S", 0.3)
    commands(squeue=BUSY, scancel=BUSY)
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1, "links": ["1", "2"]})
    write_json(run.state, {"state": "running", "attempt": 1, "job_id": "1"})
    write_json(run.supervisor_lock, {"host": "n1", "pid": 1, "started": "1", "job": "1", "restart": "0"})
    cancel_run(run, now=False, wait=False)
    assert read_json(run.stop_request) == {"reason": "cancel", "now": False}
    assert "are still queued" in capsys.readouterr().err


def test_a_run_is_not_queued_again_while_the_state_of_its_job_is_unknown(
    commands: Callable[..., Path], run: RunDir
) -> None:
    no_accounting = 'echo "Slurm accounting storage is disabled" >&2; exit 1'
    commands(squeue=f"[ $call = 1 ] && {BUSY}\nexit 0", sacct=no_accounting)
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1})
    with pytest.raises(UnansweredError, match="Socket timed out"):
        check_not_running(run)
    check_not_running(run)  # squeue no longer lists it, and it is in no other source


SILENT = pytest.mark.parametrize("silence", [BUSY, "exec sleep 60"], ids=["busy", "away"])


def end_of_trainer(
    run: RunDir, status: ExitStatus = FAILED, spares: tuple[str, ...] = ("n2",)
) -> tuple[Supervisor, PhaseRun, ProcessState]:
    """Return a trainer that has just ended on n1."""
    recipe = {"kind": "rl", "name": "toy", "model": {"name": "a/b"}, "max_steps": 3}
    recipe["environments"] = {"train": [{"id": "x"}]}
    plan = make_plan(run.root, recipe, processes=[process_plan(Role.TRAINER)])
    write_json(run.plan, plan.model_copy(update={"spare_nodes": len(spares)}).model_dump(mode="json"))
    supervisor = Supervisor(run)
    asyncio.run(supervisor._open_attempt())
    order = ("n1", *spares)
    allocation_ = Allocation(("n1",), 1, False, 0, job_id="7", spares=spares, order=order)
    nodes = supervisor.use_allocation(allocation_)
    phase = PhaseRun(supervisor.context, supervisor.plan.phases[0], nodes)
    trainer = phase.processes["trainer-0"]
    trainer.launch = Launch(trainer.plan, run, "main", 1, 0)
    trainer.hosts, trainer.ended, trainer.restart_at = ("n1",), status, None
    return supervisor, phase, trainer


@SILENT
def test_a_node_is_not_considered_lost_before_slurm_answers(
    commands: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    monkeypatch.setattr(slurm_commands, "ANSWER_S", 5.0)
    commands(
        squeue=f"[ $call = 1 ] && {silence}\n{printed(row('7', '7', 'n2', 'RUNNING'))}",
        scontrol=f"[ $call = 1 ] && {silence}\necho n2",
        sinfo=f"[ $call = 1 ] && {silence}\necho n2 idle",
    )
    _, phase, trainer = end_of_trainer(run)
    for _ in range(3):
        assert asyncio.run(phase._on_exit(trainer)) is None
        assert trainer.ended is not None and trainer.restart_at is None
    assert asyncio.run(phase._on_exit(trainer)) is None
    assert trainer.ended is None and trainer.restart_at is not None
    assert phase.nodes is not None and phase.nodes.allocation.hosts == ("n2",)


@pytest.mark.parametrize(
    "sbatch, words",
    [
        (BUSY, "SLURM did not report"),
        ('echo "Access/permission denied" >&2; exit 1', "cannot be submitted from a compute node"),
    ],
    ids=["silent", "refused"],
)
def test_the_reason_for_a_missing_next_link_is_reported(
    commands: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch, sbatch: str, words: str
) -> None:
    monkeypatch.setattr("primerl_hpc.runtime.job.chain.PATIENCE_S", 0.2)
    commands(sbatch=sbatch, squeue=BUSY)
    supervisor = end_of_trainer(run)[0]
    result = asyncio.run(supervisor.handoff._leave_to_next_link(CHAIN, (), 2))
    told = result.reason
    assert not result.is_automatic
    assert told.startswith("saved after step 2, but ") and "primerl-hpc resume" in told
    assert words in told and ("compute node" in told) == ("compute node" in words)


def test_a_walltime_before_the_first_phase_of_a_resumed_run_is_not_progress(
    commands: Callable[..., Path], run: RunDir
) -> None:
    calls = commands(scontrol="exit 0", squeue="exit 0")
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1})
    supervisor = end_of_trainer(run)[0]
    write_json(run.stop_request, {"reason": "walltime"})
    result = asyncio.run(supervisor._hand_over(PhaseEnd.ABANDONED, 100))
    assert not result.is_automatic and "before a new checkpoint" in result.reason and not calls.exists()


@pytest.mark.parametrize("tried_before", [(), ("n1",)], ids=["refused", "bad again"])
def test_a_bad_node_leaves_the_run_to_the_next_link_if_the_job_cannot_requeue(
    commands: Callable[..., Path], run: RunDir, tried_before: tuple[str, ...]
) -> None:
    """If requeue is disabled or refused, the next link continues (docs/decisions/0007-chains.md)."""
    waits = printed(queue_row("2", "PENDING", "Dependency"))
    calls = commands(scontrol='echo "requests are disabled"; exit 1', squeue=waits, scancel="exit 0")
    supervisor = end_of_trainer(run)[0]
    supervisor.handoff.chain, supervisor.handoff.job = JobChain(("1", "2")), "1"
    assert supervisor.nodes is not None
    nodes = Nodes(supervisor.context, supervisor.nodes.allocation, {"ever_excluded": tried_before})
    nodes.excluded = {"n1": "gpus: 7 of 8"}
    assert asyncio.run(supervisor._requeue_without_bad_nodes(nodes)) == ExitCode.BAD_NODE
    supervisor.journal.catch_up()
    assert read_json(run.state)["message"].startswith("link 2 of 2 continues") and not asked_of(
        calls, "scancel"
    )


@pytest.mark.parametrize("may_name_nodes", [True, False])
def test_a_requeued_job_excludes_its_bad_node_only_where_jobs_may_name_nodes(
    commands: Callable[..., Path], run: RunDir, may_name_nodes: bool
) -> None:
    """TACC deletes jobs that exclude nodes."""
    calls = commands(scontrol="exit 0", squeue=printed(row("1", "1", "1", "n1")))
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1})
    supervisor = end_of_trainer(run)[0]
    supervisor.handoff.job = "1"
    plan = supervisor.plan.model_copy(update={"may_name_nodes": may_name_nodes})
    supervisor.handoff.context = replace(supervisor.context, plan=plan)
    supervisor.journal.lock.acquire()
    assert asyncio.run(supervisor.handoff._requeue(2, {"n1"})).is_automatic
    asked = asked_of(calls, "scontrol")
    assert asked[0] == "scontrol requeue 1"
    assert any("ExcNodeList" in command for command in asked) == may_name_nodes


def test_a_refused_release_is_reported_with_its_reason_and_leaves_no_run(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    denied = 'echo "slurm_suspend error: Access/permission denied for job 41" >&2; exit 1'
    commands(**TAKES, scontrol=denied, scancel="")
    error = submit_chain(folder, monkeypatch)
    assert isinstance(error, SchedulerError) and not isinstance(error, UnansweredError)
    assert (
        "does not permit you to release job 41" in error.cause and "Access/permission denied" in error.cause
    )
    assert "chain" in error.hint and not (folder / "run").exists()


@pytest.mark.parametrize(
    "said, means",
    [
        ("slurm_requeue error: Access/permission denied for job 7", "does not let users requeue"),
        ("Requested operation is presently disabled for job 7", "switched off"),
        ("something new", "something new"),
    ],
)
def test_a_refused_requeue_reports_the_output_of_slurm_and_its_meaning(said: str, means: str) -> None:
    words = explain_refused_requeue(f"{said}\n")
    assert said in words and means in words and "\n" not in words


def test_a_notice_on_stderr_is_neither_a_refusal_nor_part_of_a_step_list(
    commands: Callable[..., Path], tmp_path: Path
) -> None:
    notice = 'echo "slurm_load_partitions: Access/permission denied" >&2\n'
    calls = commands(squeue=notice + "echo '7.3|trainer-0'", scancel="exit 0", scontrol=notice + "exit 0")
    assert asyncio.run(requeue("7")) is None
    launch = Launch(process_plan(Role.TRAINER), RunDir(tmp_path / "toy"), "main", 1, 0)
    asyncio.run(SrunStep(launch, Allocation(("n1",), 1, False, 0, job_id="7"))._end_lost_step())
    assert asked_of(calls, "scancel") == ["scancel --signal=KILL 7.3"]


def test_a_job_of_a_failed_attempt_is_cancelled_only_if_it_is_still_the_runs_job(
    commands: Callable[..., Path],
) -> None:
    """SLURM may have given its number to another job of the user since."""
    commands(
        squeue=printed(
            queue_row("41", "PENDING", name="toy-export"),
            queue_row("42", "RUNNING", name="code", submitted="2026-07-01T00:00:00"),
            queue_row("43", "RUNNING", name="toy-engines", submitted="2026-07-01T00:00:00"),  # requeued
            queue_row("44", "COMPLETED", name="toy-evaluation"),
        )
    )
    job = {"job_id": "40", "name": "toy", "submitted": datetime.fromisoformat(SUBMITTED).timestamp()}
    assert still_queued(job, ["41", "42", "43", "44"]) == ["41", "43"]
    assert still_queued(job, []) == []
