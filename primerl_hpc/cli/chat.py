"""``primerl-hpc chat``: chat with the policy of a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import RUN_CODES, json_option, make_epilog, print_json
from primerl_hpc.cli.values import RUN
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.safety.terminal import plain

if TYPE_CHECKING:
    from primerl_hpc.observe.chat import Server

EPILOG = make_epilog(
    "chat my-run",
    "chat my-run --prompt 'Reverse: hello' --max-tokens 64",
    "chat my-run --temperature 0 --json < question.txt",
    codes=(ExitCode.DATA, *RUN_CODES),
)


@click.command("chat", epilog=EPILOG)
@click.argument("run", type=RUN)
@click.option(
    "--prompt", metavar="TEXT", help="Ask one question and print the reply. [default: read from stdin]"
)
@click.option("--system", metavar="TEXT", help="Send this system message first.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="Limit the length of a reply. [default: the recipe's]"
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="Set the sampling temperature. [default: the recipe's]",
)
@json_option
def command(
    run: str,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Chat with the policy of RUN while it trains, or with the model of an inference run.

    In a terminal, this starts a conversation; ^D ends it. The policy version that generated a reply is printed to
    stderr.
    """
    from primerl_hpc.observe.chat import exec_on_router_node, find_server, router_node_command
    from primerl_hpc.plan.plan import load_plan
    from primerl_hpc.run.registry import find_run

    found = find_run(run)
    if prompt is None and sys.stdin is None:
        raise click.UsageError("stdin is closed; ask a question with --prompt")
    is_interactive = prompt is None and sys.stdin.isatty()
    if (there := router_node_command(found, sys.argv[1:], is_terminal=is_interactive)) is not None:
        exec_on_router_node(there)
    server = find_server(found)
    own = load_plan(found).phases[-1].recipe.rollouts.sampling
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens or own.max_tokens,
        "temperature": own.temperature if temperature is None else temperature,
    }
    messages = [{"role": "system", "content": system}] if system else []
    if is_interactive:
        _converse(server, messages, sampling)
        return
    messages.append({"role": "user", "content": sys.stdin.read().strip() if prompt is None else prompt})
    reply = _request_reply(server, messages, sampling, is_quiet=as_json)
    if as_json:
        last = server.last
        print_json(
            {
                "reply": reply,
                "versions": sorted(set(last.versions)),
                "tokens": last.tokens,
                "finish_reason": last.finish_reason,
                "model": server.model,
            }
        )


def _converse(server: Server, messages: list[dict[str, str]], sampling: dict[str, Any]) -> None:
    """Read questions and print replies until ^D; ^C interrupts a reply."""
    click.echo(f"{server.run.root.name}, {server.model}; ^D ends", err=True)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo(err=True)
            return
        if text:
            messages.append({"role": "user", "content": text})
            reply = _request_reply(server, messages, sampling, is_quiet=False)
            messages.append({"role": "assistant", "content": reply})


def _request_reply(
    server: Server, messages: list[dict[str, str]], sampling: dict[str, Any], *, is_quiet: bool
) -> str:
    """Return the reply to ``messages``; print it while it is generated unless ``is_quiet``."""
    pieces = []
    try:
        for piece in server.answer(messages, sampling):
            pieces.append(piece)
            if not is_quiet:
                click.echo(plain(piece), nl=False)
    except KeyboardInterrupt:
        if is_quiet:
            raise
    if not is_quiet:
        click.echo()
        cut_off = ", cut off" if server.last.finish_reason == "length" else ""
        click.secho(f"[{server.last.label}, {server.last.tokens} tokens{cut_off}]", dim=True, err=True)
    return "".join(pieces)
