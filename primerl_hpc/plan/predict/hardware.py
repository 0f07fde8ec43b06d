"""Facts about GPU types, from `hardware/*.json`: memory, peaks, bandwidths and measured utilization.

    gpu = gpu_spec("H100-SXM")              # the name in a profile's node.gpu; ConfigError for an unknown one
    gpu.peak("bfloat16").value              # 989.4e12 FLOP/s, a Figure with source
    spec_of_device("NVIDIA H100 80GB HBM3") # by the name that torch reports; None for an unknown one

Each value in a file has ``source`` and ``date``. A type without measured utilization uses that of another type, named
in ``curves_from``; ``curves_distance`` is how far that type is from this one, and widens the intervals.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.figure import Figure, Tier, estimate

DISTANCE_FACTORS = {
    "none": 1.0,
    "same_chip": 1.05,
    "same_generation": 1.15,
    "other_generation": 1.3,
    "other_vendor": 1.5,
}
"""Factor by which intervals grow when the utilization was measured on another type. Judgment, not a measurement: BLIS
reports 13–16 % median error on NVIDIA GPUs that its fit had not seen (its blog, 2026-08)."""

REPORTED_SHARE = 0.985
"""Share of the nominal memory that CUDA reports as total where no reported value is known: 79.2 of 80 GiB (H100), 178.4
of 180 (B200), 63.4 of 64 (A100-64GB)."""

CAPABILITIES = {"ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}
"""Architecture of NVIDIA's GPUs → lowest compute capability; that of GeForce and RTX PRO Blackwell GPUs is 12.0."""
FP8_NEEDS = {
    "blockwise": "NVIDIA GPUs of compute capability 9.0 or higher (H100 and later)",
    "mxfp8": "NVIDIA GPUs of compute capability 10 (B200, B300, GB200, GB300)",
}
"""GPUs that each value of ``trainer.fp8`` needs, in the words of a refusal; `fp8_modes` decides."""


def fp8_modes(capability: tuple[int, int]) -> list[str]:
    """Return the values of ``trainer.fp8`` for a compute capability, the one closest to its hardware last."""
    found = {"blockwise": capability >= (9, 0), "mxfp8": capability[0] == 10}
    return [mode for mode, is_possible in found.items() if is_possible]


