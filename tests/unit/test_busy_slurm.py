"""SLURM's controller is too busy to answer, at the end of a job and where people submit and cancel: it is asked again,
never two jobs come of it, and no run loses its folder.

SLURM's commands are shell scripts here: the first call of each times out as SLURM's own do, before or after the work.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.chain import Chain
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import UnansweredError
from primerl_hpc.launch.cancel import cancel_run
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.runtime import allocation, journal
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.chain import queue_next_link, waiting_links
from primerl_hpc.runtime.nodes import Nodes
from primerl_hpc.runtime.phase import PhaseEnd, PhaseRun
from primerl_hpc.runtime.requeue import requeue
from primerl_hpc.runtime.running import Running
from primerl_hpc.runtime.steps import ExitStatus, Launch
from primerl_hpc.runtime.supervisor import Supervisor
from tests.support import make_plan, process_plan
from tests.unit.test_cli import folder  # noqa: F401

BUSY = '{ echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; exit 1; }'
CHAIN = Chain(("1", "2"), is_until_done=True)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts commands by name before all others; their bodies know ``$call``. Returns the file with a line per call."""
    monkeypatch.setattr(allocation, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("primerl_hpc.common.sbatch.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("primerl_hpc.launch.chain.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("primerl_hpc.launch.chain.PATIENCE_S", 0.3)
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
def test_a_requeue_that_seems_to_time_out_is_asked_for_again(
    commands: Callable[..., Path], first: str, second: str
) -> None:
    calls = commands(scontrol=f"[ $call = 1 ] && {first}\n{second}", squeue="sleep 60")
    assert asyncio.run(requeue("7")) is None
    assert calls.read_text().splitlines() == ["scontrol requeue 7"] * 2  # and no question without use


def test_a_refused_requeue_is_not_tried_again(commands: Callable[..., Path]) -> None:
    calls = commands(scontrol='echo "Requested operation is presently disabled"; exit 1')
    assert asyncio.run(requeue("7")) == "Requested operation is presently disabled"
    assert len(calls.read_text().splitlines()) == 1


def test_a_slurm_that_stays_silent_is_given_up_in_time(
    commands: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocation, "ANSWER_S", 0.1)
    monkeypatch.setattr(allocation, "PATIENCE_S", 0.3)
    calls = commands(scontrol="exec sleep 60")
    assert "did not answer" in (asyncio.run(requeue("7")) or "")
    assert len(calls.read_text().splitlines()) > 1


def test_every_component_of_a_heterogeneous_job_is_kept_from_bad_hosts(
    commands: Callable[..., Path], tmp_path: Path
) -> None:
    """squeue tells a line per component, each with hosts of its own."""
    excluded = f"printf '7+0 c[1-2]\\n7+1 \\n'; [ ! -e {tmp_path}/0 ] || cat {tmp_path}/0 {tmp_path}/1"
    update = f'job="${{2#JobId=}}"; echo "$job ${{3#ExcNodeList=}}" >{tmp_path}/"${{job#7+}}"'
    calls = commands(squeue=excluded, scontrol=f"[ $1 = requeue ] || {{ {update}; }}")
    assert asyncio.run(requeue("7", ["n1"])) is None
    assert asked_of(calls, "scontrol") == [
        "scontrol requeue 7",
        "scontrol update JobId=7+0 ExcNodeList=c[1-2],n1",
        "scontrol update JobId=7+1 ExcNodeList=n1",
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.launch.mkdir(parents=True)
    (run.launch / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=1\ntrue\n")
    write_json(run.job, {"job_id": "1", "links": ["1", "2"], "until_done": True})
    return run


@pytest.mark.parametrize(
    "first, calls_of_sbatch",
    [(BUSY, 2), (f"{{ take; {BUSY} }}", 1)],
    ids=["not taken", "taken"],
)
def test_the_next_link_is_queued_once_though_sbatch_seems_to_time_out(
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
            f'take() {{ printf "%s\\x1f%s\\n" $((40 + call)) "$script" >>{queue}; }}; script="${{@: -1}}"\n'
            f'[ $call = 1 ] && {first}\ntake; echo "Submitted batch job $((40 + call))"'
        ),
        squeue=f"[ $call = 1 ] && {BUSY}\ncat {queue}",
    )
    link, refused = asyncio.run(queue_next_link(run, CHAIN, "2"))
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
def test_a_link_that_slurm_took_goes_on_with_the_run_though_the_run_directory_falters(
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

    monkeypatch.setattr(journal, "FALTERS_S", falters_s)
    monkeypatch.setattr("primerl_hpc.runtime.chain.write_json", falter)
    commands(sbatch="echo Submitted batch job 41", squeue="exit 0")
    assert asyncio.run(queue_next_link(run, CHAIN, "2")) == ("41", "")
    assert read_json(run.job)["links"] == noted


def test_a_link_whose_fate_stays_unknown_is_left_for_resume_to_find(
    commands: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("primerl_hpc.runtime.chain.PATIENCE_S", 0.2)
    commands(sbatch=BUSY, squeue=BUSY)
    link, words = asyncio.run(queue_next_link(run, CHAIN, "2"))
    assert link is None and "did not say" in words
    assert len(list((run.launch / "submitit").glob(".submission_file_*.sh"))) == 1
    assert read_json(run.job)["links"] == ["1", "2"]


@pytest.mark.parametrize(
    "words, waiting",
    [("Invalid job id specified", ()), ("Socket timed out on send/recv operation", ("2",))],
)
def test_a_link_that_slurm_has_forgotten_waits_no_more(
    commands: Callable[..., Path], words: str, waiting: tuple[str, ...]
) -> None:
    commands(squeue=f'echo "slurm_load_jobs error: {words}" >&2; exit 1')
    assert asyncio.run(waiting_links(Chain(("1", "2")), "1")) == waiting


TAKES = {"sbatch": 'echo "Submitted batch job $((40 + call))"', "srun": "", "squeue": ""}


def submit_chain(folder: Path, monkeypatch: pytest.MonkeyPatch) -> BaseException | None:  # noqa: F811
    """What ended ``submit --chain 2`` in ``folder/run``."""
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
def test_a_release_that_seems_to_time_out_is_asked_for_again(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    second: str,
) -> None:
    calls = commands(**TAKES, scontrol=f"[ $call = 1 ] && {BUSY}\n{second}", scancel="")
    assert submit_chain(folder, monkeypatch) is None
    assert asked_of(calls, "scontrol", "scancel") == ["scontrol release 41"] * 2
    assert read_json(folder / "run" / "control" / "job.json")["links"] == ["41", "42"]


def test_a_chain_that_may_have_been_released_keeps_its_jobs_and_its_folder(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = commands(**TAKES, scontrol=BUSY, scancel="")
    error = submit_chain(folder, monkeypatch)
    assert isinstance(error, UnansweredError) and "scontrol release 41" in error.mend
    assert not asked_of(calls, "scancel") and (folder / "run" / "plan.json").is_file()


def test_held_jobs_that_cannot_be_taken_out_keep_their_folder_and_are_named(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuses = '[ $call = 2 ] && { echo "sbatch: error: no training on Sundays" >&2; exit 1; }\n'
    commands(**{**TAKES, "sbatch": refuses + TAKES["sbatch"]}, scontrol="", scancel=BUSY)
    error = submit_chain(folder, monkeypatch)
    assert isinstance(error, UnansweredError)
    assert "no training on Sundays" in error.cause and error.mend.endswith("scancel 41")
    assert (folder / "run" / "plan.json").is_file()


def test_a_refused_chain_leaves_nothing_though_scancel_seems_to_time_out(
    commands: Callable[..., Path],
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = commands(
        **TAKES, scontrol='echo "Access denied" >&2; exit 1', scancel=f"[ $call = 1 ] && {BUSY}\nexit 0"
    )
    assert "Access denied" in str(submit_chain(folder, monkeypatch))
    assert asked_of(calls, "scancel") == ["scancel 41 42"] * 2 and not (folder / "run").exists()


def test_a_running_chain_is_asked_to_stop_though_slurm_is_silent(
    commands: Callable[..., Path], run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    commands(squeue=BUSY, scancel=BUSY)
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1, "links": ["1", "2"]})
    write_json(run.state, {"state": "running", "attempt": 1, "job_id": "1"})
    write_json(run.supervisor_lock, {"host": "n1", "pid": 1, "started": "1", "job": "1", "restart": "0"})
    cancel_run(run, now=False, wait=False)
    assert read_json(run.stop_request) == {"reason": "cancel", "now": False}
    assert "in the queue still" in capsys.readouterr().err


def test_a_run_is_not_queued_again_while_nobody_says_whether_its_job_waits(
    commands: Callable[..., Path], run: RunDir
) -> None:
    no_accounting = 'echo "Slurm accounting storage is disabled" >&2; exit 1'
    commands(squeue=f"[ $call = 1 ] && {BUSY}\nexit 0", sacct=no_accounting)
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1})
    with pytest.raises(UnansweredError, match="Socket timed out"):
        check_not_running(run)
    check_not_running(run)  # squeue has forgotten it, and nobody else would know


SILENT = pytest.mark.parametrize("silence", [BUSY, "exec sleep 60"], ids=["busy", "away"])


def end_of_trainer(run: RunDir) -> tuple[PhaseRun, Running]:
    """A trainer that has just died on n1, where n2 is spare."""
    recipe = {"kind": "rl", "name": "toy", "model": {"name": "a/b"}, "max_steps": 3}
    recipe["environments"] = {"train": [{"id": "x"}]}
    plan = make_plan(run.root, recipe, processes=[process_plan(Role.TRAINER)])
    write_json(run.plan, plan.model_copy(update={"spare_nodes": 1}).model_dump(mode="json"))
    supervisor = Supervisor(run)
    asyncio.run(supervisor._open_attempt())
    order = ("n1", "n2")
    allocation_ = Allocation(("n1",), 1, False, 0, job_id="7", spares=("n2",), order=order)
    supervisor.nodes = Nodes(supervisor, allocation_, {})
    phase = PhaseRun(supervisor, supervisor.plan.phases[0])
    trainer = phase.running["trainer-0"]
    trainer.launch = Launch(trainer.process, run, "main", 1, 0)
    trainer.hosts, trainer.ended, trainer.restart_at = ("n1",), ExitStatus(1), None
    return phase, trainer


@SILENT
def test_whether_a_node_is_lost_is_not_decided_before_slurm_answers(
    commands: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch, silence: str
) -> None:
    monkeypatch.setattr(allocation, "ANSWER_S", 0.5)
    commands(
        squeue=f"[ $call = 1 ] && {silence}\necho n2",
        scontrol=f"[ $call = 1 ] && {silence}\necho n2",
        sinfo=f"[ $call = 1 ] && {silence}\necho n2 idle",
    )
    phase, trainer = end_of_trainer(run)
    for _ in range(3):
        assert asyncio.run(phase._on_exit(trainer)) is None
        assert trainer.ended is not None and trainer.restart_at is None
    assert asyncio.run(phase._on_exit(trainer)) is None
    assert trainer.ended is None and trainer.restart_at is not None
    assert phase.supervisor.nodes is not None and phase.supervisor.nodes.allocation.hosts == ("n2",)


@pytest.mark.parametrize(
    "sbatch, words",
    [
        (BUSY, "SLURM did not say"),
        ('echo "Access/permission denied" >&2; exit 1', "cannot be queued from a compute node"),
    ],
    ids=["silent", "refused"],
)
def test_why_no_link_follows_is_told_as_it_happened(
    commands: Callable[..., Path], run: RunDir, monkeypatch: pytest.MonkeyPatch, sbatch: str, words: str
) -> None:
    monkeypatch.setattr("primerl_hpc.runtime.chain.PATIENCE_S", 0.2)
    commands(sbatch=sbatch, squeue=BUSY)
    phase, _ = end_of_trainer(run)
    told = asyncio.run(phase.supervisor.succession._leave_to_next_link(CHAIN, (), 2)) or ""
    assert told.startswith("saved after step 2, but ") and "primerl-hpc resume" in told
    assert words in told and ("compute node" in told) == ("compute node" in words)


def test_a_walltime_before_the_first_phase_of_a_resumed_run_is_no_progress(
    commands: Callable[..., Path], run: RunDir
) -> None:
    calls = commands(scontrol="exit 0", squeue="exit 0")
    write_json(run.job, {"scheduler": "slurm", "job_id": "1", "attempt": 1})
    phase, _ = end_of_trainer(run)
    write_json(run.stop_request, {"reason": "walltime"})
    why = asyncio.run(phase.supervisor.succession.hand_over(PhaseEnd.ABANDONED, 100))
    assert "before a new checkpoint" in (why or "") and not calls.exists()


@pytest.mark.parametrize("tried_before", [(), ("n1",)], ids=["refused", "bad again"])
def test_a_bad_node_leaves_the_run_to_the_next_link_where_the_job_cannot_come_back(
    commands: Callable[..., Path], run: RunDir, tried_before: tuple[str, ...]
) -> None:
    """docs/decisions/0007-chains.md: where requeue is off or refused, the next link takes over."""
    waits = r"printf '2\x1fPENDING\x1fDependency\x1f\x1f\n'"
    calls = commands(scontrol='echo "requests are disabled"; exit 1', squeue=waits, scancel="exit 0")
    supervisor = end_of_trainer(run)[0].supervisor
    supervisor.succession.chain, supervisor.succession.job = Chain(("1", "2")), "1"
    assert supervisor.nodes is not None
    nodes = Nodes(supervisor, supervisor.nodes.allocation, {"ever_excluded": tried_before})
    nodes.excluded = {"n1": "gpus: 7 of 8"}
    assert asyncio.run(supervisor._give_nodes_back(nodes)) == ExitCode.BAD_NODE
    assert read_json(run.state)["message"].startswith("link 2 of 2 goes on") and not asked_of(
        calls, "scancel"
    )
