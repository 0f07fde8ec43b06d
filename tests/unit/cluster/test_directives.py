"""Profile keys become sbatch options: every key, its spelling, what is refused, and what a command line changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cluster.directives import OPTION_OF_KEY, gpu_vendor, options, parse_option, srun_args
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.document import Document, dump_yaml, load_yaml
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.common.validate import validate
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.explain import field_doc
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_job
from tests.support.sbatch import read_directives

EVERY_KEY: dict[str, Any] = {
    "partition": "gpu,debug",
    "account": "proj 7",
    "qos": "long",
    "constraint": "gpu&hbm80g|(a*2)",
    "reservation": "class",
    "time": "1-00:00:00",
    "time_min": "02:00:00",
    "memory": "480G",
    "exclusive": "user",
    "gres": ["nvme:1"],
    "nodelist": "n[01-04]",
    "exclude": "n07,n09",
    "switches": "1@12:00:00",
    "segment": 1,
    "hint": "nomultithread",
    "licenses": ["scratch", "matlab:1"],
    "dependency": "afterok:12?afterok:13",
    "begin": "now+2hours",
    "nice": -5,
    "wckey": "rl",
    "comment": 'fix "this" \\ #1',
    "mail_type": ["END", "TIME_LIMIT_90"],
    "mail_user": "a@b.example",
    "signal_margin_s": 90,
    "requeue": False,
}


def profile(*, gpus: int = 8, **scheduler: Any) -> Profile:
    return Profile.model_validate({"name": "p", "node": {"gpus": gpus}, "scheduler": scheduler})


def directives(made: Profile) -> dict[str, str | None]:
    plan = compile_plan(load_recipe("reverse_text/tiny").recipe, made, run_dir="/r", python="/py")
    read = read_directives(render_job(plan, made, python="/py"))
    assert len(dict(read)) == len(read), "an option stands twice"
    return dict(read)


def test_every_key_becomes_its_option() -> None:
    plain = {key: value for key, value in EVERY_KEY.items() if isinstance(value, str)}
    assert directives(profile(**EVERY_KEY)) == {
        **{OPTION_OF_KEY[key]: value for key, value in plain.items()},
        "job-name": "reverse-text-tiny",
        "nodes": "1",
        "ntasks-per-node": "1",
        "gres": "gpu:8,nvme:1",
        "licenses": "scratch,matlab:1",
        "nice": "-5",
        "segment": "1",
        "mail-type": "END,TIME_LIMIT_90",
        "signal": "B:USR2@90",
        "open-mode": "append",
        "output": "/r/logs/slurm-%j.out",
        "no-requeue": None,
    }


def test_no_key_of_the_scheduler_is_forgotten() -> None:
    other = {"type", "gpu_request", "gpu_type", "extra", "mpi", "srun_extra", "spare_nodes"}
    other |= {"account_suffix", "cpu_account_suffix", "per_gpu", "max_jobs", "submit_env"}
    other |= {"may_name_nodes", "ask_every_s", "step_memory", "step_gres"}
    assert set(OPTION_OF_KEY) | other == set(Scheduler.model_fields)
    assert all(field_doc(Scheduler, name) for name in Scheduler.model_fields)


@pytest.mark.parametrize(
    "changes, gpus, said",
    [
        ({}, 8, {"gres": "gpu:8"}),
        ({"gpu_type": "h100"}, 4, {"gres": "gpu:h100:4"}),
        ({"gpu_request": "gpus-per-node"}, 4, {"gpus-per-node": "4"}),
        ({"gpu_request": "gpus-per-node", "gpu_type": "a100"}, 4, {"gpus-per-node": "a100:4"}),
        ({"gpu_request": "gpus-per-task"}, 4, {"gpus-per-task": "4"}),
        ({"gpu_request": "gpus-per-node", "gres": ["nvme:1"]}, 4, {"gpus-per-node": "4", "gres": "nvme:1"}),
        ({"gpu_request": "none"}, 4, {}),
        ({}, 0, {}),
        ({"gres": ["gpu:8"]}, 0, {"gres": "gpu:8"}),
    ],
)
def test_gpus_in_the_spelling_of_the_site(changes: dict[str, Any], gpus: int, said: dict[str, str]) -> None:
    found = directives(profile(gpus=gpus, **changes))
    assert {key: value for key, value in found.items() if "gpu" in key or key == "gres"} == said


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, {"mem": "0"}),
        ({"memory": None}, {}),
        ({"memory": 512}, {"mem": "512"}),
        ({"memory_per_cpu": "4G"}, {"mem-per-cpu": "4G"}),
        ({"memory": None, "memory_per_gpu": "60G"}, {"mem-per-gpu": "60G"}),
    ],
)
def test_memory_is_requested_once(changes: dict[str, Any], said: dict[str, str]) -> None:
    found = directives(profile(**changes))
    assert {key: value for key, value in found.items() if key.startswith("mem")} == said


def test_sharing_and_extra_options() -> None:
    said = directives(profile(exclusive=False, extra=["--wait-all-nodes=1", "--oversubscribe", "--tmp=a b"]))
    assert "exclusive" not in said and said["wait-all-nodes"] == "1"
    assert said["oversubscribe"] is None and said["tmp"] == "a b"
    assert directives(profile())["exclusive"] is None


@pytest.mark.parametrize(
    "cores, option", [(1, {}), (2, {"cpus-per-task": "2"}), (64, {"cpus-per-task": "64"})]
)
def test_a_task_gets_all_cores_of_a_node_whose_number_is_known(cores: int, option: dict[str, str]) -> None:
    made = Profile.model_validate({"name": "p", "node": {"cores": cores}})
    found = dict(options(made.scheduler, made.node))
    assert {name: value for name, value in found.items() if name.startswith("cpus")} == option


@pytest.mark.parametrize(
    "gpu, vendor, expected",
    [
        (None, None, "nvidia"),
        ("H100", None, "nvidia"),
        ("MI300X", None, "amd"),
        ("mi250", None, "amd"),
        ("AMD Instinct", None, "amd"),
        ("FERMI2", None, "nvidia"),  # MI within a word
        ("MI300X", "nvidia", "nvidia"),
        ("H100", "amd", "amd"),
    ],
)
def test_the_vendor_of_accelerators_follows_from_their_name_unless_it_is_set(
    gpu: str | None, vendor: str | None, expected: str
) -> None:
    node = Profile.model_validate({"name": "p", "node": {"gpu": gpu, "gpu_vendor": vendor}}).node
    assert gpu_vendor(node) == expected


@pytest.mark.parametrize(
    "scheduler, arguments",
    [
        ({}, ()),
        ({"mpi": "pmix"}, ("--mpi=pmix",)),
        ({"mpi": "pmix", "srun_extra": ["--quiet"]}, ("--mpi=pmix", "--quiet")),
        ({"mpi": "pmix", "srun_extra": ["--quiet", "--mpi=none"]}, ("--quiet", "--mpi=none")),
        ({"srun_extra": ["--mpi-like=1"]}, ("--mpi-like=1",)),
        ({"type": "local", "mpi": "pmix"}, ()),
    ],
)
def test_every_srun_names_the_mpi_plugin_once(scheduler: dict[str, Any], arguments: tuple[str, ...]) -> None:
    # a process that local runs start has no srun
    made = Scheduler.model_validate({"mpi": None} | scheduler)
    assert srun_args(made) == arguments


@pytest.mark.parametrize(
    "text, option",
    [
        ("--wait-all-nodes=1", ("wait-all-nodes", "1")),
        ("--no-kill", ("no-kill", None)),
        ("--comment=", ("comment", "")),
        ("--comment=a=b", ("comment", "a=b")),
    ],
)
def test_an_option_is_split_at_its_first_equals_sign(text: str, option: tuple[str, str | None]) -> None:
    assert parse_option(text) == option


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"time": "soon"}, ["scheduler.time", "2-12:00:00"]),
        ({"time": True}, ["scheduler.time"]),
        ({"memory": "lots"}, ["scheduler.memory", "480G"]),
        ({"memory": "1G", "memory_per_cpu": "1G"}, ["memory and memory_per_cpu are mutually exclusive"]),
        ({"gpu_type": "h100:8"}, ["scheduler.gpu_type", "one word"]),
        ({"mail_type": ["ENDE"]}, ["scheduler.mail_type.0", "'END'"]),
        ({"partition": ""}, ["scheduler.partition", "empty"]),
        ({"comment": "a\nb"}, ["scheduler.comment", "one line"]),
        ({"cpu_account": "x"}, ["'scheduler.cpu_account' was removed", "cpu_partition.account"]),
        ({"extra": ["-N4"]}, ["--key=value"]),
        ({"extra": ["--partition=x"]}, ["scheduler.partition"]),
        ({"extra": ["--output=x"]}, ["set by the plan"]),
        ({"extra": ["--a=1 --b=2\n"]}, ["one line"]),
        ({"srun_extra": ["hostname"]}, ["--key=value"]),
        ({"srun_extra": ["--mpi=pmix", "--kill-on-bad-exit=1"]}, ["--kill-on-bad-exit", "by the plan"]),
        ({"srun_extra": ["--wait=5"]}, ["--wait is set by the plan"]),
        ({"time": "60", "time_min": "5"}, ["5 minutes", "raise time_min"]),
        ({"time": "60", "time_min": "2:00:00"}, ["time_min 2:00:00 is longer than time 60"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_key(
    changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(dump_yaml({"name": "site", "scheduler": changes}))
    with pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    assert all(word in str(caught.value) for word in words), caught.value
    assert str(caught.value).startswith(f"{path}:")


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"elastic": {"time": 5}},
            r"\(5 minutes\) is not longer than signal_margin_s 300; raise elastic.time",
        ),
        (
            {"env": {"PRIMERL_ENGINE_API_KEY": "x"}},
            "env: PRIMERL_ENGINE_API_KEY is reserved: the run sets it",
        ),
        (
            {"software": {"default": {"env": {"PRIMERL_RUN_DIR": "x"}}}},
            "PRIMERL_RUN_DIR is reserved: the run sets it",
        ),
    ],
)
def test_what_a_run_could_not_live_with_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(Profile, Document({"name": "site", **changes}))


def test_walltimes_need_no_quotes(tmp_path: Path) -> None:
    """YAML 1.1 would read 12:00:00 as the number 43200."""
    path = tmp_path / "site.yaml"
    for written, meant in (("12:00:00", "12:00:00"), ("90", "90"), ("2-12:00:00", "2-12:00:00")):
        path.write_text(f"name: site\nscheduler: {{time: {written}}}\n")
        assert load_profile(str(path)).profile.scheduler.time == meant


def test_later_changes_of_the_profile_win_and_text_stays_text() -> None:
    environ = {"PRIMERL_PROFILE__SCHEDULER__QOS": "low", "PRIMERL_PROFILE__NODES": "4"}
    loaded = load_profile(
        "h100x64", overrides=["scheduler.account=0123", "scheduler.time=30"], environ=environ
    )
    assert (loaded.profile.scheduler.time, loaded.profile.nodes) == ("30", 8)
    assert loaded.profile.scheduler.account == "0123"  # YAML would read an octal number
    assert loaded.document.origins["scheduler.time"] == "--profile-set"
    assert loaded.document.origins["scheduler.qos"] == "PRIMERL_PROFILE__SCHEDULER__QOS"
    (warning,) = loaded.warnings
    assert warning.startswith("PRIMERL_PROFILE__NODES is ignored because ") and " sets nodes;" in warning
    assert load_profile("h100x64", overrides=["scheduler.partition=null"]).profile.scheduler.partition is None


def test_a_variable_keeps_its_case_and_its_value_stays_text(tmp_path: Path) -> None:
    environ = {
        "PRIMERL_PROFILE__NETWORK__ENV__NCCL_IB_HCA": "mlx5",
        "PRIMERL_PROFILE__NETWORK__INTERFACE": "ib0",
    }
    changes = [
        "env.OMP_NUM_THREADS=4",
        "software.roles.trainer.env.A=1e3",
        "software.setup=[a, b]",
        "software.setup[0]=c",
    ]
    profile = load_profile("h100x64", overrides=changes, environ=environ).profile
    assert profile.network.env["NCCL_IB_HCA"] == "mlx5" and profile.network.interface == "ib0"
    assert profile.env["OMP_NUM_THREADS"] == "4" and profile.software.of_role(Role.TRAINER).env == {
        "A": "1e3"
    }
    assert profile.software.setup == ("c", "b")


@pytest.mark.parametrize(
    "text", ["12e4", "1e-5", "12:00:00", "0123", "yes", "2024-01-01", "null", "a: b", ""]
)
def test_what_is_written_is_read_as_it_was(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(dump_yaml({"text": text, "number": 1e-05}))
    assert load_yaml(path).values == {"text": text, "number": 1e-05}


def test_the_frozen_profile_is_the_one_that_was_used(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    for overrides in ([], ["scheduler.time=30"]):
        loaded = load_profile("perlmutter", overrides=overrides, environ={})
        path.write_text(loaded.text)
        assert load_profile(str(path), environ={}).profile == loaded.profile
        assert ("# Perlmutter" in loaded.text) == (not overrides)


@pytest.mark.parametrize(
    "change, words",
    [
        ("scheduler.tiem=60", ["--profile-set", "did you mean 'scheduler.time'?"]),
        ("scheduler.time=soon", ["--profile-set", "scheduler.time", "'soon'"]),
        ("scheduler.time", ["key=value"]),
    ],
)
def test_a_wrong_change_is_named_like_a_wrong_line(change: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_profile("h100x64", overrides=[change])
    assert all(word in str(caught.value) for word in words), caught.value
