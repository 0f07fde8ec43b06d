"""Measure by how much engine and trainer differ for a model, in each data type that this machine computes.

measure_mismatch("/models/Qwen3-0.6B", report=print)      # a Mismatch with one row for each type

The measuring code is `roles/mismatch.py`; this module starts its processes and imports nothing heavy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError, DataError, PrimerlError, RoleError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.interpreters import InterpreterError, ask
from primerl_hpc.common.safety.error_text import last_error
from primerl_hpc.plan.engine_env import engine_env
from primerl_hpc.transport.base_models.quantized import quantization_of
from primerl_hpc.transport.base_models.snapshots import base_folder

MODULE = "primerl_hpc.roles.mismatch"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 48
LIMIT = 0.02
"""Mismatch KL above which engine and trainer compute different distributions (docs/training.md)."""


@dataclass(frozen=True)
class Mismatch:
    model: str
    device: str
    rows: tuple[dict[str, Any], ...]
    """For each type: ``dtype``, ``float32`` (modules of the trainer), ``tokens``, mean and maximum of the KL."""

    def as_json(self) -> dict[str, Any]:
        rows = [{**row, "is_ok": is_close(row)} for row in self.rows]
        return {"model": self.model, "device": self.device, "limit": LIMIT, "rows": rows}


def is_close(row: dict[str, Any]) -> bool:
    """True if the mean KL of a row does not exceed `LIMIT`; False for one that is not a number."""
    return row["mismatch_kl"] <= LIMIT


def measure_mismatch(
    model: str,
    dtypes: Sequence[str] = (),
    *,
    float32: Sequence[Sequence[str]] = ((),),
    report: Callable[[str], None] = lambda line: None,
) -> Mismatch:
    """Measure a model folder or hub id on this machine. ``dtypes``: some of those that it computes, all by default.

    ``float32``: lists of modules that the trainer computes in float32; each is a row for every type but float32.
    ``report`` gets lines of progress. Raises NotFoundError (no such model), DataError (no config.json or no weights),
    ConfigError (quantized weights, a type that the device does not compute, no torch), RoleError (a step failed).
    """
    folder = _model_folder(model)
    request: dict[str, Any] = {
        "model": str(folder.resolve()),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
    }
    types = _call("data_types", {}, request["model"])
    if unknown := set(dtypes) - set(types["dtypes"]):
        raise ConfigError(
            f"vLLM does not compute {', '.join(sorted(unknown))} for this model on {types['device']}",
            hint=f"choose from {', '.join(types['dtypes'])}",
        )
    variables, rows = engine_env(types["accelerator"]), list[dict[str, Any]]()
    for dtype in dtypes or types["dtypes"]:
        lists = [[]] if dtype == "float32" else [list(names) for names in float32]
        request |= {"dtype": dtype, "float32": lists}
        report(f"{dtype}: sampling {PROMPTS * NEW_TOKENS} tokens with vLLM on {types['device']}")
        sampled = _call("sample", variables, request)
        report(f"{dtype}: computing them with the trainer")
        rows += _call("compare", variables, request, sampled)
    return Mismatch(model, types["device"], tuple(rows))


def _model_folder(model: str) -> Path:
    """Return the folder of the model's bfloat16, float16 or float32 weights. Raises as `measure_mismatch`."""
    folder = base_folder(model)
    config = folder / "config.json"
    if not config.is_file():
        raise DataError(f"model folder {folder} has no config.json", hint="give a folder of save_pretrained")
    if not any(folder.glob("*.safetensors")):
        raise DataError(f"model folder {folder} has no weights (*.safetensors)")
    if (quantization := quantization_of(read_json(config))) is not None:
        raise ConfigError(
            f"model {model} is quantized ({quantization['quant_method']}), so engine and trainer differ by it",
            hint=f"run primerl-hpc convert {model} --to FOLDER, and measure the folder",
        )
    return folder


def _call(step: str, variables: dict[str, str], *arguments: Any) -> Any:
    """Call a function of `roles/mismatch.py` in a process. Raises ConfigError without torch or vLLM, RoleError if it
    fails."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", **variables}
    try:
        return ask(sys.executable, quiet, f"{MODULE}:{step}", *arguments, timeout_s=None)
    except InterpreterError as error:
        reason, details = last_error(error.details.splitlines()) or error.cause, error.details
    except PrimerlError as error:
        reason, details = error.cause, error.details
    if "ModuleNotFoundError" in reason:
        raise ConfigError(
            f"this environment cannot serve and train a model: {reason}",
            hint="run this command on a node with the environment of the trainer and engines",
        )
    what = {"data_types": "looking for devices", "sample": "sampling with vLLM", "compare": "the trainer"}[
        step
    ]
    raise RoleError(f"{what} failed: {reason}", details=details)
