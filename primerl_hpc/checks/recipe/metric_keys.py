"""Check that the metrics which a recipe names exist: ``stop_when.metric`` and ``weights.keep_best.metric``."""

from __future__ import annotations

from primerl_hpc.common.document import Document
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind
from primerl_hpc.common.validate import nearest
from primerl_hpc.observe.metric_catalog import METRICS, MetricFile, is_known
from primerl_hpc.recipe.schema.recipe import Recipe


def check_metric_keys(recipe: Recipe, document: Document | None = None) -> None:
    """Raise ConfigError for a metric that no file of this kind of run contains, or of an unknown environment."""
    keys = {
        ("stop_when", "metric"): recipe.stop_when,
        ("weights", "keep_best", "metric"): recipe.weights.keep_best,
    }
    files: tuple[MetricFile, ...] = (
        ("sft", "eval") if recipe.kind == Kind.SFT else ("orchestrator", "trainer", "eval")
    )
    labels = [environment.label for environment in recipe.environments.eval]
    for path, block in keys.items():
        if block is None:
            continue
        where = document.location(path) if document is not None else ".".join(path)
        if not any(is_known(block.metric, file) for file in files):
            names = [metric.name for metric in METRICS if set(metric.files) & set(files)]
            near = nearest(block.metric, names)
            raise ConfigError(
                f"a run of kind {recipe.kind} has no metric '{block.metric}'",
                location=where,
                hint=(f"did you mean '{near}'? " if near else "") + "docs/watching.md lists all metrics",
            )
        evaluated = block.metric.split("/")[1] if block.metric.startswith("eval/") else None
        if evaluated not in (None, "policy_version", *labels):
            raise ConfigError(
                f"'{block.metric}' is of the environment '{evaluated}', which this run does not evaluate",
                location=where,
                hint=f"environments.eval has: {', '.join(labels) or 'none'}",
            )
