"""The planner: nothing is given twice, nothing is asked of a profile that it has not, same inputs give same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.checks.nodes import node_srun_command
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError, PrimerlError
from primerl_hpc.common.names import Role
from primerl_hpc.plan.env import process_env
from primerl_hpc.plan.plan import Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe, parse_recipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import LoRA
from tests.support.helpers import ROOT, safetensors_bytes, unusable_model
from tools.recipe_table import home_profile


def tiny(*overrides: str) -> Recipe:
    return load_recipe("reverse_text/tiny", overrides=list(overrides)).recipe


def plan(recipe: Recipe, profile: Profile) -> Plan:
    return compile_plan(recipe, profile, run_dir="/runs/x", python="/venv/bin/python")


def gpu_profile(nodes: int, gpus: int = 8) -> Profile:
    return Profile.model_validate({"name": "p", "nodes": nodes, "node": {"gpus": gpus}})


RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
FOR_GPUS = [path for path in RECIPES if home_profile(path) != "local"]


@pytest.mark.parametrize("path", sorted(set(RECIPES) - set(FOR_GPUS)), ids=lambda path: path.stem)
def test_every_shipped_recipe_without_gpus_fits_on_this_machine(path: Path) -> None:
    made = plan(load_recipe(str(path)).recipe, load_profile("local").profile)
    assert len(made.nodes) == 1


@pytest.mark.parametrize("path", FOR_GPUS, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize("profile", ["", "juwels-booster", "leonardo", "perlmutter"])
def test_every_shipped_recipe_for_gpus_has_a_plan_on_large_profiles(path: Path, profile: str) -> None:
    """Without a prediction, which decides more; ``""``: the profile that the recipe names."""
    recipe, own = load_recipe(str(path)).recipe, home_profile(path)
    if profile and own != "h100x64":
        pytest.skip(f"the recipe is for the size of {own}")
    made = plan(recipe, load_profile(profile or own).profile)
    assert made.accelerator == "gpu" and len(made.nodes) <= load_profile(profile or own).profile.nodes


def test_same_inputs_give_the_same_bytes() -> None:
    def dump() -> str:
        return json.dumps(plan(tiny(), load_profile("local").profile).model_dump(mode="json"))

    assert dump() == dump()


def test_a_plan_survives_its_own_json() -> None:
    made = plan(tiny(), load_profile("local").profile)
    assert Plan.model_validate(json.loads(json.dumps(made.model_dump(mode="json")))) == made


def test_the_warmup_feeds_the_main_phase() -> None:
    warmup, main = plan(tiny(), load_profile("local").profile).phases
    assert (warmup.name, warmup.recipe.kind, main.recipe.kind) == ("warmup", "sft", "rl")
    assert main.model_path == "/runs/x/warmup/weights/step_400"
    assert [process.name for process in warmup.processes] == ["sft-0"]


@pytest.mark.parametrize(
    "changes",
    [
        ("trainer.router_replay=true",),
        ("lora={}", "after.export={to: /x, merge: true}"),
        ("weights.transport=delta",),
        ("algorithm.type=opd", "teacher={model: {name: t}, base_url: 'http://h/v1'}"),
        ("judge={model: {name: j}, base_url: 'http://h/v1'}",),
        ("after.evaluation={}", "rollouts.sampling.max_tokens=20"),
    ],
)
def test_what_fits_a_recipe_fits_it_with_a_warmup(changes: tuple[str, ...]) -> None:
    made = plan(tiny("warmup.max_steps=2", *changes), gpu_profile(2))
    assert [phase.name for phase in made.phases] == ["warmup", "main"]


def test_one_engine_of_most_of_a_node_leaves_the_trainer_the_rest() -> None:
    auto = ("layout.inference.replicas=auto", "layout.trainer.ranks=auto", "warmup=null")
    main = plan(tiny("layout.inference.tensor_parallel=6", *auto), gpu_profile(1)).phase("main")
    assert main.process("inference-0").accelerators == (0, 1, 2, 3, 4, 5)
    assert main.process("trainer-0").accelerators == (6, 7)


@pytest.mark.parametrize(
    ("changes", "profile", "hint"),
    [
        (("layout.trainer.nodes=1",), gpu_profile(1), "remove layout.inference.nodes and layout"),
        (
            ("layout.inference.nodes=4", "layout.trainer.nodes=1"),
            gpu_profile(4),
            "; lower layout.inference.nodes$",
        ),
        (("layout.trainer.nodes=4",), gpu_profile(4), "; lower layout.trainer.nodes$"),
        (
            ("algorithm.type=opd", "teacher={model: {name: org/t}, layout: {replicas: 8}}"),
            gpu_profile(1),
            "; lower teacher.layout.replicas, or choose",
        ),
    ],
)
def test_what_is_too_much_names_the_keys_that_can_be_lowered(changes, profile, hint) -> None:
    auto = ("layout.inference.replicas=auto", "layout.trainer.ranks=auto", "warmup=null")
    with pytest.raises(ConfigError, match=hint):
        plan(tiny(*auto, *changes), profile)


@pytest.mark.parametrize(
    "change", ["layout.trainer.expert_backend=deepep", "model.attention=flash_attention_2"]
)
def test_what_needs_gpus_is_refused_where_there_are_none(change: str) -> None:
    assert plan(tiny(change, "trainer.param_dtype=bfloat16"), gpu_profile(1))
    with pytest.raises(ConfigError, match="requires GPUs, and profile 'local' has none"):
        plan(tiny(change, "trainer.param_dtype=bfloat16"), load_profile("local").profile)


@pytest.mark.parametrize(
    ("gpu", "mode", "instead"),
    [
        ("A100-SXM-80GB", "blockwise", "none"),
        ("L40S", "blockwise", "none"),
        ("H100-SXM", "mxfp8", "blockwise"),
        ("RTX-5090", "mxfp8", "blockwise"),
        ("MI300X", "blockwise", "none"),
        ("H100-SXM", "blockwise", ""),
        ("GB300", "mxfp8", ""),
        ("a type of tomorrow", "mxfp8", ""),  # the trainer checks it
    ],
)
def test_fp8_on_gpus_without_it_is_refused_with_the_nearest_value(gpu: str, mode: str, instead: str) -> None:
    recipe = tiny(f"trainer.fp8={mode}", "trainer.param_dtype=bfloat16")
    profile = gpu_profile(1)
    node = profile.node.model_copy(update={"gpu": gpu})
    profile = profile.model_copy(update={"node": node})
    if not instead:
        assert plan(recipe, profile)
        return
    with pytest.raises(ConfigError, match=rf"trainer\.fp8: {mode} needs .* has {gpu}") as refused:
        plan(recipe, profile)
    assert refused.value.hint == f"set it to {instead}"


def test_a_server_by_address_is_not_started_and_the_others_keep_their_numbers() -> None:
    recipe = tiny("environments.train=[{id: a, address: 'tcp://h:1'}, {id: b, servers: 2}]", "warmup=null")
    servers = plan(recipe, load_profile("local").profile).phase("main").of_role(Role.ENV_SERVER)
    assert [(server.name, server.log) for server in servers] == [
        ("env_server-1", "envs/train/b.log"),
        ("env_server-2", "envs/train/b/1.log"),
        ("env_server-3", "envs/eval/held-out.log"),
    ]


@pytest.mark.parametrize(
    ("cores", "more", "numbers"),
    [
        (96, (), [6, 1, 4, 3]),  # three quarters of 2048 rollouts, the rest; half of them each
        (12, (), [2, 1, 1, 1]),  # a quarter of the cores, for training and for evaluation
        (96, ("environments.train[0].servers=2",), [2, 1, 4, 3]),
        (96, ("environments.train[0].max_concurrent=300",), [2, 1, 4, 3]),
        (96, ("environments.train[0].address=tcp://h:1",), [1, 1, 4, 3]),
        (96, ("rollouts.max_in_flight=256",), [1, 1, 1, 1]),
    ],
)
def test_environments_get_as_many_servers_as_their_rollouts_need(cores, more, numbers) -> None:
    train = "environments.train=[{id: a, ratio: 3}, {id: b, max_concurrent: 100}]"
    evaluated = "environments.eval=[{id: c}, {id: d, max_concurrent: 600}]"
    recipe = tiny(train, evaluated, "rollouts.max_in_flight=2048", "warmup=null", *more)
    profile = Profile.model_validate({"name": "p", "nodes": 2, "node": {"gpus": 8, "cores": cores}})
    made = plan(recipe, profile)
    environments = made.phase("main").recipe.environments
    assert [each.servers for each in (*environments.train, *environments.eval)] == numbers
    has_address = environments.train[0].address is not None
    assert len(made.phase("main").of_role(Role.ENV_SERVER)) == sum(numbers) - has_address
    noted = [note for note in made.notes if "servers, one for" in note]
    assert len(noted) == sum(number > 1 for number in numbers) - ("environments.train[0].servers=2" in more)


def test_a_run_with_node_counts_gets_nodes_of_its_own() -> None:
    recipe = tiny(
        "layout.inference={nodes: 2, replicas: auto, tensor_parallel: 4}",
        "layout.trainer={nodes: 2, ranks: auto}",
        "warmup=null",
    )
    made = plan(recipe, gpu_profile(nodes=4))
    engines = made.phase("main").of_role(Role.INFERENCE)
    assert [(engine.nodes, engine.accelerators) for engine in engines] == [
        ((0,), (0, 1, 2, 3)),
        ((1,), (0, 1, 2, 3)),
        ((0,), (4, 5, 6, 7)),
        ((1,), (4, 5, 6, 7)),
    ]
    trainer = made.phase("main").process("trainer-0")
    assert trainer.nodes == (2, 3) and trainer.accelerators == tuple(range(8))


@pytest.mark.parametrize("layout", ["tensor_parallel: 16", "tensor_parallel: 4, data_parallel: 4"])
def test_an_engine_larger_than_a_node_takes_complete_nodes(layout: str) -> None:
    recipe = tiny(
        f"layout.inference={{replicas: auto, {layout}}}", "layout.trainer.ranks=auto", "warmup=null"
    )
    made = plan(recipe, gpu_profile(nodes=6)).phase("main")
    engines = made.of_role(Role.INFERENCE)
    # the fifth node alone cannot hold another
    assert [engine.nodes for engine in engines] == [(0, 1), (2, 3)]
    assert all(engine.accelerators == tuple(range(8)) for engine in engines)
    assert made.process("trainer-0").nodes == (4,) and made.process("orchestrator-0").nodes == (0,)


TEACHER = "teacher={model: {name: org/big}, layout: {replicas: 2, tensor_parallel: 4}}"


def test_a_teachers_engines_come_after_the_trainer_and_serve_their_own_model() -> None:
    recipe = tiny(
        "layout.inference.replicas=auto", "layout.trainer.ranks=auto", "algorithm.type=opd", TEACHER
    )
    made = plan(recipe, gpu_profile(nodes=4))
    main = made.phase("main")
    taught = main.of_role(Role.TEACHER)
    assert [(each.nodes, each.accelerators) for each in taught] == [
        ((3,), (0, 1, 2, 3)),
        ((3,), (4, 5, 6, 7)),
    ]
    assert main.process("trainer-0").nodes == (2,) and len(main.of_role(Role.INFERENCE)) == 16
    assert [(each.on_exit, each.log, each.ready_timeout_s) for each in taught] == [
        ("restart", f"teacher/{index}.log", 1800) for index in (0, 1)
    ]
    assert any("teacher: 1 separate nodes for 2 engines" in note for note in made.notes)
    theirs = main.for_frozen(Role.TEACHER)
    assert theirs.model_path == theirs.recipe.model.name == "org/big"
    assert (theirs.recipe.layout.inference.tensor_parallel, theirs.recipe.max_model_len) == (4, 129)
    assert not made.phase("warmup").of_role(Role.TEACHER)
    adapted = recipe.model_copy(update={"lora": LoRA()})
    assert adapted.for_frozen(Role.TEACHER).policy_name == "org/big"  # adapters are the policy's alone


def test_a_judges_engines_come_last_and_run_in_training_and_evaluation_alike() -> None:
    judge = "judge={model: {name: org/wise}, layout: {tensor_parallel: 8}}"
    counts = ("layout.inference.replicas=8", "layout.trainer.ranks=auto")
    made = plan(tiny(*counts, "algorithm.type=opd", TEACHER, judge), gpu_profile(nodes=4))
    main = made.phase("main")
    (judging,) = main.of_role(Role.JUDGE)
    assert (judging.nodes, judging.on_exit, judging.log) == ((3,), "restart", "judge/0.log")
    assert [each.nodes for each in main.of_role(Role.TEACHER)] == [(2,), (2,)]
    theirs = main.for_frozen(Role.JUDGE)
    assert (theirs.model_path, theirs.recipe.max_model_len) == ("org/wise", 256)  # twice the policy's
    servers = main.of_role(Role.ENV_SERVER)
    assert {each.ready_timeout_s for each in servers} == {600 + 1800}  # they wait for it
    scores = plan(tiny(*counts, "kind=eval", "warmup=null", judge), gpu_profile(nodes=2)).phase("main")
    assert [each.nodes for each in scores.of_role(Role.JUDGE)] == [(1,)] and not scores.of_role(Role.TEACHER)
    elsewhere = tiny("judge={model: {name: wise}, base_url: 'http://h/v1'}")
    assert not plan(elsewhere, gpu_profile(nodes=2)).phase("main").of_role(Role.JUDGE)


def test_a_teacher_shares_the_only_node_and_one_at_an_address_takes_nothing() -> None:
    local = load_profile("local").profile
    shared = tiny("algorithm.type=opd", "teacher.model.name=org/big")
    processes = plan(shared, local).phase("main").processes
    assert {each.name: each.accelerators for each in processes if each.accelerators} == {
        "inference-0": (0,),
        "trainer-0": (1, 2),
        "teacher-0": (3,),
    }
    remote = tiny("algorithm.type=sft_distill", "teacher={base_url: 'http://h/v1', model: {name: t}}")
    assert not plan(remote, local).phase("main").of_role(Role.TEACHER)


def test_engines_that_prefill_have_a_shape_and_nodes_of_their_own() -> None:
    prefill = "layout.inference={replicas: 8, prefill: {replicas: 3, tensor_parallel: 4}}"
    recipe = tiny(prefill, "layout.trainer.ranks=auto", "judge.model.name=j")
    main = plan(recipe, gpu_profile(nodes=5)).phase("main")
    read = main.of_role(Role.PREFILL)
    assert [(each.nodes, each.accelerators) for each in read] == [
        ((2,), (0, 1, 2, 3)),
        ((3,), (0, 1, 2, 3)),
        ((2,), (4, 5, 6, 7)),
    ]
    assert main.process("judge-0").nodes == (4,)
    assert [(each.on_exit, each.log, each.ready_timeout_s) for each in read] == [
        ("restart", f"prefill/{index}.log", 1800) for index in (0, 1, 2)
    ]
    assert main.for_prefill().recipe.layout.inference.tensor_parallel == 4
    assert main.for_prefill().model_path == main.model_path
    assert main.recipe.layout.inference.tensor_parallel == 1
    assert not main.for_frozen(Role.JUDGE).recipe.layout.inference.prefill
    local = plan(tiny("layout.inference.prefill={}"), load_profile("local").profile).phase("main")
    assert {each.name: each.accelerators for each in local.processes if each.accelerators} == {
        "inference-0": (0,),
        "trainer-0": (1, 2),
        "prefill-0": (3,),
    }
    assert local.process("prefill-0").env == local.process("inference-0").env


def test_a_teacher_runs_in_the_software_of_inference_unless_it_has_its_own() -> None:
    recipe = tiny("algorithm.type=opd", "teacher.model.name=org/big")
    roles = {"inference": {"python": "/vllm/python", "env": {"A": "1"}}}
    for more, python in (({}, "/vllm/python"), ({"teacher": {"python": "/newer/python"}}, "/newer/python")):
        profile = Profile.model_validate({"name": "p", "software": {"roles": {**roles, **more}}})
        teacher = plan(recipe, profile).phase("main").process("teacher-0")
        assert teacher.argv[0] == python and "VLLM_NO_USAGE_STATS" in teacher.env


def test_a_role_may_have_its_own_interpreter() -> None:
    profile = load_profile("local").profile.model_dump()
    profile["software"]["roles"] = {"inference": {"python": "/vllm/bin/python"}}
    phase = plan(tiny(), Profile.model_validate(profile)).phase("main")
    assert phase.process("inference-0").argv[0] == "/vllm/bin/python"
    assert phase.process("trainer-0").argv[0] == "/venv/bin/python"


def with_container(role: str, container: dict) -> Profile:
    profile = gpu_profile(1).model_dump()
    profile["software"]["roles"] = {role: {"python": "/opt/python", "container": container}}
    return Profile.model_validate(profile)


def test_a_role_may_have_its_own_container() -> None:
    apptainer = {"kind": "apptainer", "image": "/img/vllm.sif", "mounts": ["/data:/data"]}
    engine = plan(tiny(), with_container("inference", apptainer)).phase("main").process("inference-0")
    assert engine.argv[:8] == (
        "apptainer", "exec", "--nv", "--bind", "/runs/x", "--bind", "/data:/data", "/img/vllm.sif",
    )  # fmt: skip
    assert engine.argv[8] == "/opt/python"
    pyxis = {"kind": "pyxis", "image": "nvcr.io#nvidia/pytorch:25.01-py3"}
    trainer = plan(tiny(), with_container("trainer", pyxis)).phase("main").process("trainer-0")
    assert trainer.argv[0] == "/opt/python"
    assert trainer.srun_args[:-1] == (
        "--mpi=none",
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        "--container-mounts=/runs/x:/runs/x",
    )


def test_planned_variables_replace_those_of_a_pyxis_image() -> None:
    """By default pyxis keeps the image's value of a variable that the job sets as well."""
    pyxis = {"kind": "pyxis", "image": "x", "args": ["--container-env=MINE", "--no-container-entrypoint"]}
    recipe = tiny("env={NCCL_DEBUG: INFO, TOKEN: {from: MY_TOKEN}}")
    words = plan(recipe, with_container("trainer", pyxis)).phase("main").process("trainer-0").srun_args
    assert "--no-container-entrypoint" in words
    (option,) = [word for word in words if word.startswith("--container-env=")]
    names = option.partition("=")[2].split(",")
    assert names[0] == "MINE" and {"NCCL_DEBUG", "TOKEN", "HF_HUB_OFFLINE", "PYTHONPATH"} <= set(names)


