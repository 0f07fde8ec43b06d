"""The optional second opinion. The package is not installed for tests: a small one with its interface stands for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.plan.predict.figure import Tier
from primerl_hpc.plan.predict.hardware import gpu_spec
from primerl_hpc.plan.predict.layouts import EngineSetup
from primerl_hpc.plan.predict.timing.second_opinion import ServingLoad, second_opinion

SETUP = EngineSetup(gpus=4, tensor_parallel=4, max_model_len=4096, dtype="fp8")
LOAD = ServingLoad(64, 1024, 1024)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Install a package with aiconfigurator's interface, whose estimate is 18.3 ms."""
    calls = []

    def run_agg(model, database, runtime, ctx_tokens):
        calls.append((model, database, runtime, ctx_tokens))
        return SimpleNamespace(get_result_dict=lambda: {"tpot": 18.3})

    (tmp_path / "model_configs").mkdir()
    (tmp_path / "model_configs" / "meta-llama--Meta-Llama-3.1-70B_config.json").write_text("{}")
    modules = {
        "aiconfigurator_core": {"__path__": [str(tmp_path)], "__spec__": None},
        "aiconfigurator_core.sdk": {},
        "aiconfigurator_core.sdk.config": {"RuntimeConfig": lambda **settings: settings},
        "aiconfigurator_core.sdk.config_builders": {
            "build_model_config": lambda *sizes, **types: (sizes, types)
        },
        "aiconfigurator_core.sdk.models": {"get_model": lambda *what: what},
        "aiconfigurator_core.sdk.perf_database": {
            "get_latest_database_version": lambda system, backend: "0.24.0",
            "get_database_view": lambda *what, **how: (what, how),
        },
        "aiconfigurator_core.sdk.backends": {},
        "aiconfigurator_core.sdk.backends.factory": {
            "get_backend": lambda name: SimpleNamespace(run_agg=run_agg)
        },
    }
    for name, members in modules.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    monkeypatch.setattr("primerl_hpc.plan.predict.timing.second_opinion.files", lambda name: tmp_path)
    return calls


def test_its_estimate_is_labeled_as_a_second_opinion(package):
    figure = second_opinion("meta-llama/Llama-3.1-70B", gpu_spec("H100-SXM"), SETUP, LOAD)
    assert figure.value == pytest.approx(0.0183)
    assert figure.tier is Tier.TABLE and "second opinion" in figure.source and "0.24.0" in figure.source
    ((model, (what, how), runtime, ctx_tokens),) = package
    assert model[0] == "meta-llama/Meta-Llama-3.1-70B"
    assert model[1][0] == (4, 1, 1, 4, 1) and model[1][1]["gemm_quant_mode"] == "fp8"
    assert what == ("h100_sxm", "vllm", "0.24.0") and how == {"database_mode": "HYBRID"}
    assert runtime == {"batch_size": 64, "isl": 1024, "osl": 1024} and ctx_tokens == 8192


@pytest.mark.parametrize(
    ("model", "gpu", "text"),
    [
        ("some/model", "H100-SXM", "model some/model"),
        ("meta-llama/Llama-3.1-70B", "MI300X", "GPU type MI300X"),
    ],
)
def test_what_it_has_no_data_for_is_refused_by_name(package, model, gpu, text):
    with pytest.raises(NotFoundError, match=text):
        second_opinion(model, gpu_spec(gpu), SETUP, LOAD)
    assert not package


def test_its_own_errors_become_one_sentence(package, monkeypatch):
    def fail(*what):
        raise KeyError("no MoE table\nwith details")

    monkeypatch.setattr(sys.modules["aiconfigurator_core.sdk.models"], "get_model", fail)
    with pytest.raises(NotFoundError, match="no estimate for meta-llama/Llama-3") as refusal:
        second_opinion("meta-llama/Llama-3.1-70B", gpu_spec("H100-SXM"), SETUP, LOAD)
    assert "\n" not in str(refusal.value)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigError, match="not installed") as refusal:
        second_opinion("meta-llama/Llama-3.1-70B", gpu_spec("H100-SXM"), SETUP, LOAD)
    assert "primerl-hpc[planner]" in refusal.value.hint
