"""A loss that the recipe names.

def loss(x: LossInputs, **kwargs) -> Tensor | TokenLoss        # [T], a number for each of the T tokens, and metrics
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.importing import import_object
from primerl_hpc.recipe.training_schema import CustomLoss, Loss
from primerl_hpc.trainer.losses.base import LossInputs, TokenLoss


class CustomLossError(RoleError):
    """The user's function raised, or returned something else than a loss for each token."""

    exit_code = ExitCode.NO_CONTINUE


def custom(x: LossInputs, config: CustomLoss) -> TokenLoss:
    """Raises ConfigError when there is no such function, CustomLossError for what it does."""
    function = import_object(config.import_path, place="loss.import_path")
    try:
        found = function(x, **config.kwargs)
    except Exception as error:  # whatever a user's function may raise
        raise _fault(config, f"raised {type(error).__name__}: {error}") from error
    result = found if isinstance(found, TokenLoss) else TokenLoss(found)
    for name, value in {"": result.loss, **result.metrics}.items():
        if not isinstance(value, Tensor) or value.shape != x.logprobs.shape:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            of = f" as its metric {name}" if name else ""
            raise _fault(
                config, f"returned {what}{of}, not a number for each of the {len(x.logprobs)} tokens"
            )
    return result


def check_metrics(config: Loss, found: Iterable[str], named: Collection[str]) -> None:
    """Raises CustomLossError for a metric that a loss has for some inputs only: all ranks add up those that its trial named."""
    if unknown := set(found) - set(named):
        raise _fault(
            config,
            f"returned its metric {min(unknown).removesuffix('/mean')}, but not for the tokens it was tried on",
            mend="return the same metrics for all inputs",
        )


def _fault(config: Loss, what: str, mend: str = "") -> CustomLossError:
    name = getattr(config, "import_path", config.type)
    return CustomLossError(f"{name} {what}", place="loss.import_path", mend=mend)