def test_containers_mount_the_folders_that_hold_parts_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROJECT", "/project/me")
    values = with_container("trainer", {"kind": "pyxis", "image": "x"}).model_dump()
    values["storage"] = {
        "project": {"path": "$PROJECT/runs", "holds": ["checkpoints", "weights"]},
        "archive": {"path": "/archive"},
    }
    trainer = plan(tiny(), Profile.model_validate(values)).phase("main").process("trainer-0")
    assert "--container-mounts=/runs/x:/runs/x,/project/me/runs:/project/me/runs" in trainer.srun_args
    values["storage"]["archive"]["holds"] = ["weights"]
    with pytest.raises(ValueError, match="weights can be held by one folder, not by project and archive"):
        Profile.model_validate(values)


def test_pyxis_without_slurm_is_refused() -> None:
    profile = with_container("trainer", {"kind": "pyxis", "image": "x"}).model_dump()
    profile["scheduler"]["type"] = "local"
    with pytest.raises(ConfigError, match="pyxis"):
        plan(tiny(), Profile.model_validate(profile))


def test_a_users_variables_win_over_the_roles_own() -> None:
    phase = plan(tiny("env={OMP_NUM_THREADS: '3'}"), load_profile("local").profile).phase("main")
    assert phase.process("inference-0").env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("overrides", "profile", "says"),
    [
        (["layout.trainer.ranks=4"], load_profile("local").profile, ["5 accelerators", "has 4"]),
        (
            ["layout.trainer.ranks=3", "algorithm.type=opd", "teacher.model.name=t"],
            load_profile("local").profile,
            ["5 accelerators", "3 trainer ranks + 1 for teacher", "has 4"],
        ),
        (
            ["layout.trainer.nodes=2", "algorithm.type=opd", "teacher.model.name=t"],
            gpu_profile(3),
            ["4 nodes", "has 3", "lower layout.trainer.nodes"],
        ),
        (
            ["algorithm.type=opd", "teacher={model: {name: t}, layout: {tensor_parallel: 16}}"],
            gpu_profile(1),
            ["16 accelerators", "teacher.layout.tensor_parallel"],
        ),
        (
            ["layout.trainer.ranks=3", "judge.model.name=j"],
            load_profile("local").profile,
            ["5 accelerators", "3 trainer ranks + 1 for judge", "has 4"],
        ),
        (["inference.kv_offload_gib=4"], load_profile("local").profile, ["kv_offload_gib", "host memory"]),
        (["trainer.router_replay=true"], load_profile("local").profile, ["router_replay", "run on CPUs"]),
        (
            ["layout.inference.prefill={replicas: 2}"],
            load_profile("local").profile,
            ["5 accelerators", "2 for prefill", "has 4"],
        ),
        (
            ["layout.trainer.nodes=2", "layout.inference.prefill={replicas: 9}"],
            gpu_profile(4),
            ["5 nodes", "has 4", "layout.inference.prefill.replicas"],
        ),
        (
            ["layout.inference.prefill.tensor_parallel=16"],
            gpu_profile(1),
            ["16 accelerators", "lower layout.inference.prefill.tensor_parallel"],
        ),
        (["layout.inference.tensor_parallel=16"], gpu_profile(1), ["16 accelerators", "has 8"]),
        (["layout.inference.tensor_parallel=12"], gpu_profile(4), ["12 accelerators", "multiple of 8"]),
        (
            ["layout.inference={tensor_parallel: 16, data_parallel: 2}"],
            gpu_profile(8),
            ["span nodes", "divides 8"],
        ),
        (
            ["layout.inference={nodes: 3, replicas: 2, tensor_parallel: 16}"],
            gpu_profile(8),
            ["2 engines", "at most 1"],
        ),
        (
            ["layout.inference={nodes: 5, replicas: 2, tensor_parallel: 16}"],
            gpu_profile(8),
            ["1 of 5 inference nodes idle"],
        ),
        (["layout.inference.nodes=4", "layout.inference.replicas=32"], gpu_profile(4), ["5 nodes", "has 4"]),
        (["layout.inference.nodes=2"], gpu_profile(4), ["1 engine ", "idle"]),
        (["layout.trainer.replicate=3"], gpu_profile(1), ["3", "2 ranks"]),
        (["layout.orchestrator.place=cpu-partition"], gpu_profile(2), ["cpu_partition"]),
        (["layout.trainer.context_parallel=3"], gpu_profile(2), ["context_parallel 3", "2 ranks"]),
        (
            ["layout.trainer={replicate: 2, expert_parallel: 4, ranks: 4}"],
            gpu_profile(1),
            ["expert_parallel 4", "the 2 ranks", "4 ranks / replicate 2"],
        ),
    ],
)
def test_more_than_the_profile_has_is_refused_with_the_numbers(
    overrides: list[str], profile: Profile, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(tiny(*overrides), profile)
    for word in says:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("seq_len", "layout", "degree", "says"),
    [
        (2048, "{ranks: 8}", 1, None),
        (65_536, "{ranks: 8}", 2, "a rank has 32,768 of the 65,536 tokens of a row"),
        (65_536, "{ranks: 6, replicate: 2}", 3, "replicate 2 × data 1 × context 3 = 6 ranks"),
        (1_000_000, "{ranks: 8, replicate: 2}", 4, "250,000"),
    ],
)
def test_auto_context_is_the_least_degree_with_which_a_row_fits(
    seq_len: int, layout: str, degree: int, says: str | None
) -> None:
    recipe = tiny(f"seq_len={seq_len}", f"layout.trainer={layout}", "layout.trainer.context_parallel=auto")
    made = plan(recipe, gpu_profile(nodes=2))
    assert [phase.recipe.layout.trainer.context_parallel for phase in made.phases] == [degree, degree]
    assert (says is None) == (not any("context" in note for note in made.notes))
    assert says is None or any(says in note for note in made.notes)


