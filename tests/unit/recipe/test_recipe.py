"""Recipes: composition, precedence, and refusals that name file, line, key and the nearest known key."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.assets import list_assets
from primerl_hpc.common.document import parse_value
from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe, parse_recipe
from primerl_hpc.recipe.sampling_rules import HARMLESS, REFUSED, refused_parameter
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import ROOT

MINIMAL = """\
kind: rl
name: small
model: {name: some/model}
max_steps: 3
environments:
  train: [{id: reverse-text}]
"""
SUPERVISED = """\
kind: sft
name: small
model: {name: some/model}
max_steps: 3
sft:
"""


def write(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", list_assets("recipes"))
def test_every_shipped_recipe_loads(name: str) -> None:
    assert load_recipe(name).recipe.name


@pytest.mark.parametrize("name", list_assets("cluster_profiles"))
def test_every_shipped_profile_loads_and_is_named_after_its_file(name: str) -> None:
    assert load_profile(name).profile.name == name.removesuffix(".yaml")


def test_later_layers_take_precedence_and_origins_are_kept(tmp_path: Path) -> None:
    write(tmp_path, "optimizer: {lr: 1.0e-3, weight_decay: 0.5}\nseed: 1\n", "low.yaml")
    write(tmp_path, "optimizer: {lr: 2.0e-3}\n", "high.yaml")
    path = write(tmp_path, "base: [low.yaml, high.yaml]\n" + MINIMAL + "seed: 2\n")
    loaded = load_recipe(
        path,
        overrides=["max_steps=9"],
        environ={
            "PRIMERL_OPTIMIZER__EPS": "1e-6",
            "PRIMERL_MAX_STEPS": "8",
            "PRIMERL_VENV": "of tools/install",
        },
    )
    recipe, origins = loaded.recipe, loaded.document.origins
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.seed) == (2e-3, 0.5, 2)
    assert recipe.max_steps == 9 and origins["max_steps"] == "--set"
    assert recipe.optimizer.eps == 1e-6 and origins["optimizer.eps"] == "PRIMERL_OPTIMIZER__EPS"
    assert origins["optimizer.lr"] == f"{tmp_path / 'high.yaml'}:1"
    assert loaded.warnings == (
        f"PRIMERL_MAX_STEPS is ignored because {path}:5 sets max_steps; files take precedence over variables now",
    )


@pytest.mark.parametrize(
    ("text", "variable", "origin", "key"),
    [
        ("optimizer: {lr: 1e-3}", "PRIMERL_OPTIMIZER__LR", "7", "optimizer.lr"),
        ("optimizer: {lr: 1e-3}", "PRIMERL_OPTIMIZER", "7", "optimizer"),
        ("loss: {kl_tau: 0.5}", "PRIMERL_LOSS__TYPE", "7", "loss.type"),
        ("warmup: null", "PRIMERL_WARMUP__MAX_STEPS", "7", "warmup.max_steps"),
        ("seed: 1", "PRIMERL_ENVIRONMENTS__TRAIN__0__ID", "6", "environments.train.0.id"),
    ],
)
def test_a_file_takes_precedence_over_a_variable(tmp_path, text, variable, origin, key) -> None:
    path = write(tmp_path, MINIMAL + text + "\n")
    loaded = load_recipe(path, environ={variable: "7"})
    (warning,) = loaded.warnings
    assert warning.startswith(f"{variable} is ignored because {path}:{origin} sets {key}")
    assert loaded.recipe == load_recipe(path, environ={}).recipe


def test_variables_set_keys_that_no_file_sets(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "optimizer: {lr: 1e-3}\n")
    names = {"OPTIMIZER__WEIGHT_DECAY": "0.3", "LOSS__TYPE": "grpo", "ENVIRONMENTS__TRAIN__0__RATIO": "5"}
    loaded = load_recipe(path, environ={f"PRIMERL_{name}": value for name, value in names.items()})
    recipe = loaded.recipe
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.loss.type) == (1e-3, 0.3, "grpo")
    assert recipe.environments.train[0].ratio == 5 and loaded.warnings == ()


def test_levels_of_logs_come_from_files_or_from_their_two_variables(tmp_path: Path) -> None:
    names = {"PRIMERL_LOG_LEVEL": "debug", "PRIMERL_VF_LOG_LEVEL": "error"}
    log = load_recipe(write(tmp_path, MINIMAL), environ=names).recipe.log
    assert (log.level, log.verifiers, log.format) == ("debug", "error", "text")
    path = write(tmp_path, MINIMAL + "log: {level: warning, roles: {trainer: debug}, json: true}\n")
    loaded = load_recipe(path, environ=names)
    log = loaded.recipe.log
    assert (log.level, log.verifiers, log.format) == ("warning", "error", "json")
    assert (log.level_of(Role.TRAINER), log.level_of(Role.ROUTER)) == ("debug", "warning")
    assert len(loaded.warnings) == 1 and loaded.warnings[0].startswith("PRIMERL_LOG_LEVEL is ignored")
    for text in ("log: {level: loud}", "log: {roles: {trainr: debug}}", "log: {json: 3}"):
        with pytest.raises(ConfigError, match=r"recipe\.yaml:\d"):
            load_recipe(write(tmp_path, MINIMAL + text + "\n"))


def test_a_block_of_another_type_replaces_the_one_below_it(tmp_path: Path) -> None:
    low = "optimizer: {lr: 1.0e-3}\nloss: {type: gspo, kl_tau: 0.5}\nalgorithm: {type: rae, decay: 0.5}\n"
    write(tmp_path, low, "low.yaml")
    above = "optimizer: {type: adamw, eps: 1.0e-6}\nloss: {type: grpo}\nalgorithm: {decay: 0.7}\n"
    path = write(tmp_path, "base: low.yaml\n" + MINIMAL + above)
    recipe = load_recipe(path).recipe
    assert (recipe.optimizer.lr, recipe.optimizer.eps) == (1e-3, 1e-6)  # adamw is what no type means
    assert (recipe.loss.type, recipe.loss.kl_tau) == ("grpo", 0.0)
    assert (recipe.algorithm.type, recipe.algorithm.decay) == ("rae", 0.7)
    for changes in (["loss.threshold=0.3", "loss.type=ipo"], ["loss.type=ipo", "loss.threshold=0.3"]):
        loss = load_recipe(path, overrides=changes).recipe.loss
        assert (loss.type, loss.threshold, loss.kl_tau) == ("ipo", 0.3, 1e-3)
    assert load_recipe("reverse_text/tiny", overrides=["loss.type=grpo"]).recipe.loss.type == "grpo"


def test_variables_for_the_roles_keep_their_case_and_are_text(tmp_path: Path) -> None:
    environ = {"PRIMERL_ENV__HF_HOME": "/x", "PRIMERL_ENVIRONMENTS__TRAIN__0__ARGS__SPLIT": "test"}
    recipe = load_recipe(
        write(tmp_path, MINIMAL), overrides=["env.OMP_NUM_THREADS=4"], environ=environ
    ).recipe
    assert recipe.env == {"HF_HOME": "/x", "OMP_NUM_THREADS": "4"}
    assert recipe.environments.train[0].args == {"split": "test"}


def test_a_list_replaces_the_list_below_it(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "base.yaml")
    path = write(tmp_path, "base: base.yaml\nenvironments: {train: [{id: other}]}\n")
    assert [each.id for each in load_recipe(path).recipe.environments.train] == ["other"]


def test_one_key_of_a_list_item_is_set_and_the_others_stay(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL, "base.yaml")
    path = write(tmp_path, "base: base.yaml\nenvironments: {train: [{id: one, ratio: 2.0}, {id: two}]}\n")
    loaded = load_recipe(
        path,
        overrides=["environments.train[0].id=7", "environments.train.1.ratio=3"],
        environ={"PRIMERL_ENVIRONMENTS__TRAIN__1__ARGS__SPLIT": "test"},
    )
    first, second = loaded.recipe.environments.train
    assert (first.id, first.ratio, second.id, second.ratio) == ("7", 2, "two", 3)
    assert second.args == {"split": "test"}
    assert loaded.document.location(("environments", "train", 1, "ratio")) == "--set"
    assert loaded.document.location(("environments", "train", 1, "id")).startswith(str(path))
    with pytest.raises(
        ConfigError, match=r"environments.train.2: environments.train has 2 items, counted from 0"
    ):
        load_recipe(path, overrides=["environments.train.2.id=three"])


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, MINIMAL + "optimizer: {lr: 3e-6}\n")).recipe.optimizer.lr == 3e-6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MINIMAL + "optimizer: {lrr: 1}\n", [":7", "'optimizer.lrr'", "'optimizer.lr'"]),
        (MINIMAL + "lr: 1\n", [":7", "unknown key 'lr'", "'optimizer.lr'"]),
        (
            MINIMAL.replace("model:", "modell:"),
            [":3: unknown key 'modell'; did you mean 'model'?; also ", "key 'model' is missing"],
        ),
        (
            SUPERVISED + "  data: [{path: a.jsonl}, {pat: b.jsonl}]\n",
            [":6", "'sft.data.1.pat'", "'sft.data.1.path'"],
        ),
        (SUPERVISED + "  data: {path: a.jsonl, nmae: x}\n", [":6", "'sft.data.nmae'", "'sft.data.name'"]),
        (
            SUPERVISED + "  data: [{path: a.jsonl, probability: 1}, {path: b.jsonl}]\n",
            ["probability, or none"],
        ),
        (
            MINIMAL + "optimizer: {lrr: 1}\nsed: 1\nloss: {type: none}\n",
            [
                ":7: unknown key 'optimizer.lrr'",
                "; also ",
                ":8: unknown key 'sed' (did you mean 'seed'?); ",
                ":9: loss.type: must be one of",
            ],
        ),
        (MINIMAL + "max-steps: 5\n", [":7: unknown key 'max-steps'; did you mean 'max_steps'?"]),
        (
            MINIMAL + "rollouts.batch_size: 3\n",
            [":7: unknown key 'rollouts.batch_size'", "nested: rollouts: {batch_size: …}"],
        ),
        (
            MINIMAL + "optimizer: {weight-decay: 5}\n",
            ["'optimizer.weight-decay'", "'optimizer.weight_decay'?"],
        ),
        (MINIMAL + "loss: {type: grpo, mask_low: 1}\n", ["'loss.mask_low'; it is a key of loss.type dppo"]),
        (MINIMAL + "loss: {type: grpo, clip_lo: 1}\n", ["'loss.clip_lo'; did you mean 'loss.clip_low'?"]),
        (MINIMAL + "trainer: {nodes: 2}\n", ["'trainer.nodes'; did you mean 'layout.trainer.nodes'?"]),
        (MINIMAL.replace("[{id: reverse-text}]", "{id: x}"), ["environments.train: must be a list"]),
        (
            MINIMAL + "rollouts: {filters: [{}]}\n",
            ["'rollouts.filters.0.type' is missing; one of", "repetition"],
        ),
        (MINIMAL + "seed: many\n", [":7", "seed", "integer", "'many'"]),
        (MINIMAL + "seed: true\n", [":7", "seed", "integer"]),
        (MINIMAL + "loss:\n  type: ppo\n", ["loss.type", "'dppo'", "'ppo'"]),
        (MINIMAL + "rollouts:\n  batch_size: 100\n", ["100", "group_size", "8"]),
        (MINIMAL + "seed: 1\nseed: 2\n", [":8", "twice"]),
        (MINIMAL + "name: [\n", ["YAML error"]),
        ("- a\n", ["mapping"]),
        ("kind: sft\nname: a\nmodel: {name: m}\nmax_steps: 1\n", ["needs an sft block"]),
        ("kind: rl\nname: a\nmodel: {name: m}\nmax_steps: 1\n", ["environments.train"]),
        ("kind: rl\nname: a b\nmodel: {name: m}\n", ["name", "letters"]),
        (MINIMAL + "layout: {inference: {nodes: few}}\n", ["layout.inference.nodes", "'auto'"]),
        (MINIMAL + "environments: {train: [{id: a}, {id: a}]}\n", ["twice"]),
        (MINIMAL.replace("[{id: reverse-text}]", "[{id: a}, {id: a}]"), ["called 'a'", "name"]),
        (MINIMAL + "env: {PRIMERL_X: a}\n", ["PRIMERL_X"]),
        (MINIMAL + "rollouts: {sampling: {max_tokens: 4096}}\n", ["max_tokens 4096", "2048"]),
        (
            MINIMAL + "warmup: {sft: {data: {path: d}}, max_steps: 1, checkpoint: {fork: {run: r}}}\n",
            ["warmup.checkpoint.fork", "starts from the model"],
        ),
        (MINIMAL + "env: {PRIMERL_RUN_DIR: /x}\n", [":7", "PRIMERL_RUN_DIR is reserved: the run sets it"]),
        *(
            (f"{MINIMAL}rollouts: {{sampling: {{extra: {{{name}: 1}}}}}}\n", ["extra", name, words])
            for name, words in {
                "temperature": "has its own key",
                "max_tokens": "has its own key",
                "seed": "would be alike",
                "n": "one reply",
                "presence_penalty": "another distribution",
                "logit_bias": "another distribution",
                "min_tokens": "another distribution",
                "allowed_token_ids": "another distribution",
                "bad_words": "another distribution",
                "structured_outputs": "another distribution",
                "thinking_token_budget": "another distribution",
            }.items()
        ),
        *(
            (
                f"{MINIMAL}rollouts: {{sampling: {{{name}: {value}}}}}\n",
                [f"rollouts.sampling may not set {name} in kind rl", "another distribution", "evaluation"],
            )
            for name, value in {"top_p": 0.9, "top_k": 40, "min_p": 0.1}.items()
        ),
        *(
            (
                MINIMAL.replace("id: reverse-text", f"id: a, env_args: {{agent: {{sampling: {sampling}}}}}"),
                ["environments.train.0.env_args.agent.sampling may not set", words],
            )
            for sampling, words in {
                "{top_p: 0.9}": "top_p",
                "{bad_words: [x]}": "bad_words",
                "{extra_body: {top_k: 5}}": "top_k",
                "{temperature: 0.5}": "computes with rollouts.sampling.temperature 1",
            }.items()
        ),
        *(
            (
                f"{MINIMAL}inference: {{extra_args: {{{name}: x}}}}\n",
                ["inference.extra_args may not set", words, "kind rl"],
            )
            for name, words in {
                "logits-processors": "logits-processors",
                "--watermark_config": "watermark-config",
            }.items()
        ),
        *(
            (f"{MINIMAL}inference: {{extra_args: {{{name}: 1}}}}\n", [":7", "inference.extra_args", words])
            for name, words in {
                "port": "may not set 'port': the run sets it itself",
                "--max_model_len": "its own key instead: inference.max_model_len",
                "dtype": "its own key instead: model.dtype",
                "no-enable-scale-out": "may not set 'enable-scale-out'",
                "generation-config": "may not set 'generation-config'",
            }.items()
        ),
        *(
            (f"{MINIMAL}rollouts: {{group_size: 1}}\nalgorithm: {{type: {kind}}}\n", [kind, "would be 0"])
            for kind in ("grpo", "grpo_std", "rloo", "opo", "max_rl")
        ),
        (
            MINIMAL + "  eval: [{id: a}, {id: b, sampling: {max_tokens: 2048}}]\n",
            ["environments.eval.1.sampling.max_tokens 2048 leaves no room"],
        ),
        (
            MINIMAL + "  eval: [{id: a, sampling: {max_tokens: null, extra: {min_tokens: 17}}}]\n",
            ["environments.eval.0.sampling.extra.min_tokens 17 needs a max_tokens"],
        ),
        (
            MINIMAL + "after: {evaluation: {environments: [{id: b, sampling: {max_tokens: 4096}}]}}\n",
            ["after.evaluation.environments.0.sampling.max_tokens 4096 leaves no room"],
        ),
        (
            MINIMAL + "after: {export: {to: x, step: 4}}\n",
            ["after.export.step 4 is greater than max_steps 3"],
        ),
        (
            MINIMAL + "after: {evaluation: {steps: [2, 7], environments: [{id: b}]}}\n",
            ["after.evaluation.steps 7 is greater than max_steps 3"],
        ),
        (
            SUPERVISED + "  data: {path: d}\nweights: {transport: delta}\n",
            ["weights.transport delta belongs to kind rl"],
        ),
        (MINIMAL + "rollouts: {sampling: {temperature: 0}}\n", ["kind rl needs", "temperature above 0"]),
        (MINIMAL + "rollouts: {sampling: {top_p: 0}}\n", ["rollouts.sampling.top_p", "greater than 0"]),
        (MINIMAL + "rollouts: {sampling: {top_k: -2}}\n", ["rollouts.sampling.top_k", "equal to -1"]),
        (MINIMAL + "rollouts: {sampling: {top_k: true}}\n", ["rollouts.sampling.top_k", "integer"]),
        (MINIMAL + "optimizer: {betas: [0.9, 1.0]}\n", ["optimizer.betas.1", "less than 1"]),
        (MINIMAL + "inference: {gpu_memory_utilization: 0}\n", ["gpu_memory_utilization", "greater than 0"]),
        (MINIMAL + "timeouts: {health_s: '30'}\n", ["timeouts.health_s", "integer"]),
        (MINIMAL + "timeouts: {health_s: 3}\n", ["timeouts.health_s", "10"]),
        ("kind: inference\nname: a\nmodel: {name: m}\njudge: {model: {name: j}}\n", ["kinds rl and eval"]),
        (
            "kind: eval\nname: a\nmodel: {name: m}\nenvironments: {eval: [{id: a}]}\njudge: {model: {name: j}}\n"
            "evaluation: {external: {base_url: 'http://h/v1'}}\n",
            ["set judge.base_url"],
        ),
        (
            MINIMAL + "trainer: {router_replay: true}\ninference: {kv_offload_gib: 4}\n",
            ["trainer.router_replay and inference.kv_offload_gib cannot be combined"],
        ),
        (
            MINIMAL + "trainer: {router_replay: true, activation_checkpointing: [self_attn, mlp.gate]}\n",
            ["trainer.router_replay and activation_checkpointing [mlp.gate] cannot be combined"],
        ),
        (
            SUPERVISED + "  data: {path: a}\ntrainer: {router_replay: true}\n",
            ["trainer.router_replay belongs to kind rl"],
        ),
        (
            MINIMAL + "layout: {trainer: {expert_backend: deepep}}\ntrainer: {param_dtype: float32}\n",
            ["layout.trainer.expert_backend deepep supports bfloat16 only", "trainer.param_dtype is float32"],
        ),
        (MINIMAL + "lora: {rank: 0}\n", ["lora.rank", "greater than or equal to 1"]),
        (MINIMAL + "lora: {}\ntrainer: {vision: trained}\n", ["trainer.vision trained is for full training"]),
        (MINIMAL + "lora: {rank: 1024}\n", ["lora.rank 1024", "512"]),
        (MINIMAL + "lora: {target_modules: []}\n", ["lora.target_modules"]),
        (MINIMAL + "lora: {target_modules: [q_b_proj, kv_b_proj]}\n", ["kv_b_proj", "ignores its adapters"]),
        (MINIMAL + "lora: {}\nweights: {transport: delta}\n", ["weights.transport delta", "adapters"]),
        (MINIMAL + "weights: {transport: deltas}\n", ["weights.transport", "delta"]),
        (MINIMAL + "lora: {dropout: 0.1}\n", ["lora.dropout belongs to kind sft"]),
        ("kind: inference\nname: a\nmodel: {name: m}\nlora: {}\n", ["lora belongs to kinds rl and sft"]),
        (
            "kind: sft\nname: m\nmodel: {name: m}\nmax_steps: 1\nsft: {data: {path: a}}\nlora: {}\n",
            ["must differ"],
        ),
        (
            MINIMAL + "after: {export: {to: x, merge: true}}\n",
            ["after.export.merge is for recipes with lora"],
        ),
        (
            MINIMAL + "after: {evaluation: {environments: [{id: a}, {id: a}]}}\n",
            ["after.evaluation.environments", "two environments are called 'a'"],
        ),
        (
            "kind: sft\nname: a\nmodel: {name: m}\nmax_steps: 1\nsft: {data: {path: a}}\nlora: {rank: 1024}\n"
            "after: {evaluation: {environments: [{id: reverse-text}]}}\n",
            ["lora.rank 1024", "512"],
        ),
    ],
)
def test_an_error_names_location_key_and_hint(tmp_path: Path, text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message and "recipe.yaml" in message
    for word in expected:
        assert word in message


def test_every_way_to_build_a_recipe_checks_its_blocks_against_each_other(tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="batch_size 100 must be a multiple"):
        parse_recipe({**loaded.document.values, "rollouts": {"batch_size": 100}})
    plan = compile_plan(loaded.recipe, load_profile("local").profile, run_dir=str(tmp_path), python="/py")
    values = plan.model_dump(mode="json")
    run = RunDir(tmp_path)
    write_json(run.plan, values)
    assert load_plan(run) == plan
    values["phases"][0]["recipe"]["rollouts"]["batch_size"] = 100
    write_json(run.plan, values)
    with pytest.raises(DataError, match=r"plan.json: phases.0.recipe: .*batch_size 100 must be"):
        load_plan(run)


def test_an_unknown_key_with_a_dash_is_reported_for_set_and_for_profiles(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--set: unknown key 'max-steps'; did you mean 'max_steps'\?"):
        load_recipe(write(tmp_path, MINIMAL), overrides=["max-steps=5"])
    with pytest.raises(ConfigError, match=r"unknown key 'scheduler.time-min'; did you mean 'scheduler.time"):
        load_profile(write(tmp_path, "name: p\nscheduler: {time-min: 5}\n"))


def test_temperature_0_is_for_evaluations_and_for_replies_of_a_teacher(tmp_path: Path) -> None:
    cold = "rollouts: {sampling: {temperature: 0}}\n"
    taught = "algorithm: {type: sft_distill}\nteacher: {base_url: 'http://h/v1', model: {name: t}}\n"
    evaluated = MINIMAL.replace(
        "[{id: reverse-text}]", "[{id: a}]\n  eval: [{id: b, sampling: {temperature: 0}}]"
    )
    alone = "kind: eval\nname: a\nmodel: {name: m}\nenvironments: {eval: [{id: a}]}\n"
    scored = MINIMAL.replace("rl", "eval", 1).replace("train:", "eval:") + "algorithm: {type: opd}\n"
    for text in (MINIMAL + cold + taught, evaluated, alone + cold, scored + cold):
        assert load_recipe(write(tmp_path, text)).recipe


def test_evaluations_may_set_any_sampling_parameter_and_rae_needs_no_group(tmp_path: Path) -> None:
    own = "  eval: [{id: b, sampling: {extra: {seed: 1, presence_penalty: 0.5}}}]\n"
    group = "rollouts: {group_size: 1, sampling: {extra: {stop: x}}}\nalgorithm: {type: rae}\n"
    assert load_recipe(write(tmp_path, MINIMAL + own + group)).recipe


REMOVES = "sampling: {top_p: 0.9, top_k: 5, min_p: 0.1, extra: {min_tokens: 1, presence_penalty: 1}}"
PLAYERS = "{agent: {sampling: {temperature: 0, top_p: 0.9}, model: other}, judge: {sampling: {top_p: 0.9}}}"


@pytest.mark.parametrize(
    "text",
    [
        f"{MINIMAL}  eval: [{{id: b, {REMOVES}}}]\n",
        f"{MINIMAL}after: {{evaluation: {{environments: [{{id: b, {REMOVES}}}]}}}}\n",
        f"{MINIMAL}rollouts: {{{REMOVES}}}\nalgorithm: {{type: sft_distill}}\nteacher: {{model: {{name: t}}}}\n",
        f"kind: eval\nname: a\nmodel: {{name: m}}\nenvironments: {{eval: [{{id: a}}]}}\nrollouts: {{{REMOVES}}}\n",
        f"kind: inference\nname: a\nmodel: {{name: m}}\nrollouts: {{{REMOVES}}}\n",
        f"{MINIMAL}rollouts: {{sampling: {{top_p: 1.0, top_k: -1, min_p: 0}}}}\n",
        f"{MINIMAL}rollouts: {{sampling: {{top_k: 0, extra: {{min_tokens: 0, repetition_penalty: 1.0, bad_words: null}}}}}}\n",  # noqa: E501
        # neither an agent that another model plays, nor one that may not be trained
        MINIMAL.replace("id: reverse-text", f"id: a, env_args: {PLAYERS}"),
        MINIMAL.replace(
            "id: reverse-text", "id: a, env_args: {agent: {sampling: {max_tokens: 9, top_p: 1}}}"
        ),
    ],
)
def test_parameters_that_remove_tokens_are_allowed_without_training_and_values_without_effect_always(
    tmp_path: Path, text: str
) -> None:
    assert load_recipe(write(tmp_path, text)).recipe


def test_every_sampling_parameter_of_the_pinned_vllm_is_refused_or_known_to_be_harmless() -> None:
    from vllm.sampling_params import SamplingParams

    assert {*SamplingParams.__struct_fields__} == {*REFUSED} | HARMLESS


@pytest.mark.parametrize(
    ("parameters", "refused"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"top_p": 1, "top_k": 0, "min_p": 0.0, "bad_words": [], "logit_bias": {}, "stop": ["x"]}, None),
        ({"n": 1}, "n"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
    ],
)
def test_parameters_are_refused_by_name_and_value(parameters: dict, refused: str | None) -> None:
    assert (refused_parameter(parameters) or (None,))[0] == refused


def test_max_tokens_null_is_the_rest_of_the_context_for_training_and_evaluation(tmp_path: Path) -> None:
    own = "  eval: [{id: b, sampling: {max_tokens: null}}]\nrollouts: {sampling: {max_tokens: null}}\n"
    recipe = load_recipe(write(tmp_path, MINIMAL + own)).recipe
    assert recipe.rollouts.sampling.max_tokens is recipe.environments.eval[0].sampling.max_tokens is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2024-13-45", ":7: YAML error: '2024-13-45' is not a valid timestamp; quote it"),
        ("0x_", ":7: YAML error: '0x_' is not a valid int"),
        ("!!int abc", ":7: YAML error: 'abc' is not a valid int"),
        ("!!bool maybe", ":7: YAML error: 'maybe' is not a valid bool"),
        ("1" * 5000, ":7: YAML error: '1111"),
        ("!!timestamp foo", ":7: YAML error: 'foo' is not a valid timestamp"),
        ("a\x01", ":7: YAML error: control character #x01"),
        ("&a [*a]", ": YAML error: nested too deeply, or an alias that refers to itself"),
        ("[" * 3000 + "]" * 3000, ": YAML error: nested too deeply"),
    ],
)
def test_what_yaml_cannot_read_is_one_sentence_in_a_file_and_text_in_a_set(
    tmp_path: Path, value: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, f"{MINIMAL}seed: {value}\n"))
    assert f"recipe.yaml{expected}" in str(caught.value) and "\n" not in str(caught.value)
    assert parse_value(value) == value


def test_a_similar_recipe_is_suggested_and_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="did you mean 'reverse_text/tiny'"):
        load_recipe("reverse_text/tini.yaml")
    with pytest.raises(NotFoundError, match="it is a folder"):
        load_recipe(str(tmp_path))


def test_a_missing_recipe_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="reverse_text/tiny"):
        load_recipe(str(tmp_path / "nothing"))


def test_a_recipe_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "base: recipe.yaml\n" + MINIMAL)
    with pytest.raises(ConfigError, match="own base"):
        load_recipe(path)


def test_a_set_without_an_assignment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        load_recipe(write(tmp_path, MINIMAL), overrides=["max_steps"])


@pytest.mark.parametrize(
    "value, words", [("4:00", "4 minutes"), ("x", "SLURM time"), ("1-2-3", "SLURM time")]
)
def test_a_walltime_that_slurm_would_not_read_as_meant_is_refused(
    tmp_path: Path, value: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_profile(write(tmp_path, f"name: p\nscheduler: {{time: {value}}}\n"))


def test_the_page_of_each_folder_lists_its_recipes() -> None:
    page = (ROOT / "recipes" / "README.md").read_text()
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    assert recipes
    for path in recipes:
        assert f"({path.parent.name}/README.md)" in page
        assert f"`{path.stem}`" in (path.parent / "README.md").read_text(), path
