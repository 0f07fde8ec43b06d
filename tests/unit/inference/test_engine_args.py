"""Translation of a recipe to vLLM's arguments and environment; settings that the run controls are protected."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.cli.profile import MAX_ITERATIONS
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role
from primerl_hpc.inference.engine_args import MAX_TRACED_ITERATIONS, engine_args, engine_seed, node_args
from primerl_hpc.inference.server import family_config, is_stored_quantized
from primerl_hpc.inference.turns import DROP_WEIGHTS, KEEP_WEIGHTS, sleep_level, wait_for_turn
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.model import Inference
from primerl_hpc.recipe.schema.recipe import InferenceLayout, Recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.turns import Grant, TurnRequest, read_request, write_grant
from tests.support.helpers import PATIENCE_S, wait_for


def recipe(**changes: Any) -> Recipe:
    return parse_recipe({"kind": "inference", "name": "r", "model": {"name": "org/model"}, **changes})


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


def test_replicas_and_incarnations_have_seeds_of_their_own_and_the_nodes_of_an_engine_the_same() -> None:
    seeds = [
        engine_seed(seed, process, instance)
        for seed in (0, 42)
        for process in ("inference-0", "inference-1")
        for instance in ("1.0", "1.1", "2.0")
    ]
    assert len(set(seeds)) == 12 and all(0 <= seed < 2**31 for seed in seeds)
    assert engine_seed(42, "inference-1", "2.0") == seeds[-1]


@pytest.mark.parametrize(
    "config", [{"model_type": "nemotron_h"}, {"text_config": {"model_type": "qwen3_5_text"}}]
)
def test_engines_on_cpus_cache_no_prefixes_of_layers_with_state(config: dict[str, Any]) -> None:
    """vLLM would need chunked prefill for it, which is off on CPUs."""

    def found(accelerator: str) -> dict[str, str | bool]:
        return flags(engine_args(recipe(), model_path="m", accelerator=accelerator, model_config=config))

    assert "no-enable-prefix-caching" in found("cpu") and "enable-prefix-caching" not in found("cpu")
    assert "enable-prefix-caching" in found("gpu") and "no-enable-prefix-caching" not in found("gpu")


@pytest.mark.parametrize(
    ("config", "changes", "is_left_out"),
    [
        ({"model_type": "gemma3", "text_config": {}}, {}, True),
        ({"model_type": "gemma3", "text_config": {}}, {"kind": "inference"}, False),
        ({"model_type": "qwen3_vl", "text_config": {}}, {}, False),
        ({"model_type": "qwen3_vl", "text_config": {}}, {"trainer": {"vision": "none"}}, True),
        (
            {"model_type": "qwen3_vl", "text_config": {}},
            {"layout": {"trainer": {"context_parallel": 2}}},
            True,
        ),
        ({"model_type": "qwen3"}, {"trainer": {"vision": "none"}}, False),
    ],
)
def test_engines_have_a_tower_if_the_trainer_loads_it(
    config: dict[str, Any], changes: dict[str, Any], is_left_out: bool
) -> None:
    changed = recipe(**RL | changes)
    arguments = engine_args(changed, model_path="m", accelerator="gpu", model_config=config)
    assert ("language-model-only" in flags(arguments)) == is_left_out


def test_the_profiler_is_configured_with_a_limit_and_a_folder_of_the_run() -> None:
    assert "profiler-config" not in flags(engine_args(recipe(), model_path="m", accelerator="gpu"))
    found = flags(
        engine_args(recipe(), model_path="m", accelerator="gpu", traces="/run/profiles/inference-0")
    )
    config = json.loads(str(found["profiler-config"]))
    assert config["torch_profiler_dir"] == "/run/profiles/inference-0"
    assert config["max_iterations"] == MAX_TRACED_ITERATIONS == MAX_ITERATIONS
    own = recipe(inference={"extra_args": {"profiler-config": '{"profiler": "cuda"}'}})
    found = flags(engine_args(own, model_path="m", accelerator="gpu", traces="/run"))
    assert json.loads(str(found["profiler-config"])) == {"profiler": "cuda"}


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
    replayed = parse_recipe(
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
def test_vllm_is_patched_only_for_expert_parallelism_on_cpus(
    kind: str, is_parallel: bool, extension: str
) -> None:
    layout = {"inference": {"tensor_parallel": 2, "expert_parallel": is_parallel}}
    found = flags(engine_args(recipe(layout=layout), model_path="m", accelerator=kind))
    assert str(found["worker-extension-cls"]).rsplit(".", 1)[1] == extension


def test_logprobs_use_the_scaled_distribution_and_sampling_has_no_hidden_defaults() -> None:
    found = flags(engine_args(recipe(), model_path="m", accelerator="gpu"))
    assert found["logprobs-mode"] == "processed_logprobs"
    assert found["generation-config"] == "vllm"


def test_engines_of_an_adapter_run_serve_one_adapter_under_the_runs_name() -> None:
    asked = recipe(
        kind="rl", max_steps=1, environments={"train": [{"id": "reverse-text"}]}, lora={"rank": 17}
    )
    found = flags(engine_args(asked, model_path="org/model", accelerator="cpu"))
    assert (found["enable-lora"], found["max-lora-rank"], found["max-loras"]) == (True, "32", "1")
    assert (found["served-model-name"], asked.policy_name) == ("org/model", "r")
    more = asked.model_copy(update={"inference": Inference(adapter_dirs=("a",), max_adapter_rank=40)})
    found = flags(engine_args(more, model_path="org/model", accelerator="cpu"))
    options = ("max-lora-rank", "max-loras", "max-cpu-loras")
    assert [found[name] for name in options] == ["64", "5", "10"]
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
    with pytest.raises(ConfigError, match="does not support adapters for mixture-of-experts models"):
        check_adapters(asked, str(tmp_path), accelerator)


def test_prefill_and_decode_engines_transfer_blocks_over_nixl() -> None:
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


def test_an_engine_without_nixl_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl_hpc.inference import server, vllm_compat
    from tests.support.helpers import make_plan

    monkeypatch.setattr(vllm_compat, "has_nixl", lambda: False)
    asked = recipe(layout={"inference": {"prefill": {}}})
    with pytest.raises(ConfigError, match="requires the package nixl"):
        server.open_side_channel(make_plan(Path("/r"), asked, processes=[]), asked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": {"inference": {"prefill": {}, "elastic": True, "replicas": 2}}}, "elastic: false"),
        (
            {"layout": {"inference": {"prefill": {"tensor_parallel": 3}, "tensor_parallel": 2}}},
            "divide the other",
        ),
        ({"inference": {"kv_offload_gib": 4}}, "inference.kv_offload_gib cannot be combined"),
        (
            {"inference": {"recompute_kv_on_update": True}},
            "inference.recompute_kv_on_update cannot be combined",
        ),
        ({"lora": {"rank": 8}}, "does not support adapters"),
        ({"trainer": {"router_replay": True}}, "stay with the engine"),
        (
            {
                "weights": {"transport": "broadcast"},
                "layout": {"inference": {"prefill": {"tensor_parallel": 2}}},
            },
            "engines of the same size",
        ),
    ],
)
def test_settings_that_exclude_prefill_are_refused(changes: dict[str, Any], says: str) -> None:
    training = {"kind": "rl", "max_steps": 1, "environments": {"train": [{"id": "reverse-text"}]}}
    with pytest.raises(ValueError, match=says):
        recipe(**training | {"layout": {"inference": {"prefill": {}}}} | changes)


def test_extra_arguments_override_ours() -> None:
    extra = {
        "max-num-seqs": 64,
        "enable_prefix_caching": False,
        "no-async-scheduling": False,
        "disable-log-stats": False,
        "--quantization": "fp8_per_block",
    }
    found = flags(engine_args(recipe(inference={"extra_args": extra}), model_path="m", accelerator="gpu"))
    assert (found["max-num-seqs"], found["quantization"]) == ("64", "fp8_per_block")
    assert "enable-prefix-caching" not in found and found["no-enable-prefix-caching"] is True
    assert found["async-scheduling"] is True
    assert not {"disable-log-stats", "no-disable-log-stats"} & found.keys()


@pytest.mark.parametrize(("is_stored", "passed"), [(False, "fp8_per_tensor"), (True, "fp8")])
def test_fp8_of_a_model_not_stored_in_fp8_is_passed_under_its_new_name(is_stored: bool, passed: str) -> None:
    asked = recipe(inference={"extra_args": {"quantization": "fp8"}})
    arguments = engine_args(asked, model_path="m", accelerator="gpu", is_stored_quantized=is_stored)
    assert flags(arguments)["quantization"] == passed


def test_stored_quantization_is_read_from_the_models_configuration(tmp_path: Path) -> None:
    config = {"model_type": "qwen3"}
    asked = recipe(inference={"extra_args": {"--quantization": "fp8"}})
    for stored in (None, {"quant_method": "fp8"}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
        assert is_stored_quantized(asked, str(tmp_path)) is (stored is not None)
    # the configuration is read only if the recipe sets a quantization
    assert not is_stored_quantized(recipe(), "no such model")


@pytest.mark.parametrize(
    "name",
    "port --api-key served_model_name worker-extension-cls middleware enable_lora kv_transfer_config".split(),
)
def test_extra_arguments_must_not_set_what_the_run_controls(name: str) -> None:
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


RL: dict[str, Any] = {"kind": "rl", "max_steps": 1, "environments": {"train": [{"id": "a"}]}}


def test_engines_that_share_gpus_sleep_or_get_their_share_of_the_memory() -> None:
    def found(accelerator: str = "gpu", **changes: Any) -> dict[str, str | bool]:
        return flags(engine_args(recipe(**RL, **changes), model_path="m", accelerator=accelerator))

    turns = found(layout={"colocated": True})
    assert turns["enable-sleep-mode"] is True and turns["gpu-memory-utilization"] == "0.9"
    assert "enable-sleep-mode" not in found("cpu", layout={"colocated": True}), "vLLM refuses it on CPUs"
    share = {"colocated": {"mode": "share", "engine_share": 0.35}}
    assert found(layout=share)["gpu-memory-utilization"] == "0.35"
    both = found(layout=share, inference={"kv_cache_gib": 2.0})
    assert (both["gpu-memory-utilization"], both["kv-cache-memory-bytes"]) == ("0.35", str(2**31))
    assert "enable-sleep-mode" not in both and "enable-sleep-mode" not in found()


def test_only_engines_of_which_an_update_writes_every_weight_drop_them() -> None:
    def level(*, is_stored_quantized: bool = False, **changes: Any) -> int:
        return sleep_level(recipe(**RL, **changes), is_stored_quantized=is_stored_quantized)

    assert level() == DROP_WEIGHTS
    assert level(lora={"rank": 8}) == KEEP_WEIGHTS
    assert level(inference={"extra_args": {"quantization": "fp8_per_tensor"}}) == KEEP_WEIGHTS
    assert level(is_stored_quantized=True) == KEEP_WEIGHTS


def test_an_engine_starts_when_its_own_incarnation_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, name = RunDir(tmp_path), "inference-0"
    monkeypatch.setenv(env.INCARNATION, "3")
    started = threading.Event()
    thread = threading.Thread(target=lambda: (wait_for_turn(run, name), started.set()), daemon=True)
    thread.start()
    wait_for(lambda: read_request(run, name, 1) == TurnRequest(1, 3), "the engine's request")
    for grant in (Grant(1, None, {name: 2}), Grant(1, (0, 1), {name: 3}), Grant(2, None, {name: 3})):
        write_grant(run, grant)
        assert not started.wait(0.25)
    write_grant(run, Grant(1, None, {name: 3}))
    assert started.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "config, option, value",
    [
        ({"model_type": "cohere2", "sliding_window": 8}, "hf-overrides", {"sliding_window": 7}),
        ({"model_type": "cohere2"}, "hf-overrides", {"sliding_window": 4095}),
        ({"model_type": "llama4_text"}, "override-generation-config", {"attn_temperature_tuning": True}),
        (
            {"model_type": "llama4_text", "attn_temperature_tuning": False},
            "override-generation-config",
            {"attn_temperature_tuning": False},
        ),
        ({"model_type": "qwen3", "sliding_window": 8}, None, None),
        ({"model_type": "unknown to transformers"}, None, None),
        (None, None, None),
    ],
)
def test_an_engine_computes_a_family_as_the_trainer_does(
    tmp_path: Path, config: dict[str, Any] | None, option: str | None, value: dict[str, Any] | None
) -> None:
    pytest.importorskip("transformers")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    read = family_config(recipe(), str(tmp_path))
    found = flags(engine_args(recipe(), model_path="m", accelerator="gpu", model_config=read))
    both = {
        name: json.loads(str(found[name]))
        for name in ("hf-overrides", "override-generation-config")
        if name in found
    }
    assert both == ({} if option is None else {option: value})
    if option == "hf-overrides":
        own = recipe(inference={"extra_args": {option: "{}"}})
        found = flags(engine_args(own, model_path="m", accelerator="gpu", model_config=read))
        assert found[option] == "{}"
