"""The table of checks: the name of each fact, where it is checked, and its function.

    for finding in findings(subject): …

`doctor` selects the checks of a login node, the preflight and `doctor --nodes` those of a node. A fact that matters at
both has one function, which gets the same subject. Functions are imported when they are called: a node imports neither
pydantic nor templates for its checks, and the supervisor imports none of them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from primerl_hpc.checks.findings import Finding, bad
from primerl_hpc.common.errors import ConfigError

if TYPE_CHECKING:
    from primerl_hpc.cluster.schema import Profile


class Where(Enum):
    LOGIN = "login"
    NODE = "node"


@dataclass(frozen=True)
class Subject:
    """The object of the checks: a node against a request of the head, or on a login node a profile."""

    where: Where
    wants: Mapping[str, Any]
    """`PreflightPlan` as JSON: what the nodes of a plan or profile must have."""
    num_gpus: int = 0
    """GPUs that this node must have."""
    head: str | None = None
    """Host that the node must be able to resolve."""
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Interpreter → versions of its packages on the head."""
    own_profile: Profile | None = None
    """On a login node."""
    ask: Callable[[list[str]], str] | None = None
    """On a login node: asks SLURM's commands."""

    @property
    def is_node(self) -> bool:
        return self.where == Where.NODE

    @property
    def has_gpus(self) -> bool:
        """False on a node without GPUs of a plan that uses them."""
        return self.num_gpus > 0 or self.wants["gpus"] == 0

    @property
    def profile(self) -> Profile:
        assert self.own_profile is not None, "a check of a login node"
        return self.own_profile


@dataclass(frozen=True)
class Check:
    name: str
    where: tuple[Where, ...]
    function: str
    """``module:function`` of this folder: Subject → findings. One without a name of its own gets that of the check."""

    def findings(self, subject: Subject) -> Iterable[Finding]:
        module, _, name = self.function.partition(":")
        return getattr(import_module(f"{__package__}.{module}"), name)(subject)


LOGIN, NODE, BOTH = (Where.LOGIN,), (Where.NODE,), (Where.LOGIN, Where.NODE)
CHECKS = (
    Check("profile", LOGIN, "site:about"),
    Check("run directory", LOGIN, "site:runs_folder"),
    Check("run directory", NODE, "machine:request_is_visible"),
    Check("login host", LOGIN, "site:login_host"),
    Check("architecture", BOTH, "surroundings:architecture"),
    Check("storage", LOGIN, "site:storage"),
    Check("module", LOGIN, "site:modules"),
    Check("variants", LOGIN, "site:variants"),
    Check("scheduler", LOGIN, "cluster:scheduler"),
    Check("host names", NODE, "machine:host_names"),
    Check("network", NODE, "machine:network"),
    Check("scratch", NODE, "machine:scratch"),
    Check("memory", NODE, "machine:memory"),
    Check("containers", NODE, "surroundings:containers"),
    Check("versions", LOGIN, "login:versions"),
    Check("versions", NODE, "machine:versions"),
    Check("GPU driver", LOGIN, "gpus:driver"),
    Check("limits", BOTH, "machine:limits"),
    Check("GPUs", NODE, "gpus:gpus"),
    Check("network plugin", NODE, "surroundings:network_plugin"),
    Check("proxy", NODE, "surroundings:proxy"),
    Check("binding", NODE, "surroundings:binding"),
    Check("site", NODE, "machine:health_commands"),
    Check("free files", LOGIN, "login:free_files"),
    Check("quota", LOGIN, "login:quota"),
    Check("hub cache", LOGIN, "login:hub_cache"),
    Check("tokens", LOGIN, "login:tokens"),
)
"""In the order of their findings."""


def findings(subject: Subject) -> Iterator[Finding]:
    """Run the checks of this place, one after the other. One that raises is a bad finding."""
    for check in CHECKS:
        if subject.where not in check.where:
            continue
        try:
            for finding in check.findings(subject):
                yield replace(finding, check=finding.check or check.name)
        except ConfigError as error:
            yield replace(bad(error.cause, error.hint), check=check.name)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            yield replace(bad(f"{type(error).__name__}: {error}"), check=check.name)
