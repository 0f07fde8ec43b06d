"""Engines reject requests that contain a chat template (CVE-2026-115911, PYSEC-2026-4349 in vLLM 0.31)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from starlette.requests import Request
from starlette.responses import JSONResponse

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.inference import routes
from primerl_hpc.recipe.schema.model import Inference

ENDLESS = "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}"
ROUTES = ("/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/responses", "/pooling", "/v2/chat")


async def vllm(scope: Any, receive: Any, send: Any) -> None:
    """Stand-in for the application behind our middleware: it returns what it received."""
    received = await Request(scope, receive).body()
    await JSONResponse({"received": received.decode()})(scope, receive, send)


async def post(path: str, body: Any, **state: Any) -> httpx.Response:
    routes.install(routes.EngineState("inference-0", 1, 1, 0, api_key="k", **state))
    transport = httpx.ASGITransport(routes.EngineRoutes(vllm))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"Authorization": "Bearer k"})


def ask(path: str, body: Any, **state: Any) -> httpx.Response:
    import asyncio

    return asyncio.run(post(path, body, **state))


MESSAGES = [{"role": "user", "content": "a chat_template is text here"}]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": ENDLESS},
        {"chat_template_kwargs": {"chat_template": ENDLESS}},
        {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": ["x"]},
    ],
    ids=["template", "kwargs", "other name", "list"],
)
def test_a_request_with_a_template_does_not_reach_vllm(path: str, fields: dict[str, Any]) -> None:
    answer = ask(path, {"messages": MESSAGES, **fields}, template_settings=frozenset({"enable_thinking"}))
    assert answer.status_code == 400
    assert "chat_template" in answer.json()["error"]


def test_no_spelling_of_chat_template_and_no_form_of_body_passes() -> None:
    escaped = json.dumps({"messages": MESSAGES, "chat_template": ENDLESS}).replace(
        "_template", "\\u005ftemplate"
    )
    bodies = [escaped, json.dumps([{"chat_template": ENDLESS}]), "chat_template=" + ENDLESS]
    bodies.append('{"chat_template": ' + "[" * 100_000)
    for body in bodies:
        assert ask("/v1/chat/completions", body.encode()).status_code == 400, body[:100]


def test_settings_of_the_models_template_and_ordinary_requests_pass_unchanged() -> None:
    allowed = {"template_settings": frozenset({"enable_thinking"})}
    for fields in (
        {},
        {"chat_template": None},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "chat_template"}}]},
    ):
        body = {"messages": MESSAGES, **fields}
        answer = ask("/v1/chat/completions", body, **allowed)
        assert answer.status_code == 200 and json.loads(answer.json()["received"]) == body


def test_the_recipe_cannot_make_vllm_trust_request_templates() -> None:
    for name in ("trust-request-chat-template", "trust_request_chat_template"):
        with pytest.raises((ConfigError, ValueError), match="trust-request-chat-template"):
            Inference(extra_args={name: True})


def test_allowed_setting_names_are_read_from_the_template() -> None:
    from primerl_hpc.recipe.template_settings import template_settings
    from tests.security.test_control_tokens import tokenizer_with

    template = (
        "{% generation %}{% set ns = namespace(x=1) %}{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}"
        "{% if enable_thinking %}{{ raise_exception('x') }}{% break %}{% endif %}{% endgeneration %}"
        "{% if tools %}{{ strftime_now('%Y') }}{% endif %}"
    )
    tokenizer = tokenizer_with(template.replace("{% break %}", ""))
    tokenizer.bos_token = "<|endoftext|>"
    assert template_settings(tokenizer) == {"enable_thinking"}
    assert template_settings(tokenizer_with("{% if broken %}")) == frozenset()


@pytest.mark.e2e
def test_a_real_engine_rejects_templates_and_serves_other_requests(serving: Any) -> None:
    def ask_engine(path: str, **fields: Any) -> httpx.Response:
        body = {"model": str(serving.model), "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
        return serving.client.post(serving.url("inference-0") + path, json=body | fields)

    assert ask_engine("/v1/chat/completions").status_code == 200
    for path in ("/v1/chat/completions", "/tokenize"):
        for fields in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}):
            answer = ask_engine(path, **fields)
            assert answer.status_code == 400 and "the model's" in answer.json()["error"], answer.text
