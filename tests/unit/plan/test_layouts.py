"""Layouts as golden text: which roles are on which node of which job, and the scripts that ask for those nodes."""

from __future__ import annotations

import asyncio
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc import __version__
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, SchedulerError
from primerl_hpc.plan.plan import Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_engines, render_job
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation, components_started_together, read_allocation
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.srun import srun_command
from primerl_hpc.slurm.jobs import parse_squeue
from tests.support.slurm_rows import printed, queue_row, row

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "layouts"
RANKS = "layout.trainer.ranks=auto"
EVAL = "environments.eval=[{id: reverse-text}]"
SFT = "sft={data: {path: data.jsonl}}"

L40S = (
    "node_types.l40s={partition: l40s, account: cheap, nodes: 6, gpus: 4, gpu: L40S, gpu_type: l40s, cores: 64, "
    "memory_gib: 500, memory: 480G, constraint: ib}"
)
TYPES = (L40S, "scheduler.gpu_type=h100", "scheduler.constraint=hbm", "scheduler.mail_type=[END]")
"""Settings of a profile with H100 and L40S nodes."""

LAYOUTS: dict[str, tuple[str, list[str], tuple[str, ...]] | tuple[str, list[str]]] = {
    "node-types": (
        "h100x64",
        [
            "layout.inference={node_type: l40s, replicas: auto, tensor_parallel: 2}",
            "layout.trainer.nodes=2",
            RANKS,
        ],
        TYPES,
    ),
    "node-types-and-cpu-partition": (
        "h100x64",
        [
            "algorithm={type: opd}",
            "teacher={model: {name: org/big}, layout: {replicas: 2, tensor_parallel: 4}}",
            "layout.inference={node_type: l40s, replicas: 8}",
            "layout.orchestrator.place=cpu-partition",
            RANKS,
        ],
        (*TYPES, "cpu_partition={partition: cpu}", "scheduler.spare_nodes=1"),
    ),
    "node-type-alone": (
        "h100x64",
        ["layout.inference={node_type: l40s, replicas: 2}", "layout.trainer={node_type: l40s, ranks: 2}"],
        TYPES,
    ),
    "node-type-elastic": (
        "h100x64",
        ["layout.inference={node_type: l40s, elastic: true, replicas: 3, tensor_parallel: 2}", RANKS],
        TYPES,
    ),
    "shared-node": ("virtual", []),
    "two-nodes-each": (
        "h100x64",
        ["layout.inference={nodes: 2, replicas: auto}", "layout.trainer.nodes=2", RANKS],
    ),
    "engine-over-nodes": ("h100x64", ["layout.inference={tensor_parallel: 16}", RANKS]),
    "sft": ("h100x64", ["kind=sft", "layout.trainer.nodes=2", RANKS, SFT]),
    "inference": ("h100x64", ["kind=inference", "layout.inference={replicas: 4, tensor_parallel: 2}"]),
    "prefill": (
        "h100x64",
        [
            "kind=inference",
            "layout.inference={nodes: 1, replicas: auto, tensor_parallel: 2, prefill: {replicas: 2, tensor_parallel: 4}}",  # noqa: E501
        ],
    ),
    "eval": ("h100x64", ["kind=eval", "layout.inference={replicas: 8}", EVAL]),
    "cpu-partition": ("virtual", ["layout.orchestrator.place=cpu-partition"]),
    "orchestrator-beside-trainer": (
        "h100x64",
        [
            "layout.inference={nodes: 2, replicas: auto}",
            "layout.trainer.nodes=2",
            RANKS,
            "layout.orchestrator.place=trainer",
        ],
    ),
    "teacher": (
        "h100x64",
        [
            "algorithm={type: opd}",
            "teacher={model: {name: org/big}, layout: {replicas: 2, tensor_parallel: 4}}",
            "layout.inference={nodes: 2, replicas: auto}",
            RANKS,
        ],
    ),
    "elastic": ("virtual", ["layout.inference={elastic: true, replicas: 3, partition: preemptible}"]),
    "elastic-gpu": ("h100x64", ["layout.inference={elastic: true, replicas: 6, tensor_parallel: 2}", RANKS]),
}


