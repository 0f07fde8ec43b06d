"""An export and an evaluation that wait for a run under SLURM: they start only when it is done."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.files import read_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.launch.compose import ONE_JOB, ChainRequest
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.render.job import render_export
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import parse_squeue, squeue_command
from tests.support.checksums import verify_checksums
from tests.support.helpers import ROOT, wait_for
from tests.support.virtual_slurm import SAY, TOY_RECIPE, TRAIN, SlurmToy, run_cli
from tests.unit.export.test_export import write_version

FAILS = TRAIN.replace(
    "if is_last or is_stop:",
    "if (run.root / 'fail').exists(): raise SystemExit(1)\n    if is_last or is_stop:",
)


class Trio:
    """A training run, its export and its evaluation."""

    def __init__(self, new_toy: Callable[..., SlurmToy], folder: Path) -> None:
        self.base, self.to = folder / "base", folder / "exported"
        self.base.mkdir()
        (self.base / "config.json").write_text("{}")
        self.main, self.judge = new_toy("run"), new_toy("run-evaluation")
        self.main.add(Role.TRAINER, FAILS, OnExit.ENDS_PHASE)
        self.judge.add(Role.EVALUATOR, SAY, OnExit.ENDS_PHASE)
        evaluation = {"environments": [{"id": "reverse-text"}]}
        self.main.recipe = {**TOY_RECIPE, "after": {"export": {"to": str(self.to)}, "evaluation": evaluation}}
        self.judge.prepare()
        plan, python = self.main.prepare(), str(Path(subprocess.sys.executable))
        text = render_export(plan, self.main.profile, python=python, package_root=str(ROOT))
        write_text(self.main.run.export_script, text)

    def submit(self, chain: ChainRequest = ONE_JOB) -> None:
        self.main.submit(chain)

    @property
    def states(self) -> dict[str, str]:
        return {name: each["state"] for name, each in self.main.snapshot().after.items()}

    @property
    def jobs(self) -> list[str]:
        return [each["job_id"] for each in read_json(self.main.run.job)["after"].values()]

    def job_states(self) -> set[str]:
        return {fact.state for fact in parse_squeue(ask(squeue_command(self.jobs))).values()}

    def warn_of_walltime(self) -> None:
        job = self.main.events("attempt_started")[-1]["job"]
        subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)

    def finish(self) -> None:
        """Complete the run and wait for its follow-up jobs."""
        write_version(self.main.run, 1, self.base)
        (self.main.run.root / "enough").touch()
        self.main.wait_for_state(RunState.DONE)
        self.judge.wait_for_state(RunState.DONE)
        wait_for(self.to.exists, "the export", tell=self.main.words)
        verify_checksums(self.to)
        self.main.assert_nothing_is_left()
        assert self.states == {"export": "done", "evaluation": "done"}


@pytest.fixture
def trio(new_toy: Callable[..., SlurmToy], tmp_path: Path) -> Trio:
    return Trio(new_toy, tmp_path)


def test_follow_up_jobs_wait_for_a_requeued_run_and_start_when_it_is_done(trio: Trio) -> None:
    trio.submit()
    trio.main.wait_until_ready("trainer-0")
    assert set(trio.states.values()) == {"waits for this run"}
    waiting = trio.judge.snapshot()
    assert waiting.state == RunState.PENDING and waiting.message == "waits for run"
    trio.warn_of_walltime()
    trio.main.wait_until_ready("trainer-0", attempt=2)
    assert trio.job_states() == {"PENDING"} and not trio.to.exists()
    shown = run_cli("status", str(trio.main.run.root)).stdout
    assert f"then export: waits for this run  {trio.to}" in shown
    trio.finish()
    assert f"follows {trio.main.run.root}" in run_cli("status", str(trio.judge.run.root)).stdout


def test_follow_up_jobs_are_removed_with_a_failed_run_and_submitted_again_by_resume(trio: Trio) -> None:
    trio.submit()
    trio.main.wait_until_ready("trainer-0")
    (trio.main.run.root / "fail").touch()
    trio.main.wait_for_state(RunState.FAILED)
    wait_for(lambda: trio.job_states() == {"CANCELLED"}, "their end", tell=trio.main.words)
    wait_for(lambda: set(trio.states.values()) == {"dropped: this run did not finish"}, "SLURM's word of it")
    never = trio.judge.snapshot()
    assert never.state == RunState.CANCELLED and "run did not finish" in (never.message or "")
    trio.main.cluster.wait_until_idle()
    (trio.main.run.root / "fail").unlink()
    trio.submit()
    trio.main.wait_until_ready("trainer-0", attempt=2)
    trio.finish()


@pytest.mark.slow
@pytest.mark.parametrize("chain", [ChainRequest(3), ChainRequest(is_until_done=True)])
def test_follow_up_jobs_start_after_whichever_link_completes_the_run(trio: Trio, chain: ChainRequest) -> None:
    trio.submit(chain)
    trio.main.wait_until_ready("trainer-0")
    trio.warn_of_walltime()
    trio.main.wait_until_ready("trainer-0", attempt=2)
    assert trio.job_states() == {"PENDING"}
    trio.finish()


def test_cancelling_a_run_cancels_its_follow_up_jobs(trio: Trio) -> None:
    trio.submit()
    trio.main.wait_until_ready("trainer-0")
    assert run_cli("cancel", str(trio.main.run.root), "--wait").returncode == 0
    assert trio.job_states() == {"CANCELLED"}
    trio.main.assert_nothing_is_left()


def test_a_refused_export_removes_the_run_from_the_queue(trio: Trio) -> None:
    script = trio.main.run.export_script
    script.write_text(script.read_text().replace("#SBATCH --partition=main", "#SBATCH --partition=nowhere"))
    with pytest.raises(SchedulerError, match="partition nowhere does not exist"):
        trio.submit()
    assert not trio.main.run.job.exists() and not trio.main.events("attempt_started")
    assert ask(["squeue", "--noheader"]) == ""
