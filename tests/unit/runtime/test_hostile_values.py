"""Hostile text in every string field of profile and recipe: refused, or it arrives byte for byte and nothing else
happens.

The judges are bash itself, which runs the rendered script with ``exec`` and ``module`` printing arguments, a reader
of ``#SBATCH`` lines by sbatch's own rules, and the argument vectors that srun would be started with.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, get_origin

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from primerl_hpc.cluster.directives import options
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.validate import unfold
from primerl_hpc.plan.plan import Plan
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe, parse_recipe
from primerl_hpc.render.job import SETUP_SCRIPT, render_job, render_setup
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import Allocation
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.srun import srun_command
from tests.support.sbatch import read_directives

SHELL = ("software.setup",)
"""Lines of shell, on purpose."""
NOT_TEXT = ("templates",)
"""A folder that must be there."""


def text_fields(block: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of every field that takes free text, alone, in a list or as a variable's value."""
    for name, field in block.model_fields.items():
        every = unfold(field.annotation)
        inner = [each for each in every if isinstance(each, type)]
        if str in inner or any(get_origin(each) is dict for each in every):
            yield f"{prefix}{name}"
        for each in inner:
            if issubclass(each, BaseModel):
                yield from text_fields(each, f"{prefix}{name}.")


PROFILE_FIELDS = [path for path in text_fields(Profile) if path not in (*SHELL, *NOT_TEXT)]
VALID = {"scheduler.extra": "--tmp=", "scheduler.srun_extra": "--tmp="}
"""Return the prefix that makes a value one of the right kind."""

HOSTILE = st.one_of(
    st.text(
        st.one_of(
            st.sampled_from("'\"\\$`;|&<>(){}[]*?!#~ \t=%-\n\ré\u2028\x7f"), st.characters(codec="utf-8")
        ),
        max_size=30,
    ),
    st.builds(
        "{}{}{}".format,
        st.sampled_from(["", "'", '"', "a", "-", "--", " ", "$'", "\\", "#", "%j", "\n", "')", '")']),
        st.sampled_from(
            [
                *("$(touch x)", "`touch x`", ";touch x;", "|touch x", "&touch x&", "\ntouch x\n"),
                *(">x", "${a:=$(touch x)}", "#", "\n#SBATCH --wrap=x", " --wrap=x", "%%", "\u00a0"),
            ]
        ),
        st.sampled_from(["", "'", '"', "#", "\\", "\n", " "]),
    ),
)


def with_value(path: str, value: str, gpus: int = 8) -> dict[str, Any]:
    """A profile with ``value`` at one path: the shape of the field decides how it is wrapped."""
    values: dict[str, Any] = {
        "name": "p",
        "nodes": 2,
        "node": {"gpus": gpus},
        "scheduler": {},
        "software": {},
    }
    head, _, last = path.rpartition(".")
    owner = values
    parts = [part for part in head.split(".") if part]
    for part in parts:
        owner = owner.setdefault(part, {})
        if part == "roles":
            owner = owner.setdefault("trainer", {})
    if parts and parts[-1] == "container":
        owner.update(kind="apptainer", image="/images/a.sif")
    if path == "software.roles":
        owner["roles"] = {value: {}}
    elif last == "env":
        owner["env"] = {"A": value}
    elif last in ("gres", "licenses", "extra", "srun_extra", "modules", "mounts", "mail_type"):
        owner[last] = [value]
    else:
        owner[last] = value
    return values


@cache
def tiny_values() -> dict[str, Any]:
    """Return the keys of a shipped recipe, read once instead of for each example."""
    return load_recipe("reverse_text/tiny").document.values


def make(
    values: dict[str, Any], *, run_dir: str = "/r", python: str = "/py", **recipe: Any
) -> tuple[Plan, Profile, str] | None:
    """None when the value is refused."""
    try:
        profile = Profile.model_validate(values)
        asked = parse_recipe(deepcopy(tiny_values()) | recipe)
        plan = compile_plan(asked, profile, run_dir=run_dir, python=profile.software.default.python or python)
        python = profile.software.default.python or python
        return plan, profile, render_job(plan, profile, python=python, package_root=f"{run_dir}/code")
    except (ConfigError, ValidationError):
        return None


def said_by_bash(script: str, folder: Path) -> list[list[str]]:
    """Return the arguments of ``module`` and ``exec`` when bash runs the complete script in an empty folder.

    Only the check of the run directory, which does not exist here, is left out.
    """
    check = r'^exec {run_fd}<.*?^\[ -z "\$foreign" \] [^\n]*$'
    script, num_checks = re.subn(check, "run_folder=$run", script, flags=re.M | re.S)
    assert num_checks == 1
    (folder / SETUP_SCRIPT).write_text(render_setup(load_profile("virtual").profile))
    script = script.replace(f'"$run_folder"/launch/{SETUP_SCRIPT}', shlex.quote(str(folder / SETUP_SCRIPT)))
    box = folder / "box"
    shutil.rmtree(box, ignore_errors=True)
    box.mkdir()
    spies = 'exec() { printf "%s\\0" exec "$PYTHONPATH" "$@"; printf "\\n\\0"; }\n'
    spies += 'module() { printf "%s\\0" "$@"; printf "\\n\\0"; }\n'
    done = subprocess.run(
        ["bash", "--norc"],
        input=(spies + script).encode(),
        cwd=box,
        env={"PATH": str(folder / "path")},
        capture_output=True,
        check=True,
    )
    assert not list(box.iterdir()), "something was executed"
    assert not done.stderr, done.stderr
    calls: list[list[str]] = [[]]
    for word in done.stdout.decode().split("\0")[:-1]:
        calls[-1].append(word) if word != "\n" or len(calls[-1]) < 2 else calls.append([])
    return calls[:-1]


