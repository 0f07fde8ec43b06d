"""Send the result of a benchmark to W&B: ``--wandb PROJECT``.

    send_result("my-project", "my-recipe-inference-bench", result)

Each load level of engines is a row; all figures are in the run's summary, and the description of the benchmark in its
config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.safety.secret_values import mask_data

_CONFIG = ("model", "profile", "accelerator", "nodes", "layout", "request", "versions", "engines")


def check_wandb() -> None:
    """Raise ConfigError if wandb is not installed: before a benchmark, not after it."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--wandb was given, but wandb is not installed", hint="pip install 'primerl-hpc[wandb]'"
        ) from None


def send_result(project: str, name: str, result: Mapping[str, Any]) -> None:
    """Send one result as a finished W&B run. Raises ConfigError if W&B refuses it."""
    import wandb
    from wandb.errors import Error as WandbError

    config = mask_data({key: result[key] for key in _CONFIG if key in result})
    settings = wandb.Settings(console="off", save_code=False, silent=True)
    mode: Any = env.wandb_mode() or "online"  # wandb refuses unknown ones
    try:
        run = wandb.init(
            project=project, name=name, job_type="bench", config=config, mode=mode, settings=settings
        )
        for level in result.get("levels", ()):
            run.log(flatten(level))
        run.summary.update(flatten({key: value for key, value in result.items() if key not in _CONFIG}))
        run.finish()
    except (WandbError, ValueError, OSError) as error:
        raise ConfigError(
            f"W&B refused the result: {describe_error(error)}",
            hint="set WANDB_API_KEY, or write to disk only: WANDB_MODE=offline",
        ) from error


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of nested blocks by path: ``{"ttft_s": {"mean": 1}}`` → ``{"ttft_s/mean": 1}``."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found
