"""Replace ``auto`` values that no prediction has decided by fixed rules, so that a plan has numbers only.

`plan.assess.search` decides ``auto`` where GPU type and model are known, before the planner runs. The number of nodes
and replicas and context_parallel have rules of their own in `split` and `degrees`.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.recipe.schema.layout import InferenceLayout, PrefillLayout
from primerl_hpc.recipe.schema.recipe import Recipe


def settle_auto(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe without ``auto`` in parallelism, memory options and rollouts in flight, and a note about it."""
    inference, trainer, rollouts = recipe.layout.inference, recipe.trainer, recipe.rollouts
    ranks = recipe.layout.trainer
    data = 1 if inference.data_parallel == "auto" else inference.data_parallel
    rules: dict[str, tuple[Any, dict[str, Any]]] = {
        "layout.inference": (
            inference,
            {"tensor_parallel": 1, "data_parallel": 1, "expert_parallel": data > 1},
        ),
        "layout.trainer": (ranks, {"replicate": 1, "tensor_parallel": 1}),
        "trainer": (
            trainer,
            {
                "activation_checkpointing": "full",
                "activation_offload": False,
                "optimizer_offload": False,
                "cpu_offload": False,
            },
        ),
        "rollouts": (rollouts, {"max_in_flight": None}),
    }
    settled: dict[str, Any] = {}
    chosen: list[str] = []
    for key, (block, defaults) in rules.items():
        changes = {name: value for name, value in defaults.items() if getattr(block, name) == "auto"}
        settled[key] = block.model_copy(update=changes)
        chosen += [f"{key}.{name} {_text(value)}" for name, value in changes.items()]
    if inference.prefill is not None:
        engines = settled["layout.inference"]
        prefill, words = _settled_prefill(inference.prefill, engines)
        settled["layout.inference"] = engines.model_copy(update={"prefill": prefill})
        chosen += words
    if not chosen:
        return recipe, ()
    layout = recipe.layout.model_copy(
        update={"inference": settled["layout.inference"], "trainer": settled["layout.trainer"]}
    )
    changed = {"layout": layout, "trainer": settled["trainer"], "rollouts": settled["rollouts"]}
    return recipe.model_copy(update=changed), (f"auto without a prediction: {', '.join(chosen)}",)


def _settled_prefill(prefill: PrefillLayout, engines: InferenceLayout) -> tuple[PrefillLayout, list[str]]:
    """Return the layout of prefill engines without ``auto``, and what was decided."""
    values = prefill.settled(engines).model_dump()
    changed = {name: value for name, value in values.items() if getattr(prefill, name) == "auto"}
    words = [f"layout.inference.prefill.{name} {_text(value)}" for name, value in changed.items()]
    return prefill.model_copy(update=changed), words


def _text(value: Any) -> str:
    """Return a value as YAML has it."""
    return "null" if value is None else str(value).lower()
