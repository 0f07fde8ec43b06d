"""Blocks of a recipe that need or exclude one another: what each check refuses, and what it must let pass."""

from __future__ import annotations

from typing import Any

import pytest

from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.cross_checks import deprecation_warnings, other_sampling

NAMED = {"name": "small", "model": {"name": "some/model"}}
RL = {"kind": "rl", **NAMED, "max_steps": 3, "environments": {"train": [{"id": "a"}]}}
SFT = {"kind": "sft", **NAMED, "max_steps": 3, "sft": {"data": {"path": "d"}}}
EVAL = {"kind": "eval", **NAMED, "environments": {"eval": [{"id": "a"}]}}
INFERENCE = {"kind": "inference", **NAMED}
HELD_OUT = {"environments": {"eval": [{"id": "b"}]}}
ONLINE = {**SFT, **HELD_OUT, "evaluation": {"every": 1}}
TEACHER, SERVED = {"base_url": "http://h/v1", "model": {"name": "t"}}, {"model": {"name": "t"}}
EXTERNAL = {"evaluation": {"external": {"base_url": "http://h/v1"}}}
OWN_ENVIRONMENT = {"environments": [{"id": "b"}]}
MORE_ADAPTERS = {"inference": {"adapter_dirs": ["a"]}}
PREFILL = {"layout": {"inference": {"prefill": {}}}}
COLOCATED = {"layout": {"colocated": True}}
Values = dict[str, Any]


def drop(values: Values, key: str) -> Values:
    return {name: value for name, value in values.items() if name != key}


def trained_on(*environments: Values, **more: Any) -> Values:
    return {**RL, "environments": {"train": list(environments)}, **more}


def colocated(**layout: Any) -> Values:
    return {"layout": {"colocated": True, **layout}}


def sampling(**values: Any) -> Values:
    return {"rollouts": {"sampling": values}}


def agent(**values: Any) -> Values:
    return trained_on({"id": "a", "env_args": {"agent": values}})


