"""A loss function that the recipe names.

def loss(x: LossInputs, **kwargs) -> Tensor | TokenLoss    # [T], one number for each of the T tokens; metrics
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from primerl_hpc.common.errors import ExitCode, RoleError
from primerl_hpc.common.importing import import_object
from primerl_hpc.recipe.schema.training import CustomLoss, Loss
from primerl_hpc.trainer.losses.inputs import LossInputs, TokenLoss


class CustomLossError(RoleError):
    """The user's function raised, or did not return a loss for each token."""

    exit_code = ExitCode.NO_CONTINUE


def custom(x: LossInputs, config: CustomLoss) -> TokenLoss:
    """Call the user's function. Raises ConfigError if it cannot be imported, CustomLossError for its failures."""
    function = import_object(config.import_path, location="loss.import_path")
    try:
        found = function(x, **config.kwargs)
    except Exception as error:  # a user's function may raise anything
        raise _fault(config, f"raised {type(error).__name__}: {error}") from error
    result = found if isinstance(found, TokenLoss) else TokenLoss(found)
    for name, value in {"": result.loss, **result.metrics}.items():
        if not isinstance(value, Tensor) or value.shape != x.logprobs.shape:
            found_type = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            of = f" as metric {name}" if name else ""
            raise _fault(
                config,
                f"returned {found_type}{of}, expected one number for each of the {len(x.logprobs)} tokens",
            )
    return result


def check_metrics(config: Loss, found: Iterable[str], named: Collection[str]) -> None:
    """Raise CustomLossError for a metric missing from the trial: all ranks sum the metrics that the trial returned."""
    if unknown := set(found) - set(named):
        raise _fault(
            config,
            f"returned the metric {min(unknown).removesuffix('/mean')}, which it did not return in its trial",
            hint="return the same metrics for all inputs",
        )


def _fault(config: Loss, problem: str, hint: str = "") -> CustomLossError:
    name = getattr(config, "import_path", config.type)
    return CustomLossError(f"{name} {problem}", location="loss.import_path", hint=hint)
