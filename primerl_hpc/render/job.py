"""Render the batch scripts.

job.sbatch: directives, site setup, then ``exec`` of the supervisor, which thereby becomes the batch process.
export.sbatch: the same except for its last line.
engines.sbatch: the same for elastic engines, as a job array whose batch processes are the engine hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from primerl_hpc import __version__
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.scheduler_schema import Scheduler
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.cluster.software_schema import SetupLine, Software
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.common.package import PACKAGE_ZIP, is_in_user_site
from primerl_hpc.plan.container import batch_options
from primerl_hpc.plan.plan import Plan
from primerl_hpc.render.bundle import UNPACK_SCRIPT
from primerl_hpc.render.engine import ShellText, quote_word, render_template
from primerl_hpc.render.lint import check_script, is_complete
from primerl_hpc.render.requests import Request, requests_of, type_request, with_walltimes

SETUP_SCRIPT = "setup.sh"
EXPORT_SETUP_SCRIPT = "export-setup.sh"
"""Files in the run's folder ``launch`` with the functions around setup lines. The export may have other templates."""
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}  # units of --mem; the default is M


def render_job(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """Return the script that runs one attempt, started by ``sbatch job.sbatch`` or locally by ``bash job.sbatch``.

    ``package_root`` is added to PYTHONPATH if the package is not installed in ``python`` (a plain checkout).
    Raises ConfigError if rendering fails, or for a script that sbatch or bash would not interpret as intended.
    """
    return _render("job.sbatch", plan, profile, python, package_root)


def render_export(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """Return the script that exports the model folder of ``after.export`` after the run: one node, no supervisor.

    Raises ConfigError like `render_job`.
    """
    after = plan.phase(MAIN_PHASE).recipe.after
    assert after is not None and after.export is not None
    alone = plan.model_copy(update={"name": f"{plan.name}-export"})
    one = (type_request(profile, None),)
    more = {"requests": one, "export": after.export, "setup_script": _in_run(f"launch/{EXPORT_SETUP_SCRIPT}")}
    return _render("export.sbatch", alone, profile, python, package_root, **more)


def render_engines(plan: Plan, profile: Profile, *, python: str, package_root: str | None = None) -> str:
    """Return the job array script of elastic engines. Each task requests the share of a node that its engine needs."""
    layout = next(phase for phase in plan.phases if phase.elastic).recipe.layout.inference
    given = profile.elastic.model_dump(exclude_none=True)
    if layout.partition is not None:
        given["partition"] = layout.partition
    # dependency and start time apply only to the run; preempted engines are requeued
    given |= {"requeue": True, "dependency": None, "begin": None}
    if profile.elastic.time is not None:
        given["time_min"] = None  # refers to the walltime of the run
    base = type_request(profile, layout.node_type)
    scheduler, node = base.scheduler.model_copy(update=given), base.node
    if node.gpus and layout.accelerators_per_replica < node.gpus:
        scheduler, node = _share_of_node(scheduler, node, layout.accelerators_per_replica)
    one = plan.model_copy(update={"name": f"{plan.name}-engines"})
    more: dict[str, object] = {
        "requests": (Request(scheduler, node),),
        "array": f"0-{plan.num_elastic - 1}",
        "output": output_pattern(plan.run_dir, "engines-%A_%a"),
    }
    return _render("engines.sbatch", one, profile, python, package_root, **more)


def render_setup(profile: Profile) -> str:
    """Return the file that scripts with setup lines source."""
    return render_template(f"{SETUP_SCRIPT}.j2", first=own_templates(profile))


def _share_of_node(scheduler: Scheduler, node: Node, gpus: int) -> tuple[Scheduler, Node]:
    """Return the request for ``gpus`` GPUs of a node with their share of its cores and memory, if that is known."""
    part, per_gpu = gpus / node.gpus, scheduler.per_gpu
    shared: dict[str, object] = {"exclusive": False}
    if per_gpu.memory is not None:
        shared["memory"] = f"{int(mib(per_gpu.memory) * gpus)}M"
    elif scheduler.memory == "0":
        shared["memory"] = f"{int(node.memory_gib * part)}G" if node.memory_gib else None
    elif scheduler.memory is not None:
        shared["memory"] = f"{max(1, int(mib(scheduler.memory) * part))}M"
    cores = per_gpu.cores * gpus if per_gpu.cores is not None else max(1, int(node.cores * part))
    smaller = {"gpus": gpus, "cores": cores}
    return scheduler.model_copy(update=shared), node.model_copy(update=smaller)


def mib(memory: str) -> float:
    """``216G`` → 221184"""
    amount, unit = memory.rstrip("BKMGT"), memory.rstrip("B")[-1]
    return int(amount) * _MIB.get(unit, 1)


def _render(
    script_name: str, plan: Plan, profile: Profile, python: str, package_root: str | None, **more: Any
) -> str:
    """Render and check a script. ``more``: additional variables of the template, which override the default ones."""
    requests: tuple[Request, ...] = more.pop("requests", None) or requests_of(plan, profile)
    requests = with_walltimes(requests, profile)
    last = requests[-1]
    is_copy = package_root is not None and Path(package_root).is_relative_to(plan.run_dir)
    code = str(Path(package_root).relative_to(plan.run_dir)) if package_root is not None and is_copy else None
    variables: dict[str, Any] = {
        "plan": plan,
        "profile": profile,
        "requests": requests,
        "scheduler": last.scheduler,
        "node": last.node,
        "software": profile.software,
        "module_lines": module_lines(profile.software),
        "early_steps": setup_steps(profile.software.early_lines),
        "setup_steps": setup_steps(profile.software.setup_lines),
        "setup_script": _in_run(f"launch/{SETUP_SCRIPT}"),
        "batch_options": batch_options(profile.software.default.container),
        "reports_setup": script_name == "job.sbatch",
        "python": ShellText('"$bundle/bin/python"') if plan.bundle is not None else python,
        "unpack_script": _in_run(f"launch/{UNPACK_SCRIPT}"),
        "package_root": package_root if code is None else _in_run(code),
        "checked_folders": _checked_folders(code),
        "hides_user_site": plan.bundle is not None or not is_in_user_site(),
        "output": output_pattern(plan.run_dir) if plan.scheduler == "slurm" else "",
        "version": __version__,
        **more,
    }
    script = render_template(f"{script_name}.j2", first=own_templates(profile), **variables)
    check_script(script, location=script_name)
    return script


def _in_run(path: str) -> ShellText:
    """Return a path in the run directory that the script has opened and checked (``partials/own_folder.j2``)."""
    return ShellText(f'"$run_folder"/{quote_word(path)}')


def _checked_folders(code: str | None) -> list[str]:
    """Return the paths whose owner and mode the script checks, down to those that contain what it executes."""
    folders = [".", "launch"]
    if code is not None:
        parts = Path(code).parts if code.endswith(PACKAGE_ZIP) else (*Path(code).parts, "primerl_hpc")
        folders += ["/".join(parts[:number]) for number in range(1, len(parts) + 1)]
    return [quote_word(folder) for folder in folders]


def module_lines(software: Software) -> list[tuple[str, bool]]:
    """Return the calls of ``module`` in their order: (line, True if it may fail)."""
    first = {"purge": "module purge", "force-purge": "module --force purge", "reset": "module reset"}
    lines = [(first[software.module_purge], False)] if software.module_purge else []
    lines += [(f"module use {quote_word(path)}", False) for path in software.module_paths]
    loads = [(f"module load {quote_word(module.name)}", module.optional) for module in software.module_names]
    return [*lines, *loads]


def setup_steps(lines: Sequence[SetupLine]) -> list[SetupLine]:
    """Return lines that bash can run one by one. Lines of one construct (``if``, a here-document) are joined."""
    steps: list[SetupLine] = []
    is_open = False
    for line in lines:
        if is_open:
            last = steps.pop()
            line = SetupLine.model_construct(  # noqa: PLW2901 - has line breaks, which the schema rejects
                run=f"{last.run}\n{line.run}", optional=last.optional or line.optional
            )
        steps.append(line)
        is_open = not is_complete(line.run)
    return steps


def own_templates(profile: Profile) -> list[Path]:
    """Return the folders of the profile's own templates, which have the highest priority."""
    return [Path(profile.templates)] if profile.templates else []


def output_pattern(run_dir: str, name: str = "%j") -> str:
    """Return ``--output`` of the batch process. SLURM expands % in it, and does not support backslashes with %j.

    Raises ConfigError for a run directory with a backslash.
    """
    if "\\" in run_dir:
        raise ConfigError(
            f"SLURM cannot write its log to {run_dir}, because it drops backslashes from paths",
            hint="choose another --run-dir",
        )
    return run_dir.replace("%", "%%") + f"/logs/slurm-{name}.out"
