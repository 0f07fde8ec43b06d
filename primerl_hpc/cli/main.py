"""``primerl-hpc``: the table of commands, and the handling of their errors.

A command module defines a click command named ``command``. An error becomes one sentence on stderr and an exit code;
``--debug`` (or PRIMERL_DEBUG=1) shows the traceback. `aliases` has the commands of earlier versions.
"""

from __future__ import annotations

import codecs
import gc
import importlib
import locale
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from primerl_hpc.cli import aliases
from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.log import notice
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.common.safety.terminal import protect_output
from primerl_hpc.run.access.ownership import set_safe_umask

# name → (module, one line of help); sections in the order in which a user needs them
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "new": ("new", "Write a recipe for a model and a number of GPUs."),
        "import-config": ("import_config", "Write a recipe from prime-rl's rl.toml."),
        "submit": ("submit", "Compile a recipe for a cluster and start it."),
        "plan": ("plan", "Show what would run where, why, and the scripts."),
        "prefetch": ("prefetch", "Fetch models, data and images before a run."),
        "bundle": ("bundle", "Pack a Python environment into one file for nodes."),
        "eval": ("evaluate", "Evaluate a model, or the weights of a run."),
    },
    "Watch": {
        "status": ("status", "Show all runs, or one run in detail."),
        "logs": ("logs", "Print or follow the log of any role."),
        "diagnose": ("diagnose", "Explain what is wrong with a run and how to fix it."),
        "top": ("top", "Follow the logs of runs side by side in tmux."),
        "stacks": ("stacks", "Print the stacks of all processes of a run."),
        "profile": ("profile", "Trace steps of a running trainer."),
        "samples": ("samples", "Show recent rollouts: prompts, replies, rewards."),
        "scores": ("scores", "Show scores of an evaluation: table, curves, SVG."),
        "sync": ("sync", "Send metrics to trackers from a login node."),
        "report": ("report", "Write a self-contained HTML report of a run."),
    },
    "Control": {
        "cancel": ("cancel", "Save and stop a run (--now: without saving)."),
        "exec": ("exec", "Run a command, or a shell, on nodes of a running run."),
        "resume": ("resume", "Continue from the last complete checkpoint."),
        "role": ("role", "Run one process of a prepared run in this terminal."),
    },
    "Store": {
        "du": ("du", "Show the disk space of a run by kind of file."),
        "prune": ("prune", "Delete weights and batches that no resume needs."),
        "archive": ("archive", "Write a run into a tar file with checksums."),
    },
    "Use": {
        "chat": ("chat", "Chat with the policy of a run while it trains."),
        "export": ("export", "Export a policy version as a model folder."),
        "convert": ("convert", "Write a quantized model with bfloat16 weights."),
    },
    "Check and measure": {
        "env": ("env", "Check or install an environment."),
        "doctor": ("doctor", "Check that this machine and cluster are ready."),
        "bench": ("bench", "Measure trainer, engines, rollouts or the loop."),
        "calibrate": ("calibrate", "Measure a node, so that plans use its speed."),
    },
    "Learn": {
        "explain": ("explain", "Explain a key: type, default, meaning, origin."),
        "completion": ("completion", "Print the completion script of a shell."),
    },
}
OBJECTS_PER_COLLECTION = 100_000
"""With Python's 700, collections take a tenth of the time of a command, most of it while modules are imported."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


@contextmanager
def _closed_pipe_is_success() -> Iterator[None]:
    """Exit with code 0 if the reader closes the pipe, as in ``… | head``; click would exit with code 1."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(ExitCode.DONE) from None


class LazyGroup(click.Group):
    """A group that lists the names and help lines of its commands without importing their modules."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _closed_pipe_is_success():  # covers --help
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _closed_pipe_is_success():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"primerl_hpc.cli.{COMMANDS[cmd_name][0]}").command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands from `COMMANDS`, and options."""
        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found or click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = click.utils.make_str(args[0]) if args else ""
        if name == "submit" and "--resume" in args:
            ctx.fail("submit starts a new run; to continue one: primerl-hpc resume RUN")
        if present := aliases.replacement(name, args[1:]):
            if not ctx.resilient_parsing:  # not while a shell completes
                notice(aliases.note(name, present))
            args = [*present, *aliases.present_arguments(name, args[1:])]
        elif name and not name.startswith("-") and name not in COMMANDS:
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
   0 done             1 failed                  2 usage error
  65 invalid data    66 not found              69 scheduler unavailable
  73 occupied        75 stopped, state saved   76 preempted before a save
  78 configuration   93 cannot continue        94 bad node excluded
 130 interrupted (^C)
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="primerl-hpc", prog_name="primerl-hpc")
def cli(debug: bool) -> None:
    """Train language models by reinforcement learning on a SLURM cluster.

    A recipe (YAML) describes what to train, and a cluster profile where.
    """
    if debug:
        os.environ[env.DEBUG] = "1"


def use_utf8() -> None:
    """Start this process again in Python's UTF-8 mode if the locale has another encoding: files are always UTF-8."""
    if not sys.flags.utf8_mode and codecs.lookup(locale.getencoding()).name != "utf-8":
        os.environ["PYTHONUTF8"] = "1"  # also for the processes that this one starts
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main() -> None:
    """Run the command line; show tracebacks only with ``--debug``."""
    use_utf8()
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    set_safe_umask()
    env.leave_open_folder()
    protect_output()
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
        notice(f"error: {error}")
        code = error.exit_code
    except OSError as error:
        if env.is_debug():
            raise
        notice(f"error: {error.filename2 or error.filename or 'system'}: {error.strerror or error}")
        code = ExitCode.FAILED
    except Exception as error:  # A bug is reported in one line as well.
        if env.is_debug():
            raise
        notice(f"error: {describe_error(error)}; --debug shows where")
        code = ExitCode.FAILED
    gc.freeze()  # the last collection finds nothing to free
    sys.exit(code if isinstance(code, int) else 0)
