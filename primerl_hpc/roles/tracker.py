"""Send metrics to one experiment tracker: ``python -m primerl_hpc.roles.tracker RUN_DIR PHASE tracker-I``.

Process I sends to target I of the recipe. It follows the metrics files like any other reader, so a tracker that is
slow, offline or down does not affect the run.
"""

from __future__ import annotations

import signal
import sys
import threading

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.roles.start import RoleProcess, start_role
from primerl_hpc.tracking.relay import Relay


def main(argv: list[str]) -> int:
    return start_role("tracker", argv, track)


def track(role: RoleProcess) -> None:
    """Follow the metrics until SIGTERM. Raises ConfigError if a package is missing or the target refuses the login."""
    targets = role.recipe.tracking.targets
    if role.index >= len(targets):
        raise ConfigError(
            "this run has no tracking", hint="set tracking in the recipe, for example tracking.wandb"
        )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    Relay(role.run, role.recipe, targets[role.index], ended).follow()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