def assert_harmless(made: tuple[Plan, Profile, str], folder: Path, *, python: str) -> None:
    plan, profile, script = made
    *modules, supervisor = said_by_bash(script, folder)
    assert modules == [["load", each] for each in profile.software.modules]
    assert supervisor[:2] == ["exec", f"{plan.run_dir}/code"]
    assert supervisor[2:] == [python, "-m", "primerl_hpc.runtime.supervisor", plan.run_dir]
    fixed = {"job-name", "nodes", "ntasks-per-node", "signal", "open-mode", "requeue", "no-requeue", "output"}
    directives = read_directives(script)
    assert [each for each in directives if each[0] not in fixed] == options(profile.scheduler, profile.node)
    assert {name for name, _ in directives} >= fixed - {"requeue", "no-requeue"}
    assert dict(directives)["output"] == plan.run_dir.replace("%", "%%") + "/logs/slurm-%j.out"
    for phase in plan.phases:
        for process in phase.processes:
            assert_one_command(plan, phase.name, process)


def assert_one_command(plan: Plan, phase: str, process: Any) -> None:
    """The options of srun come first, then the guard, then the process's arguments, none split or joined."""
    allocation = Allocation(tuple(f"n{node.index}" for node in plan.nodes), 8, True, 8, "1")
    words = srun_command(Launch(process, RunDir(Path(plan.run_dir)), phase, 1, 0), allocation)
    ours = words.index("primerl_hpc.runtime.steps.guard") - 2
    assert all(word.startswith("--") for word in words[1:ours])
    assert [word for word in words[1:ours] if word in process.srun_args] == list(process.srun_args)
    assert tuple(words[len(words) - len(process.argv) :]) == process.argv and "\0" not in "".join(words)
    assert all("=" not in name and "\0" not in name + value for name, value in process.env.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PATH with nothing but `touch`, for what must not be executed, and what the script itself needs."""
    made = tmp_path_factory.mktemp("hostile")
    (made / "path").mkdir()
    for name in ("touch", "bash"):
        (made / "path" / name).symlink_to(str(shutil.which(name)))
    return made


quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("path", PROFILE_FIELDS)
@quick
@given(value=HOSTILE)
def test_any_text_in_a_profile_is_refused_or_arrives_as_it_is(folder: Path, path: str, value: str) -> None:
    value = VALID.get(path, "") + value
    made = make(with_value(path, value))
    if made is not None:
        assert_harmless(made, folder, python=made[1].software.default.python or "/py")


@settings(quick, max_examples=40)
@example(run_dir="", python="\0", variable="", name="")
@given(run_dir=HOSTILE, python=HOSTILE, variable=HOSTILE, name=HOSTILE)
def test_any_path_interpreter_variable_and_name_too(
    folder: Path, run_dir: str, python: str, variable: str, name: str
) -> None:
    for recipe in ({"name": name}, {"env": {name: variable}}, {"env": {"A": variable}}):
        made = make(with_value("name", "p"), run_dir=f"/r/{run_dir}", python=f"/p/{python}", **recipe)
        if made is not None:
            assert_harmless(made, folder, python=f"/p/{python}")


@pytest.mark.parametrize(
    "path",
    [
        *VALID,
        "scheduler.comment",
        "scheduler.account",
        "software.modules",
        "software.default.python",
        "software.default.container.image",
        "env",
    ],
)
def test_text_that_is_only_strange_is_not_refused(folder: Path, path: str) -> None:
    """The property above would hold for a schema that refuses everything."""
    made = make(
        with_value(path, VALID.get(path, "/a") + """ b 'c' "d" \\ $(touch x) `touch x` ; # | & > x ü""")
    )
    assert made is not None
    assert_harmless(made, folder, python=made[1].software.default.python or "/py")


def test_the_check_of_scripts_detects_added_commands_and_changed_options(folder: Path) -> None:
    made = make(with_value("scheduler.comment", "x"))
    assert made is not None
    plan, profile, script = made
    for old, new in (
        ("\nexec ", "\ntouch x\nexec "),
        ("--comment=x", "--comment=y"),
        ("--comment=x", "--comment=x\n#SBATCH --hold"),
    ):
        with pytest.raises(AssertionError):
            assert_harmless((plan, profile, script.replace(old, new)), folder, python="/py")
