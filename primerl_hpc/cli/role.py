"""``primerl-hpc inference|router|…|tracker``: run one process of a prepared run in this terminal.

``inference`` also accepts a recipe, which it submits as a job. ``--bench`` of some roles measures them instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.bench_options import BENCHED, BenchOptions, bench_options, run_bench
from primerl_hpc.cli.loop_bench import (
    OWN_OPTIONS,
    bench_flag,
    bench_target,
    load_options,
    loop_options,
    run_load_bench,
    run_loop_bench,
    synthetic_option,
)
from primerl_hpc.cli.options import (
    json_option,
    load_both,
    make_epilog,
    profile_option,
    refuse_options,
    set_option,
)
from primerl_hpc.cli.submit import submit, submit_options
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from primerl_hpc.run.rundir import RunDir

_ABOUT = {
    "inference": "one vLLM engine, with its control routes",
    "router": "the router in front of the engines",
    "prefill": "one engine that only processes prompts",
    "teacher": "one engine of the teacher",
    "judge": "one engine of the judge",
    "env-server": "one verifiers environment server",
    "orchestrator": "the orchestrator, which turns rollouts into batches,",
    "trainer": "the RL trainer (torchrun starts its ranks)",
    "sft": "the SFT trainer (torchrun starts its ranks)",
    "evaluator": "the evaluator",
    "tracker": "the tracker, which sends metrics to one experiment tracker",
}


SERVED = "inference"
"""The command that also submits a recipe, as a job of engines."""
SAMPLING = "orchestrator"
"""The command that measures rollouts without a trainer."""
_PROCESS_OPTIONS = ("index", "phase")
"""Options that select a process of a run."""


def make_command(name: str) -> click.Command:
    """Return the command of the role ``name``."""
    examples = ["submit my.yaml -p local --dry-run --run-dir /scratch/my-run", f"{name} /scratch/my-run"]
    about = f"Run {_ABOUT[name]} in this terminal, with the prepared RUN directory."
    if name == SERVED:
        examples.append(f"{name} my.yaml -p h100x64 --follow")
        about += (
            "\n\nGiven a recipe of kind inference instead of RUN, submit a job of its engines behind a router. "
            "--follow and the status command print the router's address."
        )
    example, about_bench, more = _bench_of(name)
    examples += [f"{name} --bench {example}"] if example else []
    about += about_bench
    epilog = make_epilog(
        *examples,
        codes=(ExitCode.DATA, ExitCode.NOT_FOUND, ExitCode.OCCUPIED, ExitCode.CONFIG),
        more="Otherwise, the exit code is that of the process.",
    )

    @click.command(name, epilog=epilog, help=about)
    @click.argument("run", type=RUN, metavar="RUN|RECIPE" if name == SERVED else "RUN")
    @click.option(
        "--index",
        type=click.IntRange(min=0),
        default=0,
        metavar="I",
        show_default=True,
        help="Select this process of the role.",
    )
    @click.option("--phase", help="Select this phase of the plan. [default: the one with this role]")
    @more
    def command(run: str, index: int, phase: str | None, **how: Any) -> int | None:
        if how.pop("is_bench", False):
            if name in BENCHED:
                run_bench(name, run, index, phase, BenchOptions(**how))
            else:
                _measure(name, run, how)
            return None
        if name == SERVED and _is_recipe(run):
            refuse_options(_PROCESS_OPTIONS, "selects a process of a run, but a recipe was given")
            refuse_options(OWN_OPTIONS, "needs --bench")
            how = {key: value for key, value in how.items() if key not in OWN_OPTIONS}
            return _submit(run, **how)
        others = {option.name for option in click.get_current_context().command.params}
        others -= {"run", *_PROCESS_OPTIONS}
        refuse_options(OWN_OPTIONS, "needs --bench")
        refuse_options(others, "is for a recipe, but a run was given" if name == SERVED else "needs --bench")
        _run_role(name.replace("-", "_"), run, index, phase)
        return None

    return command


def _bench_of(name: str) -> tuple[str, str, Callable[[Any], Any]]:
    """Return arguments of an example, a paragraph of help, and the options of the role's ``--bench``."""
    if name in BENCHED:
        about = "measure its speed on synthetic data instead; RUN may then be a recipe."
        return "my.yaml -p local --lengths 512-2048", f"\n\nWith --bench, {about}", bench_options
    if name == SERVED:
        about = "measure the engines under load instead: tokens/s, TTFT, ITL, KV cache."
        add = lambda function: submit_options(_load_bench(json_option(function)))  # noqa: E731
        return "my.yaml -p h100x64 --concurrency 1,8,64 --json", f"\n\nWith --bench, {about}", add
    if name == SAMPLING:
        about = "measure rollouts without a trainer instead; RUN may then be a recipe."
        return "my.yaml -p h100x64 --steps 10 --json", f"\n\nWith --bench, {about}", _sampling_bench
    return "", "", lambda function: function