@pytest.mark.parametrize(
    ("ranks", "tensor", "says"),
    [
        (8, 2, "replicate 1 × data 4 × context 1 × tensor 2 = 8 ranks"),
        (6, 4, "the nearest possible tensor_parallel is 3"),
        (16, 16, "16 does not divide the 8 trainer ranks of a node"),
    ],
)
def test_a_degree_of_tensor_parallelism_is_shown_warned_about_or_refused(
    ranks: int, tensor: int, says: str
) -> None:
    layout = f"{{ranks: {ranks}, tensor_parallel: {tensor}}}"
    try:
        made = plan(tiny(f"layout.trainer={layout}"), gpu_profile(nodes=4))
    except ConfigError as error:
        assert says in str(error)
    else:
        assert any(says in note for note in made.notes)
        assert made.phases[0].num_data_ranks == ranks // tensor


@given(
    nodes=st.integers(1, 6),
    gpus=st.sampled_from([0, 1, 2, 4, 8]),
    replicas=st.one_of(st.just("auto"), st.integers(1, 9)),
    tensor_parallel=st.sampled_from([1, 2, 4, 8, 16]),
    data_parallel=st.sampled_from([1, 2, 3, 4]),
    ranks=st.one_of(st.just("auto"), st.integers(1, 16)),
    inference_nodes=st.one_of(st.just("auto"), st.integers(1, 4)),
    trainer_nodes=st.one_of(st.just("auto"), st.integers(1, 4)),
    teacher=st.one_of(st.none(), st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 8]))),
)
def test_no_accelerator_is_given_twice_and_none_that_is_not_there(
    nodes: int,
    gpus: int,
    replicas: int | str,
    tensor_parallel: int,
    data_parallel: int,
    ranks: int | str,
    inference_nodes: int | str,
    trainer_nodes: int | str,
    teacher: tuple[int, int] | None,
) -> None:
    layout = {
        "inference": {
            "nodes": inference_nodes,
            "replicas": replicas,
            "tensor_parallel": tensor_parallel,
            "data_parallel": data_parallel,
        },
        "trainer": {"nodes": trainer_nodes, "ranks": ranks},
    }
    changes: dict = {"layout": layout}
    if teacher is not None:
        shape = {"replicas": teacher[0], "tensor_parallel": teacher[1]}
        changes |= {"teacher": {"model": {"name": "t"}, "layout": shape}, "algorithm": {"type": "opd"}}
    recipe = parse_recipe({**tiny().model_dump(), **changes})
    try:
        made = plan(recipe, gpu_profile(nodes, gpus))
    except ConfigError:
        return
    for phase in made.phases:
        taken = [
            (node, slot) for each in phase.processes for node in each.nodes for slot in each.accelerators
        ]
        assert len(taken) == len(set(taken))
        assert all(node < len(made.nodes) <= nodes and slot < (gpus or 4) for node, slot in taken)
        for engine in phase.of_role(Role.INFERENCE):
            assert len(engine.nodes) * len(engine.accelerators) == tensor_parallel * data_parallel
    teachers = made.phase("main").of_role(Role.TEACHER)
    assert len(teachers) == (teacher[0] if teacher else 0)
    assert all(len(each.nodes) * len(each.accelerators) == teacher[1] for each in teachers if teacher)


