"""Keys of a profile that describe a site: validation, and the script and plan that they produce."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.limits import check_limits, max_elastic_engines, walltime
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.document import Document, dump_yaml
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.common.validate import validate
from primerl_hpc.plan.plan import Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_engines, render_job
from primerl_hpc.render.requests import type_request, with_walltimes
from tests.support.sbatch import read_directives

TINY = "reverse_text/tiny"


def profile(**changes: Any) -> Profile:
    return validate(Profile, Document({"name": "p", "nodes": 4, **changes}))


def plan_of(made: Profile, *overrides: str) -> Plan:
    recipe = load_recipe(TINY, overrides=list(overrides)).recipe
    return compile_plan(recipe, made, run_dir="/r", python="/py")


def script(made: Profile, *overrides: str) -> str:
    return render_job(plan_of(made, *overrides), made, python="/py")


def options(made: Profile, *overrides: str) -> dict[str, str | None]:
    return dict(read_directives(script(made, *overrides)))


# -- job options


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scheduler": {"account": "abc", "account_suffix": "@h100"}}, {"account": "abc@h100"}),
        ({"scheduler": {"account": "abc@h100", "account_suffix": "@h100"}}, {"account": "abc@h100"}),
        ({"scheduler": {"gpu_request": "gpus"}, "node": {"gpus": 4}}, {"gpus": "4"}),
        ({"scheduler": {"segment": 1}}, {"segment": "1"}),
        ({"node": {"threads_per_core": 1}}, {"threads-per-core": "1"}),
        ({"scratch": {"path": "/nvme", "constraint": "nvme"}}, {"constraint": "nvme"}),
        (
            {"scheduler": {"constraint": "a|b"}, "scratch": {"path": "/nvme", "constraint": "nvme"}},
            {"constraint": "(a|b)&nvme"},
        ),
        ({"scratch": {"path": "$TMPDIR", "gres": "tmpfs:200G"}}, {"gres": "gpu:8,tmpfs:200G"}),
        (
            {"software": {"default": {"container": {"kind": "uenv", "image": "pt/v1", "view": "default"}}}},
            {"uenv": "pt/v1", "view": "default"},
        ),
    ],
)
def test_a_site_key_becomes_its_option(changes: dict[str, Any], expected: dict[str, str]) -> None:
    found = options(profile(**changes))
    assert {name: found.get(name) for name in expected} == expected


def test_an_elastic_engine_requests_what_its_gpus_bring() -> None:
    made = profile(
        node={"gpus": 4, "cores": 288, "memory_gib": 800},
        scheduler={"per_gpu": {"cores": 72, "memory": "216G"}},
    )
    plan = plan_of(made, "layout.inference={elastic: true, replicas: 2}", "warmup=null")
    found = dict(read_directives(render_engines(plan, made, python="/py")))
    assert (found["mem"], found["cpus-per-task"], found["gres"]) == (f"{216 * 1024}M", "72", "gpu:1")


def test_the_account_of_a_cpu_partition_has_its_own_suffix() -> None:
    made = profile(
        scheduler={"account": "ab", "account_suffix": "-gpu", "cpu_account_suffix": "-cpu"},
        cpu_partition={"partition": "cpu"},
    )
    accounts = [
        value
        for name, value in read_directives(script(made, "layout.orchestrator.place=cpu-partition"))
        if name == "account"
    ]
    assert accounts == ["ab-cpu", "ab-gpu"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"scheduler": {"may_name_nodes": False, "exclude": "n1"}},
            "exclude: this site does not accept jobs",
        ),
        ({"scheduler": {"extra": ["--threads-per-core=1"]}}, "own key: node.threads_per_core"),
        ({"scheduler": {"segment": 9}}, "segment 9 must be at most nodes"),
        ({"scheduler": {"per_gpu": {"memory": "0"}}}, "must be greater than 0"),
        ({"scheduler": {"submit_env": {"drop": ["A-B"]}}}, "a pattern such as CONDA_"),
        ({"node": {"gpus": 2, "numa_of_gpu": [0]}}, "numa_of_gpu has 1 entries for 2 GPUs"),
        ({"node": {"gpus": 1, "cpus_of_gpu": ["3-1"]}}, "first CPU is greater"),
        ({"node": {"gpus": 1, "cpus_of_gpu": ["0,,1"]}}, "must be a list of CPUs such as 0-17,72-89"),
        ({"node": {"gpus": 1, "cpus_of_gpu": ["0"], "numa_of_gpu": [0]}}, "mutually exclusive"),
        (
            {"node": {"arch": "aarch64"}, "node_types": {"x": {"nodes": 1, "arch": "x86_64"}}},
            "node_types.x.arch is x86_64, but node.arch is aarch64",
        ),
        ({"node": {"memory_gib": 10, "host_memory_gib": 20}}, "host_memory_gib 20 must be at most"),
        (
            {"network": {"proxy": {"http": "http://me:pw@proxy:1"}}},
            "such as http://proxy.site:3128, not 'http://***@proxy:1'",
        ),
        ({"network": {"proxy": {}}}, "http or https must be given"),
        ({"limits": [{"min_nodes": 4, "max_nodes": 2}]}, "max_nodes 2 is less than min_nodes 4"),
        ({"software": {"module_paths": ["-f"]}}, "starts with '-'"),
        (
            {"software": {"default": {"container": {"kind": "pyxis", "image": "a", "gpu": "nv"}}}},
            "kind apptainer",
        ),
        (
            {"software": {"default": {"container": {"kind": "pyxis", "image": "a", "command": "b"}}}},
            "command is a",
        ),
        (
            {
                "software": {
                    "default": {"container": {"kind": "container-engine", "image": "a", "mounts": ["/a:/a"]}}
                }
            },
            "EDF file",
        ),
    ],
)
def test_a_site_key_that_cannot_be_meant_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        profile(**changes)


@pytest.mark.parametrize("protocol", [None, "LL128", "LL,LL128", "^LL"])
def test_a_gh200_profile_without_protection_from_ll128_is_refused(protocol: str | None) -> None:
    network = {"env": {"NCCL_PROTO": protocol}} if protocol else {}
    with pytest.raises(ConfigError, match="silently corrupts data"):
        profile(node={"gpus": 4, "gpu": "GH200-96GB"}, network=network)


@pytest.mark.parametrize("protocol", ["^LL128", "Simple", "LL,Simple", "^LL128,LL"])
def test_a_gh200_profile_that_excludes_ll128_is_accepted(protocol: str) -> None:
    made = profile(node={"gpus": 4, "gpu": "GH200-96GB"}, network={"env": {"NCCL_PROTO": protocol}})
    assert made.node.is_grace_hopper


# -- limits and variants

LIMITS = [
    {"partition": "batch", "max_nodes": 2, "time": "2:00:00"},
    {"partition": "batch", "min_nodes": 3, "time": "6:00:00"},
    {"partition": "extended", "max_nodes": 2, "time": "24:00:00", "max_running": 1},
    {"partition": "debug", "node_minutes": 90, "time": "1:30:00"},
]


def limited(**scheduler: Any) -> Profile:
    return profile(limits=LIMITS, scheduler={"partition": "batch", **scheduler})


@pytest.mark.parametrize(("num_nodes", "expected"), [(1, "2:00:00"), (2, "2:00:00"), (3, "6:00:00")])
def test_the_walltime_follows_the_number_of_nodes(num_nodes: int, expected: str) -> None:
    made = limited()
    assert walltime(made, made.scheduler, num_nodes) == expected
    assert walltime(limited(time=30), limited(time=30).scheduler, num_nodes) == "30"


@pytest.mark.parametrize(("num_nodes", "expected"), [(1, "1:30:00"), (2, "45"), (4, "22")])
def test_the_walltime_of_a_limit_in_node_minutes_is_admitted_by_it(num_nodes: int, expected: str) -> None:
    made = limited(partition="debug")
    assert walltime(made, made.scheduler, num_nodes) == expected
    check_limits(made, made.scheduler, num_nodes)


def test_the_walltime_of_a_node_type_follows_its_own_gpus() -> None:
    limits = [{"max_gpus": 8, "time": 60}, {"time": 30}]
    node_type = {"nodes": 2, "gpus": 1}
    made = profile(limits=limits, node={"gpus": 8}, node_types={"small": node_type})
    (request,) = with_walltimes((replace(type_request(made, "small"), num_nodes=2),), made)
    assert request.scheduler.time == "60"


def test_the_script_has_the_walltime_of_its_limit() -> None:
    assert options(limited())["time"] == "2:00:00"


@pytest.mark.parametrize(
    ("scheduler", "num_nodes", "words"),
    [
        ({"time": "12:00:00"}, 2, ["partition batch: 1 to 2 nodes, at most 2:00:00", "--partition extended"]),
        ({"time": "7:00:00"}, 4, ["4 nodes for 7:00:00", "lower scheduler.time to 6:00:00"]),
        ({"partition": "debug", "time": 60}, 4, ["90 node-minutes", "--partition batch"]),
        ({"partition": "debug", "time": "10:00:00"}, 4, ["lower scheduler.time to 22"]),
        ({"partition": "extended", "time": "30-00:00:00"}, 4, ["partition extended", "use fewer nodes"]),
    ],
)
def test_a_job_beyond_the_limits_is_refused_with_what_fits(
    scheduler: dict[str, Any], num_nodes: int, words: list[str]
) -> None:
    made = limited(**scheduler)
    with pytest.raises(ConfigError) as caught:
        check_limits(made, made.scheduler, num_nodes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_plan_is_refused_before_the_queue() -> None:
    with pytest.raises(ConfigError, match="exceed the limits of partition batch"):
        plan_of(limited(time="3:00:00"))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            [{"partition": "l40s", "max_nodes": 1}, {"partition": "l40s-big", "max_nodes": 8}],
            [
                "2 nodes of node_types.l40s for 12:00:00 exceed the limits of partition l40s: 1 to 1 nodes",
                "partition l40s-big admits these nodes: node_types.l40s.partition: l40s-big",
            ],
        ),
        (
            [{"partition": "cpu", "time": "6:00:00"}, {"partition": "cpu-long", "time": "24:00:00"}],
            [
                "1 node of cpu_partition for 12:00:00 exceed the limits of partition cpu: at most 6:00:00",
                "partition cpu-long admits these nodes: cpu_partition.partition: cpu-long",
            ],
        ),
        ([{"max_nodes": 4, "min_nodes": 2}], []),
    ],
)
def test_the_component_that_exceeds_a_limit_is_named_with_its_key(
    limits: list[dict[str, Any]], words: list[str]
) -> None:
    made = profile(
        node={"gpus": 4},
        node_types={"l40s": {"partition": "l40s", "nodes": 4, "gpus": 4}},
        cpu_partition={"partition": "cpu"},
        scheduler={"partition": "batch", "time": "12:00:00"},
        limits=limits,
    )
    layout = [
        "layout.inference={node_type: l40s, replicas: 2, tensor_parallel: 4}",
        "layout.trainer={nodes: 2, ranks: auto}",
        "layout.orchestrator.place=cpu-partition",
    ]
    if not words:
        assert len(plan_of(made, *layout).components) == 3
        return
    with pytest.raises(ConfigError) as caught:
        plan_of(made, *layout)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_partition_without_limits_is_not_checked() -> None:
    made = limited(partition="other", time="100-00:00:00")
    check_limits(made, made.scheduler, 4)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, None),
        ({"scheduler": {"max_jobs": 3}}, 2),
        ({"elastic": {"max_engines": 1}}, 1),
        ({"limits": LIMITS, "scheduler": {"partition": "extended"}}, 0),
        ({"limits": LIMITS, "scheduler": {"partition": "batch"}, "elastic": {"partition": "extended"}}, 1),
    ],
)
def test_elastic_engines_fit_the_limits_of_jobs(changes: dict[str, Any], most: int | None) -> None:
    made = profile(**changes)
    assert max_elastic_engines(made) == most
    if most is not None:
        with pytest.raises(ConfigError, match=f"more than the {most} that profile 'p' admits"):
            plan_of(made, f"layout.inference={{elastic: true, replicas: {most + 1}}}", "warmup=null")


SITE = {
    "name": "site",
    "nodes": 8,
    "scheduler": {"partition": "gpu", "time": "24:00:00"},
    "variants": {"debug": {"nodes": 2, "scheduler": {"partition": "dev", "time": 30}}},
}


def test_a_variant_changes_the_profile_and_explicit_options_change_the_variant(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(dump_yaml(SITE))
    assert load_profile(str(path)).profile.scheduler.partition == "gpu"
    loaded = load_profile(str(path), variant="debug", overrides=["scheduler.time=10"])
    assert (loaded.profile.nodes, loaded.profile.scheduler.partition) == (2, "dev")
    assert loaded.profile.scheduler.time == "10"
    # a run directory stores what was used
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(loaded.text)
    assert load_profile(str(frozen), environ={}).profile == loaded.profile
    assert not loaded.profile.variants
    with pytest.raises(NotFoundError, match="one of debug"):
        load_profile(str(path), variant="dbg")


def test_a_wrong_variant_is_reported_with_its_line_whichever_is_used(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: site\nnodes: 2\nvariants:\n  debug:\n    scheduler:\n      tiem: 30\n")
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    assert str(caught.value).startswith(f"{path}:6: variants.debug: unknown key 'scheduler.tiem'")


# -- software


def test_purge_paths_and_early_lines_come_before_the_modules() -> None:
    software = {
        "before_modules": ["export A=1"],
        "module_purge": "force-purge",
        "module_paths": ["/appl/modules"],
        "modules": ["nccl"],
        "setup": ["export B=2"],
    }
    text = script(profile(software=software))
    lines = [
        "export A=1",
        "module --force purge",
        "module use /appl/modules",
        "module load nccl",
        "export B=2",
    ]
    positions = [text.index(f"\n{line}\nsetup_check") for line in lines]
    assert positions == sorted(positions)


CONTAINERS = [
    (
        {"kind": "apptainer", "command": "singularity", "gpu": "none", "args": ["--writable-tmpfs"]},
        ("singularity", "exec", "--bind", "/r", "--writable-tmpfs", "img"),
    ),
    ({"kind": "apptainer", "gpu": "rocm"}, ("apptainer", "exec", "--rocm", "--bind", "/r", "img")),
    (
        {"kind": "shifter", "args": ["--module=gpu,nccl-plugin"]},
        ("shifter", "--volume=/r:/r", "--module=gpu,nccl-plugin", "--image=img"),
    ),
]


@pytest.mark.parametrize(("container", "expected"), CONTAINERS, ids=lambda value: str(value)[:30])
def test_a_container_is_a_command_in_front_of_the_process(
    container: dict[str, Any], expected: tuple[str, ...]
) -> None:
    made = profile(software={"default": {"container": {"image": "img", **container}}})
    process = plan_of(made).phase("main").process("trainer-0")
    assert process.argv[: len(expected) + 1] == (*expected, "/py") and process.container == "command"


def test_podman_receives_the_variables_of_the_process() -> None:
    made = profile(
        software={"default": {"container": {"image": "img", "kind": "podman-hpc"}}}, env={"MINE": "1"}
    )
    argv = plan_of(made).phase("main").process("trainer-0").argv
    assert argv[:2] == ("podman-hpc", "run") and {"--env=MINE", "--env=PRIMERL_*", "--gpu"} <= set(argv)


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"kind": "container-engine", "image": "vllm"}, ("--environment=vllm",)),
        ({"kind": "uenv", "image": "pt/v1", "view": "default"}, ("--uenv=pt/v1", "--view=default")),
    ],
)
def test_a_container_of_cscs_is_an_option_of_srun(
    container: dict[str, Any], expected: tuple[str, ...]
) -> None:
    process = (
        plan_of(profile(software={"default": {"container": container}})).phase("main").process("trainer-0")
    )
    assert process.srun_args[-len(expected) :] == expected and process.container == "step"


def test_variables_of_network_scratch_and_proxy_reach_the_processes() -> None:
    made = profile(
        network={
            "interface": "hsn0",
            "interfaces": ["hsn0", "hsn1"],
            "host_suffix": "i",
            "proxy": {"http": "http://proxy:3128", "no_proxy": [".site"]},
        },
        scratch="/nvme/$USER",
    )
    plan = plan_of(made)
    env = plan.phase("main").process("env_server-0").env
    assert env["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1" and env["GLOO_SOCKET_IFNAME"] == "hsn0"
    assert env["PRIMERL_HOST_SUFFIX"] == "i" and env["PRIMERL_SCRATCH"] == "/nvme/$USER"
    assert env["http_proxy"] == env["HTTPS_PROXY"] == "http://proxy:3128" and plan.no_proxy == (".site",)