@dataclass(frozen=True)
class GpuSpec:
    """One GPU type. Bandwidths are bytes per second in one direction."""

    name: str
    memory_bytes: int
    """Total memory that the driver reports."""
    peak_flops: Mapping[str, float]
    """Dense FLOP/s by data type, without sparsity."""
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    """NVLink, Infinity Fabric or PCIe between GPUs of a node, all links of a GPU together."""
    network_bytes_per_s: float
    """Network between nodes for each GPU, if a node has one network card a GPU."""
    pcie_bytes_per_s: float = 32e9
    """Between host memory and GPU."""
    vendor: str = "nvidia"
    architecture: str = ""
    """``ampere``, ``hopper``, ``blackwell``, ``ada``, ``cdna2``, …"""
    curves: Mapping[str, Any] = field(default_factory=dict)
    """Measured utilization by kind of operation; see `curves`."""
    curves_from: str = ""
    """Type on which ``curves`` were measured; its own name if they are its own."""
    curves_distance: str = "none"
    """Key of `DISTANCE_FACTORS`."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The file: every value with its source and date."""

    @property
    def curve_tier(self) -> Tier:
        """Tier of a figure that rests on the curves."""
        return Tier.TABLE if self.curves and self.curves_distance in ("none", "same_chip") else Tier.DATASHEET

    @property
    def curve_factor(self) -> float:
        """Factor on intervals of figures that rest on curves of another type."""
        return DISTANCE_FACTORS[self.curves_distance]

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability; (0, 0) for GPUs of other vendors."""
        is_workstation = self.name.startswith("RTX") and self.architecture == "blackwell"
        return (12, 0) if is_workstation else CAPABILITIES.get(self.architecture, (0, 0))

    def peak(self, dtype: str) -> Figure:
        """Return the dense peak in FLOP/s. int4 and fp4 weights are computed in bfloat16 where fp4 has no peak.

        Raises ConfigError if the type cannot compute in ``dtype``.
        """
        known = self.peak_flops
        used = dtype if dtype in known else {"int4": "bfloat16", "fp4": "bfloat16"}.get(dtype, dtype)
        if used not in known:
            raise ConfigError(
                f"GPU type {self.name} does not compute in {dtype}",
                hint=f"data types that it has: {', '.join(sorted(known))}",
            )
        return self._figure(f"hardware.peak_flops.{used}", "FLOP/s", ("peak_flops", used))

    @property
    def memory(self) -> Figure:
        """Total memory that the driver reports."""
        key = "reported_memory_gib" if "reported_memory_gib" in self.facts else "memory_gib"
        source = self.facts.get(key, {}).get("source", "")
        factor = 1.0 if key == "reported_memory_gib" else 1.01
        inputs = {"gib": self.memory_bytes / 2**30}
        return estimate(
            "hardware.memory",
            self.memory_bytes,
            factor,
            "B",
            "reported total",
            inputs,
            source=source,
            tier=Tier.DATASHEET,
        )

    def _figure(self, name: str, unit: str, keys: tuple[str, ...]) -> Figure:
        fact = self.facts
        for key in keys:
            fact = fact[key]
        value = fact["value"]
        return Figure(
            name,
            value,
            fact.get("low", value),
            fact.get("high", value),
            unit,
            f"{self.name}, {fact['date']}",
            {},
            fact["source"],
            Tier.DATASHEET,
        )


def known_gpus() -> list[str]:
    """Return the names of all types, sorted."""
    return sorted(_specs())


def gpu_spec(name: str | None, *, location: str = "node.gpu") -> GpuSpec:
    """Return the type with this name or alias. Letter case, spaces, underscores and a vendor's name do not matter.

    Raises ConfigError that lists the known names.
    """
    hint = f"known: {', '.join(known_gpus())}"
    if not name:
        raise ConfigError("the profile does not name the GPU type", location=location, hint=hint)
    found = _aliases().get(_plain(name))
    if found is None:
        raise ConfigError(f"unknown GPU type '{name}'", location=location, hint=hint)
    return _specs()[found]


_SAME_MODEL = r"(?! (?:Ti|SUPER|D|Laptop)\b)"


def is_known_gpu(name: str | None) -> bool:
    """True if `gpu_spec` knows the type."""
    return name is not None and _plain(name) in _aliases()


def spec_of_device(device_name: str) -> GpuSpec | None:
    """Return the type by the name that torch reports, e.g. ``NVIDIA H100 80GB HBM3``; the longest match counts.

    A suffix of another GeForce model is not part of a match: a ``GeForce RTX 3090 Ti`` has a higher peak.
    """
    found = [key for key in _device_names() if re.search(rf"\b{re.escape(key)}\b{_SAME_MODEL}", device_name)]
    return _specs()[_device_names()[max(found, key=len)]] if found else None


def _plain(name: str) -> str:
    text = re.sub(r"[\s_]+", "-", name.strip().casefold())
    return re.sub(r"^(nvidia|amd|instinct|geforce|tesla|-)+-", "", text)


@cache
def _aliases() -> dict[str, str]:
    names = {_plain(spec.name): spec.name for spec in _specs().values()}
    for spec in _specs().values():
        names |= {_plain(alias): spec.name for alias in spec.facts["aliases"]}
    return names


@cache
def _device_names() -> dict[str, str]:
    return {key: spec.name for spec in _specs().values() for key in spec.facts["device_names"]}


@cache
def _specs() -> dict[str, GpuSpec]:
    folder = files("primerl_hpc.plan.predict") / "hardware"
    facts = [json.loads(path.read_text("utf-8")) for path in folder.iterdir() if path.name.endswith(".json")]
    by_name = {fact["name"]: fact for fact in facts}
    return {name: _spec(fact, by_name) for name, fact in by_name.items()}


def _spec(fact: Mapping[str, Any], by_name: Mapping[str, Any]) -> GpuSpec:
    reported = fact.get("reported_memory_gib", {}).get("value", fact["memory_gib"]["value"] * REPORTED_SHARE)
    source = fact.get("curves_from", fact["name"])
    return GpuSpec(
        name=fact["name"],
        memory_bytes=math.floor(reported * 2**30),
        peak_flops={dtype: peak["value"] for dtype, peak in fact["peak_flops"].items()},
        hbm_bytes_per_s=fact["hbm_bytes_per_s"]["value"],
        link_bytes_per_s=fact["link_bytes_per_s"]["value"],
        network_bytes_per_s=fact["network_bytes_per_s"]["value"],
        pcie_bytes_per_s=fact["pcie_bytes_per_s"]["value"],
        vendor=fact["vendor"],
        architecture=fact["architecture"],
        curves=by_name[source].get("curves", {}),
        curves_from=source,
        curves_distance=fact.get("curves_distance", "none"),
        facts=fact,
    )
