"""Weights & Biases: ``tracking.wandb``.

The number of an item is its step in W&B, so a row that the server already has is never added again, and after an
interruption sending continues after the server's last step. Charts use ``<source>/step`` as their x-axis.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.safety.secret_values import mask_data
from primerl_hpc.recipe.schema.run import Wandb
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.tracking.base import (
    SAMPLE_COLUMNS,
    Item,
    MetricRow,
    Outcome,
    TargetContext,
    TargetUnavailableError,
)

OWNER = "primerl_run"
"""Key of the W&B config that identifies the run."""


class WandbTarget:
    def __init__(self, context: TargetContext, settings: Wandb, side: str | None = None) -> None:
        """``side``: ``trainer`` or ``orchestrator`` if this run has only the metrics of one of them."""
        try:
            import wandb
            from wandb.errors import AuthenticationError, CommError
            from wandb.errors import Error as WandbError
        except ImportError:
            raise ConfigError(
                "tracking.wandb is set, but wandb is not installed", hint="pip install 'primerl-hpc[wandb]'"
            ) from None
        self._wandb, self.context = wandb, context
        name, run_id = identity(context.run, settings, side)
        mode: Any = (
            "offline" if settings.offline else env.wandb_mode() or "online"
        )  # wandb refuses unknown ones
        folder = Path(settings.dir).expanduser() if settings.dir is not None else context.run.root
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.session = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=settings.group,
                id=run_id,
                resume="allow",
                mode=mode,
                dir=str(folder),
                settings=wandb.Settings(console="off", save_code=False),
            )
        except AuthenticationError as error:
            raise _refused(error) from error
        except CommError as error:
            raise TargetUnavailableError(f"W&B does not respond: {describe_error(error)}") from error
        except (WandbError, ValueError, OSError) as error:
            raise _refused(error) from error
        self._own(run_id)
        # only now: the id may be that of another run, which must not be renamed
        self.session.name, self.session.tags = name, settings.tags
        for source in context.sources:
            self.session.define_metric(f"{source}/*", step_metric=f"{source}/step")

    @property
    def position(self) -> int | None:
        return self.session.starting_step if self.session.resumed else None

    def send(self, item: Item) -> None:
        values: dict[str, Any] = {}
        if isinstance(item, MetricRow):
            values |= item.values
        else:
            values["orchestrator/step"] = item.step
            if item.rows:
                rows = [[row[column] for column in SAMPLE_COLUMNS] for row in item.rows]
                values["samples"] = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)
            for name, numbers in item.distributions.items():
                values[f"distributions/{name}"] = self._wandb.Histogram(_finite(numbers))
        self.session.log(values, step=item.number, commit=True)

    def finish(self, outcome: Outcome | None, summary: dict[str, float]) -> None:
        self.session.finish(exit_code=1 if outcome == "failed" else 0)

    def _own(self, run_id: str) -> None:
        """Write the recipe to the config. Raises ConfigError if the id belongs to another run."""
        own = hashlib.sha256(_submission(self.context.run).encode()).hexdigest()
        known = self.session.config.get(OWNER)
        if known is not None and known != own:
            self.session.finish()
            raise ConfigError(
                f"tracking.wandb.id: {run_id} is the W&B run of another run",
                hint="choose another id, or remove the key",
            )
        recipe = mask_data(self.context.recipe.model_dump(mode="json"))
        self.session.config.update({**recipe, OWNER: own}, allow_val_change=True)


def identity(run: RunDir, settings: Wandb, side: str | None) -> tuple[str, str]:
    """Return display name and id of a W&B run; the same for every attempt."""
    own = getattr(settings, side) if side is not None else None
    suffix = "" if side is None else f"-{side}"
    default_id = hashlib.sha256(f"{_submission(run)}{suffix}".encode()).hexdigest()[:16]
    shared_id = f"{settings.id}{suffix}" if settings.id is not None else default_id
    name = (own.name if own is not None else None) or f"{settings.name or run.root.name}{suffix}"
    return name, (own.id if own is not None else None) or shared_id


def _submission(run: RunDir) -> str:
    """Identify the run: ``submit --overwrite`` replaces it by another one in the same directory."""
    return f"{run.root}{(read_json_or_none(run.provenance) or {}).get('time', '')}"


def _refused(error: Exception) -> ConfigError:
    return ConfigError(
        f"wandb failed to start: {describe_error(error)}",
        hint="set WANDB_API_KEY before you submit, or write to disk only: WANDB_MODE=offline, or offline: true in "
        "tracking.wandb",
    )


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