REFUSED: list[tuple[Values, str]] = [
    # kinds and their blocks
    (drop(RL, "max_steps"), "kind rl needs max_steps"),
    (drop(SFT, "max_steps"), "kind sft needs max_steps"),
    (drop(RL, "environments"), "kind rl needs at least one environment in environments.train"),
    (drop(EVAL, "environments"), "kind eval needs at least one environment in environments.eval"),
    (drop(SFT, "sft"), "kind sft needs an sft block"),
    (SFT | {"warmup": {"sft": {"data": {"path": "d"}}, "max_steps": 1}}, "warmup belongs to kind rl"),
    # forks
    (EVAL | {"checkpoint": {"fork": {"run": "r"}}}, "checkpoint.fork belongs to kinds rl and sft"),
    (
        RL
        | {"checkpoint": {"fork": {"run": "r"}}, "warmup": {"sft": {"data": {"path": "d"}}, "max_steps": 1}},
        "without a warmup",
    ),
    (RL | {"checkpoint": {"fork": {"run": "r", "step": 3}}}, "fork.step 3 must be less than max_steps 3"),
    # the block evaluation
    (RL | {"evaluation": {}}, "evaluation belongs to kinds eval and sft, but the kind is rl"),
    (EVAL | {"evaluation": {"steps": [1]}}, "select versions in the folder weights"),
    (EVAL | {"evaluation": {"base": False}}, "there is nothing to evaluate"),
    (ONLINE | {"evaluation": {"every": 1, "weights": "w"}}, "evaluation.weights belongs to kind eval"),
    (ONLINE | {"evaluation": {"every": 1, "watch": True}}, "evaluation.watch belongs to kind eval"),
    (ONLINE | EXTERNAL, "evaluation.external belongs to kind eval"),
    (ONLINE | {"evaluation": {}}, "evaluation needs every"),
    (drop(ONLINE, "environments"), "evaluation needs environments.eval in kind sft"),
    (ONLINE | {"evaluation": {"steps": [1, 4]}}, "evaluation.steps 4 is greater than max_steps 3"),
    # groups
    (RL | {"rollouts": {"batch_size": 9, "group_size": 2}}, "batch_size 9 must be a multiple"),
    (RL | {"rollouts": {"group_size": 1}, "algorithm": {"type": "grpo"}}, "algorithm grpo compares"),
    # lengths
    (RL | {"seq_len": 64} | sampling(max_tokens=64), r"rollouts.sampling.max_tokens 64 leaves no room"),
    (
        RL | sampling(max_tokens=None, extra={"min_tokens": 17}),
        "extra.min_tokens 17 needs a max_tokens: .* greater than 16",
    ),
    (ONLINE | {"seq_len": 64} | sampling(max_tokens=64), "leaves no room"),
    (EVAL | {"seq_len": 64} | sampling(max_tokens=64), "leaves no room"),
    (SFT | {"seq_len": 64, "after": {"evaluation": OWN_ENVIRONMENT}} | sampling(max_tokens=64), "no room"),
    # what engines and trainer must agree on
    (RL | sampling(temperature=0), "temperature above 0"),
    (RL | sampling(top_p=0.5), "rollouts.sampling may not set top_p in kind rl"),
    (RL | sampling(extra={"min_p": 0.5}), "may not set min_p|min_p has its own key"),
    (
        trained_on(
            {
                "id": "a",
                "algorithm": {"type": "sft_distill"},
                "env_args": {"agent": {"sampling": {"top_p": 0.5}}},
            },
            {"id": "b", "env_args": {"agent": {"sampling": {"top_p": 0.5}}}},
            teacher=TEACHER,
        ),
        "environments.train.1.env_args.agent.sampling may not set top_p",
    ),
    (agent(sampling={"temperature": 0.5}), "computes with rollouts.sampling.temperature 1;"),
    (RL | {"inference": {"extra_args": {"--logits_processors": "x"}}}, "may not set 'logits-processors'"),
    # follow-up jobs
    (EVAL | {"after": {"export": {"to": "x"}}}, "after belongs to kinds rl and sft: a run of kind eval"),
    (RL | {"after": {"export": {"to": "x", "merge": True}}}, "merge is for recipes with lora"),
    (RL | {"after": {"export": {"to": "x", "step": 4}}}, "after.export.step 4 is greater than max_steps 3"),
    (RL | {"after": {"evaluation": OWN_ENVIRONMENT | {"steps": [4]}}}, "after.evaluation.steps 4 is greater"),
    (RL | {"after": {"evaluation": {}}}, "after.evaluation needs environments"),
    # adapters
    (EVAL | {"lora": {}}, "a run of kind eval trains no adapters"),
    (INFERENCE | {"lora": {}}, "a run of kind inference trains no adapters"),
    (RL | {"lora": {"dropout": 0.1}}, "lora.dropout belongs to kind sft"),
    (RL | {"lora": {"rank": 513}}, "lora.rank 513 exceeds 512"),
    (ONLINE | {"lora": {"rank": 513}}, "lora.rank 513 exceeds 512"),
    (SFT | {"lora": {"rank": 513}, "after": {"evaluation": OWN_ENVIRONMENT}}, "lora.rank 513 exceeds 512"),
    (RL | {"lora": {"target_modules": ["q_proj", "attn.kv_b_proj"]}}, "may not contain kv_b_proj"),
    (SFT | {"lora": {}, "trainer": {"vision": "trained"}}, "trainer.vision trained is for full training"),
    (
        SFT | {"lora": {}, "trainer": {"router_bias_rate": 0.1}},
        "trainer.router_bias_rate is for full training",
    ),
    (RL | {"lora": {}, "weights": {"transport": "delta"}}, "weights.transport delta is for full training"),
    (SFT | {"lora": {}, "name": "m", "model": {"name": "m"}}, "name must differ from model.name with lora"),
    # mixtures of experts
    (
        RL | {"layout": {"trainer": {"expert_backend": "deepep"}}, "trainer": {"param_dtype": "float32"}},
        "deepep supports bfloat16 only, but trainer.param_dtype is float32",
    ),
    (SFT | {"trainer": {"router_replay": True}}, "router_replay belongs to kind rl: in kind sft"),
    (RL | {"trainer": {"router_replay": True}, "inference": {"kv_offload_gib": 1}}, "kv_offload_gib cannot"),
    *(
        (
            RL | {"trainer": {"router_replay": True, "activation_checkpointing": ["mlp", name]}},
            rf"router_replay and activation_checkpointing \[{name}\]",
        )
        for name in ("mlp.gate", "router", "block.mlp.router")
    ),
    # teachers and judges
    (RL | {"algorithm": {"type": "opd"}}, "algorithm opd needs a teacher"),
    (RL | {"teacher": TEACHER}, "there is a teacher, but no algorithm uses it"),
    (
        RL | {"algorithm": {"type": "opd"}, "teacher": TEACHER} | sampling(temperature=0.7),
        "algorithm opd compares log-probabilities at temperature 1, but .* is 0.7",
    ),
    (INFERENCE | {"judge": SERVED}, "a run of kind inference has no rollouts"),
    (SFT | {"judge": SERVED}, "a run of kind sft has no rollouts"),
    (EVAL | EXTERNAL | {"judge": SERVED}, "set judge.base_url"),
    # engines and trainer on the same accelerators
    (SFT | COLOCATED, "layout.colocated belongs to kind rl, but the kind is sft"),
    (RL | colocated(inference={"elastic": True, "replicas": 1}), "colocated and layout.inference.elastic"),
    (RL | colocated(inference={"prefill": {}}), "colocated and layout.inference.prefill"),
    (RL | colocated(inference={"node_type": "l40s"}), "the same node_type in layout.inference and"),
    (
        RL | colocated(inference={"nodes": 1}, trainer={"nodes": 2}),
        "nodes 1 and layout.trainer.nodes 2 differ",
    ),
    (RL | colocated(auto_split=True), "colocated and layout.auto_split"),
    (RL | COLOCATED | {"judge": SERVED}, "a judge that the run serves .* set judge.base_url"),
    (RL | colocated(inference={"data_parallel": 2}), "data_parallel 1 only"),
    (RL | COLOCATED | {"weights": {"transport": "broadcast"}}, "NCCL accepts one rank per GPU"),
    (RL | COLOCATED | {"weights": {"transport": "delta"}}, "mode sleep, use filesystem"),
    (RL | COLOCATED | {"inference": {"kv_offload_gib": 1}}, "drop their KV cache at every turn"),
    # goals
    (EVAL | {"stop_when": {"metric": "a", "at_least": 1.0}}, "stop_when belongs to kinds rl and sft"),
    (SFT | {"weights": {"keep_best": {"metric": "a"}}}, "keep_best belongs to kind rl, and to kind sft with"),
    # adapters that are loaded while engines run
    (RL | MORE_ADAPTERS, "adapter_dirs and max_adapters belong to kind inference and to runs with lora"),
    (EVAL | MORE_ADAPTERS, "adapter_dirs and max_adapters belong to kind inference"),
    (INFERENCE | MORE_ADAPTERS | PREFILL, "remove prefill or inference.adapter_dirs"),
    (INFERENCE | {"inference": {"max_adapter_rank": 513}}, "less than or equal to 512"),
    # prefill engines
    (EVAL | EXTERNAL | PREFILL, "evaluation.external starts no engines; remove prefill"),
    (RL | PREFILL | {"lora": {}}, "does not support adapters"),
    (RL | PREFILL | {"trainer": {"router_replay": True}}, "router_replay and layout.inference.prefill"),
    (RL | PREFILL | {"inference": {"kv_offload_gib": 1}}, "prefill and inference.kv_offload_gib"),
    (RL | PREFILL | {"inference": {"recompute_kv_on_update": True}}, "inference.recompute_kv_on_update"),
    (
        RL
        | {
            "layout": {"inference": {"prefill": {"tensor_parallel": 2}}},
            "weights": {"transport": "broadcast"},
        },
        "broadcast needs engines of the same size",
    ),
]

