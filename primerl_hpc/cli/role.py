"""``primerl-hpc inference|router|prefill|teacher|judge|env-server|orchestrator|trainer|sft|evaluator``: one part of a run by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from primerl_hpc.cli.bench import BENCHED, bench_options, refuse_without_bench, run_bench

_ABOUT = {
    "inference": "one vLLM engine, with its control routes",
    "router": "the router in front of the engines",
    "prefill": "one engine that reads prompts for the others",
    "teacher": "one engine of the teacher",
    "judge": "one engine of the judge",
    "env-server": "one verifiers environment server",
    "orchestrator": "the orchestrator: rollouts, advantages, batches",
    "trainer": "the RL trainer (torchrun starts its ranks)",
    "sft": "the SFT trainer (torchrun starts its ranks)",
    "evaluator": "the evaluator",
    "tracker": "the tracker, which sends metrics to Weights & Biases",
}


def make_command(name: str) -> click.Command:
    epilog = f"""\b
Example:
  primerl-hpc submit my.yaml -p local --dry-run --run-dir /scratch/my-run
  primerl-hpc {name} /scratch/my-run
"""
    about = f"Run {_ABOUT[name]}, in this terminal, against the prepared RUN directory."
    if name in BENCHED:
        epilog += f"  primerl-hpc {name} --bench my.yaml -p local --lengths 512-2048\n"
        about += "\n\nWith --bench measure it instead, on made-up data; RUN may then be a recipe."

    @click.command(name, epilog=epilog, help=about)
    @click.argument("run")
    @click.option("--index", default=0, show_default=True, help="Which one of the role.")
    @click.option("--phase", help="Phase of the plan. [default: the one that has this role]")
    def command(run: str, index: int, phase: str | None, **bench: Any) -> None:
        if bench.pop("is_bench", False):
            run_bench(name, run, index, phase, **bench)
            return
        refuse_without_bench(bench)
        _run_role(name.replace("-", "_"), run, index, phase)

    return bench_options(command) if name in BENCHED else command


def _run_role(role: str, word: str, index: int, phase_name: str | None) -> None:
    """Replace this process by the role's, with the environment the supervisor would give it."""
    from primerl_hpc.common.files import read_json_or_none
    from primerl_hpc.common.names import Role, process_name
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.common.rundir import ensure_api_key
    from primerl_hpc.plan.types import load_plan
    from primerl_hpc.runtime.local_step import visible_accelerators
    from primerl_hpc.runtime.steps import Launch

    run = find_run(word)
    phase = load_plan(run).phase_of(Role(role), phase_name)
    process = phase.process(process_name(Role(role), index))
    attempt = int((read_json_or_none(run.state) or {}).get("attempt", 1))
    launch = Launch(process, run, phase.name, attempt, 0)
    ensure_api_key(run)
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **visible_accelerators(launch), **launch.environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    click.echo(f"{process.name}: {' '.join(process.argv)}", err=True)
    os.execvpe(process.argv[0], list(process.argv), environment)
