"""The checks of a login node for a profile: the lines of ``primerl-hpc doctor``.

for finding in examine(profile): print(finding.check, finding.level, finding.message)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from primerl_hpc.checks.findings import Finding
from primerl_hpc.checks.table import Subject, Where, findings
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.plan.preflight import preflight_plan
from primerl_hpc.slurm.commands import ask


def examine(profile: Profile, ask: Callable[[list[str]], str] = ask) -> Iterator[Finding]:
    """Yield what the checks of a login node find. ``ask``: returns the output of a command of SLURM."""
    software = [profile.software.default, *profile.software.roles.values()]
    wants = preflight_plan(profile, software, sys.executable, num_nodes=profile.nodes)
    subject = Subject(Where.LOGIN, wants.model_dump(mode="json"), own_profile=profile, ask=ask)
    yield from findings(subject)
