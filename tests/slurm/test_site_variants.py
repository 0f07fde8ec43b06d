"""Sites that differ from SLURM's defaults: a job_submit plug-in, hidden jobs and nodes, no accounting, JobRequeue=0.

All of it as an ordinary user. Limits of an account: test_submission.py. Outputs of other versions: tests/slurm/data.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from tests.support.cluster_user import ClusterUser
from tests.support.virtual_slurm import SERVE, TRAIN, Cluster, SlurmToy, cluster_of_users, run_cli

POLICY = (
    "**************************************************",
    "Jobs on partition main must name a project with",
    "--comment=PROJECT:<id>. Yours names none.",
    "* See https://hpc.acme.example/policy#comments",
    "* or write to help@acme.example",
    "**************************************************",
)
PLUGIN = """
function slurm_job_submit(job, partitions, uid)
    if job.comment == nil then
        slurm.log_user([[TEXT]])
        return slurm.ERROR
    end
    slurm.log_user("Welcome to ACME. Maintenance: Monday.")
    if job.comment == "PROJECT:low" then job.partition = "preemptible" end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
""".replace("TEXT", "\n".join(POLICY))
HIDDEN = "PrivateData=accounts,events,jobs,nodes,partitions,reservations,usage,users"
Toys = Callable[..., SlurmToy]


@pytest.fixture(scope="module")
def site(users_folder: Path, virtual_cluster: Cluster) -> Iterator[ClusterUser]:
    """An ordinary user of the site."""
    plugin = users_folder / "job_submit.lua"
    plugin.write_text(PLUGIN)
    options = ("--slurm-conf", f"{HIDDEN} JobRequeue=0", "--job-submit", str(plugin))
    with cluster_of_users(users_folder, *options) as (_, users):
        yield users[0]


@pytest.fixture
def new_run(site: ClusterUser, users_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    home = users_folder / site.name
    site.act_here(home, monkeypatch)
    made: list[SlurmToy] = []

    def make(name: str, **scheduler: Any) -> SlurmToy:
        toy = SlurmToy(Cluster(site.folder, site), home / name, **scheduler)
        toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
        toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1,))
        made.append(toy)
        return toy

    yield make
    for toy in made:
        toy.end()


def test_a_rejection_of_the_sites_plugin_is_printed_complete_and_nothing_is_queued(new_run: Toys) -> None:
    toy = new_run("rejected")
    with pytest.raises(SchedulerError) as caught:
        toy.submit()
    sentence, *text = str(caught.value).splitlines()
    assert "a rule of this site (job_submit) rejects it" in sentence
    assert [line.strip() for line in text if line.strip() in POLICY] == list(POLICY)
    assert toy.cluster.jobs_of(toy.cluster.user.name if toy.cluster.user else "") == []


def test_a_job_that_the_site_moves_and_hides_is_requeued_and_ends(new_run: Toys, site: ClusterUser) -> None:
    """The plug-in replaces the partition, SLURM hides nodes and partitions, and jobs are not requeued by default."""
    toy = new_run("moved", comment="PROJECT:low")
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    assert "Partition=preemptible" in toy.cluster.admin("scontrol", "show", "job", toy.job)
    shown = run_cli("status", str(toy.run.root), user=site)
    assert shown.returncode == 0 and "running" in shown.stdout, shown.stdout + shown.stderr
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.wait_for_words("goes on after 2", "trainer-0", attempt=2)
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    used = run_cli("status", str(toy.run.root), user=site)
    assert used.returncode == 0 and "done" in used.stdout, used.stderr