def compiled(layout: str) -> tuple[Plan, list[str]]:
    """Plan and scripts of a layout."""
    name, overrides, *settings = LAYOUTS[layout]
    profile = load_profile(name, overrides=settings[0] if settings else ()).profile
    recipe = load_recipe("reverse_text/tiny", overrides=["warmup=null", *overrides]).recipe
    plan = compile_plan(recipe, profile, run_dir="/shared/runs/tiny-001", python="/venv/bin/python")
    scripts = [render_job(plan, profile, python="/venv/bin/python")]
    if plan.num_elastic:
        scripts.append(render_engines(plan, profile, python="/venv/bin/python"))
    return plan, [script.replace(f"primerl-hpc {__version__}", "primerl-hpc VERSION") for script in scripts]


def shown(plan: Plan, scripts: list[str]) -> str:
    nodes = [f"node {node.index}: {', '.join(node.roles)}" for node in plan.nodes]
    elastic = [f"own job: {process.name}" for phase in plan.phases for process in phase.elastic]
    return "\n".join([*nodes, *elastic, *plan.notes, "", *scripts])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_as_recorded(layout: str, request: pytest.FixtureRequest) -> None:
    text, golden = shown(*compiled(layout)), GOLDEN / f"{layout}.txt"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_scripts_pass_shellcheck(layout: str, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    for script in compiled(layout)[1]:
        (tmp_path / "x.sbatch").write_text(script)
        subprocess.run(["shellcheck", str(tmp_path / "x.sbatch")], check=True)


def test_elastic_engines_leave_all_nodes_of_the_job_to_the_trainer() -> None:
    plan, _ = compiled("elastic")
    main = plan.phase("main")
    assert [process.name for process in main.elastic] == ["inference-0", "inference-1", "inference-2"]
    assert "inference-0" not in [process.name for process in main.processes]
    assert main.process("inference-2").nodes == (0,) and len(plan.nodes) == 1
    assert plan.num_hosts == 4  # so no process listens on the loopback address only


def test_a_trainer_alone_has_no_engines_whatever_its_recipe_asks() -> None:
    """As benchmark mode measures it."""
    name, overrides = LAYOUTS["elastic"][:2]
    overrides = ["warmup=null", "layout.trainer={nodes: 2, ranks: 4}", *overrides]
    recipe = load_recipe("reverse_text/tiny", overrides=overrides).recipe
    place = {"run_dir": "/shared/runs/x", "python": "/venv/bin/python"}
    plan = compile_plan(recipe, load_profile(name).profile, **place, only_trainer=True)
    assert [node.roles for node in plan.nodes] == [("trainer-0 [0,1]",)] * 2 and plan.num_elastic == 0


@pytest.mark.parametrize(
    ("overrides", "profile", "says"),
    [
        (["layout.inference={elastic: true, replicas: 2}"], "local", "SLURM jobs"),
        (["layout.inference={elastic: true, replicas: 1}", "kind=eval", EVAL], "virtual", "kind rl"),
        (["layout.inference={elastic: true, replicas: 1, tensor_parallel: 4}"], "virtual", "one node with 2"),
        (["layout.inference={elastic: true, replicas: auto}"], "virtual", "need a number of replicas"),
        (["layout.inference={partition: x}"], "virtual", "elastic: true"),
    ],
)
def test_what_elastic_engines_cannot_be_is_refused(overrides: list[str], profile: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe = load_recipe("reverse_text/tiny", overrides=["warmup=null", *overrides]).recipe
        compile_plan(recipe, load_profile(profile).profile, run_dir="/r", python="/p")


APPTAINER = (
    "software.default={python: /opt/primerl/bin/python, container: "
    "{kind: apptainer, image: /shared/images/primerl-hpc.sif, mounts: ['/shared/models:/shared/models:ro']}}"
)


@pytest.mark.parametrize(
    ("kind", "profile", "overrides"),
    [("pyxis", "h100x64-pyxis", []), ("apptainer", "h100x64", [APPTAINER])],
    ids=["pyxis", "apptainer"],
)
def test_srun_lines_of_a_container_are_as_recorded(
    kind: str, profile: str, overrides: list[str], request: pytest.FixtureRequest
) -> None:
    layout = ["layout.inference={nodes: 1, replicas: 2, tensor_parallel: 4}", RANKS, "warmup=null"]
    recipe = load_recipe("reverse_text/tiny", overrides=layout).recipe
    place = {"run_dir": "/shared/runs/tiny-001", "python": "/venv/bin/python"}
    plan = compile_plan(recipe, load_profile(profile, overrides=overrides).profile, **place)
    nodes = Allocation(("gpu04", "gpu05"), cpus_per_node=96, has_gpus=True, gpus_per_node=8, job_id="7")
    lines = []
    for process in plan.phase("main").processes:
        words = srun_command(Launch(process, RunDir(Path(plan.run_dir)), "main", 1, 0), nodes)
        lines.append(shlex.join("/venv/bin/python" if word == sys.executable else word for word in words))
    text, golden = "\n\n".join(lines) + "\n", GOLDEN.parent / "srun" / f"{kind}.txt"
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


HET = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST": "c3",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "c3",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[04-05]",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "16",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "64(x2)",
}


def test_nodes_of_a_heterogeneous_job_are_found_on_their_component() -> None:
    plan, _ = compiled("cpu-partition")
    allocation = read_allocation(plan, HET)
    assert allocation.hosts == ("gpu04", "gpu05", "c3")
    phase = plan.phase("main")
    lines = {}
    for process in phase.processes:
        launch = Launch(process, RunDir(Path("/r")), "main", 1, 0)
        lines[process.name] = srun_command(launch, allocation)
    assert {"--het-group=1", "--nodelist=gpu05", "--cpus-per-task=64"} <= set(lines["trainer-0"])
    assert {"--het-group=0", "--nodelist=c3", "--cpus-per-task=16"} <= set(lines["orchestrator-0"])


def test_nodes_of_three_types_are_found_on_their_components_and_spares_replace_their_own_type() -> None:
    plan, _ = compiled("node-types-and-cpu-partition")
    hosts = ("c3", "l[01-02]", "gpu[04-06]")  # CPU node; engines; trainer, teacher and the spare node
    environ = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "3"}
    for index, (names, cpus) in enumerate(zip(hosts, ("8", "64(x2)", "96(x3)"), strict=True)):
        environ |= {
            f"SLURM_JOB_ID_HET_GROUP_{index}": str(7 + index),
            f"SLURM_JOB_NODELIST_HET_GROUP_{index}": names,
            f"SLURM_JOB_CPUS_PER_NODE_HET_GROUP_{index}": cpus,
        }
    allocation = read_allocation(plan, environ)
    assert allocation.hosts == ("l01", "l02", "gpu04", "gpu05", "c3") and allocation.spares == ("gpu06",)
    words = {}
    for process in plan.phase("main").processes:
        words[process.name] = srun_command(Launch(process, RunDir(Path("/r")), "main", 1, 0), allocation)
    assert {"--het-group=1", "--nodelist=l02", "--cpus-per-task=64"} <= set(words["inference-1"])
    assert {"--het-group=2", "--nodelist=gpu04", "--cpus-per-task=96"} <= set(words["trainer-0"])
    # an engine uses 1 of the 4 GPUs of its node; the trainer uses all 8 of its node, so it needs no device list
    assert "--devices" in words["inference-1"] and "--devices" not in words["trainer-0"]
    replaced = allocation.without({"gpu04"})
    assert replaced is not None and replaced.hosts == ("l01", "l02", "gpu06", "gpu05", "c3")
    assert allocation.without({"l01"}) is None  # the spare node has another type
    assert allocation.by_component(allocation.order) == [["c3"], ["l01", "l02"], ["gpu04", "gpu05", "gpu06"]]