ACCEPTED: list[Values] = [
    RL,
    SFT,
    EVAL,
    INFERENCE,
    ONLINE,
    RL | {"warmup": {"sft": {"data": {"path": "d"}}, "max_steps": 1}},
    RL | {"checkpoint": {"fork": {"run": "r", "step": 2}}},
    RL | {"checkpoint": {"fork": {"run": "r"}}},
    SFT | {"checkpoint": {"fork": {"run": "r", "step": 2}}},
    RL | {"weights": {"transport": "delta"}},
    EVAL | {"evaluation": {}},
    EVAL | {"evaluation": {"weights": "w", "steps": [7], "base": False}},
    EVAL | {"evaluation": {"weights": "w", "every": 2}},
    EVAL | EXTERNAL,
    ONLINE | {"evaluation": {"steps": [3]}},
    ONLINE | {"evaluation": {"every": 5}},
    RL | {"rollouts": {"batch_size": 8, "group_size": 2}},
    RL | {"rollouts": {"group_size": 1}, "algorithm": {"type": "rae"}},
    EVAL | {"rollouts": {"group_size": 1}, "algorithm": {"type": "grpo"}},
    # lengths
    RL | {"seq_len": 64} | sampling(max_tokens=63),
    RL | sampling(max_tokens=None, extra={"min_tokens": 0}),
    EVAL | sampling(max_tokens=None, extra={"min_tokens": 16}),
    EVAL | sampling(max_tokens=18, extra={"min_tokens": 17}),
    EVAL | sampling(max_tokens=None),
    SFT | {"seq_len": 64} | sampling(max_tokens=64),
    INFERENCE | {"seq_len": 64} | sampling(max_tokens=64),
    RL
    | {
        "environments": {
            "train": [{"id": "a"}],
            "eval": [{"id": "b"}, {"id": "c", "sampling": {"top_p": 0.5}}],
        }
    },
    # agents that the policy does not play, and values without effect
    agent(sampling={"max_tokens": 5, "top_p": 1}),
    agent(sampling={"top_p": 0.5}, model="other"),
    agent(sampling={"top_p": 0.5}, client={"base_url": "http://h"}),
    agent(sampling=None),
    trained_on({"id": "a", "env_args": {"agent": "solver"}}),
    RL | {"inference": {"extra_args": {"--max_num_seqs": 8}}},
    EVAL | {"inference": {"extra_args": {"logits-processors": "x"}}},
    EVAL | sampling(temperature=0),
    # follow-up jobs
    RL | {"after": {"export": {"to": "x", "step": 3}}},
    RL | {"after": {"export": {"to": "x"}}},
    RL | {"after": {"evaluation": OWN_ENVIRONMENT | {"steps": [3]}}},
    RL | {"after": {"evaluation": {}}, "environments": {"train": [{"id": "a"}], "eval": [{"id": "b"}]}},
    SFT | {"after": {"evaluation": OWN_ENVIRONMENT}},
    RL | {"lora": {}, "after": {"export": {"to": "x", "merge": True}}},
    # adapters
    EVAL | {"lora": {}, "evaluation": {"weights": "w"}},
    SFT | {"lora": {"dropout": 0.1, "rank": 1024, "target_modules": ["kv_b_proj"]}},
    RL | {"lora": {"rank": 512, "target_modules": ["kv_b_proj.other", "q_proj"]}},
    # mixtures of experts
    RL | {"layout": {"trainer": {"expert_backend": "deepep"}}},
    RL | {"trainer": {"param_dtype": "float32"}},
    RL | {"trainer": {"router_replay": True}},
    RL | {"trainer": {"router_replay": True, "activation_checkpointing": ["mlp", "gate.other"]}},
    RL | {"trainer": {"activation_checkpointing": ["mlp.gate"]}},
    # teachers and judges
    RL | {"algorithm": {"type": "opd"}, "teacher": TEACHER},
    RL | {"algorithm": {"type": "sft_distill"}, "teacher": TEACHER} | sampling(temperature=0.7),
    EVAL | {"algorithm": {"type": "opd"}},
    EVAL | {"teacher": TEACHER},
    *(values | {"judge": SERVED} for values in (RL, EVAL, ONLINE)),
    EVAL | EXTERNAL | {"judge": TEACHER},
    # engines and trainer on the same accelerators
    RL | COLOCATED,
    RL | {"layout": {"colocated": False}, "weights": {"transport": "broadcast"}},
    RL | colocated(inference={"nodes": 2, "tensor_parallel": 2}, trainer={"nodes": 2}),
    RL | {"layout": {"colocated": {"mode": "share"}}, "weights": {"transport": "delta"}},
    RL | COLOCATED | {"judge": TEACHER},
    # prefill engines
    RL | PREFILL,
    RL | PREFILL | {"weights": {"transport": "broadcast"}},
    RL | {"layout": {"inference": {"prefill": {"tensor_parallel": 2}}}},
    INFERENCE | MORE_ADAPTERS,
    RL | MORE_ADAPTERS | {"lora": {}},
    EVAL | PREFILL | {"trainer": {"param_dtype": "float32"}},
]


