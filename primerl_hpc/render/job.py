"""job.sbatch: directives, site setup, then ``exec`` of the supervisor, so the batch process *is* the supervisor.

export.sbatch is the same but for its last line.
"""

from __future__ import annotations

from pathlib import Path

from primerl_hpc import __version__
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.plan.types import Plan
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.lint import check_script


def render_job(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """The script that runs one attempt: under SLURM ``sbatch job.sbatch``, locally ``bash job.sbatch``.

    ``package_root`` goes onto PYTHONPATH when the package is not installed in ``python`` (a plain checkout).
    Raises ConfigError for a template that does not render and for a script that sbatch or bash would not take as meant.
    """
    return _render("job.sbatch", plan, profile, python, package_root)


def render_export(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """The script that makes the model folder of ``after.export`` when ``plan`` is done: one node, no supervisor.

    Raises ConfigError as `render_job`.
    """
    after = plan.phase(MAIN_PHASE).recipe.after
    assert after is not None and after.export is not None
    alone = plan.model_copy(update={"name": f"{plan.name}-export", "nodes": plan.nodes[:1]})
    return _render("export.sbatch", alone, profile, python, package_root, export=after.export)


def _render(
    script_name: str, plan: Plan, profile: Profile, python: str, package_root: str | None, **more: object
) -> str:
    script = render_template(
        f"{script_name}.j2",
        first=own_templates(profile),
        plan=plan,
        profile=profile,
        scheduler=profile.scheduler,
        node=profile.node,
        software=profile.software,
        python=python,
        package_root=package_root,
        output=output_pattern(plan.run_dir) if plan.scheduler == "slurm" else "",
        version=__version__,
        **more,
    )
    check_script(script, place=script_name)
    return script


def own_templates(profile: Profile) -> list[Path]:
    """Folders whose templates come before all others."""
    return [Path(profile.templates)] if profile.templates else []


def output_pattern(run_dir: str) -> str:
    """``--output`` of the batch process. SLURM expands % in it, and drops every backslash together with its own %j.

    Raises ConfigError for a run directory with a backslash.
    """
    if "\\" in run_dir:
        raise ConfigError(
            f"SLURM cannot write its log into {run_dir}: it drops backslashes from paths",
            mend="choose another --run-dir",
        )
    return run_dir.replace("%", "%%") + "/logs/slurm-%j.out"
