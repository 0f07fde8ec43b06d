"""A recipe becomes vLLM's arguments and environment, and nothing that the run decides can be overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.inference.engine_args import engine_args, node_args
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.recipe.schema import InferenceLayout, Recipe


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate(
        {"kind": "inference", "name": "r", "model": {"name": "org/model"}, **changes}
    )


def flags(arguments: list[str]) -> dict[str, str | bool]:
    """``--a 1 --b`` → ``{"a": "1", "b": True}``"""
    found: dict[str, str | bool] = {}
    for position, part in enumerate(arguments):
        if part.startswith("--"):
            after = arguments[position + 1 : position + 2]
            found[part[2:]] = after[0] if after and not after[0].startswith("--") else True
    return found


def test_the_served_name_stays_while_the_weights_change() -> None:
    first = flags(engine_args(recipe(), model_path="org/model", accelerator="cpu"))
    later = flags(engine_args(recipe(), model_path="/run/weights/step_3", accelerator="cpu"))
    assert later["model"] == "/run/weights/step_3"
    assert {k: v for k, v in first.items() if k != "model"} == {
        k: v for k, v in later.items() if k != "model"
    }
    assert later["served-model-name"] == later["tokenizer"] == "org/model"


def test_cpu_engines_run_eagerly_with_a_bounded_kv_cache() -> None:
    found = flags(engine_args(recipe(), model_path="m", accelerator="cpu"))
    assert found["enforce-eager"] is True
    assert found["kv-cache-memory-bytes"] == str(2**30)
    assert "gpu-memory-utilization" not in found


def test_gpu_engines_capture_graphs_and_take_a_share_of_the_memory() -> None:
    found = flags(engine_args(recipe(), model_path="m", accelerator="gpu"))
    assert "enforce-eager" not in found
    assert found["gpu-memory-utilization"] == "0.9"
    fixed = recipe(inference={"kv_cache_gib": 4.0, "enforce_eager": True})
    found = flags(engine_args(fixed, model_path="m", accelerator="gpu"))
    assert found["enforce-eager"] is True
    assert found["kv-cache-memory-bytes"] == str(4 * 2**30)
    assert "gpu-memory-utilization" not in found


def test_only_the_engines_of_a_policy_whose_routers_are_replayed_return_experts() -> None:
    replayed = Recipe.model_validate(
        {
            "kind": "rl",
            "name": "r",
            "model": {"name": "org/moe"},
            "max_steps": 1,
            "environments": {"train": [{"id": "reverse-text"}]},
            "trainer": {"router_replay": True},
            "judge": {"model": {"name": "org/dense"}},
        }
    )
    assert "enable-return-routed-experts" in flags(engine_args(replayed, model_path="m", accelerator="gpu"))
    for other in (recipe(), replayed.for_frozen(Role.JUDGE)):
        found = flags(engine_args(other, model_path="m", accelerator="gpu"))
        assert "enable-return-routed-experts" not in found


def test_parallel_sizes_and_lengths_come_from_the_recipe() -> None:
    layout = {"inference": {"tensor_parallel": 2, "data_parallel": 4, "expert_parallel": True}}
    found = flags(engine_args(recipe(layout=layout, seq_len=4096, seed=7), model_path="m", accelerator="gpu"))
    assert (found["tensor-parallel-size"], found["data-parallel-size"]) == ("2", "4")
    assert found["enable-expert-parallel"] is True
    assert (found["max-model-len"], found["seed"]) == ("4096", "7")


def test_blocks_that_leave_the_gpus_cache_may_go_to_host_memory() -> None:
    found = flags(engine_args(recipe(inference={"kv_offload_gib": 16}), model_path="m", accelerator="gpu"))
    assert (found["kv-offloading-size"], found["gpu-memory-utilization"]) == ("16.0", "0.9")


@pytest.mark.parametrize(
    ("kind", "is_parallel", "extension"),
    [("cpu", True, "CPUWeightUpdate"), ("cpu", False, "WeightUpdate"), ("gpu", True, "WeightUpdate")],
)
def test_vllm_is_changed_only_where_experts_are_spread_over_cpus(
    kind: str, is_parallel: bool, extension: str
) -> None:
    layout = {"inference": {"tensor_parallel": 2, "expert_parallel": is_parallel}}
    found = flags(engine_args(recipe(layout=layout), model_path="m", accelerator=kind))
    assert found["worker-extension-cls"].rsplit(".", 1)[1] == extension


def test_logprobs_are_of_the_scaled_distribution_and_sampling_has_no_hidden_defaults() -> None:
    found = flags(engine_args(recipe(), model_path="m", accelerator="gpu"))
    assert found["logprobs-mode"] == "processed_logprobs"
    assert found["generation-config"] == "vllm"


def test_engines_of_a_run_with_adapters_take_one_under_the_runs_name() -> None:
    asked = recipe(
        kind="rl", max_steps=1, environments={"train": [{"id": "reverse-text"}]}, lora={"rank": 17}
    )
    found = flags(engine_args(asked, model_path="org/model", accelerator="cpu"))
    assert (found["enable-lora"], found["max-lora-rank"], found["max-loras"]) == (True, "32", "1")
    assert (found["served-model-name"], asked.policy_name) == ("org/model", "r")
    assert "enable-lora" not in flags(engine_args(recipe(), model_path="m", accelerator="cpu"))


@pytest.mark.parametrize(
    ("family", "accelerator"), [("qwen3", "cpu"), ("qwen3_moe", "gpu"), ("qwen3_moe", "cpu")]
)
def test_adapters_on_a_mixture_of_experts_are_refused_on_cpus(
    tmp_path: Path, family: str, accelerator: str
) -> None:
    from primerl_hpc.inference.server import check_adapters

    (tmp_path / "config.json").write_text(f'{{"model_type": "{family}"}}')
    asked = recipe(kind="rl", max_steps=1, environments={"train": [{"id": "reverse-text"}]}, lora={"rank": 8})
    if (family, accelerator) != ("qwen3_moe", "cpu"):
        return check_adapters(asked, str(tmp_path), accelerator)
    with pytest.raises(ConfigError, match="serves no adapters on a mixture of experts"):
        check_adapters(asked, str(tmp_path), accelerator)


def test_extra_arguments_pass_through_and_win() -> None:
    extra = {"max-num-seqs": 64, "enable_prefix_caching": False, "--quantization": "fp8"}
    found = flags(engine_args(recipe(inference={"extra_args": extra}), model_path="m", accelerator="gpu"))
    assert (found["max-num-seqs"], found["quantization"]) == ("64", "fp8")
    assert "enable-prefix-caching" not in found


@pytest.mark.parametrize(
    "name", ["port", "--api-key", "served_model_name", "worker-extension-cls", "middleware", "enable_lora"]
)
def test_extra_arguments_may_not_touch_what_the_run_decides(name: str) -> None:
    with pytest.raises(ConfigError, match="may not set"):
        engine_args(recipe(inference={"extra_args": {name: "x"}}), model_path="m", accelerator="cpu")


def test_only_cpu_engines_get_openmp_settings() -> None:
    assert engine_env("cpu")["OMP_NUM_THREADS"] == "1"
    assert engine_env("cpu")["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert not any("OMP" in name or "CPU" in name for name in engine_env("gpu"))


MEETING = {"host": "10.0.0.1", "port": 4242}


def test_an_engine_splits_over_nodes_by_data_parallel_ranks() -> None:
    layout = InferenceLayout(tensor_parallel=4, data_parallel=4)
    head, second = (flags(node_args(layout, 2, rank, MEETING)) for rank in (0, 1))
    shared = {
        "data-parallel-size-local": "2",
        "data-parallel-address": "10.0.0.1",
        "data-parallel-rpc-port": "4242",
    }
    assert head == shared
    assert second == {**shared, "headless": True, "data-parallel-start-rank": "2"}


def test_an_engine_splits_over_nodes_by_tensor_parallel_ranks() -> None:
    layout = InferenceLayout(tensor_parallel=16)
    head, second = (flags(node_args(layout, 2, rank, MEETING)) for rank in (0, 1))
    shared = {"nnodes": "2", "master-addr": "10.0.0.1", "master-port": "4242"}
    assert head == {**shared, "node-rank": "0"}
    assert second == {**shared, "node-rank": "1", "headless": True}