def test_a_relative_model_folder_becomes_absolute_and_is_checked(tmp_path: Path) -> None:
    loaded = load_recipe("reverse_text/tiny", overrides=["model.name=./model", "warmup=null"])
    with pytest.raises(NotFoundError, match="does not exist"):
        resolve(loaded, folder=tmp_path)
    (tmp_path / "model").mkdir()
    for name, says in (
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ):
        with pytest.raises(DataError, match=says):
            resolve(loaded, folder=tmp_path)
        (tmp_path / "model" / name).write_bytes(b"{}" if name.endswith("json") else safetensors_bytes())
    assert resolve(loaded, folder=tmp_path).model.name == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.name=outputs/tinny", "model folder .*outputs/tinny does not exist"),
        ("model.name=gpt2", "gpt2 does not exist; .*hub id \\(owner/name\\)"),
        ("model.tokenizer=/nope", "folder /nope has no tokenizer"),
        ("model.tokenizer=outputs", "folder .*outputs has no tokenizer"),
        ("sft.data.path=gsm8k", "gsm8k does not exist; .*hub id \\(owner/name\\)"),
        ("sft.data.path=outputs/rows", "outputs/rows does not exist"),
        ("sft.data.path=outputs", "outputs: there are no SFT rows; give a .jsonl or .parquet file"),
        ("sft.data.path=./x.txt", "x.txt: there are no SFT rows"),
    ],
)
def test_a_path_that_leads_to_nothing_is_not_taken_for_a_hub_id(
    tmp_path: Path, change: str, says: str
) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "x.txt").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "kind: sft\nname: r\nmodel: {name: org/model}\nmax_steps: 1\nsft: {data: {path: org/data}}\n"
    )
    assert resolve(load_recipe(str(recipe)), folder=tmp_path).model.name == "org/model"
    with pytest.raises(PrimerlError, match=says):
        resolve(load_recipe(str(recipe), overrides=[change]), folder=tmp_path)