@pytest.mark.parametrize(("values", "reason"), REFUSED, ids=[reason[:60] for _, reason in REFUSED])
def test_blocks_that_exclude_each_other_are_refused_with_the_reason(values: Values, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_recipe(values)


@pytest.mark.parametrize("values", ACCEPTED, ids=range(len(ACCEPTED)))
def test_blocks_that_are_compatible_are_accepted(values: Values) -> None:
    assert parse_recipe(values).kind == values["kind"]


@pytest.mark.parametrize(
    ("parameters", "temperature", "refused"),
    [
        ({}, 0.7, None),
        ({"temperature": 0.7}, 0.7, None),
        ({"temperature": None}, 1.0, None),
        ({"temperature": None}, 0.7, "temperature"),
        ({"temperature": None}, 2.0, "temperature"),
        ({"temperature": 0.7}, 1.0, "temperature"),
        ({"temperature": 1.0, "top_k": 5}, 1.0, "top_k"),
        ({"stop": ["x"]}, 1.0, None),
    ],
)
def test_engines_sample_an_agent_at_temperature_1_unless_the_request_sets_another(
    parameters: Values, temperature: float, refused: str | None
) -> None:
    found = other_sampling(parameters, temperature)
    assert (found and found[0]) == refused


def test_the_old_name_of_online_fp8_is_reported_for_each_model_that_uses_it() -> None:
    fp8 = {"inference": {"extra_args": {"quantization": "fp8"}}}
    assert deprecation_warnings(parse_recipe(RL)) == []
    new = {"inference": {"extra_args": {"quantization": "fp8_per_tensor"}}}
    assert deprecation_warnings(parse_recipe(RL | new)) == []
    (warning,) = deprecation_warnings(parse_recipe(RL | fp8))
    assert warning.startswith("inference.extra_args: ") and "{quantization: fp8_per_tensor}" in warning
    judged = RL | {"judge": SERVED | fp8}
    (warning,) = deprecation_warnings(parse_recipe(judged))
    assert warning.startswith("judge.inference.extra_args: ")
