"""Facts about GPU types."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.figure import Tier
from primerl_hpc.plan.predict.hardware import DISTANCE_FACTORS, gpu_spec, known_gpus, spec_of_device

ROOT = Path(__file__).resolve().parents[4]
FILES = [path for path in (files("primerl_hpc.plan.predict") / "hardware").iterdir()]


def test_every_shipped_profile_names_a_known_gpu():
    named = 0
    for path in sorted((ROOT / "cluster_profiles").glob("*.yaml")):
        if gpu := (yaml.safe_load(path.read_text()).get("node") or {}).get("gpu"):
            assert gpu_spec(gpu).name == gpu
            named += 1
    assert named >= 8


@pytest.mark.parametrize(
    ("name", "known_as"),
    [
        ("h100", "H100-SXM"),
        ("NVIDIA H200 SXM", "H200-SXM"),
        ("AMD Instinct MI300X", "MI300X"),
        ("MI250X", "MI250X-GCD"),
        ("rtx_4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("A6000", "RTX-A6000"),
    ],
)
def test_aliases_spaces_and_case_do_not_matter(name, known_as):
    assert gpu_spec(name).name == known_as


@pytest.mark.parametrize("name", ["H1000", "TPU v5e", "", None, "H100-SXM-80GB-extra"])
def test_an_unknown_gpu_is_refused_with_the_known_names(name):
    with pytest.raises(ConfigError) as refusal:
        gpu_spec(name, location="profile.yaml:14")
    assert refusal.value.location == "profile.yaml:14"
    assert all(known in refusal.value.hint for known in known_gpus())
    assert not name or name in refusal.value.cause


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI250X", "MI250X-GCD"),
        ("NVIDIA A10", "A10"),
    ],
)
def test_torch_device_names_are_recognized(device, name):
    assert spec_of_device(device).name == name


def test_an_unknown_device_has_no_spec():
    assert spec_of_device("NVIDIA GeForce GTX 1080") is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_value_has_a_source_and_a_date(path):
    fact = json.loads(path.read_text("utf-8"))

    def values(node):
        if isinstance(node, dict):
            if "value" in node:
                yield node
            for child in node.values():
                yield from values(child)

    found = list(values(fact))
    assert len(found) >= 6
    for value in found:
        assert value["value"] > 0 and len(value["source"]) > 8
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", value["date"])
    assert path.name == f"{fact['name'].lower()}.json"
    # a curve of another type states its distance from that type
    if "curves_from" in fact:
        assert fact["curves_distance"] in DISTANCE_FACTORS and fact["curves_distance"] != "none"


def test_names_aliases_and_device_names_are_unique():
    facts = [json.loads(path.read_text("utf-8")) for path in FILES]
    for key in ("aliases", "device_names"):
        names = [name.casefold() for fact in facts for name in fact[key]]
        names += [fact["name"].casefold() for fact in facts] if key == "aliases" else []
        assert sorted(names) == sorted(set(names))


def test_peaks_are_ordered_and_a_missing_type_of_number_is_refused():
    for name in known_gpus():
        peaks = gpu_spec(name).peak_flops
        assert peaks["float32"] <= peaks["bfloat16"] <= peaks.get("fp8", peaks["bfloat16"])
    with pytest.raises(ConfigError, match="A100-SXM-80GB does not compute in fp8"):
        gpu_spec("A100").peak("fp8")
    assert gpu_spec("A100").peak("int4").value == 312e12  # weights are converted, products are bfloat16


def test_a_value_known_only_as_a_range_keeps_its_interval():
    hbm = gpu_spec("H100-SXM-64GB")._figure("hardware.hbm", "B/s", ("hbm_bytes_per_s",))
    assert hbm.low < hbm.value < hbm.high and hbm.tier is Tier.DATASHEET


def test_reported_memory_is_less_than_nominal():
    for name in known_gpus():
        spec = gpu_spec(name)
        nominal = spec.facts["memory_gib"]["value"]
        assert 0.9 * nominal < spec.memory_bytes / 2**30 < nominal
        assert spec.memory.low <= spec.memory_bytes <= spec.memory.high
