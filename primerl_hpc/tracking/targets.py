"""The targets of a recipe: which rows each receives, and how it is opened.

for name in recipe.tracking.targets:
    open_target(name, context)
"""

from __future__ import annotations

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.run import LogExtras, Tracking
from primerl_hpc.tracking.base import Target, TargetContext

SOURCES = ("sft", "trainer", "orchestrator", "eval")
"""Names of the metrics files that are sent."""
PACKAGES: dict[str, tuple[str, ...]] = {"prime": ()}
PACKAGES |= {name: (name,) for name in ("wandb", "mlflow", "trackio", "tensorboard")}
"""Kind of target → packages that it imports."""


_SIDES = {"wandb-trainer": ("sft", "trainer"), "wandb-orchestrator": ("orchestrator", "eval")}


def sources_of(name: str, tracking: Tracking) -> tuple[str, ...]:
    """Return the metrics files whose rows the target ``name`` receives."""
    if name in _SIDES:
        return _SIDES[name]
    own = {source for side, sources in _SIDES.items() if side in tracking.targets for source in sources}
    return tuple(source for source in SOURCES if name != "wandb" or source not in own)


def extras_of(name: str, tracking: Tracking) -> LogExtras | None:
    """Return what the target receives in addition to metrics."""
    if (
        name == "wandb-orchestrator"
        and tracking.wandb is not None
        and tracking.wandb.orchestrator is not None
    ):
        return tracking.wandb.orchestrator.log_extras or tracking.wandb.log_extras
    settings = getattr(tracking, name.partition("-")[0])
    return getattr(settings, "log_extras", None)


def open_target(name: str, context: TargetContext) -> Target:
    """Connect to the target. Raises TargetUnavailableError, or ConfigError if another try cannot succeed."""
    tracking = context.recipe.tracking
    kind, _, side = name.partition("-")
    if kind == "wandb" and tracking.wandb is not None:
        from primerl_hpc.tracking.wandb import WandbTarget

        return WandbTarget(context, tracking.wandb, side or None)
    if kind == "prime" and tracking.prime is not None:
        from primerl_hpc.tracking.prime import PrimeTarget

        return PrimeTarget(context, tracking.prime)
    if kind == "mlflow" and tracking.mlflow is not None:
        from primerl_hpc.tracking.mlflow import MlflowTarget

        return MlflowTarget(context, tracking.mlflow)
    if kind == "trackio" and tracking.trackio is not None:
        from primerl_hpc.tracking.trackio import TrackioTarget

        return TrackioTarget(context, tracking.trackio)
    if kind == "tensorboard" and tracking.tensorboard is not None:
        from primerl_hpc.tracking.tensorboard import TensorboardTarget

        return TensorboardTarget(context, tracking.tensorboard)
    raise ConfigError(f"this run has no tracking by '{name}'", hint="set tracking in the recipe")
