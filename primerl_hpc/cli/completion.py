"""``primerl-hpc completion``: print a script for shell completion; `values` has the argument types with completion."""

from __future__ import annotations

import os

import click
from click.shell_completion import get_completion_class

from primerl_hpc.cli.options import json_option, make_epilog, print_json

EPILOG = make_epilog("completion bash", "completion fish > ~/.config/fish/completions/primerl-hpc.fish")
SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_PRIMERL_HPC_COMPLETE"
"""Set by the shell's function when it asks for completions; click derives the name from the program's name."""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(SHELLS), required=False)
@json_option
def command(shell: str | None, as_json: bool) -> None:
    """Print the completion script of SHELL (default: that of $SHELL).

    In ~/.bashrc or ~/.zshrc: eval "$(primerl-hpc completion bash)"

    It completes commands, options, runs, roles and processes of a run, recipes, profiles, and keys of --set.
    """
    from primerl_hpc.cli.main import cli

    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    found = get_completion_class(name) if name in SHELLS else None
    if found is None:
        raise click.UsageError(
            f"there is no completion for {name or 'an unknown shell'}; name one of: {', '.join(SHELLS)}"
        )
    script = found(cli, {}, "primerl-hpc", VARIABLE).source()
    if as_json:
        print_json({"shell": name, "script": script})
    else:
        click.echo(script)