SFT_RECIPE = "kind: sft\nname: r\nmodel: {name: org/model, renderer: {name: chatml}}\nmax_steps: 1\n"
GOOD_ROW = {"prompt": "p", "completion": "c"}
TYPO = {"messages": [{"role": "asistant", "content": "c"}]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}


@pytest.mark.parametrize("form", ["rows.jsonl", "folder/rows.jsonl", "folder/rows.parquet"])
@pytest.mark.parametrize(
    ("row", "says"),
    [
        (TYPO, "message 1 has the unknown role 'asistant'"),
        (
            {**GOOD_ROW, "tools": [{"name": "add"}]},
            "the row has tools, which renderer 'chatml' does not render",
        ),
        (
            {"messages": [CALL]},
            "the row has tool_calls in message 1, which renderer 'chatml' does not render",
        ),
    ],
)
def test_rows_that_the_trainer_would_refuse_are_refused_before_the_queue(
    tmp_path: Path, form: str, row: dict, says: str
) -> None:
    path = tmp_path / form
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    data = path if path.parent == tmp_path else path.parent
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SFT_RECIPE + f"sft: {{data: [{{path: org/data}}, {{path: {data}}}]}}\n")
    with pytest.raises(DataError, match=rf"{path.name}:1: .*{says}"):
        resolve(load_recipe(str(recipe)), folder=tmp_path)
    path.unlink()
    path.with_suffix(".jsonl").write_text(f"{json.dumps(GOOD_ROW)}\n{json.dumps(row)}\n")
    one_row = [
        f"sft.data.0.path={path.with_suffix('.jsonl')}",
        "sft.data.0.num_rows=1",
        "sft.data.1.path=org/more",
    ]
    assert resolve(load_recipe(str(recipe), overrides=one_row), folder=tmp_path)


