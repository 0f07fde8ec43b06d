"""MLflow: ``tracking.mlflow``. The tag ``primerl.number`` of the run counts the items that it has."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.safety.secret_values import mask_data
from primerl_hpc.recipe.schema.run import Mlflow
from primerl_hpc.tracking.base import (
    SAMPLE_COLUMNS,
    Item,
    MetricRow,
    Outcome,
    TargetContext,
    TargetUnavailableError,
    missing_package,
)

NUMBER = "primerl.number"
MAX_METRICS = 1000
"""Maximum number of metrics of one request."""
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]")
_REFUSALS = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_PARAMETER_VALUE", "FEATURE_DISABLED"})


class MlflowTarget:
    def __init__(self, context: TargetContext, settings: Mlflow) -> None:
        try:
            mlflow: Any = import_module("mlflow")
            entities: Any = import_module("mlflow.entities")
        except ImportError:
            raise missing_package("mlflow", "mlflow-skinny") from None
        self._metric, self._tag, self._error = entities.Metric, entities.RunTag, mlflow.MlflowException
        self._client: Any = self._ask(lambda: mlflow.MlflowClient(tracking_uri=settings.uri))
        if "run_id" not in context.memory:
            context.memory["run_id"] = self._ask(lambda: self._create(context, settings))
            context.remember()
        self.run_id: str = context.memory["run_id"]
        self._ask(lambda: self._client.update_run(self.run_id, status="RUNNING"))
        tags = self._ask(lambda: self._client.get_run(self.run_id).data.tags)
        self._number = int(tags.get(NUMBER, 0))

    @property
    def position(self) -> int | None:
        return self._number

    def send(self, item: Item) -> None:
        self._ask(lambda: self._send(item))

    def finish(self, outcome: Outcome | None, summary: dict[str, float]) -> None:
        if outcome is not None:
            status = "FINISHED" if outcome == "completed" else "FAILED"
            self._ask(lambda: self._client.set_terminated(self.run_id, status))

    def _create(self, context: TargetContext, settings: Mlflow) -> str:
        found = self._client.get_experiment_by_name(settings.experiment)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(settings.experiment)
        )
        tags = mask_data({"primerl.recipe": context.recipe.name, "primerl.model": context.recipe.model.name})
        name = settings.run_name or context.run.root.name
        return self._client.create_run(experiment, run_name=name, tags=tags).info.run_id

    def _send(self, item: Item) -> None:
        tag = self._tag(NUMBER, str(item.number + 1))
        if not isinstance(item, MetricRow):
            table = {column: [row[column] for row in item.rows] for column in SAMPLE_COLUMNS}
            self._client.log_dict(self.run_id, table, f"samples/step_{item.step}.json")
            self._client.log_dict(self.run_id, item.distributions, f"distributions/step_{item.step}.json")
            self._client.log_batch(self.run_id, tags=[tag])
            return
        time_ms = round(item.time_s * 1000)
        metrics = [
            self._metric(_NOT_IN_NAMES.sub("_", name), float(value), time_ms, item.step)
            for name, value in item.values.items()
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            part = metrics[start : start + MAX_METRICS]
            is_last = start + MAX_METRICS >= len(metrics)
            self._client.log_batch(self.run_id, metrics=part, tags=[tag] if is_last else [])

    def _ask(self, call: Any) -> Any:
        try:
            return call()
        except self._error as error:
            if getattr(error, "error_code", "") in _REFUSALS:
                raise ConfigError(
                    f"MLflow refused a request: {describe_error(error)}", hint="check tracking.mlflow"
                ) from error
            raise TargetUnavailableError(f"MLflow does not respond: {describe_error(error)}") from error
        except OSError as error:
            raise TargetUnavailableError(f"MLflow does not respond: {describe_error(error)}") from error
