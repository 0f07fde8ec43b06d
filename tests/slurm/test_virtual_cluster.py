"""tools/virtual-cluster: a start after an unclean end, no process left by ``down``, power cuts and returns of nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, captured, wait_for
from tests.support.virtual_slurm import TOOL, Cluster, set_node_state, take_out_of_service


def holds(folder: Path) -> list[int]:
    """Processes of the cluster in ``folder``."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes() + b"\0" + (each / "environ").read_bytes()
        except OSError:
            continue
        if f"{folder}\0".encode() in words and int(each.name) != os.getpid():
            found.append(int(each.name))
    return found


def setting(cluster: Cluster, key: str) -> str:
    """Value of a setting in the cluster's slurm.conf."""
    lines = (cluster.folder / "etc" / "slurm.conf").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith(f"{key}="))


@pytest.fixture
def mine(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster that is not started. SLURM's sockets in its folder must have short names."""
    return Cluster(tmp_path_factory.mktemp("mine"))


def test_up_after_a_kill_and_down_leave_no_process_behind(mine: Cluster, virtual_cluster: Cluster) -> None:
    """A second cluster with the same node names and addresses does not disturb the first one."""
    mine.tool("up", "--nodes", "2", "--no-accounting")
    assert mine.tool("exec", str(mine.folder / "bin" / "srun"), "-N2", "hostname").split() != []
    assert mine.tool("status").startswith("up ") and "main*" in mine.tool("status")
    os.kill(int((mine.folder / "holder.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: mine.tool("status", check=False).startswith("down "), "its end to be told")
    mine.tool("up", "--nodes", "2", "--no-accounting")
    names = captured([str(mine.folder / "bin" / "srun"), "-N2", "hostname"], check=True).stdout.split()
    assert sorted(names) == ["n1", "n2"]
    mine.tool("down", "--purge")
    assert not mine.folder.exists()
    wait_for(lambda: not holds(mine.folder), "the end of its processes")
    assert "v-n1" not in captured(["ip", "link"], check=True).stdout
    virtual_cluster.wait_until_idle()


INSTALL = """
set -e
cp -a /etc {folder}/etc-of-machine && mount --bind {folder}/etc-of-machine /etc
{tool} up --nodes 1 --no-accounting --users alice
for file in passwd group hosts nsswitch.conf; do cp -a /etc/$file /etc/$file.new && mv /etc/$file.new /etc/$file; done
{tool} as alice id -un
{tool} as alice srun --partition=main id -un
"""
"""A package manager renames files into place. All of it in a folder /etc of its own: other clusters run here."""


def test_users_remain_when_a_package_is_installed_on_the_machine(mine: Cluster) -> None:
    tool = f"{TOOL} --dir {mine.folder}/cluster"
    try:
        done = captured(["unshare", "--mount", "bash", "-c", INSTALL.format(folder=mine.folder, tool=tool)])
        assert done.returncode == 0 and done.stdout.splitlines()[-2:] == ["alice", "alice"], done
    finally:
        subprocess.run([*tool.split(), "down", "--purge"], check=True)


def test_clusters_of_one_machine_find_processes_in_the_same_way_and_number_jobs_differently(
    mine: Cluster, virtual_cluster: Cluster
) -> None:
    """SLURM signals the groups of a job, whose names contain the job's number, not those of another cluster."""
    mine.tool("up", "--nodes", "1", "--no-accounting")
    try:
        tracking, others = (setting(each, "ProctrackType") for each in (mine, virtual_cluster))
        assert tracking == others
        if tracking == "proctrack/cgroup":
            assert setting(mine, "FirstJobId") != setting(virtual_cluster, "FirstJobId")
    finally:
        mine.tool("down", "--purge")


def test_a_node_loses_power_and_returns(mine: Cluster, virtual_cluster: Cluster) -> None:
    mine.tool("up", "--nodes", "2", "--no-accounting", "--node-timeout", "3")
    try:
        mine.tool("kill-node", "n2")
        assert "n2 is off" in captured([str(TOOL), "--dir", str(mine.folder), "on", "n2", "true"]).stderr
        states = lambda: mine.tool("exec", "sinfo", "-h", "-N", "-n", "n2", "-p", "main", "-o", "%T")  # noqa: E731
        wait_for(lambda: states().startswith("down"), "the controller's notice", tell=states)
        mine.tool("return-node", "2")
        wait_for(lambda: states() == "idle", "its return", tell=states)
    finally:
        mine.tool("down", "--purge")


def test_a_node_out_of_service_gets_no_job_whatever_it_answers(virtual_cluster: Cluster) -> None:
    told = lambda: virtual_cluster.tool("exec", "scontrol", "show", "node", "n2")  # noqa: E731
    take_out_of_service("n2")
    try:
        # the answer of a node that runs is evaluated seconds later, as is the last one of a node without power
        wait_for(lambda: "State=IDLE+DRAIN " in told(), "its answer", tell=told)
    finally:
        set_node_state("n2", "undrain")
    wait_for(lambda: "State=IDLE " in told(), "its return to service", tell=told)


@pytest.mark.parametrize(
    "folder, words",
    [
        ("c", ["up", "--nodse", "4"]),
        ("c", ["up", "--nodes", "0"]),
        ("c", ["up", "--nodes", "abc"]),
        ("c", ["up", "--nodes"]),
        ("c", ["up", "--gpus", "-1"]),
        ("c", ["up", "--cpus", "08"]),
        ("c", ["up", "--image", "/nowhere"]),
        ("c", ["dwon"]),
        ("too-long-for-sockets" * 4, ["up"]),
    ],
)
def test_a_mistyped_command_starts_nothing(tmp_path: Path, folder: str, words: list[str]) -> None:
    done = captured([str(TOOL), "--dir", str(tmp_path / folder), *words])
    assert done.returncode and done.stderr
    assert not (tmp_path / folder / "holder.pid").exists()


@pytest.mark.parametrize(
    "words, says",
    [
        (["up", "--nodes", "abc"], "--nodes must be an integer of at least 1, not 'abc'"),
        (["up", "--nodes"], "--nodes needs a value"),
        (["up", "--gpus", "-1"], "--gpus must be an integer of at least 0"),
        (["up", "--tracking", "pgid"], "--tracking must be cgroup or linuxproc"),
        (["up", "--users", "Alice"], "--users must be names"),
        (["as", "carol", "id"], "there is no user carol"),
        (["kill-node"], "kill-node NODE"),
        (["return-node"], "return-node NODE"),
        (["on", "n1"], "on NODE COMMAND..."),
        (["exec"], "exec COMMAND..."),
        (["down", "--prugee"], "unknown option --prugee"),
    ],
)
def test_invalid_arguments_are_one_sentence_and_do_not_affect_the_running_cluster(
    virtual_cluster: Cluster, words: list[str], says: str
) -> None:
    before = (virtual_cluster.folder / "holder.pid").read_text()
    command = [str(TOOL), "--dir", str(virtual_cluster.folder), *words]
    done = captured(command)
    assert done.returncode and says in done.stderr and done.stderr.count("\n") == 1
    assert (virtual_cluster.folder / "holder.pid").read_text() == before
    assert virtual_cluster.tool("status").startswith("up ")


def test_a_user_who_is_not_root_gets_an_error_and_help_explains_how_to_add_users(
    virtual_cluster: Cluster, tmp_path: Path
) -> None:
    tool = shutil.copy(TOOL, tmp_path)  # the user may not enter the folder of the checkout
    command = [tool, "--dir", str(virtual_cluster.folder), "status"]
    done = captured(command, user=65534, group=65534)
    assert done.returncode and "status requires root" in done.stderr and "down" not in done.stdout
    shown = captured([str(TOOL), "--help"], check=True).stdout
    assert "sacctmgr -i add user carol account=lab" in shown


def test_the_script_passes_shellcheck() -> None:
    from shutil import which

    if which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run(["shellcheck", str(TOOL)], check=True, cwd=ROOT)
