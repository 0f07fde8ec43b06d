"""`chat` with a real router and engine: one question, stdin, several turns, the policy version of replies, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner, Result

from primerl_hpc.cli.chat import _converse
from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import RoleError
from primerl_hpc.observe.chat import find_server
from primerl_hpc.run.rundir import VERSION_HEADER
from tests.support.serving import Serving

pytestmark = pytest.mark.e2e


def chat(serving: Serving, *words: str, **more: str) -> Result:
    return CliRunner().invoke(cli, ["chat", str(serving.run.root), *words], **more)


def test_one_question_gets_one_answer_from_the_command_line_or_stdin(serving: Serving) -> None:
    words = ("--temperature", "0", "--max-tokens", "5")
    asked = json.loads(chat(serving, "--prompt", "abc", *words, "--json").output)
    assert asked["versions"] == [0] and 1 <= asked["tokens"] <= 5 and asked["model"] == str(serving.model)
    told = chat(serving, *words, input="abc\n")
    assert told.exit_code == 0 and told.stdout == asked["reply"] + "\n"
    assert "policy v0, " in told.stderr and " tokens" in told.stderr


def test_a_conversation_includes_its_earlier_turns(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = iter(["abc", "", "def"])

    def ask(_: str) -> str:
        try:
            return next(questions)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", ask)
    messages = [{"role": "system", "content": "reverse"}]
    _converse(find_server(serving.run), messages, {"max_tokens": 4, "temperature": 0.0})
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant"]
    replies = [each["content"] for each in messages if each["role"] == "assistant"]
    assert capsys.readouterr().out == "".join(f"{reply}\n" for reply in replies)


def test_every_reply_names_its_policy_version(serving: Serving) -> None:
    def load(path: Path, version: int) -> None:
        assert serving.post("inference-0", "/pause", {}).status_code == 200
        answer = serving.post("inference-0", "/update_weights", {"path": str(path), "version": version})
        assert answer.status_code == 200, answer.text
        assert serving.post("inference-0", "/resume", {}).status_code == 200

    body = {"model": str(serving.model), "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
    load(serving.model, 7)
    try:
        for name in ("inference-0", "router-0"):
            answer: httpx.Response = serving.post(name, "/v1/chat/completions", body)
            assert answer.headers[VERSION_HEADER] == "7"
        assert json.loads(chat(serving, "--prompt", "abc", "--json").output)["versions"] == [7]
    finally:
        load(serving.model, 0)


def test_a_reply_ends_at_the_models_length_if_more_tokens_are_allowed(serving: Serving) -> None:
    asked = chat(serving, "--prompt", "abc", "--max-tokens", "100000", "--json")
    assert asked.exit_code == 0, asked.exception
    assert 1 <= json.loads(asked.output)["tokens"] < serving.recipe.max_model_len


def test_a_refusal_of_the_engine_is_printed_unchanged(serving: Serving) -> None:
    done = chat(serving, "--prompt", "word " * 2000)
    assert isinstance(done.exception, RoleError)
    assert "HTTP 400" in str(done.exception) and "context" in str(done.exception)
