"""job.sbatch: directives, site setup, then ``exec`` of the supervisor, so the batch process *is* the supervisor.

export.sbatch is the same but for its last line.
engines.sbatch: the same for elastic engines, a job array whose batch processes are the engines' hosts.
"""

from __future__ import annotations

from pathlib import Path

from primerl_hpc import __version__
from primerl_hpc.cluster.schema import Node, Profile, Scheduler
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.plan.types import Plan
from primerl_hpc.render.engine import render_template
from primerl_hpc.render.lint import check_script

_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}  # of the units of --mem, whose own is M


def render_job(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """The script that runs one attempt: under SLURM ``sbatch job.sbatch``, locally ``bash job.sbatch``.

    ``package_root`` goes onto PYTHONPATH when the package is not installed in ``python`` (a plain checkout).
    Raises ConfigError for a template that does not render and for a script that sbatch or bash would not take as meant.
    """
    if not plan.is_heterogeneous:
        return _render("job.sbatch", plan, profile, python, package_root)
    # what a job waits for and whom it writes to is said once, in the component that leads
    quiet = {"dependency": None, "begin": None, "mail_type": (), "mail_user": None}
    scheduler = profile.scheduler.model_copy(update=quiet)
    others = plan.model_copy(update={"nodes": tuple(each for each in plan.nodes if not each.is_cpu)})
    cpu = dict(zip(("scheduler", "node"), cpu_component(profile), strict=True))
    return _render("job.sbatch", others, profile, python, package_root, scheduler=scheduler, cpu=cpu)


def render_export(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """The script that makes the model folder of ``after.export`` when ``plan`` is done: one node, no supervisor.

    Raises ConfigError as `render_job`.
    """
    after = plan.phase(MAIN_PHASE).recipe.after
    assert after is not None and after.export is not None
    alone = plan.model_copy(update={"name": f"{plan.name}-export", "nodes": plan.nodes[:1], "spare_nodes": 0})
    return _render("export.sbatch", alone, profile, python, package_root, export=after.export)


def render_engines(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """The job array of a plan with elastic engines; each task asks for what its engine takes of a node."""
    layout = next(phase for phase in plan.phases if phase.elastic).recipe.layout.inference
    given = profile.elastic.model_dump(exclude_none=True)
    if layout.partition is not None:
        given["partition"] = layout.partition
    # dependency and start time are the run's own; an engine that is taken away comes back
    given |= {"requeue": True, "dependency": None, "begin": None}
    if profile.elastic.time is not None:
        given["time_min"] = None  # it is of the run's own walltime
    scheduler, node = profile.scheduler.model_copy(update=given), profile.node
    if node.gpus and layout.accelerators_per_replica < node.gpus:
        scheduler, node = _share_of_node(scheduler, node, layout.accelerators_per_replica)
    one = plan.model_copy(update={"name": f"{plan.name}-engines", "nodes": plan.nodes[:1], "spare_nodes": 0})
    more = {"scheduler": scheduler, "node": node, "array": f"0-{plan.num_elastic - 1}"}
    more |= {"output": output_pattern(plan.run_dir, "engines-%A_%a")}
    return _render("engines.sbatch", one, profile, python, package_root, **more)


def cpu_component(profile: Profile) -> tuple[Scheduler, Node]:
    """What the one node of ``cpu_partition`` is asked for: it has the run's own account, walltime and wishes."""
    asked, common = profile.cpu_partition, profile.scheduler
    assert asked is not None
    kept = ("account", "qos", "time", "dependency", "begin", "nice", "wckey")
    kept += ("comment", "mail_type", "mail_user")
    values = {name: getattr(common, name) for name in kept}
    values |= {"partition": asked.partition, "constraint": asked.constraint, "exclusive": asked.exclusive}
    values |= {name: own for name in ("account", "qos") if (own := getattr(asked, name)) is not None}
    scheduler = Scheduler().model_copy(update={**values, "memory": asked.memory})
    return scheduler, Node(gpus=0, cores=asked.cores)


def _share_of_node(scheduler: Scheduler, node: Node, gpus: int) -> tuple[Scheduler, Node]:
    """So many of a node's GPUs, with their share of its cores and memory; no memory is asked for where all of it is not known."""
    part = gpus / node.gpus
    shared: dict[str, object] = {"exclusive": False}
    if scheduler.memory == "0":
        shared["memory"] = f"{int(node.memory_gib * part)}G" if node.memory_gib else None
    elif scheduler.memory is not None:
        amount, unit = scheduler.memory.rstrip("BKMGT"), scheduler.memory.rstrip("B")[-1]
        shared["memory"] = f"{max(1, int(int(amount) * _MIB.get(unit, 1) * part))}M"
    smaller = {"gpus": gpus, "cores": max(1, int(node.cores * part))}
    return scheduler.model_copy(update=shared), node.model_copy(update=smaller)


def _render(
    script_name: str, plan: Plan, profile: Profile, python: str, package_root: str | None, **more: object
) -> str:
    """``more`` variables of the template, some of which may take the place of the usual ones."""
    variables = {
        "plan": plan,
        "profile": profile,
        "scheduler": profile.scheduler,
        "node": profile.node,
        "software": profile.software,
        "python": python,
        "package_root": package_root,
        "output": output_pattern(plan.run_dir) if plan.scheduler == "slurm" else "",
        "version": __version__,
        **more,
    }
    script = render_template(f"{script_name}.j2", first=own_templates(profile), **variables)
    check_script(script, place=script_name)
    return script


def own_templates(profile: Profile) -> list[Path]:
    """Folders whose templates come before all others."""
    return [Path(profile.templates)] if profile.templates else []


def output_pattern(run_dir: str, name: str = "%j") -> str:
    """``--output`` of the batch process. SLURM expands % in it, and drops every backslash together with its own %j.

    Raises ConfigError for a run directory with a backslash.
    """
    if "\\" in run_dir:
        raise ConfigError(
            f"SLURM cannot write its log into {run_dir}: it drops backslashes from paths",
            mend="choose another --run-dir",
        )
    return run_dir.replace("%", "%%") + f"/logs/slurm-{name}.out"
