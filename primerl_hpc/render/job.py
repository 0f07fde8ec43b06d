"""job.sbatch: directives, site setup, then ``exec`` of the supervisor, so the batch process *is* the supervisor."""

from __future__ import annotations

from primerl_hpc import __version__
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.plan.types import Plan
from primerl_hpc.render.engine import render_template


def render_job(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """The script that runs one attempt: under SLURM ``sbatch job.sbatch``, locally ``bash job.sbatch``.

    ``package_root`` goes onto PYTHONPATH when the package is not installed in ``python`` (a plain checkout).
    """
    return render_template(
        "job.sbatch.j2",
        plan=plan,
        profile=profile,
        scheduler=profile.scheduler,
        node=profile.node,
        software=profile.software,
        python=python,
        package_root=package_root,
        # SLURM expands % in this path itself
        output=plan.run_dir.replace("%", "%%") + "/logs/slurm-%j.out",
        version=__version__,
    )