def with_spares(nodes: int, spares: int) -> Profile:
    scheduler = {"spare_nodes": spares}
    return Profile.model_validate({"name": "p", "nodes": nodes, "scheduler": scheduler, "node": {"gpus": 8}})


def test_spare_nodes_are_no_nodes_to_plan_with() -> None:
    recipe = tiny(
        "layout.inference={nodes: auto, replicas: auto, tensor_parallel: 8}", "layout.trainer.nodes=1"
    )
    made = plan(recipe, with_spares(nodes=6, spares=2))
    assert len(made.nodes) == 4 and made.spare_nodes == 2
    with pytest.raises(ConfigError, match="5 nodes, profile 'p' has 6, 2 of them spare"):
        plan(tiny("layout.inference={nodes: 4, replicas: 32}", "layout.trainer.nodes=1"), with_spares(6, 2))


@pytest.mark.parametrize("scheduler", [{"spare_nodes": 4}, {"spare_nodes": 1, "type": "local"}])
def test_spares_must_leave_nodes_to_work_and_need_slurm(scheduler: dict) -> None:
    with pytest.raises(ValueError, match="spare_nodes"):
        Profile.model_validate({"name": "p", "nodes": 4, "scheduler": scheduler})


def test_the_preflight_asks_every_interpreter_outside_containers_and_may_be_switched_off() -> None:
    image = {"container": {"kind": "pyxis", "image": "x.sqsh"}}
    roles = {"inference": {"python": "/vllm/python"}, "trainer": image}
    values = {"name": "p", "nodes": 2, "node": {"gpus": 8}, "software": {"roles": roles}}
    asked = plan(tiny(), Profile.model_validate(values)).preflight
    assert asked is not None and asked.gpus == 8
    assert set(asked.pythons) == {"/vllm/python", "/venv/bin/python"}
    assert plan(tiny(), Profile.model_validate(values | {"preflight": {"enabled": False}})).preflight is None


