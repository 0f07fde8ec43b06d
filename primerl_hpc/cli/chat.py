"""``primerl-hpc chat``"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from primerl_hpc.cli.options import json_option, print_json

if TYPE_CHECKING:
    from primerl_hpc.observe.chat import Server

EPILOG = """\b
Examples:
  primerl-hpc chat my-run
  primerl-hpc chat my-run --prompt 'Reverse: hello' --max-tokens 64
  primerl-hpc chat my-run --temperature 0 --json < question.txt
"""


@click.command("chat", epilog=EPILOG)
@click.argument("run")
@click.option("--prompt", metavar="TEXT", help="One question, one answer. [default: what stands on stdin]")
@click.option("--system", metavar="TEXT", help="System message before it.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Longest reply. [default: the recipe's]")
@click.option("--temperature", type=click.FloatRange(min=0), help="[default: the recipe's]")
@json_option
def command(
    run: str,
    prompt: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    as_json: bool,
) -> None:
    """Talk to the policy of RUN while it trains, or to the model of an inference run.

    In a terminal: a conversation; ^D ends it. Which policy version answered is said on stderr.
    """
    from primerl_hpc.common.registry import find_run
    from primerl_hpc.observe.chat import find_server, hop, hop_command
    from primerl_hpc.plan.types import load_plan

    found = find_run(run)
    if prompt is None and sys.stdin is None:
        raise click.UsageError("stdin is closed: ask with --prompt")
    is_talk = prompt is None and sys.stdin.isatty()
    if (there := hop_command(found, sys.argv[1:], is_terminal=is_talk)) is not None:
        hop(there)
    server = find_server(found)
    own = load_plan(found).phases[-1].recipe.rollouts.sampling
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens or own.max_tokens,
        "temperature": own.temperature if temperature is None else temperature,
    }
    messages = [{"role": "system", "content": system}] if system else []
    if is_talk:
        _talk(server, messages, sampling)
        return
    messages.append({"role": "user", "content": sys.stdin.read().strip() if prompt is None else prompt})
    reply = _say(server, messages, sampling, is_quiet=as_json)
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


def _talk(server: Server, messages: list[dict[str, str]], sampling: dict[str, Any]) -> None:
    """Question and answer in turn, until ^D; ^C breaks an answer off."""
    click.echo(f"{server.run.root.name}, {server.model}; ^D ends", err=True)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo(err=True)
            return
        if text:
            messages.append({"role": "user", "content": text})
            reply = _say(server, messages, sampling, is_quiet=False)
            messages.append({"role": "assistant", "content": reply})


def _say(server: Server, messages: list[dict[str, str]], sampling: dict[str, Any], *, is_quiet: bool) -> str:
    pieces = []
    try:
        for piece in server.answer(messages, sampling):
            pieces.append(piece)
            if not is_quiet:
                click.echo(piece, nl=False)
    except KeyboardInterrupt:
        if is_quiet:
            raise
    if not is_quiet:
        click.echo()
        cut_off = ", cut off" if server.last.finish_reason == "length" else ""
        click.secho(f"[{server.last.label}, {server.last.tokens} tokens{cut_off}]", dim=True, err=True)
    return "".join(pieces)
