"""A recipe becomes vLLM's arguments and environment, and nothing that the run decides can be overridden."""

from __future__ import annotations

import json
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
    assert found["no-enable-chunked-prefill"] is True


def test_gpu_engines_capture_graphs_and_take_a_share_of_the_memory() -> None:
    found = flags(engine_args(recipe(), model_path="m", accelerator="gpu"))
    assert "enforce-eager" not in found and "no-enable-chunked-prefill" not in found
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


def test_engines_that_prefill_and_those_that_decode_share_blocks_over_nixl() -> None:
    layout = {"inference": {"tensor_parallel": 2, "prefill": {"tensor_parallel": 4}}}
    asked = recipe(layout=layout, timeouts={"weight_update_s": 100})
    decodes = flags(engine_args(asked, model_path="m", accelerator="gpu"))
    reads = flags(engine_args(asked.for_prefill(), model_path="m", accelerator="gpu", is_prefill=True))
    assert (decodes["tensor-parallel-size"], reads["tensor-parallel-size"]) == ("2", "4")
    configs = [json.loads(str(each["kv-transfer-config"])) for each in (decodes, reads)]
    assert [each.pop("kv_role") for each in configs] == ["kv_consumer", "kv_producer"]
    assert configs[0] == configs[1]
    assert configs[0]["kv_load_failure_policy"] == "recompute"
    assert configs[0]["kv_connector_extra_config"] == {"kv_lease_duration": 130}  # blocks outlive an update
    assert "kv-transfer-config" not in flags(engine_args(recipe(), model_path="m", accelerator="gpu"))


def test_an_engine_without_nixl_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl_hpc.inference import server, vllm_compat
    from tests.support import make_plan

    monkeypatch.setattr(vllm_compat, "has_nixl", lambda: False)
    asked = recipe(layout={"inference": {"prefill": {}}})
    with pytest.raises(ConfigError, match="needs the package nixl"):
        server.open_side_channel(make_plan(Path("/r"), asked, processes=[]), asked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": {"inference": {"prefill": {}, "elastic": True, "replicas": 2}}}, "elastic: false"),
        (
            {"layout": {"inference": {"prefill": {"tensor_parallel": 3}, "tensor_parallel": 2}}},
            "divide the other",
        ),
        ({"inference": {"kv_offload_gib": 4}}, "excludes inference.kv_offload_gib"),
        ({"inference": {"recompute_kv_on_update": True}}, "excludes inference.recompute_kv_on_update"),
        ({"lora": {"rank": 8}}, "for whole models"),
        ({"trainer": {"router_replay": True}}, "stay with the engine"),
        (
            {
                "weights": {"transport": "broadcast"},
                "layout": {"inference": {"prefill": {"tensor_parallel": 2}}},
            },
            "engines of one size",
        ),
    ],
)
def test_what_prefill_cannot_go_with_is_refused(changes: dict[str, Any], says: str) -> None:
    training = {"kind": "rl", "max_steps": 1, "environments": {"train": [{"id": "reverse-text"}]}}
    with pytest.raises(ValueError, match=says):
        recipe(**training | {"layout": {"inference": {"prefill": {}}}} | changes)


def test_extra_arguments_pass_through_and_win() -> None:
    extra = {
        "max-num-seqs": 64,
        "enable_prefix_caching": False,
        "no-async-scheduling": False,
        "disable-log-stats": False,
        "--quantization": "fp8",
    }
    found = flags(engine_args(recipe(inference={"extra_args": extra}), model_path="m", accelerator="gpu"))
    assert (found["max-num-seqs"], found["quantization"]) == ("64", "fp8")
    assert "enable-prefix-caching" not in found and found["no-enable-prefix-caching"] is True
    assert found["async-scheduling"] is True
    assert not {"disable-log-stats", "no-disable-log-stats"} & found.keys()


@pytest.mark.parametrize(
    "name",
    [
        "port",
        "--api-key",
        "served_model_name",
        "worker-extension-cls",
        "middleware",
        "enable_lora",
        "kv_transfer_config",
    ],
)
def test_extra_arguments_may_not_touch_what_the_run_decides(name: str) -> None:
    with pytest.raises(ValueError, match="may not set"):
        recipe(inference={"extra_args": {name: "x"}})


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