ENV_LAYERS = [
    {"network": {"env": {"X": "network"}}},
    {"env": {"X": "profile"}},
    {"software": {"roles": {"trainer": {"env": {"X": "profile role"}}}}},
    "env={X: recipe}",
    "env_by_role={trainer: {X: recipe role}}",
]


@pytest.mark.parametrize("highest", range(len(ENV_LAYERS)))
def test_variables_of_a_role_come_from_the_highest_layer_that_has_them(highest: int) -> None:
    layers = ENV_LAYERS[: highest + 1]
    profile = load_profile("local").profile.model_dump()
    for layer in layers[:3]:
        profile.update({name: {**profile[name], **value} for name, value in layer.items()})
    phase = plan(tiny(*layers[3:]), Profile.model_validate(profile)).phase("main")
    expected = ["network", "profile", "profile role", "recipe", "recipe role"][highest]
    assert phase.process("trainer-0").env["X"] == expected
    others = "recipe" if highest >= 3 else "profile" if highest >= 1 else "network"
    assert phase.process("orchestrator-0").env["X"] == others


def test_variables_of_engines_are_those_of_every_engine_without_its_own() -> None:
    made = tiny("algorithm={type: opd}", "teacher={model: {name: a/b}}", "env_by_role={inference: {X: '1'}}")
    assert made.env_of_role(Role.TEACHER) == {"X": "1"} and made.env_of_role(Role.ROUTER) == {}
    own = tiny("env_by_role={inference: {X: '1'}, teacher: {}}")
    assert own.env_of_role(Role.TEACHER) == {} and own.env_of_role(Role.PREFILL) == {"X": "1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("env_by_role={trainr: {X: '1'}}", "env_by_role.trainr"),
        ("env_by_role={trainer: {PRIMERL_X: '1'}}", "PRIMERL_X is reserved: the run sets it"),
        ("env_by_role={trainer: {X: 1}}", "env_by_role.trainer.X"),
    ],
)
def test_wrong_variables_of_a_role_are_refused_by_name(change: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(change)
    assert words in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


def test_the_folders_of_pythonpath_are_joined_over_all_layers() -> None:
    profile = load_profile("local").profile.model_copy(update={"env": {"PYTHONPATH": "/site:/both"}})
    recipe = tiny("env={PYTHONPATH: '/both:/mine'}", "env_by_role={env_server: {PYTHONPATH: /own}}")
    phase = plan(recipe, profile).phase("main")
    assert phase.process("trainer-0").env["PYTHONPATH"] == "/both:/mine:/site"
    assert phase.process("env_server-0").env["PYTHONPATH"] == "/own:/both:/mine:/site"


@pytest.mark.parametrize(
    "node, option",
    [
        ({"gpu": "H100-SXM"}, "--nv"),
        ({"gpu": None}, "--nv"),
        ({"gpu": "MI250X-GCD"}, "--rocm"),
        ({"gpu": "AMD Instinct MI300A"}, "--rocm"),
        ({"gpu": "Frontier-GCD", "gpu_vendor": "amd"}, "--rocm"),
    ],
)
def test_a_container_gets_the_driver_of_its_nodes_vendor(node: dict[str, Any], option: str) -> None:
    values = with_container("inference", {"kind": "apptainer", "image": "/img/vllm.sif"}).model_dump()
    values["node"] |= node
    made = plan(tiny(), Profile.model_validate(values))
    assert made.phase("main").process("inference-0").argv[:3] == ("apptainer", "exec", option)
    vendor = {"--nv": "nvidia", "--rocm": "amd"}[option]
    assert made.preflight is not None and (made.preflight.gpus, made.preflight.vendor) == (8, vendor)


@pytest.mark.parametrize(
    "scheduler, expected",
    [
        ({}, ("--mpi=none",)),
        ({"mpi": "pmix"}, ("--mpi=pmix",)),
        ({"mpi": None}, ()),
        ({"srun_extra": ["--mpi=cray_shasta", "--cpu-bind=none"]}, ("--mpi=cray_shasta", "--cpu-bind=none")),
        ({"srun_extra": ["--cpu-bind=none"]}, ("--mpi=none", "--cpu-bind=none")),
    ],
)
def test_every_srun_starts_without_mpi_unless_the_profile_asks_for_it(
    scheduler: dict[str, Any], expected: tuple[str, ...]
) -> None:
    values = gpu_profile(1).model_dump(mode="json", exclude_unset=True)
    values["scheduler"] = {**values.get("scheduler", {}), "type": "slurm", **scheduler}
    profile = Profile.model_validate(values)
    made = plan(tiny(), profile)
    assert {process.srun_args for phase in made.phases for process in phase.processes} == {expected}
    assert made.preflight is not None and made.preflight.srun_args == expected
    doctors = [word for word in node_srun_command(profile, 1) if word.startswith(("--mpi", "--cpu-bind"))]
    assert doctors == list(expected)


def test_locked_memory_matters_where_gpus_of_several_nodes_meet_over_rdma() -> None:
    values = gpu_profile(2).model_dump()
    values["network"]["env"] = {"NCCL_IB_DISABLE": "1"}
    for recipe, profile, nodes, uses_rdma in (
        (tiny(), gpu_profile(2), 1, False),
        (tiny("layout.inference.nodes=1", "layout.trainer.nodes=1"), gpu_profile(2), 2, True),
        (
            tiny("layout.inference.nodes=1", "layout.trainer.nodes=1"),
            Profile.model_validate(values),
            2,
            False,
        ),
    ):
        made = plan(recipe, profile)
        assert made.preflight is not None
        assert (len(made.nodes), made.preflight.uses_rdma) == (nodes, uses_rdma)


def test_every_process_with_gpus_counts_them_in_the_same_order() -> None:
    """CUDA's own order puts the fastest GPU first: on nodes with unlike GPUs two processes would share one."""
    recipe, profile = load_recipe("reverse_text/tiny").recipe, load_profile("h100x64").profile
    for role in (Role.TRAINER, Role.SFT, Role.INFERENCE, Role.PREFILL, Role.TEACHER, Role.JUDGE):
        assert process_env(role, recipe, profile)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in process_env(Role.ROUTER, recipe, profile)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("model.safetensors", safetensors_bytes("a")[:-1], "not a complete safetensors file"),
    ],
)
def test_half_a_model_is_refused_before_the_queue(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    file = unusable_model(tmp_path / "model") / name
    file.write_bytes(content)
    loaded = load_recipe("reverse_text/tiny", overrides=["model.name=./model", "warmup=null"])
    with pytest.raises(DataError, match=f"{name}: {says}"):
        resolve(loaded, folder=tmp_path)