def _load_bench(function: Any) -> Any:
    about = "Measure the engines under load, in a temporary run that then ends."
    return bench_flag(about)(load_options(function))


def _sampling_bench(function: Any) -> Any:
    flag = bench_flag("Measure rollouts with engines and environments but without a trainer.")
    return flag(profile_option(set_option(synthetic_option(loop_options(json_option(function))))))


def _measure(name: str, target: str, how: dict[str, Any]) -> None:
    refuse_options(
        ("run_dir", "dry_run", "follow", "is_live", *_PROCESS_OPTIONS), "does not apply to --bench"
    )
    found = bench_target(name, target, how["profile_name"], how["overrides"])
    if name == SERVED:
        run_load_bench(found, how, as_json=how["as_json"])
    else:
        run_loop_bench(name, found, how, as_json=how["as_json"])


def _is_recipe(target: str) -> bool:
    from primerl_hpc.launch.evaluate import find_source

    return isinstance(find_source(target), Path)


def _submit(recipe: str, profile_name: str | None, overrides: tuple[str, ...], **how: Any) -> int:
    from primerl_hpc.common.names import Kind

    loaded, profile = load_both(recipe, profile_name, overrides)
    if loaded.recipe.kind != Kind.INFERENCE:
        raise ConfigError(
            f"a recipe of kind {loaded.recipe.kind} has more processes than engines",
            location=recipe,
            hint="run it with primerl-hpc submit, or use a recipe of kind inference",
        )
    return submit(loaded, profile, **how)


def _use_code_of(run: RunDir) -> None:
    """Start this command again with the run's own copy of the code, if it has one and this is another."""
    from primerl_hpc.common import env
    from primerl_hpc.offline.code.keep import code_root, has_copy

    root = code_root(run) if has_copy(run) else None
    if root is None or Path(root).resolve() == Path(__file__).resolve().parents[2]:
        return
    path = env.join_pythonpath(root, os.environ.get(env.PYTHONPATH))
    environment = {**os.environ, env.PYTHONPATH: path, "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "primerl_hpc", *sys.argv[1:]], environment)


def _run_role(role: str, target: str, index: int, phase_name: str | None) -> None:
    """Replace this process by that of the role, with the environment that the supervisor would set."""
    from primerl_hpc.common import env
    from primerl_hpc.common.files import read_json_or_none
    from primerl_hpc.common.names import Role, process_name
    from primerl_hpc.launch.queue import environ_here
    from primerl_hpc.plan.plan import load_plan, with_interpreter
    from primerl_hpc.run.access.keys import run_keys
    from primerl_hpc.run.access.ownership import check_own
    from primerl_hpc.run.registry import find_run
    from primerl_hpc.runtime.step import Launch
    from primerl_hpc.runtime.steps.guard import drop_variables
    from primerl_hpc.runtime.steps.local import visible_accelerators

    run = find_run(target)
    check_own(run)
    _use_code_of(run)
    plan = with_interpreter(load_plan(run), sys.executable)
    phase = plan.phase_of(Role(role), phase_name)
    process = phase.process(process_name(Role(role), index))
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 1))
    launch = Launch(process, run, phase.name, attempt, 0)
    run_keys(run, attempt)
    root = str(Path(__file__).resolve().parents[2])
    visible = visible_accelerators(launch, has_gpus=plan.accelerator == "gpu")
    environment = {**environ_here(plan.passed_variables), **visible, **launch.environment}
    environment[env.PYTHONPATH] = env.join_pythonpath(root, environment.get(env.PYTHONPATH))
    drop_variables(environment)
    click.echo(f"{process.name}: {' '.join(process.argv)}", err=True)
    os.execvpe(process.argv[0], list(process.argv), environment)
