"""``primerl-hpc``: the table of commands, and how every one of them ends.

A command module defines one click command called ``command``. Errors become one sentence on stderr and their own exit
code; ``--debug`` (or PRIMERL_DEBUG=1) shows the traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError

# name → (module, one line of help); sections in the order of a user's story
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "submit": ("submit", "Compile a recipe for a cluster and start it."),
        "plan": ("plan", "Show what would run where, and why."),
        "render": ("render", "Write the batch scripts alone."),
        "eval": ("evaluate", "Score a model, or the weights of a run."),
    },
    "Look": {
        "status": ("status", "All runs on one screen, or one run in depth."),
        "list": ("list_runs", "Names and folders of your runs."),
        "logs": ("logs", "Print or follow the log of any role."),
        "diagnose": ("diagnose", "What is wrong with a run, and what to do."),
        "samples": ("samples", "The last rollouts: prompts, replies, rewards."),
        "scores": ("scores", "Scores of an evaluation: table, curves, SVG."),
        "report": ("report", "One HTML page of a run, to keep or to send."),
    },
    "Steer": {
        "cancel": ("cancel", "Save and stop a run (--now: without saving)."),
        "resume": ("resume", "Go on from the last complete checkpoint."),
    },
    "Use": {
        "chat": ("chat", "Talk to the policy of a run while it trains."),
        "export": ("export", "A policy version as a model folder."),
    },
    "Learn": {
        "env": ("env", "Try an environment out, or install one."),
        "doctor": ("doctor", "Is this machine, this cluster ready?"),
        "explain": ("explain", "Type, default, meaning and origin of a key."),
        "schema": ("schema", "JSON schema of recipes or profiles."),
    },
    "One part by hand": {
        "inference": ("role", "Serve a model as a job, or one engine of a run."),
        "router": ("role", "Run the router of a prepared run."),
        "prefill": ("role", "Run one engine that reads prompts for the others."),
        "teacher": ("role", "Run one engine of the teacher."),
        "judge": ("role", "Run one engine of the judge."),
        "env-server": ("role", "Run one environment server."),
        "orchestrator": ("role", "Run the orchestrator."),
        "trainer": ("role", "Run the RL trainer."),
        "sft": ("role", "Run the SFT trainer."),
        "evaluator": ("role", "Run the evaluator."),
        "tracker": ("role", "Send metrics to Weights & Biases."),
    },
}
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """``… | head`` is no failure; click by itself would make it exit code 1."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(ExitCode.DONE) from None


class LazyGroup(click.Group):
    """Knows its commands' names and help lines without importing them."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _reader_may_leave():  # --help
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"primerl_hpc.cli.{COMMANDS[cmd_name][0]}")
        return module.make_command(cmd_name) if hasattr(module, "make_command") else module.command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = click.utils.make_str(args[0]) if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{name}'.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, line) for name, (_, line) in commands.items()])


EPILOG = """\b
Example:
  primerl-hpc submit recipes/reverse_text/tiny.yaml --profile local --follow

\b
Exit codes:
  0 done        1 failed       2 usage          65 bad data    66 not found
  69 scheduler  73 occupied    75 stopped       76 preempted   78 configuration
  93 do not go on              94 bad node     130 interrupted (^C)
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(package_name="primerl-hpc", prog_name="primerl-hpc")
def cli(debug: bool) -> None:
    """Train language models by reinforcement learning on a SLURM cluster.

    A recipe (YAML) says what to train, a cluster profile where.
    """
    if debug:
        os.environ[env.DEBUG] = "1"


def main() -> None:
    """Entry point: never a traceback but with ``--debug``."""
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print(file=sys.stderr)
        code = 130
    except PrimerlError as error:
        if env.is_debug():
            raise
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        if env.is_debug():
            raise
        print(f"error: {error.filename or 'system'}: {error.strerror or error}", file=sys.stderr)
        code = ExitCode.FAILED
    except Exception as error:  # a fault of ours: told in one line as any other
        if env.is_debug():
            raise
        said = " ".join(str(error).split())
        print(f"error: {type(error).__name__}: {said}; --debug shows where", file=sys.stderr)
        code = ExitCode.FAILED
    sys.exit(code if isinstance(code, int) else 0)
