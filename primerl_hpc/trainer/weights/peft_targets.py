"""The part of ``adapter_config.json`` that names the adapted modules and parameters, so that PEFT loads all of them.

PEFT rewrites the configuration of most mixtures of experts (``peft.utils.transformers_weight_conversion``): it treats a
target module named like an expert's matrix, such as ``gate_proj``, as the fused experts, and drops dense layers and
shared experts of the same names without an error (PEFT 0.21, issue 3711). Qwen2-MoE's configuration is not rewritten,
and there the experts are dropped. ``target_parameters`` are left unchanged in both cases, so every parameter that PEFT
may misinterpret is named there by its full path. vLLM reads only rank, alpha and the names of the tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

GATED = "gate_up_proj"  # two matrices in one parameter
# Names in the tables of PEFT's conversion: matrices of single experts, and routers.
MISINTERPRETED = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


def peft_targets(config: dict[str, Any], adapted: Iterable[str], *, is_mixture: bool) -> dict[str, Any]:
    """Return ``config`` with its targets.

    ``adapted``: names of the adapted parameters in transformers' model (``….q_proj.weight``, ``….experts.down_proj``);
    ``is_mixture``: True if the model has fused experts. The fused gate_up_proj holds the adapters of two matrices, so
    PEFT needs twice the rank for it, and the alpha that keeps the scale: twice alpha, or √2 times if the scale is
    alpha / √rank.
    """
    modules, parameters, patterns = set(), [], set()
    for name in sorted(adapted):
        owner, _, leaf = name.rpartition(".")
        module = owner.rpartition(".")[2]
        if leaf == "weight" and not (is_mixture and module in MISINTERPRETED):
            modules.add(module)
            continue
        parameters.append(name)
        if leaf == GATED:
            patterns.add(re.escape(f"{module}.{GATED}"))
    targets: dict[str, Any] = {"target_modules": sorted(modules)}
    if parameters:
        # PEFT refuses dropout for parameters; a finished adapter does not need it
        targets |= {"target_parameters": parameters, "lora_dropout": 0.0}
    if patterns:
        factor = math.sqrt(2) if config["use_rslora"] else 2
        targets["rank_pattern"] = dict.fromkeys(sorted(patterns), 2 * config["r"])
        targets["alpha_pattern"] = dict.fromkeys(sorted(patterns), factor * config["lora_alpha"])
    return config | targets