def test_the_preflight_expects_the_gpus_of_each_node_type() -> None:
    plan, _ = compiled("node-types-and-cpu-partition")
    assert plan.preflight is not None
    assert plan.preflight.component_gpus == (0, 4, 8)


@pytest.mark.parametrize(
    ("overrides", "says", "hint"),
    [
        (["layout.trainer.node_type=l40"], "has no node type 'l40'", "use one of l40s"),
        (["layout.inference.node_type=v100"], "layout.inference.node_type", "l40s"),
        (
            ["layout.inference={node_type: l40s, replicas: 1, nodes: 7}", RANKS],
            "leave 6 of 7 inference nodes idle",
            "lower layout.inference.nodes",
        ),
        (
            ["layout.inference={node_type: l40s, replicas: 28, nodes: 7}", RANKS],
            "requires 7 nodes, node type 'l40s' of profile 'h100x64' has 6",
            "lower layout.inference.nodes",
        ),
        (
            ["layout.trainer={node_type: l40s, nodes: 1, ranks: 8}"],
            "ranks 8 on 1 nodes of 4 accelerators",
            "",
        ),
        (
            ["layout.inference={node_type: l40s, tensor_parallel: 6}"],
            "a node of node type 'l40s' of profile 'h100x64' has 4",
            "multiple of 4",
        ),
    ],
)
def test_layouts_that_a_node_type_cannot_hold_are_refused(overrides: list[str], says: str, hint: str) -> None:
    recipe = load_recipe("reverse_text/tiny", overrides=["warmup=null", *overrides]).recipe
    profile = load_profile("h100x64", overrides=TYPES).profile
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        compile_plan(recipe, profile, run_dir="/r", python="/p")
    assert hint in caught.value.hint


def test_a_node_type_without_types_in_the_profile_names_the_block_to_add() -> None:
    recipe = load_recipe("reverse_text/tiny", overrides=["layout.trainer.node_type=h100"]).recipe
    with pytest.raises(ConfigError, match="profile 'local' has no node type 'h100'") as caught:
        compile_plan(recipe, load_profile("local").profile, run_dir="/r", python="/p")
    assert "add it to node_types of the profile" in caught.value.hint


@pytest.mark.parametrize(
    ("profile", "node_type", "says"),
    [
        ("h100x64", "{nodes: 2, gpus: 0}", "describe nodes without GPUs in cpu_partition"),
        ("virtual", "{nodes: 2, gpus: 8}", "describe GPU nodes in node"),
        ("h100x64", "{gpus: 8}", "nodes"),
        ("h100x64", "{nodes: 2, spare_nodes: 2}", "spare_nodes 2 must be less than nodes 2"),
        ("local", "{nodes: 2, gpus: 0}", "needs SLURM"),
        ("h100x64", "{nodes: 2, walltime: 3}", "walltime"),
    ],
)
def test_node_types_that_cannot_be_used_are_refused_in_the_profile(
    profile: str, node_type: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_profile(profile, overrides=[f"node_types.big={node_type}"])


@pytest.mark.parametrize(
    "said, are_together",
    [
        (row("7", "7+0", "120", "101") + row("8", "7+1", "119", "110"), True),
        (row("7", "7+0", "180", "160") + row("8", "7+1", "120", "101"), False),
        ("", True),
        ("Socket timed out", True),
    ],
    ids=["both ended and began again", "the head alone", "no answer", "an error"],
)
def test_components_components_started_together_unless_one_began_before_the_other_was_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, are_together: bool
) -> None:
    (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ "$SLURM_TIME_FORMAT" = %s ] && {printed(said)}\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    allocation = read_allocation(compiled("cpu-partition")[0], HET)
    assert asyncio.run(components_started_together(allocation)) is are_together


def test_a_plan_of_two_components_in_an_ordinary_job_is_refused() -> None:
    with pytest.raises(SchedulerError, match="heterogeneous"):
        read_allocation(compiled("cpu-partition")[0], {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"})


def test_a_heterogeneous_job_is_known_by_its_leader() -> None:
    rows = (("7", "7+0"), ("8", "7+1"), ("9", "9"))
    text = "".join(queue_row(number, "RUNNING", listed=listed) for number, listed in rows)
    assert sorted(parse_squeue(text)) == ["7", "9"]
